"""The contract of every page transport, and the two hosts it is tried on.

A new transport joins by a subclass with one fixture:

    class TestNixl(PageTransportContract):
        @pytest.fixture
        async def transport(self, world, nursery):
            yield NixlPages(world.main, world.standby, world.still_valid)

`transport` copies from `world.main` to `world.standby`; it must ask `world.still_valid` (or, where pages are
asked for by name, `world.pin`) before it counts a page, and may ask `world.accepts` before it writes one.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from engine.shapes import PageRef
from transport.page_hosts import PageParty, PinnedPages
from transport.pages import PageCopy, PageFetch, PagePool, PagePools

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transport.page_wire import PageName
    from transport.pages import PageTransport

MAIN, STANDBY = 0, 1
LIMIT_S = 20


class PageWorld:
    """Two hosts of one pool each: what they hold, what their allocators say, and what they were told."""

    def __init__(self, page_bytes: int, pages: int, seed: int = 0) -> None:
        self.page_bytes = page_bytes
        self.pages = pages
        self.contents = random.Random(seed).randbytes(pages * page_bytes)
        self.memory = bytearray(self.contents + b"end")
        self.standby_memory = bytearray(pages * page_bytes + 3)
        self.main = PagePool(MAIN, memoryview(self.memory), page_bytes)
        self.standby = PagePool(STANDBY, memoryview(self.standby_memory), page_bytes)
        self.mains, self.standbys = PagePools(self.main), PagePools(self.standby)
        self.here = PageParty("numerics 1", "host-a", 1)
        self.there = PageParty("numerics 1", "host-b", 1)
        self.generations = dict.fromkeys(range(pages), 1)
        self.reused: set[int] = set()
        """Pages that get another use right after somebody first asks for them."""
        self.overwrites = True
        """Whether that use has written to them already."""
        self.refused: set[int] = set()
        """Targets that nobody wants any more."""
        self.sealed = True
        """Whether checksums were recorded."""
        self.pinned: Counter[PageRef] = Counter()
        self.reads: list[list[PageRef]] = []
        self.asked: list[PageName] = []
        self.stored_targets: list[PageRef] = []

    def key(self, index: int) -> bytes:
        return b"key of page %04d" % index

    def copies(self, *indexes: int, generation: int = 1) -> list[PageCopy]:
        """Each page goes to the mirrored slot."""
        return [
            PageCopy(PageRef(MAIN, index, generation), PageRef(STANDBY, self.pages - 1 - index, 4))
            for index in indexes
        ]

    def fetches(self, copies: Sequence[PageCopy]) -> list[PageFetch]:
        return [PageFetch(copy.source, self.key(copy.source.index), copy.target) for copy in copies]

    # What the giving host says.

    def still_valid(self, page: PageRef) -> bool:
        valid = self.generations.get(page.index) == page.generation
        if page.index in self.reused:
            self.reused.discard(page.index)
            self.generations[page.index] += 1
            if self.overwrites:
                start = page.index * self.page_bytes
                self.memory[start : start + self.page_bytes] = bytes(self.page_bytes)
        return valid

    async def pin(self, names: Sequence[PageName]) -> PinnedPages:
        await trio.lowlevel.checkpoint()
        self.asked += names
        there = [self.key(name.page.index) == name.key and self.still_valid(name.page) for name in names]
        pages = [name.page for name, pinned in zip(names, there, strict=True) if pinned]
        self.pinned.update(pages)
        self.reads.append(pages)
        return PinnedPages(len(self.reads) - 1, there)

    def unpin(self, read: int) -> None:
        self.pinned.subtract(self.reads[read])
        self.reads[read] = []

    def checksum_of(self, page: PageRef) -> int | None:
        start = page.index * self.page_bytes
        return zlib.crc32(self.contents[start : start + self.page_bytes]) if self.sealed else None

    # What the taking host says.

    def accepts(self, target: PageRef) -> bool:
        return target.index not in self.refused

    def stored(self, target: PageRef) -> None:
        self.stored_targets.append(target)

    # What the test says.

    def at_target(self, index: int) -> bytes:
        """What the target slot of a page of the main pool holds."""
        return bytes(self.standby.slot(PageRef(STANDBY, self.pages - 1 - index, 0)))

    def page(self, index: int) -> bytes:
        """What a page held at first."""
        return self.contents[index * self.page_bytes : (index + 1) * self.page_bytes]

    def check(self) -> None:
        """No pin is kept, no page was stored twice, and nothing was written beyond the pool."""
        assert not any(self.pinned.values())
        assert len(set(self.stored_targets)) == len(self.stored_targets)
        assert self.standby_memory[self.pages * self.page_bytes :] == bytes(3)

    def check_answers(self, copies: Sequence[PageCopy], answers: Sequence[bool]) -> None:
        """What was called whole is whole."""
        assert len(copies) == len(answers)
        for copy, whole in zip(copies, answers, strict=True):
            if whole:
                assert self.at_target(copy.source.index) == self.page(copy.source.index), copy


class PageTransportContract:
    """What every way of copying pages does; a subclass says how it is made."""

    PAGE_BYTES = 5000
    PAGES = 40

    @pytest.fixture
    def world(self) -> PageWorld:
        return PageWorld(self.PAGE_BYTES, self.PAGES)

    @pytest.fixture
    async def transport(self, world: PageWorld, nursery: trio.Nursery) -> PageTransport:
        raise NotImplementedError

    async def test_pages_arrive_whole(self, transport: PageTransport, world: PageWorld) -> None:
        with trio.fail_after(LIMIT_S):
            assert await transport.copy(world.copies(0, 3)) == [True, True]
            assert await transport.copy(world.copies(39)) == [True]
            assert await transport.copy([]) == []
        for index in range(self.PAGES):
            assert world.at_target(index) == (
                world.page(index) if index in (0, 3, 39) else bytes(self.PAGE_BYTES)
            )
        assert world.memory == world.contents + b"end"
        world.check()

    async def test_pages_without_a_checksum_arrive_whole(
        self, transport: PageTransport, world: PageWorld
    ) -> None:
        world.sealed = False
        copies = world.copies(5, 6)
        with trio.fail_after(LIMIT_S):
            assert await transport.copy(copies) == [True, True]
        world.check_answers(copies, [True, True])

    async def test_many_pages_in_any_order(self, transport: PageTransport, world: PageWorld) -> None:
        indexes = [*range(self.PAGES)]
        random.Random(1).shuffle(indexes)
        copies = world.copies(*indexes)
        with trio.fail_after(LIMIT_S):
            answers = await transport.copy(copies)
        assert all(answers)
        world.check_answers(copies, answers)
        world.check()

    async def test_a_page_of_another_generation_is_not_copied(
        self, transport: PageTransport, world: PageWorld
    ) -> None:
        world.generations[2] = 9
        with trio.fail_after(LIMIT_S):
            assert await transport.copy(world.copies(1, 2, 4)) == [True, False, True]
            assert await transport.copy(world.copies(2)) == [False]
        assert world.at_target(2) == bytes(self.PAGE_BYTES)
        world.check()

    @pytest.mark.parametrize("overwrites", [True, False])
    async def test_a_page_reused_while_it_was_copied_does_not_count(
        self, transport: PageTransport, world: PageWorld, overwrites: bool
    ) -> None:
        world.reused = {4}
        world.overwrites = overwrites
        with trio.fail_after(LIMIT_S):
            assert await transport.copy(world.copies(1, 4, 5)) == [True, False, True]
        world.check_answers(world.copies(1, 5), [True, True])
        world.check()

    @pytest.mark.parametrize(
        ("source", "target"),
        [
            (PageRef(MAIN, 40, 1), PageRef(STANDBY, 1, 4)),
            (PageRef(MAIN, -1, 1), PageRef(STANDBY, 1, 4)),
            (PageRef(STANDBY, 1, 1), PageRef(STANDBY, 1, 4)),
            (PageRef(MAIN, 1, 1), PageRef(STANDBY, 40, 4)),
            (PageRef(MAIN, 1, 1), PageRef(STANDBY, -1, 4)),
            (PageRef(MAIN, 1, 1), PageRef(MAIN, 1, 4)),
        ],
    )
    async def test_a_slot_outside_the_pools_is_the_callers_fault(
        self, transport: PageTransport, world: PageWorld, source: PageRef, target: PageRef
    ) -> None:
        with trio.fail_after(LIMIT_S):
            with pytest.raises(IndexError):
                await transport.copy([PageCopy(source, target)])
            assert await transport.copy(world.copies(7)) == [True]

    async def test_copying_lets_others_run(self, transport: PageTransport, world: PageWorld) -> None:
        with trio.fail_after(LIMIT_S):
            with trio.testing.assert_checkpoints():
                await transport.copy(world.copies(1))
            with trio.testing.assert_checkpoints():
                await transport.copy([])

    async def test_many_callers_at_once(self, transport: PageTransport, world: PageWorld) -> None:
        answers: dict[int, list[bool]] = {}

        async def copy(caller: int) -> None:
            answers[caller] = await transport.copy(world.copies(*range(caller, self.PAGES, 8)))

        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                for caller in range(8):
                    nursery.start_soon(copy, caller)
        assert all(all(of_caller) for of_caller in answers.values())
        world.check_answers(world.copies(*range(self.PAGES)), [True] * self.PAGES)
        world.check()

    @pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 5, 6, 8, 11, 15, 20, 30, 50])
    async def test_a_cancelled_copy_writes_no_more_and_another_one_is_right(
        self, transport: PageTransport, world: PageWorld, turns: int
    ) -> None:
        copies = world.copies(*range(self.PAGES))

        async def copy(scope: trio.CancelScope) -> None:
            with scope:
                world.check_answers(copies, await transport.copy(copies))

        with trio.fail_after(LIMIT_S):
            scope = trio.CancelScope()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(copy, scope)
                for _ in range(turns):
                    await trio.lowlevel.checkpoint()
                scope.cancel()
            # The slots have another use now, until the same pages are asked for once more.
            world.refused.update(range(self.PAGES))
            world.standby_memory[:-3] = b"\xee" * (len(world.standby_memory) - 3)
            world.stored_targets.clear()
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert world.standby_memory[:-3] == b"\xee" * (len(world.standby_memory) - 3)
            world.refused.clear()
            again = world.copies(*range(0, self.PAGES, 2))
            # In other slots: the first ones may be known as stored.
            answers = await transport.copy(
                [PageCopy(copy.source, PageRef(STANDBY, copy.target.index, 5)) for copy in again]
            )
        assert all(answers)
        world.check_answers(again, answers)
        for index in range(1, self.PAGES, 2):
            assert world.at_target(index) == b"\xee" * self.PAGE_BYTES
        await trio.testing.wait_all_tasks_blocked(0.01)
        world.check()
