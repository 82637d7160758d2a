"""The file of pages when it is cut, flipped, full, failing or its writer killed: right pages, or none."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
from page_files import (
    FORM,
    ODD,
    SLOTS,
    TOKENS,
    aligned,
    budget,
    bytes_of,
    contents,
    fill,
    good,
    key,
    number_of,
    page,
    put,
    read,
    reopen,
    target,
    write,
)

from engine.errors import StartError
from engine.tier import TierIndex
from transport import page_disk
from transport.page_disk import PageDisk
from transport.page_file import PageFile
from transport.page_format import BLOCK, FILE_MAGIC

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
async def file(path: Path) -> AsyncIterator[PageFile]:
    opened = await reopen(path)
    yield opened.file
    opened.file.close()


@pytest.fixture
async def full(path: Path) -> bytes:
    """The bytes of a file with pages 1 … SLOTS, page n in slot n − 1."""
    await fill(path)
    return contents(path)


def cuts() -> Iterator[int]:
    """Around every border: of the file's header, of slot headers, of pages; and within each."""
    borders = {0, BLOCK, *(FORM.offset(slot) for slot in range(SLOTS + 1))}
    borders |= {FORM.offset(slot) + FORM.header_bytes for slot in range(SLOTS)}
    for border in sorted(borders):
        yield from (border + off for off in (-BLOCK // 2, -1, 0, 1, 100) if border + off >= 0)


async def test_a_file_cut_anywhere_keeps_its_whole_slots(full: bytes, path: Path) -> None:
    for cut in sorted(set(cuts())):
        put(path, full[:cut])
        whole = {number for number in range(1, SLOTS + 1) if FORM.offset(number) <= cut}
        assert await good(path) == whole, cut
        # What the cut had left of a page was found to be no page, and is not found again.
        opened = await reopen(path)
        assert {number_of(stored) for _, stored in opened.pages} == whole, cut
        assert await write(opened.file, SLOTS - 1, 50)
        assert await read(opened.file, SLOTS - 1, 50)
        opened.file.close()


async def test_a_flipped_bit_anywhere_costs_that_page_alone(full: bytes, path: Path) -> None:
    slot = 2
    start, body = FORM.offset(slot), FORM.offset(slot) + FORM.header_bytes
    places = [start, start + 9, start + 20, start + 40, start + 70, start + 100, start + 400]
    places += [body - 1, body, body + 1, body + FORM.page_bytes // 2, body + FORM.page_bytes - 1]
    tokens_at = full.index(page(slot + 1).tokens)
    assert start < tokens_at < body
    places += range(tokens_at, tokens_at + 4 * TOKENS, 7)
    for place in places:
        damaged = bytearray(full)
        damaged[place] ^= 1 << place % 8
        put(path, damaged)
        assert await good(path) == {1, 2, 4, 5, 6}, place
        assert await good(path) == {1, 2, 4, 5, 6}, "and it is not found again"


async def test_a_flipped_bit_under_an_open_file(file: PageFile, path: Path) -> None:
    assert await write(file, 0, 1)
    assert await write(file, 1, 2)
    with path.open("r+b") as raw:
        raw.seek(FORM.offset(0) + FORM.header_bytes + 5)
        raw.write(bytes([bytes_of(1)[5] ^ 0x10]))
    assert not await read(file, 0, 1)
    assert file.failure == "slot 0 was not read: its bytes do not match their checksum"
    assert not await read(file, 0, 1)
    assert "its header is damaged" in file.failure
    assert not await read(file, 1, 3)
    assert "it holds another page" in file.failure
    assert file.statistics()["corrupt"] == 3
    assert await write(file, 0, 4)
    assert await read(file, 0, 4)


async def test_a_file_cut_under_its_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What memory still holds of the page from another time does not count."""
    # Through the cache, where a short read leaves the rest of the memory as it was.
    monkeypatch.setattr(page_disk, "_pass_by_cache", lambda fd: False)
    opened = await reopen(path)
    file, into = opened.file, target()
    assert await write(file, 0, 1)
    assert await file.read(0, key(1), into) == page(1)
    os.truncate(path, FORM.offset(1) - 100)
    assert await file.read(0, key(1), into) is None
    assert "cut short" in file.failure
    assert await write(file, 0, 2)
    assert await read(file, 0, 2)
    file.close()


async def test_a_damaged_file_header_empties_the_file(full: bytes, path: Path) -> None:
    for place in (len(FILE_MAGIC), 30, 60, BLOCK - 1):
        damaged = bytearray(full)
        damaged[place] ^= 4
        put(path, damaged)
        opened = await reopen(path)
        assert opened.pages == []
        assert "its header is damaged" in opened.note
        opened.file.close()
        assert await good(path) == set()


async def test_a_slot_copied_to_another_place_is_none(full: bytes, path: Path) -> None:
    one, two = FORM.offset(1), FORM.offset(2)
    put(path, full[:two] + full[one:two] + full[FORM.offset(3) :])
    assert await good(path) == {1, 2, 4, 5, 6}


# Full, failing, killed


class Failing:
    """os.pwrite whose call number `at` fails, from then on or that one alone, wholly or after a part."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how, self.calls = at, how, 0
        self.pwrite = os.pwrite

    def __call__(self, fd: int, data: memoryview, offset: int) -> int:
        self.calls += 1
        if self.calls == self.at or (self.calls > self.at and self.how == "stays"):
            if self.how == "short":
                return self.pwrite(fd, data[: BLOCK // 2], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.pwrite(fd, data, offset)


@pytest.mark.parametrize("how", ["once", "stays", "short"])
async def test_a_write_that_fails_anywhere_loses_that_page_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each of five writes makes a header invalid, writes a page and then its header: each call fails once."""
    # Through the cache, where a part of a write need not be aligned.
    monkeypatch.setattr(page_disk, "_pass_by_cache", lambda fd: False)
    for at in range(1, 3 * 5 + 1):
        path = tmp_path / str(at)
        await fill(path)
        opened = await reopen(path)
        held = dict(enumerate(range(1, SLOTS + 1)))
        failing = Failing(at, how)
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", failing)
            for slot, number in [(0, 11), (1, 12), (0, 13), (0, 14), (1, 15)]:
                if await write(opened.file, slot, number):
                    held[slot] = number
                else:
                    held.pop(slot, None)
                    assert "No space left" in opened.file.failure or "could be written" in opened.file.failure
        errors = opened.file.statistics()["errors"]
        assert errors == (5 - (at - 1) // 3 if how == "stays" else 1)
        for slot, number in held.items():
            assert await read(opened.file, slot, number)
        opened.file.close()
        # If it was the old header that could not be made invalid, its page is still there, and right.
        assert set(held.values()) <= await good(path) <= set(held.values()) | {1, 2, 11, 12, 13, 14}


async def test_a_disk_that_is_full_keeps_what_it_has(path: Path) -> None:
    """RLIMIT_FSIZE stands for the disk: the file may have a header and two slots."""
    opened = await reopen(path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FORM.offset(2) + BLOCK, hard))
    try:
        index = TierIndex(opened.file.slots)
        kept = 0
        for number in range(1, 20):
            slot = index.plan_store(key(number))
            assert slot is not None
            written = await write(opened.file, slot, number)
            if written is None:
                index.failed(slot, key(number))
                assert "File too large" in opened.file.failure or "could be written" in opened.file.failure
            else:
                kept += 1
                index.stored(slot, written)
        assert opened.file.statistics()["errors"] == 19 - kept == 1
        assert index.find(key(19)) == page(19)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    opened.file.close()
    assert await good(path) == {18, 19}


async def test_a_budget_that_the_system_refuses(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FORM.offset(2), hard))
    try:
        with pytest.raises(StartError, match=r"cannot keep pages in .*File too large"):
            await PageFile.open(path, FORM, budget())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    opened = await reopen(path)
    opened.file.close()


async def test_a_read_that_fails(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await write(file, 0, 1)
    with monkeypatch.context() as patch:

        def preadv(*_: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "preadv", preadv)
        assert not await read(file, 0, 1)
    assert file.failure == "slot 0 was not read: Input/output error"
    assert file.statistics()["errors"] == 1
    assert await read(file, 0, 1), "it was only that once"


async def test_slot_headers_that_cannot_be_read_are_passed_over(
    full: bytes, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv

    def bad_sector(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == FORM.offset(3):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", bad_sector)
    opened = await reopen(path)
    assert {number_of(stored) for _, stored in opened.pages} == {1, 2, 3, 5, 6}
    monkeypatch.undo()
    # The header may be good: it is made invalid before its page is overwritten.
    assert await opened.file.write(3, page(9), aligned(bytes_of(9)), lambda: False) is None
    opened.file.close()
    opened = await reopen(path)
    assert {number_of(stored) for _, stored in opened.pages} == {1, 2, 3, 5, 6}
    opened.file.close()


async def test_without_o_direct_the_system_caches(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_flags = page_disk.fcntl.fcntl

    def no_direct(fd: int, command: int, argument: int = 0) -> int:
        if argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return set_flags(fd, command, argument)

    monkeypatch.setattr(page_disk.fcntl, "fcntl", no_direct)
    opened = await reopen(path, ODD)
    assert not opened.file.direct
    assert opened.file.statistics()["direct"] == 0
    assert await write(opened.file, 0, 1, ODD)
    assert await read(opened.file, 0, 1, ODD)
    opened.file.close()


async def test_a_file_system_that_takes_the_flag_and_refuses_the_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite, get_flags = os.pwrite, page_disk.fcntl.fcntl

    def no_direct(fd: int, data: memoryview, offset: int) -> int:
        if get_flags(fd, page_disk.fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", no_direct)
    opened = await reopen(path)
    assert not opened.file.direct
    assert await write(opened.file, 0, 1)
    opened.file.close()


WRITER = f"""
    import itertools, sys
    from pathlib import Path
    import trio
    from engine.tier import TierIndex
    from transport.page_file import PageFile
    sys.path.insert(0, {str(Path(__file__).parent)!r})
    from page_files import FORM, aligned, budget, bytes_of, key, page

    async def main(path, first):
        file, pages, _ = await PageFile.open(Path(path), FORM, budget())
        index = TierIndex(file.slots, pages)
        prepared = {{n: (page(n), aligned(bytes_of(n))) for n in range(first, first + 40)}}

        async def store(number):
            slot = index.plan_store(key(number))
            if slot is not None:
                print(end=".", flush=True)
                index.stored(slot, await file.write(slot, *prepared[number]))

        for round in itertools.count():
            async with trio.open_nursery() as nursery:
                for n in range(3):
                    nursery.start_soon(store, first + (3 * round + n) % 40)

    trio.run(main, sys.argv[1], int(sys.argv[2]))
"""


@pytest.mark.system
async def test_a_writer_killed_anywhere_leaves_right_pages_only(path: Path) -> None:
    survivors = 0
    with trio.fail_after(120):
        for life in range(6):
            command = [sys.executable, "-c", textwrap.dedent(WRITER), str(path), str(100 * life + 1)]
            process = await trio.lowlevel.open_process(command, stdout=subprocess.PIPE)
            assert process.stdout is not None
            try:
                begun = 0
                while begun < 5 + 7 * life and (dots := await process.stdout.receive_some()):
                    begun += len(dots)
            finally:
                process.kill()
            assert await process.wait() == -signal.SIGKILL
            await process.stdout.aclose()
            opened = await reopen(path)
            assert opened.note == ""
            for slot, stored in opened.pages:
                assert await read(opened.file, slot, number_of(stored)), opened.file.failure
            survivors += len(opened.pages)
            opened.file.close()
    assert survivors > 6, "hardly a page outlived its writer"


def test_the_state_after_every_call_of_a_writer_is_one_to_restart_from(path: Path) -> None:
    """Killed between any two writes to the file: a slot holds the page before, the page after, or none."""
    disk = PageDisk(path, FORM, budget(slots=1), 1)
    disk.write(0, 1, page(1), aligned(bytes_of(1)), lambda: True)
    states: list[bytes] = []
    pwrite = os.pwrite

    def recording(fd: int, data: memoryview, offset: int) -> int:
        size = pwrite(fd, data, offset)
        states.append(path.read_bytes())
        return size

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", recording)
        disk.write(0, 2, page(2), aligned(bytes_of(2)), lambda: True)
    disk.close()
    assert len(states) == 3
    found = []
    for state in states:
        path.write_bytes(state)
        disk = PageDisk(path, FORM, budget(slots=1), 1)
        found.append([entry.page for entry in disk.scan([0])])
        for entry in disk.scan([0]):
            into = target()
            assert disk.read(0, entry.page.key, into) == entry.page
            assert into == bytes_of(2)
        disk.close()
    assert found == [[], [], [page(2)]]
