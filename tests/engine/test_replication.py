"""The replication plan: what is safe is whole and current, and no standby slot is used twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tables import page_table

from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner, PageTable
from engine.messages import Drain, PagesSealed, Roster, Stop
from engine.replication import CopyPage, ReplicationPlan

if TYPE_CHECKING:
    from engine.shapes import PageRef

KEY = SequenceKey(1, 0)
WORKER = Incarnation("w", 1)
PAGES = 8


def table() -> PageTable:
    return page_table(PAGES)


def sealed(pages: PageTable, page: int) -> PageRef:
    ref = pages.lease(page, Owner(1, 1))
    pages.open(page, 1, 0, 1, 0)
    pages.seal(page)
    return ref


def tell(plan: ReplicationPlan, *pages: PageRef) -> None:
    assert plan.handle(WORKER, PagesSealed(KEY, 1, pages), 0.0) == []
    plan.check()


def copy_one(plan: ReplicationPlan) -> CopyPage:
    copy = plan.next_copy()
    assert copy is not None
    plan.done(copy, whole=True)
    plan.check()
    return copy


def test_pages_are_copied_oldest_first_and_are_safe_only_when_whole() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 4)
    refs = [sealed(pages, page) for page in range(3)]
    tell(plan, *refs)
    for ref in refs:
        copy = plan.next_copy()
        assert copy is not None
        assert copy.page == ref
        assert plan.slot_of(ref) is None
        plan.done(copy, whole=True)
        assert plan.slot_of(ref) == copy.slot
    assert plan.next_copy() is None


def test_the_oldest_copy_makes_room() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 2)
    refs = [sealed(pages, page) for page in range(3)]
    for ref in refs:
        tell(plan, ref)
        copy_one(plan)
    assert [plan.slot_of(ref) is not None for ref in refs] == [False, True, True]


def test_outdated_copies_make_room_before_current_ones() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 2)
    refs = [sealed(pages, page) for page in range(3)]
    for ref in refs[:2]:
        tell(plan, ref)
        copy_one(plan)
    pages.free(1)
    tell(plan, refs[2])
    copy_one(plan)
    assert plan.slot_of(refs[0]) is not None
    assert plan.slot_of(refs[1]) is None


def test_a_page_that_was_freed_meanwhile_is_not_copied() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 2)
    tell(plan, sealed(pages, 0))
    pages.free(0)
    sealed(pages, 0)
    assert plan.next_copy() is None
    assert plan.statistics()["pages_outdated"] == 1


def test_a_copy_whose_source_changed_is_not_safe_and_gives_its_slot_back() -> None:
    """Field report 14: pages are recycled while a transfer reads them."""
    pages = table()
    plan = ReplicationPlan(pages, 1)
    ref = sealed(pages, 0)
    for _ in range(3):
        tell(plan, ref)
        copy = plan.next_copy()
        assert copy is not None
        plan.done(copy, whole=False)
        plan.check()
    assert plan.slot_of(ref) is None
    tell(plan, ref)
    copy_one(plan)


def test_the_same_page_twice_takes_one_slot() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 2)
    ref = sealed(pages, 0)
    tell(plan, ref, ref)
    copy_one(plan)
    second = copy_one(plan)
    assert plan.slot_of(ref) == second.slot
    assert plan.statistics()["pages_safe"] == 1


def test_when_every_slot_is_being_copied_into_the_next_page_waits() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 1)
    tell(plan, sealed(pages, 0))
    first = plan.next_copy()
    assert first is not None
    tell(plan, sealed(pages, 1))
    assert plan.next_copy() is None
    plan.done(first, whole=True)
    assert copy_one(plan).page.index == 1


def test_no_standby_pool_wants_nothing() -> None:
    pages = table()
    plan = ReplicationPlan(pages, 0)
    tell(plan, sealed(pages, 0))
    assert plan.next_copy() is None
    assert plan.statistics()["pages_waiting"] == 0


def test_waiting_pages_are_bounded() -> None:
    """Field report 26: the list does not grow when nobody drains it."""
    pages = table()
    plan = ReplicationPlan(pages, 3)
    refs = [sealed(pages, page) for page in range(PAGES)]
    for _ in range(50):
        tell(plan, *refs)
    assert plan.statistics()["pages_waiting"] == 3
    assert plan.statistics()["pages_dropped"] == 50 * PAGES - 3


@pytest.mark.parametrize("message", [Drain(), Stop(), Roster((1, 1), ())])
def test_what_is_the_shells_own_changes_nothing(message: Drain | Stop | Roster) -> None:
    plan = ReplicationPlan(table(), 1)
    assert plan.handle(WORKER, message, 0.0) == []
    assert plan.peers((), (), 0.0) == []


class Ring(RuleBasedStateMachine):
    """Pages come and go while several copies are on their way; a standby pool remembers contents."""

    @initialize(capacity=st.integers(0, 5))
    def begin(self, capacity: int) -> None:
        self.pages = table()
        self.plan = ReplicationPlan(self.pages, capacity)
        self.capacity = capacity
        self.current: dict[int, PageRef] = {}
        self.copying: list[CopyPage] = []
        self.pool: dict[int, PageRef] = {}

    @rule(page=st.integers(0, PAGES - 1))
    def seal_or_free(self, page: int) -> None:
        if page in self.current:
            self.pages.free(page)
            del self.current[page]
        else:
            self.current[page] = sealed(self.pages, page)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def say(self, data: st.DataObject) -> None:
        tell(self.plan, *data.draw(st.lists(st.sampled_from(list(self.current.values())), max_size=4)))

    @rule()
    def copy(self) -> None:
        copy = self.plan.next_copy()
        if copy is not None:
            assert self.pages.is_current(copy.page)
            assert 0 <= copy.slot < self.capacity
            assert copy.slot not in [other.slot for other in self.copying], "two copies into one slot"
            self.copying.append(copy)
            self.pool[copy.slot] = copy.page

    @precondition(lambda self: self.copying)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        copy = self.copying.pop(data.draw(st.integers(0, len(self.copying) - 1)))
        self.plan.done(copy, whole=self.pages.is_current(copy.page))

    @invariant()
    def what_is_safe_is_there(self) -> None:
        if not hasattr(self, "plan"):
            return
        self.plan.check()
        for ref in self.current.values():
            slot = self.plan.slot_of(ref)
            if slot is not None:
                assert self.pool[slot] == ref
        figures = self.plan.statistics()
        assert len(self.plan._free) + figures["pages_safe"] + len(self.copying) == self.capacity


TestRing = Ring.TestCase
TestRing.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
