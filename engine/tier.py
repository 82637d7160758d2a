"""The index of the tier below memory: which evicted page is in which slot of the file, and which goes next.

    free + writing + stored + dropped = slots
    a key is in at most one slot that is WRITING or STORED
    only STORED pages are found; a page that others in the file go on from is evicted after them
    a slot is never given away while a read of it is under way

The index does no I/O and keeps nothing itself: `transport.page_file` moves the bytes, and after a
restart the index is made again from the headers that it finds there.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

import msgspec

from engine.ids import Incarnation
from engine.lifecycle import advance

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView, Sequence

EVICT_AFTER_FAILURE = 64
"""Stores that take the place of another page after one that failed, before a free slot is tried again.

A full disk has no room for a slot that was never written, but those that were have theirs.
"""


class TierPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a page is: enough to find it, to compare it on a hit, and to know where it came from."""

    key: bytes
    """The chain key of all tokens up to the end of the page (`engine.chain`)."""
    parent: bytes
    """The key of the page before it, or the root of the chain."""
    tokens: bytes
    """The tokens of the page itself, u32 little endian. Whoever has a hit compares them."""
    origin: Incarnation
    """The worker that computed it."""
    checksum: int | None = None
    """CRC-32 of the page's bytes (ISO 3309, as in zlib); None while nobody has computed it."""


class SlotState(Enum):
    """What a slot of the file is used for."""

    FREE = "free"
    WRITING = "writing"
    STORED = "stored"
    DROPPED = "dropped"


class SlotEvent(Enum):
    """What changes a slot."""

    PLAN = "plan"
    KEEP = "keep"
    FAIL = "fail"
    DROP = "drop"
    FREE = "free"
    RESTORE = "restore"


#          PLAN             KEEP            DROP (evicted or forgotten: not found any more)
#   FREE ────────▶ WRITING ──────▶ STORED ──────▶ DROPPED
#    ▲ ▲              │               ▲              │
#    │ └──── FAIL ────┘               │              │
#    ├──────────── RESTORE ───────────┘              │
#    └──────────── FREE (nobody reads it) ◀──────────┘
SLOT: dict[tuple[SlotState, SlotEvent], SlotState] = {
    (SlotState.FREE, SlotEvent.PLAN): SlotState.WRITING,
    (SlotState.FREE, SlotEvent.RESTORE): SlotState.STORED,
    (SlotState.WRITING, SlotEvent.KEEP): SlotState.STORED,
    (SlotState.WRITING, SlotEvent.FAIL): SlotState.FREE,
    (SlotState.STORED, SlotEvent.DROP): SlotState.DROPPED,
    (SlotState.DROPPED, SlotEvent.FREE): SlotState.FREE,
}


class _Slot:
    """One slot: what it holds, who reads it, and when it was last used."""

    __slots__ = ("page", "readers", "state", "used")

    def __init__(self) -> None:
        self.state = SlotState.FREE
        self.page: TierPage | None = None
        self.readers = 0
        self.used = 0


class TierIndex:
    """Which page is in which slot.

    Full, it gives up the page that was used longest ago of those that no other page in the file goes on
    from: a page without the ones before it is of little use, the other way round is not so.
    """

    def __init__(self, slots: int, found: Iterable[tuple[int, TierPage]] = ()) -> None:
        """`found`: the slots whose headers were good when the file was opened, the longest unused first.

        Of two slots with one key the first counts. Raises ValueError for a slot that is none.
        """
        if slots < 0:
            raise ValueError(f"a file cannot have {slots} slots")
        self._slots = [_Slot() for _ in range(slots)]
        self._at: dict[bytes, int] = {}
        """Slots that are STORED, by key."""
        self._writing: dict[bytes, int] = {}
        """Slots that are WRITING, by the key that is meant for them."""
        self._children: Counter[bytes] = Counter()
        """How many stored pages name a key as their parent, whether or not that one is there."""
        self._leaves: list[tuple[int, int]] = []
        """A heap of (last used, slot); entries that `_is_evictable` denies are passed over."""
        self._clock = 0
        self._evict_first = 0
        self._reads = 0
        """Reads under way."""
        self._counts = dict.fromkeys(("stores", "failures", "reads", "evictions", "forgotten"), 0)
        for slot, page in found:
            if not 0 <= slot < slots:
                raise ValueError(f"there is no slot {slot} among {slots}")
            if page.key not in self._at:
                self._hold(slot, page, SlotEvent.RESTORE)
        self._free = [slot for slot in reversed(range(slots)) if self._slots[slot].state is SlotState.FREE]

    def __len__(self) -> int:
        return len(self._at)

    def plan_store(self, key: bytes) -> int | None:
        """The slot into which to write a page, evicting another if need be.

        `stored`, `failed` or `withdrawn` ends it. None when there is nothing to write: the page is there,
        or being written, or no slot can be had, because there are none or all are in use at this moment.
        """
        if key in self._writing:
            return None
        if key in self._at:
            self._touch(self._at[key])
            return None
        slot = self._take()
        if slot is not None:
            self._move(slot, SlotEvent.PLAN)
            self._writing[key] = slot
        return slot

    def stored(self, slot: int, page: TierPage) -> None:
        """The page that was planned is in its slot, header and all."""
        self._end_store(slot, page.key)
        self._hold(slot, page, SlotEvent.KEEP)
        self._counts["stores"] += 1

    def failed(self, slot: int, key: bytes) -> None:
        """The page that was planned could not be written: the slot is free, and the disk may be full."""
        self.withdrawn(slot, key)
        self._evict_first = EVICT_AFTER_FAILURE
        self._counts["failures"] += 1

    def withdrawn(self, slot: int, key: bytes) -> None:
        """The page that was planned is not wanted any more, or no longer in memory: the slot is free."""
        self._end_store(slot, key)
        self._move(slot, SlotEvent.FAIL)
        self._free.append(slot)

    def keys(self) -> KeysView[bytes]:
        """Of all pages that are stored."""
        return self._at.keys()

    def find(self, key: bytes) -> TierPage | None:
        """What is stored under a key, for the caller to compare its tokens; None when nothing is."""
        slot = self._at.get(key)
        return None if slot is None else self._slots[slot].page

    def run(self, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the front, are stored."""
        return next((i for i, key in enumerate(keys) if key not in self._at), len(keys))

    def begin_read(self, key: bytes) -> int | None:
        """The slot to read, not to be reused before as many `end_read`s; None when the key is not stored."""
        slot = self._at.get(key)
        if slot is not None:
            self._slots[slot].readers += 1
            self._reads += 1
            self._touch(slot)
            self._counts["reads"] += 1
        return slot

    def end_read(self, slot: int) -> None:
        """A read is over, whether or not it was good; if it was not, `forget` the key as well."""
        entry = self._slots[slot]
        if not entry.readers:
            raise ValueError(f"nobody reads slot {slot}")
        entry.readers -= 1
        self._reads -= 1
        if entry.state is SlotState.DROPPED:
            self._free_unread(slot)
        else:
            self._offer(slot)

    def forget(self, key: bytes) -> bool:
        """Find a stored page no more; whether there was one. Its slot is free once nobody reads it."""
        slot = self._at.get(key)
        if slot is None:
            return False
        self._drop(slot)
        self._free_unread(slot)
        self._counts["forgotten"] += 1
        return True

    def _take(self) -> int | None:
        """A free slot, or else that of the page to give up; the other way round after a failure."""
        victim = self._victim() if self._evict_first or not self._free else None
        self._evict_first = max(0, self._evict_first - 1)
        if victim is not None:
            self._drop(victim)
            self._move(victim, SlotEvent.FREE)
            self._counts["evictions"] += 1
            return victim
        return self._free.pop() if self._free else None

    def _victim(self) -> int | None:
        while self._leaves:
            used, slot = heappop(self._leaves)
            if self._slots[slot].used == used and self._is_evictable(slot):
                return slot
        return None

    def _is_evictable(self, slot: int) -> bool:
        entry = self._slots[slot]
        if entry.state is not SlotState.STORED or entry.readers or entry.page is None:
            return False
        return entry.page.key not in self._children

    def _hold(self, slot: int, page: TierPage, event: SlotEvent) -> None:
        self._move(slot, event)
        self._slots[slot].page = page
        self._at[page.key] = slot
        self._children[page.parent] += 1
        self._touch(slot)

    def _drop(self, slot: int) -> None:
        """STORED → DROPPED: the key is gone, and its parent may be the next to go."""
        self._move(slot, SlotEvent.DROP)
        page = self._slots[slot].page
        assert page is not None
        self._slots[slot].page = None
        del self._at[page.key]
        self._children[page.parent] -= 1
        if not self._children[page.parent]:
            del self._children[page.parent]
            if page.parent in self._at:
                self._offer(self._at[page.parent])

    def _free_unread(self, slot: int) -> None:
        if not self._slots[slot].readers:
            self._move(slot, SlotEvent.FREE)
            self._free.append(slot)

    def _end_store(self, slot: int, key: bytes) -> None:
        if self._writing.get(key) != slot:
            raise ValueError(f"no store of {key.hex()} into slot {slot} was planned")
        del self._writing[key]

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._slots[slot].used = self._clock
        self._offer(slot)

    def _offer(self, slot: int) -> None:
        """Put a slot where `_victim` looks, if it may be evicted now."""
        if not self._is_evictable(slot):
            return
        heappush(self._leaves, (self._slots[slot].used, slot))
        # Every use leaves an entry behind: clear them away before they outnumber the slots.
        if len(self._leaves) > 2 * len(self._slots) + 64:
            self._leaves = [
                (entry.used, index) for index, entry in enumerate(self._slots) if self._is_evictable(index)
            ]
            heapify(self._leaves)

    def _move(self, slot: int, event: SlotEvent) -> None:
        self._slots[slot].state = advance(SLOT, self._slots[slot].state, event)

    def check(self) -> None:
        """The invariants above, and that every page that may be evicted is known to be so."""
        by_state: dict[SlotState, set[int]] = {state: set() for state in SlotState}
        for slot, entry in enumerate(self._slots):
            by_state[entry.state].add(slot)
            assert (entry.page is not None) == (entry.state is SlotState.STORED)
            assert entry.readers == 0 or entry.state in (SlotState.STORED, SlotState.DROPPED)
            assert entry.readers > 0 or entry.state is not SlotState.DROPPED
        assert sum(entry.readers for entry in self._slots) == self._reads
        assert sorted(self._free) == sorted(by_state[SlotState.FREE])
        assert sorted(self._writing.values()) == sorted(by_state[SlotState.WRITING])
        assert sorted(self._at.values()) == sorted(by_state[SlotState.STORED])
        assert not self._at.keys() & self._writing.keys()
        pages = {slot: page for slot, entry in enumerate(self._slots) if (page := entry.page) is not None}
        assert {page.key: slot for slot, page in pages.items()} == self._at
        assert Counter(page.parent for page in pages.values()) == self._children
        offered = set(self._leaves)
        for slot in pages:
            assert not self._is_evictable(slot) or (self._slots[slot].used, slot) in offered
        assert len(self._leaves) <= 2 * len(self._slots) + 64

    def statistics(self) -> dict[str, int | float]:
        """Slots by use, reads under way, and what happened since the start."""
        return {
            "slots": len(self._slots),
            "free": len(self._free),
            "writing": len(self._writing),
            "stored": len(self._at),
            "reading": self._reads,
            **self._counts,
        }
