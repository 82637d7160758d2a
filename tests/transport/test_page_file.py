"""The file of pages: they come back to the bit, to their own kind of system, to one process at a time."""

from __future__ import annotations

import os
import re
import stat
import sys
import textwrap
import threading
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing
from page_files import (
    FORM,
    ODD,
    SLOTS,
    TOKENS,
    aligned,
    budget,
    bytes_of,
    contents,
    entries,
    fill,
    good,
    key,
    page,
    put,
    read,
    reopen,
    target,
    write,
)

from engine.errors import StartError
from engine.ids import Incarnation
from engine.tier import TierIndex, TierPage
from transport import page_disk
from transport.page_disk import is_aligned
from transport.page_file import PARALLEL, PageFile
from transport.page_format import BLOCK, FILE_MAGIC, PageFormat
from transport.segments import create_segment, map_segment

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture(params=["straight", "bounced", "through the cache"])
async def any_file(
    request: pytest.FixtureRequest, path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[PageFile, PageFormat]]:
    form = ODD if request.param == "bounced" else FORM
    if request.param == "through the cache":
        monkeypatch.setattr(page_disk, "_pass_by_cache", lambda fd: False)
    opened = await reopen(path, form)
    yield opened.file, form
    opened.file.close()


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


async def test_pages_come_back(any_file: tuple[PageFile, PageFormat]) -> None:
    file, form = any_file
    for slot in range(SLOTS):
        assert await write(file, slot, slot + 10, form) == page(slot + 10, form)
    assert await write(file, 2, 99, form)
    for slot in range(SLOTS):
        assert await read(file, slot, 99 if slot == 2 else slot + 10, form)
    statistics = file.statistics()
    assert statistics["writes"] == SLOTS + 1
    assert statistics["read_bytes"] == SLOTS * form.page_bytes
    assert statistics["errors"] == statistics["corrupt"] == 0


async def test_they_come_back_after_a_restart_oldest_first(any_file: tuple[PageFile, PageFormat]) -> None:
    file, form = any_file
    path = Path(os.readlink(f"/proc/self/fd/{file._disk._fd}"))
    for slot, number in [(0, 1), (5, 2), (3, 3), (0, 4)]:
        assert await write(file, slot, number, form)
    file.close()
    file.close()
    for _ in range(2):
        opened = await reopen(path, form)
        assert opened.note == ""
        assert opened.pages == [(5, page(2, form)), (3, page(3, form)), (0, page(4, form))]
        for slot, number in [(5, 2), (3, 3), (0, 4)]:
            assert await read(opened.file, slot, number, form)
        index = TierIndex(opened.file.slots, opened.pages)
        assert index.run([key(n) for n in (2, 3, 4, 5)]) == 3
        opened.file.close()
    # A page written after a restart is newer than those before it.
    opened = await reopen(path, form)
    assert await write(opened.file, 1, 7, form)
    opened.file.close()
    opened = await reopen(path, form)
    assert [slot for slot, _ in opened.pages] == [5, 3, 0, 1]
    opened.file.close()


async def test_the_pools_memory_is_read_and_written_in_place(file: PageFile) -> None:
    fd = create_segment("pool", 3 * FORM.page_bytes)
    pool = map_segment(fd)
    os.close(fd)
    first, second, odd = (pool.view[at : at + FORM.page_bytes] for at in (0, FORM.page_bytes, 100))
    assert is_aligned(first)
    assert not is_aligned(odd)
    first[:] = bytes_of(1)
    assert await file.write(0, page(1), first)
    assert await file.read(0, key(1), second) == page(1)
    assert second == bytes_of(1)
    assert await file.read(0, key(1), odd) == page(1)
    assert odd == bytes_of(1)
    assert await file.write(1, page(1), odd) == page(1)
    assert await file.read(1, key(1), first) == page(1)
    for view in (first, second, odd):
        view.release()
    pool.close()


async def test_the_checksum_is_computed_once_and_compared_from_then_on(file: PageFile) -> None:
    unknown = msgspec.structs.replace(page(1), checksum=None)
    assert await file.write(0, unknown, aligned(bytes_of(1))) == page(1)
    changed = bytearray(bytes_of(1))
    changed[77] ^= 1
    assert await file.write(0, page(1), aligned(bytes(changed))) is None
    assert "does not match its checksum" in file.failure
    assert file.statistics()["corrupt"] == 1
    assert await read(file, 0, 1), "nothing was overwritten"


async def test_a_page_whose_memory_got_another_use_is_not_kept(file: PageFile, path: Path) -> None:
    assert await write(file, 0, 1)
    memory = aligned(bytes_of(2))
    asked_in = []

    def reused() -> bool:
        asked_in.append(threading.get_ident())
        return False

    assert await file.write(0, page(2), memory, reused) is None
    assert len(asked_in) == 1
    assert asked_in[0] != threading.get_ident()
    assert "another use" in file.failure
    assert file.statistics()["withdrawn"] == 1
    file.close()
    assert await good(path) == set()


async def test_a_budget_is_kept(path: Path) -> None:
    for limit in (0, BLOCK, FORM.offset(1) - 1, FORM.offset(1), FORM.offset(3) + 5):
        opened = await PageFile.open(path, FORM, limit)
        assert opened.file.slots == max(0, limit - BLOCK) // FORM.slot_bytes
        assert os.stat(path).st_size <= max(limit, BLOCK)
        with pytest.raises(ValueError, match="no slot"):
            await write(opened.file, opened.file.slots, 1)
        opened.file.close()


async def test_a_budget_that_changed_keeps_what_fits(full: bytes, path: Path) -> None:
    for slots, expected in [(3, {1, 2, 3}), (SLOTS, {1, 2, 3}), (9, {1, 2, 3})]:
        opened = await reopen(path, slots=slots)
        assert {int.from_bytes(stored.key, "big") for _, stored in opened.pages} == expected
        assert os.stat(path).st_size == FORM.offset(slots)
        assert opened.note == ""
        opened.file.close()
    opened = await reopen(path, slots=9)
    assert await write(opened.file, 8, 20)
    assert await read(opened.file, 8, 20)
    opened.file.close()


async def test_what_people_wrote_is_not_for_others(file: PageFile, path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            PageFormat(FORM.page_bytes, TOKENS, "another model"),
            "its pages are of 'smollm2:.*ours of 'another",
        ),
        (PageFormat(2 * BLOCK, TOKENS, FORM.identity), "12288 bytes and 16 tokens, ours 8192 and 16"),
        (PageFormat(FORM.page_bytes, 32, FORM.identity), "12288 bytes and 16 tokens, ours 12288 and 32"),
    ],
)
async def test_pages_of_another_kind_are_not_used(
    full: bytes, path: Path, other: PageFormat, reason: str
) -> None:
    opened = await reopen(path, other)
    assert opened.pages == []
    assert re.search(reason, opened.note), opened.note
    assert await write(opened.file, 0, 5, other)
    opened.file.close()
    assert await good(path, other) == {5}


async def test_another_version_is_not_used(full: bytes, path: Path) -> None:
    header = bytearray(full[: BLOCK - 4])
    header[len(FILE_MAGIC)] = 2
    put(path, header + zlib.crc32(header).to_bytes(4, "little") + full[BLOCK:])
    opened = await reopen(path)
    assert opened.pages == []
    assert "it is of version 2, this is version 1" in opened.note
    opened.file.close()
    opened = await reopen(path)
    assert (opened.pages, opened.note) == ([], "")
    opened.file.close()


async def test_a_strangers_file_is_moved_aside(path: Path) -> None:
    for number, text in enumerate((b"my diary\n", b"x", FILE_MAGIC[:-1] + b"G" + bytes(BLOCK)), 1):
        put(path, text)
        opened = await reopen(path)
        assert opened.note.endswith(f"was not a file of pages and is pages.aside-{number} now")
        assert contents(path.with_name(f"pages.aside-{number}")) == text
        assert opened.pages == []
        opened.file.close()
        os.unlink(path)


async def test_what_cannot_be_a_file_of_pages_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for wrong, match in [
        (tmp_path, "Is a directory"),
        (tmp_path / "none" / "pages", "make the folder .*none first"),
        (fifo, "not a regular file"),
    ]:
        before = os.listdir("/proc/self/fd")
        with pytest.raises(StartError, match=match):
            await PageFile.open(wrong, FORM, budget())
        assert os.listdir("/proc/self/fd") == before


async def test_a_file_has_one_user(file: PageFile, path: Path) -> None:
    assert await write(file, 0, 1)
    with pytest.raises(StartError, match="another process keeps its pages in"):
        await PageFile.open(path, FORM, budget())
    script = f"""
        import trio
        from pathlib import Path
        from transport.page_file import PageFile
        from transport.page_format import PageFormat
        trio.run(PageFile.open, Path({str(path)!r}), PageFormat({FORM.page_bytes}, {TOKENS}, "other"), 0)
    """
    other = await trio.run_process(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_stdout=True,
        capture_stderr=True,
        check=False,
    )
    assert other.returncode == 1
    assert b"StartError: another process keeps its pages in" in other.stderr
    assert await read(file, 0, 1), "the file was not touched"


async def test_a_file_moved_away_while_it_was_waited_for_is_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our lock, another process moved a stranger's file aside and made its own."""
    put(path, b"my diary\n")
    flock = page_disk.fcntl.flock

    def slow_flock(fd: int, how: int) -> None:
        monkeypatch.setattr(page_disk.fcntl, "flock", flock)
        path.rename(path.with_name("aside"))
        path.write_bytes(FORM.encode_header())
        flock(fd, how)

    monkeypatch.setattr(page_disk.fcntl, "flock", slow_flock)
    opened = await reopen(path)
    assert opened.note == ""
    assert entries(path.parent) == ["aside", "pages"]
    opened.file.close()


async def test_what_has_begun_is_seen_through(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cancelled read ends when the thread has left the page alone, and its slot is its own until then."""
    assert await write(file, 0, 1)
    started, go_on = threading.Event(), threading.Event()
    preadv = os.preadv

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        started.set()
        assert go_on.wait(10)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    into, scope = target(), trio.CancelScope()
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def cancelled_read() -> None:
                with scope:
                    assert await file.read(0, key(1), into) == page(1)

            nursery.start_soon(cancelled_read)
            await trio.to_thread.run_sync(started.wait)
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert file.statistics()["reading"] == 1
            file.check()
            with pytest.raises(trio.BusyResourceError, match="slot 0 is in use"):
                await write(file, 0, 2)
            with pytest.raises(trio.BusyResourceError, match="being written or read"):
                file.close()
            go_on.set()
    assert into == bytes_of(1)
    assert file.statistics()["reading"] == 0


async def test_operations_are_bounded_and_overlap(file: PageFile, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()
    preadv = os.preadv
    for slot in range(3):
        assert await write(file, slot, slot + 1)

    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        entered.release()
        assert go_on.wait(10)
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", slow)
    results: list[bool] = []

    async def reader(slot: int) -> None:
        results.append(await read(file, slot, slot + 1))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for i in range(2 * PARALLEL):
                nursery.start_soon(reader, i % 3)
            for _ in range(PARALLEL):
                await trio.to_thread.run_sync(entered.acquire)
            statistics = file.statistics()
            assert (statistics["reading"], statistics["waiting"]) == (2 * PARALLEL, PARALLEL)
            assert not entered.acquire(blocking=False)
            go_on.set()
    assert results == [True] * 2 * PARALLEL
    assert file.statistics()["waiting"] == 0


async def test_a_call_that_waits_for_its_turn_can_be_cancelled(file: PageFile) -> None:
    with trio.CancelScope() as scope:
        scope.cancel()
        await write(file, 0, 1)
    assert scope.cancelled_caught
    assert not await read(file, 0, 1)
    assert await write(file, 0, 1)
    with trio.CancelScope() as scope:
        scope.cancel()
        await read(file, 0, 1)
    assert scope.cancelled_caught
    assert await read(file, 0, 1)
    assert file.statistics()["reading"] == file.statistics()["writing"] == 0


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda page: msgspec.structs.replace(page, key=b"short"), "keys have 16 bytes, not 5 and 16"),
        (lambda page: msgspec.structs.replace(page, parent=bytes(17)), "keys have 16 bytes, not 16 and 17"),
        (lambda page: msgspec.structs.replace(page, tokens=bytes(60)), "16 tokens have 4 bytes each, not 60"),
        (lambda page: msgspec.structs.replace(page, origin=Incarnation("w" * 256, 1)), "at most 255 bytes"),
        (lambda page: msgspec.structs.replace(page, origin=Incarnation("w", 1 << 32)), "too large"),
    ],
)
async def test_a_page_that_does_not_fit_is_the_callers_fault(
    file: PageFile, change: Callable[[TierPage], TierPage], match: str
) -> None:
    assert await write(file, 0, 1)
    with pytest.raises(ValueError, match=match):
        await file.write(0, change(page(1)), aligned(bytes_of(1)))
    assert await read(file, 0, 1)


async def test_memory_that_does_not_fit_is_the_callers_fault(file: PageFile) -> None:
    with pytest.raises(ValueError, match="a page has 12288 bytes, not 12287"):
        await file.write(0, page(1), memoryview(bytes(12287)))
    with pytest.raises(ValueError, match="may not be written"):
        await file.read(0, key(1), memoryview(bytes(12288)))
    for slot in (-1, SLOTS):
        with pytest.raises(ValueError, match=f"no slot {slot}"):
            await read(file, slot, 1)
    file.close()
    with pytest.raises(trio.ClosedResourceError):
        await read(file, 0, 1)


def test_kinds_of_pages_that_cannot_be() -> None:
    for wrong in [(0, 16, ""), (4096, 0, ""), (4096, 16, "x" * BLOCK)]:
        with pytest.raises(ValueError, match=r"is none|at most"):
            PageFormat(*wrong)
    big = PageFormat(BLOCK, 4096, "i")
    assert big.header_bytes % BLOCK == 0
    full = TierPage(key(1), key(0), bytes(4 * 4096), Incarnation("é" * 127, 1 << 20), 7)
    found = big.decode_slot(3, big.encode_slot(3, 9, full))
    assert found is not None
    assert (found.slot, found.sequence, found.page) == (3, 9, full)
    assert big.decode_slot(4, big.encode_slot(3, 9, full)) is None
