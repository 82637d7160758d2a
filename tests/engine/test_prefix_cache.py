"""The prefix cache: what is found is what was asked for, and only what nobody has goes, children first."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tables import OldestFirst, page_table

from engine.chain import KEY_BYTES, Chain, chain_root, token_bytes
from engine.layout import Owner, Seal
from engine.prefix_cache import PrefixCache

PAGE = 4
ROOT = chain_root("model")
WORKER = Owner(3, 1)


class Shelf:
    """A cache over a table, and one worker's row of holders."""

    def __init__(self, pages: int = 12) -> None:
        self.table = page_table(pages, PAGE)
        self.row = self.table.claim(WORKER)
        self.cache = PrefixCache(self.table, OldestFirst())
        self.free = list(range(pages))[::-1]

    def put(self, seal: Seal, block: int, *, held: bool = False) -> tuple[int, bool]:
        """A page with that seal, and whether the cache took it."""
        page = self.free.pop()
        self.table.lease(page, WORKER)
        self.table.open(page, 1, 0, 1, block)
        self.table.seal(page, seal)
        self.row[page] = held
        taken = self.cache.add(page, 0.0)
        self.cache.check()
        return page, taken

    def log(self, *blocks: int, held: bool = False) -> list[int]:
        """The pages of a log, each of one token, as far as they are not there."""
        pages = []
        for block, seal in enumerate(seals(*blocks)):
            there = self.cache.index.find(seal.key)
            pages.append(self.put(seal, block, held=held)[0] if there is None else there)
        return pages

    def find(self, *blocks: int, most: int = 99) -> list[int]:
        return self.cache.find(ROOT, token_bytes([b for b in blocks for _ in range(PAGE)]), most, 0.0)

    def hold(self, *pages: int, held: bool = True) -> None:
        for page in pages:
            self.row[page] = held
            self.cache.look(page)
        self.cache.check()

    def evict(self, count: int) -> list[int]:
        pages = self.cache.evict(count)
        self.cache.check()
        for page in pages:
            assert not self.cache.held(page), f"page {page} is in use"
            self.table.free(page)
            self.free.insert(0, page)
        return pages


def seals(*blocks: int) -> list[Seal]:
    chain = Chain(ROOT, PAGE)
    found = []
    for block in blocks:
        parent, tokens = chain.parent, token_bytes([block] * PAGE)
        found.append(Seal(chain.append(tokens), parent, tokens, None))
    return found


# ── idle, held, pinned ────────────────────────────────────────────────────────────────────────


def test_a_page_is_idle_when_nobody_holds_or_pins_it() -> None:
    shelf = Shelf()
    [page] = shelf.log(1, held=True)
    assert not shelf.cache.is_idle(page)
    shelf.cache.pin([page, page])
    shelf.hold(page, held=False)
    assert not shelf.cache.is_idle(page)
    assert shelf.cache.unpin([page]) == []
    assert not shelf.cache.is_idle(page)
    assert shelf.cache.unpin([page]) == [page]
    assert shelf.cache.is_idle(page)
    assert shelf.cache.idle == 1
    shelf.hold(page)
    assert shelf.cache.idle == 0
    assert shelf.evict(9) == []


def test_a_holder_may_come_between_a_pin_and_its_end() -> None:
    """The grant is pinned until it is taken, and then it is held."""
    shelf = Shelf()
    [page] = shelf.log(1)
    shelf.cache.pin([page])
    shelf.row[page] = 1
    assert shelf.cache.unpin([page]) == []
    assert not shelf.cache.is_idle(page)


def test_what_is_not_in_the_cache_can_be_pinned_and_is_returned_when_nobody_has_it() -> None:
    shelf = Shelf()
    shelf.table.lease(0, WORKER)
    shelf.cache.pin([0])
    assert shelf.cache.held(0)
    assert shelf.cache.unpin([0]) == [0]
    assert not shelf.cache.held(0)
    assert shelf.cache.idle == 0


@pytest.mark.parametrize("state", ["open", "sealed without a key", "leased"])
def test_only_sealed_pages_with_a_key_are_taken_in(state: str) -> None:
    """Field report 11: what is not complete is not found."""
    shelf = Shelf()
    shelf.table.lease(0, WORKER)
    if state != "leased":
        shelf.table.open(0, 1, 0, 1, 0)
    if state == "sealed without a key":
        shelf.table.seal(0)
    assert not shelf.cache.add(0, 0.0)
    assert 0 not in shelf.cache
    shelf.cache.check()


# ── found ─────────────────────────────────────────────────────────────────────────────────────


def test_the_longest_prefix_is_found_and_no_more_than_was_asked_for() -> None:
    shelf = Shelf()
    pages = shelf.log(1, 2, 3)
    assert shelf.find(1, 2, 3, 4) == pages
    assert shelf.find(1, 2, 9) == pages[:2]
    assert shelf.find(1, 2, 3, most=1) == pages[:1]
    assert shelf.find(2, 3) == []


def test_a_second_page_with_the_same_tokens_is_not_taken_in() -> None:
    shelf = Shelf()
    first = shelf.put(seals(1)[0], 0)
    assert first == (0, True)
    assert shelf.put(seals(1)[0], 0) == (1, False)
    assert shelf.cache.add(0, 1.0), "said twice"
    assert shelf.find(1) == [0]
    assert shelf.cache.statistics()["duplicates"] == 1
    assert shelf.evict(1) == [0]
    assert shelf.cache.add(1, 2.0), "now it may stand in"
    assert shelf.find(1) == [1]


def test_what_comes_behind_a_collision_is_found_by_nobody() -> None:
    """Field report 13: two prefixes with one key would share all that follows. None of it is taken in."""
    shelf = Shelf()
    mine = seals(1, 2, 3)
    page, _ = shelf.put(mine[0], 0)
    other = Seal(mine[0].key, ROOT, token_bytes([8] * PAGE), None)
    assert not shelf.put(other, 0)[1]
    assert not shelf.put(mine[1], 1)[1], "by its link it may be the other one's"
    assert not shelf.put(mine[2], 2)[1]
    assert shelf.cache.statistics()["collisions"] == 1
    assert shelf.find(1, 2, 3) == [page], "what was there before is right, by its tokens"
    assert shelf.find(8) == []


def test_the_memory_of_collisions_is_bounded() -> None:
    """Field report 26: whoever makes them does not make it grow."""
    shelf = Shelf(4)
    key = bytes(KEY_BYTES - 2)
    shelf.put(Seal(key + b"aa", ROOT, token_bytes([1] * PAGE), None), 0)
    assert not shelf.put(Seal(key + b"aa", ROOT, token_bytes([2] * PAGE), None), 0)[1]
    for n in range(1, 3000):
        parent = key + (b"aa" if n == 1 else (n - 1).to_bytes(2, "big"))
        page, taken = shelf.put(Seal(key + n.to_bytes(2, "big"), parent, token_bytes([3] * PAGE), None), 1)
        assert not taken
        shelf.table.free(page)
        shelf.free.append(page)
    assert len(shelf.cache._cut) <= 1024


# ── evicted ───────────────────────────────────────────────────────────────────────────────────


def test_children_go_before_their_parents_and_the_oldest_first() -> None:
    shelf = Shelf()
    one = shelf.log(1, 2, 3)
    [_, fork] = shelf.log(1, 9)
    assert shelf.cache.coming(3) == [one[2], one[1], fork]
    assert len(shelf.cache) == 4, "nothing has changed"
    assert shelf.evict(3) == [one[2], one[1], fork]
    assert shelf.find(1, 2) == [one[0]]
    assert shelf.evict(9) == [one[0]]
    assert shelf.cache.statistics()["pages_evicted"] == 4


def test_an_idle_parent_goes_with_what_is_behind_it_when_all_leaves_are_held() -> None:
    """A sequence that filled the pages before it beside these holds the end only.

    What is behind stays where it is, for who holds it, but is found no more.
    """
    shelf = Shelf()
    first, second, third = shelf.log(1, 2, 3)
    shelf.hold(third)
    assert shelf.evict(1) == [second]
    assert third not in shelf.cache
    assert shelf.find(1, 2, 3) == [first]
    assert shelf.cache.held(third)
    assert shelf.evict(9) == [first]


def test_a_page_that_is_held_unheard_of_is_not_evicted_nor_what_is_before_it() -> None:
    """Field report 14: a worker that is thought dead takes a grant that was on its way."""
    shelf = Shelf()
    first, second, third = shelf.log(1, 2, 3)
    other, *_ = shelf.log(5)
    shelf.row[second] = 1
    assert shelf.evict(1) == [third]
    assert shelf.evict(9) == [other, first], "what is before goes when nothing else is left"
    assert second not in shelf.cache
    shelf = Shelf()
    [page] = shelf.log(1)
    shelf.row[page] = 1
    assert shelf.evict(1) == []
    assert not shelf.cache.is_idle(page)


def test_pinned_pages_behind_an_evicted_parent_are_returned_when_they_are_let_go() -> None:
    shelf = Shelf()
    first, second = shelf.log(1, 2)
    shelf.cache.pin([second])
    assert shelf.evict(9) == [first]
    assert second not in shelf.cache
    assert shelf.cache.unpin([second]) == [second]


def test_what_cannot_be_reached_is_evicted_too() -> None:
    shelf = Shelf()
    orphan, taken = shelf.put(seals(1, 2)[1], 1)
    assert taken
    assert shelf.find(1, 2) == []
    assert shelf.evict(1) == [orphan]


# ── against a naive model ─────────────────────────────────────────────────────────────────────


class Machine(RuleBasedStateMachine):
    """Pages come, are held, pinned, found, evicted. The model: a dictionary of prefixes, and two of users."""

    @initialize(pages=st.integers(2, 10))
    def begin(self, pages: int) -> None:
        self.shelf = Shelf(pages)
        self.pages = pages
        self.cached: dict[tuple[int, ...], int] = {}
        self.turn = 0
        self.since: dict[tuple[int, ...], int] = {}
        self.pins: Counter[int] = Counter()
        self.loose: set[int] = set()
        """Sealed, held or pinned, and not found."""

    def in_use(self, page: int) -> bool:
        return bool(self.shelf.row[page]) or self.pins[page] > 0

    @precondition(lambda self: self.shelf.free)
    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple), held=st.booleans())
    def put(self, blocks: tuple[int, ...], held: bool) -> None:
        page, taken = self.shelf.put(seals(*blocks)[-1], len(blocks) - 1, held=held)
        assert taken == (blocks not in self.cached)
        if taken:
            self.cached[blocks] = page
            self.turn += 1
            self.since[blocks] = self.turn
        elif held:
            self.loose.add(page)
        else:
            self.drop(page)

    def drop(self, page: int) -> None:
        self.shelf.table.free(page)
        self.shelf.free.insert(0, page)
        self.loose.discard(page)

    @rule(blocks=st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple), most=st.integers(0, 5))
    def find(self, blocks: tuple[int, ...], most: int) -> None:
        expected = []
        for length in range(1, min(most, len(blocks)) + 1):
            if blocks[:length] not in self.cached:
                break
            expected.append(self.cached[blocks[:length]])
        assert self.shelf.find(*blocks, most=most) == expected

    @precondition(lambda self: self.cached)
    @rule(data=st.data(), held=st.booleans())
    def hold_or_let_go(self, data: st.DataObject, held: bool) -> None:
        self.shelf.hold(data.draw(st.sampled_from(sorted(self.cached.values()))), held=held)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.cached.values())), max_size=3))
        self.shelf.cache.pin(pages)
        self.pins.update(pages)

    @precondition(lambda self: self.pins.total())
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.pins.elements())))
        self.pins[page] -= 1
        gone = self.shelf.cache.unpin([page])
        assert gone == ([] if self.in_use(page) else [page])
        if gone and page in self.loose:
            self.drop(page)

    @precondition(lambda self: self.loose)
    @rule(data=st.data())
    def let_go_of_what_is_not_found(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.loose)))
        self.shelf.row[page] = 0
        if not self.in_use(page):
            self.drop(page)

    @rule(count=st.integers(0, 4))
    def evict(self, count: int) -> None:
        """As many as there are; a page that stays has no parent that went, and none goes that is in use."""
        before = dict(self.cached)
        idle = [page for page in before.values() if not self.in_use(page)]
        for pages in (self.shelf.cache.coming(count), self.shelf.evict(count)):
            assert len(pages) == len(set(pages))
            assert set(pages) <= set(idle)
        assert len(pages) == min(count, len(idle))
        self.cached = {blocks: page for blocks, page in before.items() if page in self.shelf.cache}
        lost = set(before.values()) - set(self.cached.values()) - set(pages)
        self.loose |= lost
        for blocks, page in before.items():
            if page in lost:
                assert self.in_use(page), "an idle page was forgotten and not freed"
                above = {before.get(blocks[:n]) for n in range(1, len(blocks))}
                assert above & set(pages), "nothing before it went"
        for blocks in self.cached:
            # Who came before its parent is not known as its child.
            if blocks[:-1] in before and self.since[blocks[:-1]] < self.since[blocks]:
                assert blocks[:-1] in self.cached, "a parent went before its child"

    @invariant()
    def all_is_known(self) -> None:
        if not hasattr(self, "shelf"):
            return
        cache = self.shelf.cache
        cache.check()
        assert {page for page in range(self.pages) if page in cache} == set(self.cached.values())
        for page in self.cached.values():
            assert cache.is_idle(page) == (not self.in_use(page))
        assert len(cache) + len(self.loose) + len(self.shelf.free) == self.pages


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
