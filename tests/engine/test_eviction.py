"""Eviction policies: leaves first, never a held page, and LRU as a naive model has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.eviction import GHOSTS, LRU, CostAware, RecomputeCost

if TYPE_CHECKING:
    from engine.eviction import EvictionPolicy

CAPACITY = 6


class NaivePage:
    def __init__(self, parent: int | None, block: int, used: int) -> None:
        self.parent, self.block, self.used, self.held = parent, block, used, True


class PolicyMachine(RuleBasedStateMachine):
    """Any allocator: pages come, are found, held, let go, and leave."""

    def make(self) -> EvictionPolicy:
        return CostAware(CAPACITY, RecomputeCost(1.0, 0.1))

    def __init__(self) -> None:
        super().__init__()
        self.policy = self.make()
        self.pages: dict[int, NaivePage] = {}
        self.clock = 0

    def children(self, page: int, gone: list[int]) -> bool:
        return any(other.parent == page and name not in gone for name, other in self.pages.items())

    def candidates(self, gone: list[int]) -> list[int]:
        return [
            name
            for name, page in self.pages.items()
            if name not in gone and not page.held and not self.children(name, gone)
        ]

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.pages)))

    def remove(self, page: int) -> None:
        self.policy.removed(page)
        del self.pages[page]

    @rule(data=st.data(), root=st.booleans(), key=st.integers(0, 20))
    def added(self, data: st.DataObject, root: bool, key: int) -> None:
        self.clock += 1
        page = data.draw(st.sampled_from([name for name in range(40) if name not in self.pages] or [40]))
        if page == 40:
            return
        parent = None if root or not self.pages else self.pick(data)
        block = 0 if parent is None else self.pages[parent].block + 1
        self.policy.added(page, parent, block, bytes([key]), float(self.clock))
        self.pages[page] = NaivePage(parent, block, self.clock)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        self.clock += 1
        path: list[int] = []
        page: int | None = self.pick(data)
        while page is not None:
            path.insert(0, page)
            page = self.pages[page].parent
        self.policy.hit(path, float(self.clock))
        for name in path:
            self.pages[name].used = self.clock

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def held_or_unheld(self, data: st.DataObject) -> None:
        page = self.pick(data)
        if self.pages[page].held:
            self.policy.unheld(page)
        else:
            self.policy.held(page)
        self.pages[page].held = not self.pages[page].held

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def removed_for_another_reason(self, data: st.DataObject) -> None:
        page = self.pick(data)
        if self.children(page, []):
            with pytest.raises(ValueError, match="has a cached child"):
                self.policy.removed(page)
        else:
            self.remove(page)

    @rule(count=st.integers(0, 12), share=st.integers(0, 12))
    def victims(self, count: int, share: int) -> None:
        victims = self.policy.victims(count)
        assert self.policy.victims(count) == victims, "it proposes, and changes nothing"
        gone: list[int] = []
        for page in victims:
            assert page in self.candidates(gone)
            gone.append(page)
        assert len(victims) == count or (len(victims) < count and not self.candidates(gone))
        self.compare(victims)
        for page in victims[:share]:
            self.remove(page)

    def compare(self, victims: list[int]) -> None:
        """A policy with a naive model is like it."""

    @invariant()
    def checks(self) -> None:
        self.policy.check()
        figures = self.policy.statistics()
        assert figures["eviction_pages"] == len(self.pages)
        assert figures["eviction_candidates"] == len(self.candidates([]))

    def teardown(self) -> None:
        for name, page in self.pages.items():
            if page.held:
                self.policy.unheld(name)
                page.held = False
        assert sorted(self.policy.victims(100)) == sorted(self.pages), (
            "all are victims once nobody holds them"
        )


class LRUMachine(PolicyMachine):
    def make(self) -> EvictionPolicy:
        return LRU()

    def compare(self, victims: list[int]) -> None:
        gone: list[int] = []
        for page in victims:
            first = min(self.candidates(gone), key=lambda n: (self.pages[n].used, -self.pages[n].block, n))
            assert page == first
            gone.append(page)


TestCostAware = PolicyMachine.TestCase
TestLRU = LRUMachine.TestCase
TestCostAware.settings = TestLRU.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def chain(policy: EvictionPolicy, *pages: int, parent: int | None = None, block: int = 0) -> None:
    """A request adds these one behind the other, and lets them go."""
    for index, page in enumerate(pages, block):
        policy.added(page, parent, index, str(page).encode(), 0.0)
        parent = page
    for page in pages:
        policy.unheld(page)


@pytest.mark.parametrize("policy", [LRU(), CostAware(8)])
def test_what_cannot_be_is_refused(policy: EvictionPolicy) -> None:
    chain(policy, 1, 2)
    for event in (
        lambda: policy.added(1, None, 0, b"", 0.0),
        lambda: policy.added(3, 9, 1, b"", 0.0),
        lambda: policy.added(3, None, -1, b"", 0.0),
        lambda: policy.hit([2, 1], 0.0),
        lambda: policy.hit([1, 1], 0.0),
        lambda: policy.unheld(1),
        lambda: policy.held(9),
        lambda: policy.removed(1),
        lambda: policy.victims(-1),
    ):
        with pytest.raises(ValueError):
            event()
        policy.check()
    assert policy.victims(5) == [2, 1]


@pytest.mark.parametrize("policy", [LRU(), CostAware(8)])
def test_a_parent_that_came_later_is_learnt_of_at_the_next_hit(policy: EvictionPolicy) -> None:
    policy.added(2, None, 1, b"2", 0.0)
    policy.added(1, None, 0, b"1", 0.0)
    policy.unheld(1)
    assert policy.victims(1) == [1]
    policy.hit([1, 2], 0.0)
    assert policy.victims(2) == []
    policy.unheld(2)
    assert policy.victims(2) == [2, 1]


def test_a_session_that_went_on_outlives_prompts_that_came_after_it() -> None:
    policy, lru = CostAware(40, RecomputeCost(1.0, 0.0)), LRU()
    for either in (policy, lru):
        chain(either, 0, 1)
        either.hit([0, 1], 0.0)
        chain(either, 2, 3, parent=1, block=2)
        either.hit([0, 1, 2, 3], 0.0)
        chain(either, 10, 11)
    assert lru.victims(2) == [3, 2]
    assert policy.victims(2) == [11, 10]


def test_of_prompts_that_nobody_came_back_to_the_long_one_goes_first() -> None:
    policy, lru = CostAware(4000, RecomputeCost(1.0, 0.0)), LRU()
    for either in (policy, lru):
        chain(either, 0, 1)
        chain(either, *range(100, 164))
    assert lru.victims(2) == [1, 0]
    assert set(policy.victims(64)) == set(range(100, 164))
    policy.hit(range(100, 164), 0.0)
    assert policy.victims(2) == [1, 0], "somebody came back"


def test_a_rewritten_turn_goes_first_and_a_shared_prefix_has_none() -> None:
    policy = CostAware(40)
    chain(policy, 0, 1, 2)
    chain(policy, 20, 21)
    policy.hit([0], 0.0)
    chain(policy, 5, 6, parent=0, block=1)
    policy.hit([20, 21], 0.0)
    assert policy.victims(2) == [2, 1]
    assert policy.statistics()["eviction_superseded"] == 2
    policy.hit([0, 1, 2], 0.0)
    assert policy.statistics()["eviction_superseded"] == 0
    for page in (30, 31, 32):
        chain(policy, page, parent=0, block=1)
    assert policy.statistics()["eviction_superseded"] == 2, "5 and 6; then it is a shared prefix"


def test_a_page_that_comes_back_is_known_by_its_key() -> None:
    policy = CostAware(2, RecomputeCost(1.0, 0.0))
    chain(policy, 1)
    policy.removed(1)
    assert policy.statistics()["eviction_ghosts"] == 1
    chain(policy, 1)
    chain(policy, 2)
    assert policy.statistics()["eviction_ghosts"] == 0
    for page in range(10, 10 + 3 * GHOSTS):
        chain(policy, page)
        policy.removed(page)
    assert policy.statistics()["eviction_ghosts"] == 2 * GHOSTS


def test_a_dear_page_outlives_a_cheap_one() -> None:
    def first_victim(slope: float) -> int:
        policy = CostAware(1000, RecomputeCost(1.0, slope))
        for page, block in ((1, 500), (2, 0)):
            policy.added(page, None, block, bytes([page]), 0.0)
            policy.unheld(page)
            policy.hit([page], 0.0)
        return policy.victims(1)[0]

    assert first_victim(0.0) == 1
    assert first_victim(0.01) == 2


def test_bad_constants_are_refused() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        CostAware(0)
    with pytest.raises(ValueError, match="cost"):
        CostAware(4, RecomputeCost(0.0, 1.0))


@pytest.mark.parametrize("policy", [LRU(), CostAware(64)])
def test_events_without_evictions_do_not_pile_up(policy: EvictionPolicy) -> None:
    chain(policy, 1, 2)
    for _ in range(1000):
        policy.hit([1, 2], 0.0)
        policy.held(2)
        policy.unheld(2)
    assert len(policy._heap) <= 2 + 64 + 1  # type: ignore[attr-defined]
