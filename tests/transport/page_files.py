"""Files of pages for tests: every byte of a page follows from its number, so that any reader can check it."""

from __future__ import annotations

import mmap
import os
import random
import zlib
from typing import TYPE_CHECKING

import trio

from engine.chain import KEY_BYTES
from engine.ids import Incarnation
from engine.tier import TierPage
from transport.page_file import PageFile
from transport.page_format import BLOCK, PageFormat

if TYPE_CHECKING:
    from pathlib import Path

    from transport.page_file import Opened

TOKENS = 16
FORM = PageFormat(3 * BLOCK, TOKENS, "smollm2:q4_1:float16:cpu-exact-1")
ODD = PageFormat(2 * BLOCK + 1234, TOKENS, FORM.identity)
"""Pages that O_DIRECT cannot take as they lie."""
SLOTS = 6


def budget(form: PageFormat = FORM, slots: int = SLOTS) -> int:
    return form.offset(slots)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


def number_of(page: TierPage) -> int:
    return int.from_bytes(page.key, "big")


def bytes_of(number: int, form: PageFormat = FORM) -> bytes:
    return random.Random(number).randbytes(form.page_bytes)


def page(number: int, form: PageFormat = FORM) -> TierPage:
    tokens = b"".join((number * TOKENS + i).to_bytes(4, "little") for i in range(form.page_tokens))
    checksum = zlib.crc32(bytes_of(number, form))
    return TierPage(key(number), key(number - 1), tokens, Incarnation("worker.1", 4), checksum)


def aligned(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def target(form: PageFormat = FORM) -> memoryview:
    return aligned(b"\xa5" * form.page_bytes)


async def write(file: PageFile, slot: int, number: int, form: PageFormat = FORM) -> TierPage | None:
    written = await file.write(slot, page(number, form), aligned(bytes_of(number, form)))
    file.check()
    return written


async def read(file: PageFile, slot: int, number: int, form: PageFormat = FORM) -> bool:
    """Whether the page is given back; asserts that it is then right to the bit."""
    into = target(form)
    found = await file.read(slot, key(number), into)
    file.check()
    if found is not None:
        assert found == page(number, form)
        assert into == bytes_of(number, form)
    return found is not None


async def reopen(path: Path, form: PageFormat = FORM, slots: int = SLOTS) -> Opened:
    with trio.fail_after(20):
        return await PageFile.open(path, form, budget(form, slots))


async def good(path: Path, form: PageFormat = FORM) -> set[int]:
    """Opens the file and reads every page that it says it has: the numbers of those that are right."""
    opened = await reopen(path, form)
    right = set()
    for slot, stored in opened.pages:
        number = number_of(stored)
        assert stored == page(number, form)
        if await read(opened.file, slot, number, form):
            right.add(number)
    opened.file.close()
    return right


async def fill(path: Path) -> None:
    """Makes a file with pages 1 … SLOTS, page n in slot n − 1."""
    opened = await reopen(path)
    for number in range(1, SLOTS + 1):
        assert await write(opened.file, number - 1, number)
    opened.file.close()


def put(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def contents(path: Path) -> bytes:
    return path.read_bytes()


def entries(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
