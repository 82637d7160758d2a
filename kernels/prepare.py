"""Turn a GGUF file into a prepared model folder (see engine.model), once.

`python -m kernels.prepare SOURCE [--cache DIR]` prints the folder. It lies in the cache directory
under a name that the source's path, size and modification time decide, so a second call only
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
from typing import TYPE_CHECKING

import msgspec

from engine.errors import EstafetError, ModelError, StartError
from engine.model import CONFIG, TEMPLATE, TOKENIZER, WEIGHTS, read_config

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = 2
"""To be raised whenever the same source would make another folder: it is part of the folder's name."""
PARTIAL = ".partial-"
SPARE_BYTES = 64 << 20


def cache_dir() -> Path:
    """Where prepared and fetched models live: $ESTAFET_CACHE, else the user's cache directory."""
    if own := os.environ.get("ESTAFET_CACHE"):
        return Path(own).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "estafet"


def prepare(source: Path, cache: Path, progress: bool = True) -> Path:
    """The prepared folder of a GGUF file, made under `cache` unless it is there; a prepared folder is itself.

    Shows a progress bar on stderr if `progress`. ModelError when the source cannot be served,
    StartError when the cache cannot be written.
    """
    if source.is_dir():
        _check_folder(source)
        return source
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
        facts = path.stat()
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
        raise ModelError(f"{source}: {reason}; name a GGUF file or a prepared model folder") from None
    if not stat.S_ISREG(facts.st_mode):
        raise ModelError(f"{source}: not a regular file; name a GGUF file or a prepared model folder")
    identity = f"{FORMAT}\0{path}\0{facts.st_size}\0{facts.st_mtime_ns}"
    key = hashlib.blake2b(os.fsencode(identity), digest_size=8).hexdigest()
    return f"{re.sub(r'[^A-Za-z0-9._-]', '_', path.stem)[:100]}-{key}"


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
    path = folder / WEIGHTS
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            table = msgspec.json.decode(file.read(length) if length < size else b"")
            complete = 8 + length + max(entry.get("data_offsets", [0, 0])[1] for entry in table.values())
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(f"{path}: unreadable: {error}; delete the folder and prepare it again") from None
    if size != complete:
        raise ModelError(
            f"{path}: {size} bytes instead of {complete}; delete the folder and prepare it again"
        )


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

    from kernels.gguf_file import read_header
    from kernels.gguf_llama import plan_llama_tensors, read_llama_config
    from kernels.gguf_tokenizer import build_tokenizer, read_chat_template
    from kernels.gguf_weights import check_numbers, check_types, write_safetensors

    header = read_header(source)
    config = read_llama_config(header, weights_id="")
    plans = plan_llama_tensors(header, config)
    check_types(header, plans)
    config = msgspec.structs.replace(config, weights_id=check_numbers(header, plans))
    build_tokenizer(header, config.vocab_size).save(str(folder / TOKENIZER), pretty=False)
    template = read_chat_template(header)
    if template is not None:
        (folder / TEMPLATE).write_text(template, encoding="utf-8")
    total = sum(plan.source.elements for plan in plans)
    free = shutil.disk_usage(folder).free
    if free < 4 * total + SPARE_BYTES:
        raise StartError(
            f"{folder.parent.parent}: {4 * total >> 20} MiB needed for {source.name}, {free >> 20} MiB free; "
            "set ESTAFET_CACHE to a directory with room"
        )
    with tqdm(
        total=total, desc=f"preparing {source.name}", unit="w", unit_scale=True, disable=not progress
    ) as bar:
        write_safetensors(header, plans, folder / WEIGHTS, bar.update)
    (folder / CONFIG).write_bytes(msgspec.json.format(msgspec.json.encode(config)))


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.prepare", description="Prepare a GGUF file for serving."
    )
    parser.add_argument(
        "source", type=Path, metavar="SOURCE", help="a GGUF file, or a prepared folder to check"
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
