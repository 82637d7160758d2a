"""Turn a GGUF file or a Hugging Face folder into a prepared model folder (see engine.model), once.

`python -m kernels.prepare SOURCE [--cache DIR]` prints the folder. It lies in the cache directory
under a name that the source's path, sizes and modification times decide, so a second call only
finds it. A folder appears whole or not at all, and two launches at once prepare it once.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from engine.errors import EstafetError, ModelError, StartError
from engine.model import CONFIG, TEMPLATE, TOKENIZER, WEIGHTS, read_config
from kernels.weight_files import link_weights, read_weight_files

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 3
"""To be raised whenever the same source would make another folder: it is part of the folder's name."""
PARTIAL = ".partial-"
SPARE_BYTES = 64 << 20
HF_CONFIG = "config.json"
HF_SUFFIXES = (".json", ".jinja", ".safetensors")
"""What a Hugging Face folder is read from."""
WHAT_TO_NAME = "name a GGUF file, a Hugging Face folder or a prepared model folder"


def cache_dir() -> Path:
    """Where prepared and fetched models live: $ESTAFET_CACHE, else the user's cache directory."""
    if own := os.environ.get("ESTAFET_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "estafet"


def prepare(source: Path, cache: Path, progress: bool = True) -> Path:
    """The prepared folder of a model, made under `cache` unless it is there.

    source: a GGUF file, a Hugging Face folder, or a prepared folder, which is only checked.

    Shows a progress bar on stderr if `progress`. ModelError when the source cannot be served,
    StartError when the cache cannot be written.
    """
    if source.is_dir():
        if (source / CONFIG).exists():
            _check_folder(source)
            return source
        if not (source / HF_CONFIG).exists():
            raise ModelError(f"{source}: no {CONFIG} and no {HF_CONFIG} in it; {WHAT_TO_NAME}")
    target = cache / _folder_name(source)
    if _intact(target):
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _only_one(cache):
            if not _intact(target):  # unless somebody else prepared it while we waited
                shutil.rmtree(target, ignore_errors=True)
                with tempfile.TemporaryDirectory(
                    prefix=PARTIAL, dir=cache, ignore_cleanup_errors=True
                ) as partial:
                    folder = Path(partial) / target.name
                    folder.mkdir()
                    _convert(source, folder, progress)
                    folder.replace(target)
    except OSError as error:
        raise StartError(
            f"{cache}: cannot hold the prepared model: {error.strerror or error}; set ESTAFET_CACHE to a "
            "directory with room"
        ) from error
    return target


def _folder_name(source: Path) -> str:
    try:
        path = source.resolve(strict=True)
        files = [path]
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in HF_SUFFIXES)
        facts = [file.stat() for file in files]
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ModelError(f"{error.filename or source}: {reason}; {WHAT_TO_NAME}") from None
    if not path.is_dir() and not stat.S_ISREG(facts[0].st_mode):
        raise ModelError(f"{source}: not a regular file; {WHAT_TO_NAME}")
    identity = f"{FORMAT}\0{path}"
    for file, fact in zip(files, facts, strict=True):
        inside = "" if file == path else f"\0{file.name}"
        identity += f"{inside}\0{fact.st_size}\0{fact.st_mtime_ns}"
    key = hashlib.blake2b(os.fsencode(identity), digest_size=8).hexdigest()
    stem = path.name if path.is_dir() else path.stem
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', stem)[:100]}-{key}"


def _intact(folder: Path) -> bool:
    try:
        _check_folder(folder)
    except ModelError:
        return False
    return True


def _check_folder(folder: Path) -> None:
    """ModelError unless the folder reads as prepared: a configuration, a tokeniser, weights of full length.

    The length matters: after a power cut a file may have its name but not its bytes.
    """
    try:
        read_config(folder)
    except OSError as error:
        raise ModelError(f"{folder}: unreadable: {error.strerror or error}; prepare it again") from None
    if not (folder / TOKENIZER).is_file():
        raise ModelError(f"{folder}: no {TOKENIZER}; delete the folder and prepare it again")
    read_weight_files(folder)


@contextlib.contextmanager
def _only_one(cache: Path) -> Iterator[None]:
    """Hold the cache's lock, and sweep what a killed preparation left: under the lock nobody prepares."""
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in cache.glob(PARTIAL + "*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _convert(source: Path, folder: Path, progress: bool) -> None:
    """Write the prepared files of `source` into the empty `folder`, everything cheap checked first."""
    # These cost a third of a second to import, which finding a prepared folder need not pay.
    from tqdm import tqdm

    from kernels.convert import check_numbers, write_safetensors
    from kernels.gguf_llama import read_gguf_model
    from kernels.hf_folder import read_hf_folder

    model = read_hf_folder(source) if source.is_dir() else read_gguf_model(source)
    total = sum(plan.source.elements for plan in model.plans)
    free = shutil.disk_usage(folder).free
    if free < 4 * total + SPARE_BYTES and not model.as_they_are:
        raise StartError(
            f"{folder.parent.parent}: {4 * total >> 20} MiB needed for {source.name}, {free >> 20} MiB free; "
            "set ESTAFET_CACHE to a directory with room"
        )

    def bar(doing: str, **options: Any) -> tqdm[NoReturn]:
        what = f"{doing} {source.name}"
        # None: on a terminal only.
        quiet = None if progress else True
        return tqdm(total=total, desc=what, unit="w", unit_scale=True, disable=quiet, **options)

    # Checking is worth a bar for large models only, and none stays when there is something to say instead.
    with bar("checking", leave=False, delay=1.0) as checking:
        weights_id = check_numbers(model.plans, checking.update)
    config = msgspec.structs.replace(model.config, weights_id=weights_id, stored=model.stored)
    if model.as_they_are:
        link_weights(folder, model.as_they_are)
    else:
        with bar("preparing") as preparing:
            write_safetensors(model.plans, folder / WEIGHTS, preparing.update)
    model.tokenizer.save(str(folder / TOKENIZER), pretty=False)
    if model.template is not None:
        (folder / TEMPLATE).write_text(model.template, encoding="utf-8")
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.prepare", description="Prepare a model for serving."
    )
    parser.add_argument(
        "source",
        type=Path,
        metavar="SOURCE",
        help="a GGUF file, a Hugging Face folder, or a prepared folder to check",
    )
    parser.add_argument("--cache", type=Path, default=None, help="cache directory (default: $ESTAFET_CACHE)")
    options = parser.parse_args(arguments)
    try:
        print(prepare(options.source, options.cache or cache_dir()))
    except EstafetError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
