"""The tier below memory as the replicator serves it: pages to the file and back, and who is told of it.

    SpillWanted ──▶ written, slot by slot ──▶ FileKeys (difference), SpillEnded
    FetchWanted ──▶ read into leased pages, in the order of the chain; each whole one is opened and
                    sealed in the page table; the first that fails ends the run ──▶ FetchEnded

What is not written or not read is computed again by whoever needs it: nothing here is an error of a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import trio

from actors.landing import publish
from engine.core import Send
from engine.errors import StartError
from engine.ids import Incarnation
from engine.layout import NO_KEY, Seal
from engine.lifecycle import PageState
from engine.messages import FetchEnded, FileKeys, SpillEnded
from engine.tier import TierIndex, TierPage
from transport.page_file import PageFile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from engine.core import Statistics
    from engine.layout import PageTable
    from engine.messages import FetchWanted, PageWanted, SpillWanted
    from engine.shapes import PageRef
    from transport.page_format import PageFormat
    from transport.pages import PagePool

log = structlog.get_logger()

READ_AHEAD = 4
"""Pages that are read at once: what a disk wants, and no more is thrown away when one of them fails."""


class FileTier:
    """The file of one host, its index, and the pool beside it."""

    def __init__(
        self,
        file: PageFile,
        index: TierIndex,
        table: PageTable,
        pool: PagePool,
        names: Mapping[int, str],
        allocator: str,
    ) -> None:
        """`names` of actors by their ordinals: who computed a page is written beside it. `allocator`: that
        of this host."""
        self.allocator = allocator
        self.file = file
        self.index = index
        self._table = table
        self._pool = pool
        self._names = names
        self._told: set[bytes] = set()

    @classmethod
    async def open(
        cls,
        path: Path,
        form: PageFormat,
        budget: int,
        table: PageTable,
        pool: PagePool,
        names: Mapping[int, str],
        allocator: str,
    ) -> FileTier:
        """Open the file, and find what an earlier launch left in it. StartError when it cannot be."""
        if form.slots(budget) == 0:
            least = form.offset(1)
            raise StartError(
                f"allocator.file_bytes = {budget} has no room for a page; expected at least {least}"
            )
        opened = await PageFile.open(path, form, budget)
        if opened.note:
            log.warning("file_tier_emptied", path=str(path), why=opened.note)
        index = TierIndex(opened.file.slots, opened.pages)
        log.info("file_tier_opened", path=str(path), pages=len(index), slots=opened.file.slots)
        return cls(opened.file, index, table, pool, names, allocator)

    def all_keys(self) -> FileKeys:
        """What a new allocator is told."""
        self._told = set(self.index.keys())
        return FileKeys(tuple(sorted(self._told)), (), whole=True)

    def _news(self) -> list[Send]:
        """What has changed since somebody was told."""
        keys = set(self.index.keys())
        added, removed = keys - self._told, self._told - keys
        self._told = keys
        if not added and not removed:
            return []
        return [Send(self.allocator, FileKeys(tuple(sorted(added)), tuple(sorted(removed)), whole=False))]

    # ── down ──────────────────────────────────────────────────────────────────────────────────

    async def spill(self, message: SpillWanted) -> list[Send]:
        """Write pages; they are pinned until the answer."""
        async with trio.open_nursery() as nursery:
            for page in message.pages:
                nursery.start_soon(self._write, page)
        return [*self._news(), Send(self.allocator, SpillEnded(message.pages))]

    async def _write(self, ref: PageRef) -> None:
        table = self._table
        if not table.is_current(ref) or table.state(ref.index) is not PageState.SEALED:
            return
        seal, origin = table.sealed(ref.index), table.origin(ref.index)
        slot = self.index.plan_store(seal.key) if seal.key != NO_KEY else None
        if slot is None:
            # It is there already: whoever asks does not know, and is told once more.
            self._told.discard(seal.key)
            return
        name = self._names.get(origin.ordinal, "unknown")
        page = TierPage(seal.key, seal.parent, seal.tokens, Incarnation(name, origin.epoch), seal.checksum)
        written: TierPage | None = None
        try:
            written = await self.file.write(slot, page, self._pool.slot(ref), lambda: table.is_current(ref))
        finally:
            if written is not None:
                self.index.stored(slot, written)
            elif table.is_current(ref):
                self.index.failed(slot, seal.key)
            else:
                self.index.withdrawn(slot, seal.key)
        if written is None:
            log.warning("page_not_spilled", page=ref.index, why=self.file.failure)

    # ── up ────────────────────────────────────────────────────────────────────────────────────

    async def fetch(self, message: FetchWanted) -> list[Send]:
        """Read a run of pages into their targets; whatever comes first is published first."""
        began = trio.current_time()
        landed = 0
        pages = message.pages
        while landed < len(pages):
            some = pages[landed : landed + READ_AHEAD]
            whole = await self._read(some)
            for wanted, seal in zip(some, whole, strict=True):
                if seal is None:
                    break
                publish(self._table, wanted, seal.checksum)
                landed += 1
            if None in whole:
                break
        seconds = trio.current_time() - began
        return [*self._news(), Send(self.allocator, FetchEnded(message.ticket, landed, seconds))]

    async def _read(self, pages: Sequence[PageWanted]) -> list[Seal | None]:
        whole: list[Seal | None] = [None] * len(pages)

        async def read(number: int, wanted: PageWanted) -> None:
            whole[number] = await self._read_one(wanted)

        async with trio.open_nursery() as nursery:
            for number, wanted in enumerate(pages):
                nursery.start_soon(read, number, wanted)
        return whole

    async def _read_one(self, wanted: PageWanted) -> Seal | None:
        """The page's seal when its bytes are at the target, whole and right; else nothing that counts."""
        slot = self.index.begin_read(wanted.key)
        if slot is None:
            return None
        page: TierPage | None = None
        try:
            page = await self.file.read(slot, wanted.key, self._pool.slot(wanted.target))
        finally:
            self.index.end_read(slot)
        if page is None:
            self.index.forget(wanted.key)
            log.warning("page_not_read", key=wanted.key.hex(), why=self.file.failure)
            return None
        if page.tokens != wanted.tokens or page.parent != wanted.parent:
            # Another prefix under the same key: right where it is, and nobody's here.
            return None
        return Seal(page.key, page.parent, page.tokens, page.checksum)

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def check(self) -> None:
        self.index.check()
        self.file.check()

    def statistics(self) -> Statistics:
        return {
            **{f"file_{name}": count for name, count in self.file.statistics().items()},
            **{f"tier_{name}": count for name, count in self.index.statistics().items()},
        }
