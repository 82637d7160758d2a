"""The replication plan: which sealed pages are safe in the standby pool, and which go there next.

Pages are copied oldest first into a ring: when the standby pool is full, the oldest copy makes
room. A copy counts once it is whole and its source was still in the same generation afterwards.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple, assert_never

from engine.messages import (
    Drain,
    FetchWanted,
    PageSite,
    PagesSealed,
    ReadGranted,
    Roster,
    SpillWanted,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core import Send, Statistics
    from engine.ids import Incarnation, SequenceKey
    from engine.layout import PageTable
    from engine.messages import Member, ToReplicator
    from engine.shapes import PageRef


class CopyPage(NamedTuple):
    """Copy this page into that slot of the standby pool."""

    page: PageRef
    slot: int


class ReplicationPlan:
    """What the replicator knows and what it does next."""

    def __init__(self, table: PageTable, standby_pages: int) -> None:
        self.table = table
        self._free = deque(range(standby_pages))
        self._capacity = standby_pages
        self._waiting: deque[tuple[SequenceKey, PageRef]] = deque()
        self._safe: OrderedDict[PageRef, int] = OrderedDict()
        self._swept_at = -standby_pages
        self.copied = 0
        self.outdated = 0
        self.dropped = 0

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        return []

    def handle(self, source: Incarnation, message: ToReplicator, now: float) -> list[Send]:
        """Take one message."""
        match message:
            case PagesSealed():
                if self._capacity:
                    self._waiting.extend((message.key, page) for page in message.pages)
                    while len(self._waiting) > self._capacity:
                        # More than the standby pool can hold anyway.
                        self._waiting.popleft()
                        self.dropped += 1
                return []
            case Roster() | Drain() | Stop():
                return []
            case FetchWanted() | SpillWanted() | ReadGranted() | PageSite():
                raise TypeError(f"{type(message).__name__} is the actor's own")
            case _:
                assert_never(message)

    def next_copy(self) -> CopyPage | None:
        """The next page to copy, or None when there is none, or every slot is being copied into."""
        while self._waiting and (self._free or self._safe):
            _, page = self._waiting.popleft()
            if not self.table.is_current(page):
                self.outdated += 1
                continue
            if not self._free and self.copied - self._swept_at > self._capacity // 8:
                self._forget_outdated()
            if not self._free:
                _, slot = self._safe.popitem(last=False)
                self._free.append(slot)
            return CopyPage(page, self._free.popleft())
        return None

    def done(self, copy: CopyPage, whole: bool) -> None:
        """A copy ended; `whole` if it is complete and its source still had the same generation."""
        if not whole:
            self.outdated += 1
            self._free.append(copy.slot)
            return
        self.copied += 1
        before = self._safe.pop(copy.page, None)
        if before is not None:
            self._free.append(before)
        self._safe[copy.page] = copy.slot

    def _forget_outdated(self) -> None:
        # Looks at every copy, so not at each one that is made.
        self._swept_at = self.copied
        for page in [page for page in self._safe if not self.table.is_current(page)]:
            self._free.append(self._safe.pop(page))

    def slot_of(self, page: PageRef) -> int | None:
        """Where the copy of a page lies, if it is safe."""
        return self._safe.get(page)

    def check(self) -> None:
        slots = [*self._free, *self._safe.values()]
        assert len(slots) == len(set(slots)), "a standby slot is used twice"
        assert len(slots) <= self._capacity

    def statistics(self) -> Statistics:
        return {
            "standby_pages": self._capacity,
            "pages_safe": len(self._safe),
            "pages_waiting": len(self._waiting),
            "pages_copied": self.copied,
            "pages_outdated": self.outdated,
            "pages_dropped": self.dropped,
        }
