"""Pools, and copies between two of them that this process has mapped; the contract is in page_contract."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import trio

from engine.shapes import PageRef
from transport.pages import CHECKPOINT_BYTES, PageCopy, PagePool, PagePools, SharedMemoryPages
from transport.segments import create_segment, map_segment

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transport.segments import Segment

PAGE = 5000
PAGES = 8
MAIN, STANDBY = 0, 1


@pytest.fixture
def segments() -> Iterator[tuple[Segment, Segment]]:
    mapped = []
    for name in ("main", "standby"):
        fd = create_segment(name, PAGES * PAGE + 7)
        mapped.append(map_segment(fd))
        os.close(fd)
    mapped[0].view[:] = os.urandom(mapped[0].size)
    yield mapped[0], mapped[1]
    for segment in mapped:
        segment.close()


async def test_copies_between_segments_leave_no_view_behind(segments: tuple[Segment, Segment]) -> None:
    pools = [PagePool(number, segment.view, PAGE) for number, segment in enumerate(segments)]
    transport = SharedMemoryPages(*pools, lambda _: True)
    copies = [PageCopy(PageRef(MAIN, index, 1), PageRef(STANDBY, index, 1)) for index in range(PAGES)]
    with trio.fail_after(10):
        assert await transport.copy(copies) == [True] * PAGES
    assert segments[1].view[: PAGES * PAGE] == segments[0].view[: PAGES * PAGE]
    assert segments[1].view[PAGES * PAGE :] == bytes(7)


def test_pools_must_fit(segments: tuple[Segment, Segment]) -> None:
    pool = PagePool(MAIN, segments[0].view, PAGE)
    with pytest.raises(ValueError, match="do not fit"):
        SharedMemoryPages(pool, PagePool(STANDBY, segments[1].view, PAGE + 1), lambda _: True)
    with pytest.raises(ValueError, match="must have bytes"):
        PagePool(MAIN, segments[0].view, 0)
    assert pool.pages == PAGES
    for wrong in (PageRef(STANDBY, 0, 1), PageRef(MAIN, -1, 1), PageRef(MAIN, PAGES, 1)):
        with pytest.raises(IndexError):
            pool.slot(wrong)


def test_pools_together(segments: tuple[Segment, Segment]) -> None:
    main, standby = (PagePool(number, segment.view, PAGE) for number, segment in enumerate(segments))
    pools = PagePools(main, standby)
    assert pools.page_bytes == PAGE
    assert pools.sizes() == {MAIN: PAGES, STANDBY: PAGES}
    assert pools.slot(PageRef(MAIN, 2, 1)) == segments[0].view[2 * PAGE : 3 * PAGE]
    assert pools.slot(PageRef(STANDBY, 2, 1)) == segments[1].view[2 * PAGE : 3 * PAGE]
    for wrong in (PageRef(2, 0, 1), PageRef(MAIN, PAGES, 1)):
        with pytest.raises(IndexError):
            pools.slot(wrong)
    for others in ((), (main, main), (main, PagePool(STANDBY, segments[1].view, PAGE + 1))):
        with pytest.raises(ValueError, match="one page size and a number each"):
            PagePools(*others)


async def test_a_long_copy_lets_others_run() -> None:
    size = CHECKPOINT_BYTES // 2
    memories = [memoryview(bytearray(8 * size)) for _ in range(2)]
    pools = [PagePool(number, memory, size) for number, memory in enumerate(memories)]
    transport = SharedMemoryPages(*pools, lambda _: True)
    copies = [PageCopy(PageRef(MAIN, index, 1), PageRef(STANDBY, index, 1)) for index in range(8)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.lowlevel.checkpoint()

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await transport.copy(copies)
            nursery.cancel_scope.cancel()
    assert turns >= 3
