"""The tier below memory: a file of KV pages that outlives every process, within a budget of bytes.

The file knows no policy: `engine.tier` says which page goes into which slot. A call here moves one
page, in a thread, and says whether it is whole; nothing that goes wrong with the file is an error of
its user, who computes what the file does not have.

Whoever opens the file locks it (flock), so that no two processes write it, and the lock goes with the
process. The system's page cache is passed by (O_DIRECT) where the file system can: the pages in memory
are the cache, and a second copy of each would take memory from them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec
import trio

from transport.page_disk import NotThePage, PageDisk, Withdrawn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.tier import TierPage
    from transport.page_format import FoundPage, PageFormat

PARALLEL = 4
"""Operations under way at once. A disk wants a few to be fast; each may need a slot's size of memory."""

T = TypeVar("T")


class Opened(NamedTuple):
    """A file, what is in it, and what became of what was in its place."""

    file: PageFile
    pages: list[tuple[int, TierPage]]
    """Slots with good headers, the longest ago written first, as `TierIndex` wants them. The bytes of
    their pages are not looked at before they are read."""
    note: str
    """Why an older file was not used, in words for the log; empty when there was none, or it was."""


class PageFile:
    """An open file of pages, for any number of tasks; a slot has one writer at a time, or readers.

    A call that waits for its turn can be cancelled. One that has begun is seen through whatever
    happens: a thread left alone would go on reading into pages that have another use by then.
    """

    def __init__(self, disk: PageDisk, sequence: int) -> None:
        """Use `open`."""
        self.failure = ""
        """Why the last page that was not kept, or not given back, was not; in words for the log."""
        self._disk = disk
        self._sequence = sequence
        self._limiter = trio.CapacityLimiter(PARALLEL)
        self._writing: set[int] = set()
        self._reading: dict[int, int] = {}
        self._counts = dict.fromkeys(
            ("writes", "written_bytes", "reads", "read_bytes", "withdrawn", "corrupt", "errors"), 0
        )

    @classmethod
    async def open(cls, path: Path, form: PageFormat, budget: int) -> Opened:
        """Open or make the file, of at most `budget` bytes, and find the pages in it.

        A file of pages of another kind or version, or with a damaged header, is emptied; one that never
        was a file of pages is moved aside. Of one that was cut short the whole slots count. It is
        readable by its owner alone, for it holds what people wrote.

        Raises StartError when it cannot be opened, or another process has it open.
        """
        disk = await trio.to_thread.run_sync(PageDisk, path, form, budget, PARALLEL)
        found: list[FoundPage] = []

        async def scan(first: int) -> None:
            found.extend(await trio.to_thread.run_sync(disk.scan, range(first, disk.slots, PARALLEL)))

        try:
            async with trio.open_nursery() as nursery:
                for first in range(PARALLEL):
                    nursery.start_soon(scan, first)
        except BaseException:
            disk.close()
            raise
        found.sort(key=lambda page: page.sequence)
        file = cls(disk, found[-1].sequence if found else 0)
        return Opened(file, [(page.slot, page.page) for page in found], disk.note)

    @property
    def slots(self) -> int:
        """How many pages fit."""
        return self._disk.slots

    @property
    def direct(self) -> bool:
        """Whether the system's page cache is passed by."""
        return self._disk.direct

    def close(self) -> None:
        """Close the file and let go of its lock. Idempotent; raises BusyResourceError while it is used."""
        if self._writing or self._reading:
            raise trio.BusyResourceError("pages are being written or read")
        self._disk.close()

    async def write(
        self, slot: int, page: TierPage, memory: memoryview, still_valid: Callable[[], bool] = lambda: True
    ) -> TierPage | None:
        """Write a page into a slot; returns it with its checksum, or None when it is not kept.

        It is not kept when the disk is full or fails, when its bytes are not those of the checksum it
        came with, or when `still_valid`, asked from another thread once all bytes are down, denies
        that `memory` held this page all the time. Then the slot holds nothing; `failure` says why.
        Raises ValueError for a page that does not fit the file.
        """
        memory = self._whole(memory)
        self._disk.form.encode_slot(slot, 0, msgspec.structs.replace(page, checksum=page.checksum or 0))
        self._may_use(slot, shared=False)
        self._sequence += 1
        self._writing.add(slot)
        try:
            work = partial(self._disk.write, slot, self._sequence, page, memory, still_valid)
            written = await self._run(work, f"slot {slot} was not written")
        finally:
            self._writing.discard(slot)
        if written is not None:
            self._counts["writes"] += 1
            self._counts["written_bytes"] += len(memory)
        return written

    async def read(self, slot: int, key: bytes, into: memoryview) -> TierPage | None:
        """Read a page into memory, straight where that is aligned; returns what the file says of it.

        None when it could not be read, or is not whole, or is not the page of this key; `failure` says
        why. Then `into` holds garbage that must not be published, and the slot is not to be used before
        it is written again: have the index forget the key. Compare the tokens before you believe a key.
        """
        into = self._whole(into)
        if into.readonly:
            raise ValueError("a page cannot be read into memory that may not be written")
        self._may_use(slot, shared=True)
        self._reading[slot] = self._reading.get(slot, 0) + 1
        try:
            page = await self._run(partial(self._disk.read, slot, key, into), f"slot {slot} was not read")
        finally:
            self._reading[slot] -= 1
            if not self._reading[slot]:
                del self._reading[slot]
        if page is not None:
            self._counts["reads"] += 1
            self._counts["read_bytes"] += len(into)
        return page

    def _whole(self, memory: memoryview) -> memoryview:
        expected = self._disk.form.page_bytes
        if memory.nbytes != expected:
            raise ValueError(f"a page has {expected} bytes, not {memory.nbytes}")
        return memory.cast("B")

    def _may_use(self, slot: int, *, shared: bool) -> None:
        if not self._disk.is_open:
            raise trio.ClosedResourceError("the file of pages is closed")
        if not 0 <= slot < self.slots:
            raise ValueError(f"the file has {self.slots} slots, no slot {slot}")
        if slot in self._writing or (slot in self._reading and not shared):
            raise trio.BusyResourceError(f"slot {slot} is in use")

    async def _run(self, work: Callable[[], T], what: str) -> T | None:
        """Do the work in a thread; None, counted, when the disk or the data are to blame."""
        try:
            return await trio.to_thread.run_sync(work, limiter=self._limiter)
        except OSError as error:
            self._counts["errors"] += 1
            self.failure = f"{what}: {error.strerror or error}"
        except NotThePage as error:
            self._counts["corrupt"] += 1
            self.failure = f"{what}: {error}"
        except Withdrawn as error:
            self._counts["withdrawn"] += 1
            self.failure = f"{what}: {error}"
        return None

    def check(self) -> None:
        """One writer or readers a slot; no more threads than operations or buffers."""
        assert not self._writing & self._reading.keys()
        assert all(0 <= slot < self.slots for slot in (*self._writing, *self._reading))
        assert all(readers > 0 for readers in self._reading.values())
        busy = len(self._writing) + sum(self._reading.values())
        assert self._limiter.borrowed_tokens <= min(busy, PARALLEL)
        assert self._disk.is_open or not busy

    def statistics(self) -> dict[str, int | float]:
        """The file, what is under way, and what happened since it was opened."""
        return {
            "slots": self.slots,
            "slot_bytes": self._disk.form.slot_bytes,
            "direct": int(self.direct),
            "writing": len(self._writing),
            "reading": sum(self._reading.values()),
            "waiting": self._limiter.statistics().tasks_waiting,
            **self._counts,
        }
