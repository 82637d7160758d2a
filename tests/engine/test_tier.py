"""The index of the file tier: found once stored, leaf first when full, and never reused under a reader."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.chain import KEY_BYTES
from engine.ids import Incarnation
from engine.tier import EVICT_AFTER_FAILURE, TierIndex, TierPage

ORIGIN = Incarnation("worker.0", 3)


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "big")


ROOT = key(0)


def page(number: int, parent: int = 0) -> TierPage:
    return TierPage(key(number), key(parent), number.to_bytes(4, "little") * 4, ORIGIN, number)


def store(index: TierIndex, number: int, parent: int = 0) -> int:
    slot = index.plan_store(key(number))
    assert slot is not None
    index.stored(slot, page(number, parent))
    index.check()
    return slot


def there(index: TierIndex, *numbers: int) -> list[int]:
    return [number for number in numbers if index.find(key(number)) is not None]


def test_a_page_is_found_once_it_is_stored_and_not_before() -> None:
    index = TierIndex(2)
    slot = index.plan_store(key(7))
    assert slot is not None
    assert index.find(key(7)) is None
    assert index.begin_read(key(7)) is None
    assert index.run([key(7)]) == 0
    assert index.plan_store(key(7)) is None
    index.stored(slot, page(7))
    assert index.find(key(7)) == page(7)
    assert index.plan_store(key(7)) is None
    assert index.begin_read(key(7)) == slot
    index.end_read(slot)
    index.check()


def test_a_run_ends_at_the_first_page_that_is_not_there() -> None:
    index = TierIndex(8)
    for number, parent in [(1, 0), (2, 1), (4, 3)]:
        store(index, number, parent)
    assert index.run([key(n) for n in (1, 2, 3, 4)]) == 2
    assert index.run([key(n) for n in (3, 4)]) == 0
    assert index.run([key(4)]) == 1
    assert index.run([]) == 0


def test_no_slots_no_pages() -> None:
    index = TierIndex(0)
    assert index.plan_store(key(1)) is None
    assert not index.forget(key(1))
    index.check()
    with pytest.raises(ValueError, match="cannot have -1 slots"):
        TierIndex(-1)


def test_the_page_unused_for_longest_goes_first() -> None:
    index = TierIndex(3)
    for number in (1, 2, 3):
        store(index, number)
    slot = index.begin_read(key(1))
    assert slot is not None
    index.end_read(slot)
    assert index.plan_store(key(2)) is None  # which says that it was wanted
    store(index, 4)
    assert there(index, 1, 2, 3, 4) == [1, 2, 4]
    store(index, 5)
    assert there(index, 1, 2, 4, 5) == [2, 4, 5]


def test_a_chain_is_worn_off_from_its_end() -> None:
    index = TierIndex(4)
    for number in (1, 2, 3, 4):
        store(index, number, number - 1)
    for new in (11, 12, 13):
        store(index, new)
    assert there(index, 1, 2, 3, 4) == [1]
    store(index, 14)
    assert there(index, 1, 11, 12, 13, 14) == [11, 12, 13, 14], "an inner page that lost its child is a leaf"


def test_a_child_that_came_before_its_parent_counts() -> None:
    index = TierIndex(3)
    store(index, 1)
    store(index, 3, 2)
    store(index, 2, 1)
    store(index, 9)
    assert there(index, 1, 2, 3, 9) == [1, 2, 9]


def test_a_slot_that_is_read_is_not_reused() -> None:
    index = TierIndex(2)
    store(index, 1)
    store(index, 2)
    slot = index.begin_read(key(1))
    assert slot is not None
    assert index.begin_read(key(1)) == slot
    store(index, 3)
    assert there(index, 1, 2, 3) == [1, 3]
    planned = index.plan_store(key(4))
    assert planned not in (None, slot)
    assert index.plan_store(key(5)) is None, "one slot is read, the other one written"
    index.end_read(slot)
    assert index.plan_store(key(5)) is None, "another reader is left"
    index.end_read(slot)
    assert index.plan_store(key(5)) == slot
    with pytest.raises(ValueError, match="nobody reads slot"):
        index.end_read(slot)
    index.check()


def test_a_page_forgotten_while_it_is_read_leaves_its_slot_to_the_reader() -> None:
    index = TierIndex(1)
    slot = store(index, 1)
    assert index.begin_read(key(1)) == slot
    assert index.forget(key(1))
    assert not index.forget(key(1))
    assert index.find(key(1)) is None
    assert index.plan_store(key(1)) is None
    index.check()
    index.end_read(slot)
    assert index.plan_store(key(1)) == slot


def test_a_page_that_cannot_be_written_is_not_there() -> None:
    index = TierIndex(1)
    slot = index.plan_store(key(1))
    assert slot is not None
    index.failed(slot, key(1))
    assert index.find(key(1)) is None
    assert index.plan_store(key(1)) == slot
    index.check()


def test_a_page_that_is_withdrawn_says_nothing_of_the_disk() -> None:
    index = TierIndex(3)
    store(index, 1)
    slot = index.plan_store(key(2))
    assert slot is not None
    index.withdrawn(slot, key(2))
    index.check()
    store(index, 3)
    store(index, 4)
    assert index.keys() == {key(1), key(3), key(4)}
    assert index.statistics()["failures"] == 0


def test_a_full_disk_makes_a_smaller_tier_not_a_stale_one() -> None:
    index = TierIndex(1000)
    for number in range(1, 11):
        store(index, number)
    failures = 0
    for number in range(100, 100 + 5 * EVICT_AFTER_FAILURE):
        slot = index.plan_store(key(number))
        assert slot is not None
        if slot < 10:
            index.stored(slot, page(number))
        else:
            index.failed(slot, key(number))
            failures += 1
        index.check()
    assert failures == 5, "free slots are tried again now and then"
    assert len(index) == 10
    newest = 100 + 5 * EVICT_AFTER_FAILURE - 1
    assert len(there(index, *range(newest - 10, newest + 1))) >= 9


def test_only_what_was_planned_ends() -> None:
    index = TierIndex(2)
    slot = index.plan_store(key(1))
    assert slot is not None
    for wrong_slot, wrong_key in [(slot, key(2)), (1 - slot, key(1))]:
        with pytest.raises(ValueError, match="was planned"):
            index.failed(wrong_slot, wrong_key)
        with pytest.raises(ValueError, match="was planned"):
            index.stored(wrong_slot, TierPage(wrong_key, ROOT, b"", ORIGIN))
    index.check()


def test_an_index_made_again_knows_what_the_file_holds() -> None:
    found = [(5, page(3, 2)), (0, page(1)), (2, page(2, 1)), (3, page(1)), (4, page(9))]
    index = TierIndex(6, found)
    index.check()
    assert there(index, 1, 2, 3, 9) == [1, 2, 3, 9]
    assert index.begin_read(key(1)) == 0, "of two slots with one key the first counts"
    index.end_read(0)
    assert sorted([store(index, 10), store(index, 11)]) == [1, 3]
    assert store(index, 12) == 5, "the longest unused leaf"
    for slot in (-1, 6):
        with pytest.raises(ValueError, match="there is no slot"):
            TierIndex(6, [(slot, page(1))])


def test_the_bookkeeping_of_uses_stays_small() -> None:
    index = TierIndex(4)
    for number in (1, 2, 3):
        store(index, number)
    for _ in range(1000):
        slot = index.begin_read(key(2))
        assert slot is not None
        index.end_read(slot)
    index.check()
    assert index.statistics()["reads"] == 1000


class NaiveTier:
    """The same promises by brute force: a list in order of use, searched from its front."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.order: list[TierPage] = []
        self.readers: dict[bytes, int] = {}
        self.dropped: dict[int, int] = {}
        """Readers of slots whose page was forgotten."""
        self.writing: set[bytes] = set()
        self.evict_first = 0

    def stored(self) -> list[bytes]:
        return [page.key for page in self.order]

    def use(self, key: bytes) -> None:
        (used,) = [page for page in self.order if page.key == key]
        self.order.remove(used)
        self.order.append(used)

    def victim(self) -> bytes | None:
        parents = {page.parent for page in self.order}
        for candidate in self.order:
            if candidate.key not in parents and not self.readers.get(candidate.key):
                return candidate.key
        return None

    def free(self) -> int:
        return self.slots - len(self.order) - len(self.writing) - len(self.dropped)

    def plan(self, key: bytes) -> bool:
        """Whether there is something to write."""
        if key in self.writing:
            return False
        if key in self.stored():
            self.use(key)
            return False
        victim = self.victim()
        evicts = victim is not None and (self.evict_first > 0 or not self.free())
        self.evict_first = max(0, self.evict_first - 1)
        if not evicts and not self.free():
            return False
        if evicts:
            self.order = [page for page in self.order if page.key != victim]
        self.writing.add(key)
        return True


class Machine(RuleBasedStateMachine):
    """Stores, reads and failures that overlap in any way, against the naive tier and a file of slots."""

    @initialize(slots=st.integers(0, 6))
    def begin(self, slots: int) -> None:
        self.index = TierIndex(slots)
        self.naive = NaiveTier(slots)
        self.file: dict[int, bytes] = {}
        """What the slots really hold."""
        self.writes: dict[bytes, int] = {}
        self.reads: list[tuple[int, bytes]] = []

    # A tree of 12 keys with branches: the parent of n is n // 2, that of 1 the root.
    @rule(number=st.integers(1, 12))
    def plan(self, number: int) -> None:
        slot = self.index.plan_store(key(number))
        assert (slot is not None) == self.naive.plan(key(number))
        if slot is not None:
            assert slot not in self.writes.values()
            assert slot not in [read for read, _ in self.reads], "reused under a reader"
            self.file.pop(slot, None)
            self.writes[key(number)] = slot

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), end=st.sampled_from(["stored", "stored", "failed", "withdrawn"]))
    def end_write(self, data: st.DataObject, end: str) -> None:
        which = data.draw(st.sampled_from(sorted(self.writes)))
        slot = self.writes.pop(which)
        self.naive.writing.discard(which)
        if end == "stored":
            number = int.from_bytes(which, "big")
            self.file[slot] = which
            self.index.stored(slot, page(number, number // 2))
            self.naive.order.append(page(number, number // 2))
        elif end == "withdrawn":
            self.index.withdrawn(slot, which)
        else:
            self.index.failed(slot, which)
            self.naive.evict_first = EVICT_AFTER_FAILURE

    @rule(number=st.integers(1, 12))
    def begin_read(self, number: int) -> None:
        slot = self.index.begin_read(key(number))
        assert (slot is not None) == (key(number) in self.naive.stored())
        if slot is not None:
            self.naive.use(key(number))
            self.naive.readers[key(number)] = self.naive.readers.get(key(number), 0) + 1
            self.reads.append((slot, key(number)))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.reads))
        self.reads.remove(read)
        slot, which = read
        assert self.file[slot] == which, "the slot was overwritten under its reader"
        self.index.end_read(slot)
        if slot in self.naive.dropped:
            self.naive.dropped[slot] -= 1
            if not self.naive.dropped[slot]:
                del self.naive.dropped[slot]
        else:
            self.naive.readers[which] -= 1

    @rule(number=st.integers(1, 12))
    def forget(self, number: int) -> None:
        known = key(number) in self.naive.stored()
        assert self.index.forget(key(number)) == known
        self.naive.order = [page for page in self.naive.order if page.key != key(number)]
        if known and (readers := self.naive.readers.pop(key(number), 0)):
            # A slot dropped before has its readers under the same key, but is not this one.
            (slot,) = {s for s, k in self.reads if k == key(number) and s not in self.naive.dropped}
            self.naive.dropped[slot] = readers

    @precondition(lambda self: not self.writes and not self.reads)
    @rule()
    def restart(self) -> None:
        """From what the headers of the file say, the longest unused first."""
        slots = {self.index.begin_read(which): which for which in self.naive.stored()}
        for slot in slots:
            assert slot is not None
            self.index.end_read(slot)
        found = [(slot, self.index.find(which)) for slot, which in slots.items()]
        self.index = TierIndex(self.naive.slots, found)  # type: ignore[arg-type]
        self.naive.evict_first = 0
        self.naive.readers.clear()

    @invariant()
    def as_the_naive_one(self) -> None:
        if not hasattr(self, "index"):
            return
        self.index.check()
        keys = self.naive.stored()
        assert len(self.index) == len(keys)
        for stored in self.naive.order:
            assert self.index.find(stored.key) == stored
        statistics = self.index.statistics()
        assert statistics["free"] == self.naive.free()
        assert statistics["writing"] == len(self.naive.writing)
        assert statistics["reading"] == len(self.reads)
        chain = [key(n) for n in (1, 2, 4, 8)]
        expected = 0
        while expected < 4 and chain[expected] in keys:
            expected += 1
        assert self.index.run(chain) == expected


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
test_stores_and_reads_that_overlap = Machine.TestCase
