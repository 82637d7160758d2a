"""The prefix index: the longest prefix that is there, never another's page, whatever comes and goes."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine import chain
from engine.chain import CHUNK_PAGES, KEY_BYTES, Chain, chain_root, page_keys, token_bytes
from engine.prefix_index import PrefixIndex, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = 8
ROOT = chain_root("m")
ROOTS = {"plain": ROOT, "salted": chain_root("m", "s"), "other": chain_root("n")}


def page_of(letter: str, page_tokens: int = PAGE) -> bytes:
    """A page of one letter: b and c differ from a in the last and the first token only."""
    tokens = [7] * page_tokens
    if letter != "a":
        tokens[-1 if letter == "b" else 0] = 8
    return token_bytes(tokens)


def tokens_of(letters: str, page_tokens: int = PAGE) -> bytes:
    return b"".join(page_of(letter, page_tokens) for letter in letters)


def links(letters: str, root: bytes = ROOT, page_tokens: int = PAGE) -> list[tuple[bytes, bytes, bytes]]:
    """Key, parent and tokens of each page of a sequence."""
    grown = Chain(root, page_tokens)
    found = []
    for letter in letters:
        parent, tokens = grown.parent, page_of(letter, page_tokens)
        found.append((grown.append(tokens), parent, tokens))
    return found


def put(index: PrefixIndex, letters: str, first: int = 0, order: Iterable[int] | None = None) -> list[int]:
    """The pages of a sequence go in, in the given order of places; their numbers count from `first`."""
    pages = links(letters)
    for place in range(len(pages)) if order is None else order:
        assert index.insert(first + place, *pages[place]) is None
        index.check()
    return [first + place for place in range(len(pages))]


# ── against a naive model ─────────────────────────────────────────────────────────────────────

letters_run = st.tuples(st.sampled_from("abc"), st.sampled_from([1, 2, 7, 14, 15, 16, 17]))
sequences = st.lists(letters_run, min_size=1, max_size=4).map(
    lambda runs: "".join(letter * count for letter, count in runs)
)
owners = st.sampled_from(sorted(ROOTS))


class Machine(RuleBasedStateMachine):
    """The model is a dict from (root, letters up to the end of a page) to the page."""

    @initialize(page_tokens=st.sampled_from([8, 16]))
    def begin(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.index = PrefixIndex(page_tokens)
        self.model: dict[tuple[str, str], int] = {}
        self.free = list(range(10_000))
        self.duplicates = 0

    def expected(self, owner: str, letters: str, most: int) -> list[int]:
        pages: list[int] = []
        while len(pages) < min(len(letters), most):
            page = self.model.get((owner, letters[: len(pages) + 1]))
            if page is None:
                break
            pages.append(page)
        return pages

    def look_up(self, owner: str, letters: str, most: int | None = None, behind: bytes = b"") -> None:
        tokens = tokens_of(letters, self.page_tokens) + behind
        found = self.index.lookup(ROOTS[owner], tokens, most)
        assert found == self.expected(owner, letters, len(letters) if most is None else most)

    def pick(self, data: st.DataObject) -> tuple[str, str]:
        return data.draw(st.sampled_from(sorted(self.model)), label="page")

    @rule(owner=owners, letters=sequences, data=st.data())
    def insert(self, owner: str, letters: str, data: st.DataObject) -> None:
        """Pages of a sequence in any order, sometimes not all; the last freed numbers come back first."""
        places = data.draw(st.permutations(range(len(letters))), label="order")
        if data.draw(st.booleans(), label="gaps"):
            places = places[: len(places) * 3 // 4]
        pages = links(letters, ROOTS[owner], self.page_tokens)
        for place in places:
            prefix = (owner, letters[: place + 1])
            there = self.model.get(prefix)
            assert self.index.find(pages[place][0]) == there
            assert self.index.insert(self.free[-1], *pages[place]) == there
            if there is None:
                self.model[prefix] = self.free.pop()
            else:
                self.duplicates += 1
        self.look_up(owner, letters)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def insert_again(self, data: st.DataObject) -> None:
        """The same page as the same thing changes nothing, as another thing is an error."""
        owner, letters = self.pick(data)
        page = self.model[owner, letters]
        key, parent, tokens = links(letters, ROOTS[owner], self.page_tokens)[-1]
        assert self.index.insert(page, key, parent, memoryview(tokens)) is None
        other = links(letters + "a", ROOTS[owner], self.page_tokens)[-1]
        with pytest.raises(ValueError, match="something else"):
            self.index.insert(page, *other)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), back=st.booleans())
    def remove(self, data: st.DataObject, back: bool) -> None:
        """Any page, looked up before and after; perhaps its like comes back as another page."""
        prefix = owner, letters = self.pick(data)
        longest = max(
            (other for name, other in self.model if name == owner and other.startswith(letters)), key=len
        )
        self.look_up(owner, longest)
        self.free.append(self.model.pop(prefix))
        self.index.remove(self.free[-1])
        assert self.free[-1] not in self.index
        self.look_up(owner, longest)
        if back:
            page = self.free.pop(0)
            assert self.index.insert(page, *links(letters, ROOTS[owner], self.page_tokens)[-1]) is None
            self.model[prefix] = page
            self.look_up(owner, longest)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), count=st.integers(1, 40))
    def evict_leaves(self, data: st.DataObject, count: int) -> None:
        """Leaf first, as a cache does."""
        for _ in range(count):
            leaves = sorted(page for page in self.model.values() if self.index.is_leaf(page))
            if not leaves:
                return
            page = data.draw(st.sampled_from(leaves), label="leaf")
            [prefix] = [prefix for prefix, other in self.model.items() if other == page]
            assert not any(
                owner == prefix[0] and len(letters) == len(prefix[1]) + 1 and letters.startswith(prefix[1])
                for owner, letters in self.model
            )
            self.index.remove(page)
            del self.model[prefix]
            self.free.append(page)

    @rule(owner=owners, letters=sequences, most=st.none() | st.integers(0, 70), half=st.booleans())
    def lookup(self, owner: str, letters: str, most: int | None, half: bool) -> None:
        behind = page_of("a", self.page_tokens)[:-4] if half else b""
        self.look_up(owner, letters, most, behind)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tail=sequences, most=st.none() | st.integers(0, 70))
    def lookup_of_what_was_there(self, data: st.DataObject, tail: str, most: int | None) -> None:
        owner, letters = self.pick(data)
        self.look_up(owner, letters + tail, most)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def a_page_says_what_it_is(self, data: st.DataObject) -> None:
        owner, letters = self.pick(data)
        page = self.model[owner, letters]
        key, parent, tokens = links(letters, ROOTS[owner], self.page_tokens)[-1]
        assert page in self.index
        assert (self.index.key_of(page), self.index.parent_of(page)) == (key, parent)
        assert self.index.tokens_of(page) == tokens
        children = sum((owner, letters + letter) in self.model for letter in "abc")
        assert self.index.children(page) == children
        assert self.index.is_leaf(page) == (children == 0)

    @invariant()
    def whole(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)
        figures = self.index.statistics()
        assert figures["pages_indexed"] == len(self.model)
        assert figures["duplicates"] == self.duplicates
        assert figures["collisions"] == 0


Machine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.generate],
)
TestMachine = Machine.TestCase


# ── collisions ────────────────────────────────────────────────────────────────────────────────


class WeakHash:
    """A hash with 5 values."""

    def __init__(self, tokens: bytes = b"", **how: Any) -> None:
        self._hash = blake2b(tokens, **how)

    def update(self, tokens: bytes) -> None:
        self._hash.update(tokens)

    def digest(self) -> bytes:
        return bytes([self._hash.digest()[0] % 5]) * KEY_BYTES


@given(st.lists(st.tuples(sequences, st.booleans()), min_size=1, max_size=8), sequences)
@settings(deadline=None)
def test_a_hit_is_never_of_other_tokens_even_where_keys_collide(
    put_in: list[tuple[str, bool]], wanted: str
) -> None:
    """Field report 13: whatever the hash says, tokens and links are those asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain, "blake2b", WeakHash)
        index = PrefixIndex(PAGE)
        refused = 0
        for number, (letters, backwards) in enumerate(put_in):
            pages = list(enumerate(links(letters)))
            for place, (key, parent, tokens) in reversed(pages) if backwards else pages:
                if key == parent:
                    continue
                there = index.find(key)
                answer = index.insert(number * 100 + place, key, parent, tokens)
                if there is None:
                    assert answer is None
                elif (index.tokens_of(there), index.parent_of(there)) == (tokens, parent):
                    assert answer == there
                else:
                    assert answer is Refused.COLLISION
                    assert number * 100 + place not in index
                    refused += 1
                assert index.statistics()["collisions"] == refused
                index.check()
        for letters in (wanted, *(letters for letters, _ in put_in)):
            # Twice, since the second look-up goes by what the first remembered.
            for _ in range(2):
                found = index.lookup(ROOT, tokens_of(letters))
                above = ROOT
                for page, letter in zip(found, letters, strict=False):
                    assert index.tokens_of(page) == page_of(letter)
                    assert index.parent_of(page) == above
                    above = index.key_of(page)
                index.check()


def test_a_taken_key_is_refused_and_the_page_stays_its_owners() -> None:
    index = PrefixIndex(PAGE)
    [(key, parent, tokens)] = links("a")
    assert index.insert(3, key, parent, tokens) is None
    assert index.insert(4, key, parent, page_of("b")) is Refused.COLLISION
    assert index.insert(4, key, chain_root("n"), tokens) is Refused.COLLISION
    assert index.insert(4, key, parent, tokens) == 3, "that is no collision but the same page again"
    assert (4 in index, len(index), index.find(key), index.tokens_of(3)) == (False, 1, 3, tokens)
    assert index.collisions == 2
    index.check()


@pytest.mark.parametrize("behind", [0, 4, CHUNK_PAGES - 1, CHUNK_PAGES, CHUNK_PAGES + 4])
def test_a_key_that_lies_is_found_out_by_its_tokens(behind: int) -> None:
    """The page at the end has the key of what is asked for, and holds something else."""
    index = PrefixIndex(PAGE)
    pages = put(index, "a" * behind)
    key, parent, _ = links("a" * (behind + 1))[-1]
    assert index.insert(900, key, parent, page_of("b")) is None
    for _ in range(2):
        assert index.lookup(ROOT, tokens_of("a" * (behind + 1))) == pages
        assert index.lookup(ROOT, tokens_of("a" * behind + "b")) == pages
    assert index.collisions == 2
    index.check()


@pytest.mark.parametrize("behind", [1, CHUNK_PAGES - 1, CHUNK_PAGES, CHUNK_PAGES + 4])
def test_a_page_of_another_prefix_is_found_out_by_its_parent(behind: int) -> None:
    """Key and tokens are those of what is asked for, but it was computed behind something else."""
    index = PrefixIndex(PAGE)
    pages = put(index, "a" * behind)
    key, _, tokens = links("a" * (behind + 1))[-1]
    assert index.insert(900, key, chain_root("elsewhere"), tokens) is None
    for _ in range(2):
        assert index.lookup(ROOT, tokens_of("a" * (behind + 1))) == pages
    assert index.collisions == 2


def test_a_remembered_run_is_not_taken_for_another_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """All chunks have one key here: only tokens, and the key above them, tell them apart."""
    index = PrefixIndex(PAGE)
    pages = put(index, "a" * CHUNK_PAGES)
    key = index.key_of(pages[-1])
    assert index.lookup(ROOT, tokens_of("a" * CHUNK_PAGES)) == pages

    class Constant(WeakHash):
        def digest(self) -> bytes:
            return key

    monkeypatch.setattr(chain, "blake2b", Constant)
    assert index.lookup(ROOT, tokens_of("a" * CHUNK_PAGES)) == pages
    assert index.lookup(ROOT, tokens_of("a" * (CHUNK_PAGES - 1) + "b")) == []
    assert index.lookup(ROOTS["salted"], tokens_of("a" * CHUNK_PAGES)) == []


# ── gaps, in any order ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("order", [range(40), range(39, -1, -1), [*range(1, 40, 2), *range(0, 40, 2)]])
def test_pages_come_in_any_order(order: Iterable[int]) -> None:
    index = PrefixIndex(PAGE)
    pages = put(index, "ab" * 20, order=order)
    assert index.lookup(ROOT, tokens_of("ab" * 20)) == pages


@pytest.mark.parametrize("gap", range(2 * CHUNK_PAGES + 3))
def test_a_look_up_ends_at_the_gap_until_it_is_filled(gap: int) -> None:
    letters = "a" * (2 * CHUNK_PAGES + 3)
    index = PrefixIndex(PAGE)
    pages = put(index, letters)
    assert index.lookup(ROOT, tokens_of(letters)) == pages
    index.remove(gap)
    index.check()
    assert index.lookup(ROOT, tokens_of(letters)) == pages[:gap]
    with pytest.raises(KeyError):
        index.remove(gap)
    assert index.insert(500, *links(letters)[gap]) is None
    assert index.lookup(ROOT, tokens_of(letters)) == [*pages[:gap], 500, *pages[gap + 1 :]]
    index.check()


def test_a_page_in_several_runs_takes_all_of_them_along() -> None:
    """Chunks that part in the middle share the pages before that."""
    index = PrefixIndex(PAGE)
    trunk = "a" * 10
    pages = put(index, trunk)
    for number, letter in enumerate("abc"):
        for place, page in enumerate(links(trunk + letter * 6)[10:]):
            assert index.insert(100 * (number + 1) + place, *page) is None
    branches = [trunk + letter * 6 for letter in "abc"]
    assert [len(index.lookup(ROOT, tokens_of(branch))) for branch in branches] == [16, 16, 16]
    assert index.statistics()["runs_remembered"] == 3
    index.remove(pages[4])
    index.check()
    assert [index.lookup(ROOT, tokens_of(branch)) for branch in branches] == [pages[:4]] * 3


def test_a_leaf_leaves_the_other_runs_remembered() -> None:
    index = PrefixIndex(PAGE)
    pages = put(index, "a" * 2 * CHUNK_PAGES)
    index.lookup(ROOT, tokens_of("a" * 2 * CHUNK_PAGES))
    index.remove(pages[-1])
    assert index.statistics()["runs_remembered"] == 1
    index.check()


def test_most_is_never_exceeded() -> None:
    index = PrefixIndex(PAGE)
    pages = put(index, "a" * 2 * CHUNK_PAGES)
    for most in range(2 * CHUNK_PAGES + 2):
        assert index.lookup(ROOT, tokens_of("a" * 2 * CHUNK_PAGES), most) == pages[:most]
    with pytest.raises(ValueError, match="at most -1 pages"):
        index.lookup(ROOT, tokens_of("a"), -1)


def test_the_answer_is_the_callers_to_change() -> None:
    index = PrefixIndex(PAGE)
    pages = put(index, "a" * CHUNK_PAGES)
    for _ in range(3):
        found = index.lookup(ROOT, tokens_of("a" * CHUNK_PAGES))
        assert found == pages
        found.append(99)


# ── cost ──────────────────────────────────────────────────────────────────────────────────────


def test_a_look_up_hashes_once_a_whole_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    index = PrefixIndex(PAGE)
    letters = "a" * (4 * CHUNK_PAGES + 5)
    put(index, letters)
    made: list[int] = []
    updates: list[int] = []

    class Counted(WeakHash):
        def __init__(self, tokens: bytes = b"", **how: Any) -> None:
            super().__init__(tokens, **how)
            made.append(len(tokens))

        def update(self, tokens: bytes) -> None:
            super().update(tokens)
            updates.append(len(tokens))

        def digest(self) -> bytes:
            return self._hash.digest()

    monkeypatch.setattr(chain, "blake2b", Counted)
    size = PAGE * 4
    for _ in range(2):
        made.clear()
        assert len(index.lookup(ROOT, tokens_of(letters))) == 4 * CHUNK_PAGES + 5
        assert (made, updates) == ([CHUNK_PAGES * size] * 4 + [5 * size], [])
    index.remove(2 * CHUNK_PAGES + 3)
    made.clear()
    assert len(index.lookup(ROOT, tokens_of(letters))) == 2 * CHUNK_PAGES + 3
    assert len(made) <= 5, "three chunks, and one that goes on page by page"
    assert updates == [size] * 4, "as far as the gap, in the chunk that has it"


# ── bad input ─────────────────────────────────────────────────────────────────────────────────


def test_bad_input_is_said_and_changes_nothing() -> None:
    index = PrefixIndex(PAGE)
    [(key, parent, tokens)] = links("a")
    with pytest.raises(ValueError, match="a key has 16 bytes"):
        index.insert(0, key[:8], parent, tokens)
    with pytest.raises(ValueError, match="a key has 16 bytes"):
        index.insert(0, key, b"", tokens)
    with pytest.raises(ValueError, match="its own parent"):
        index.insert(0, key, key, tokens)
    for wrong in (tokens[:-4], tokens + tokens):
        with pytest.raises(ValueError, match="not one page"):
            index.insert(0, key, parent, wrong)
    with pytest.raises(ValueError, match="at least one token"):
        PrefixIndex(0)
    for ask in (index.key_of, index.tokens_of, index.parent_of, index.children, index.is_leaf, index.remove):
        with pytest.raises(KeyError):
            ask(0)
    assert (len(index), 0 in index, index.find(key)) == (0, False, None)
    assert index.lookup(ROOT, b"") == index.lookup(ROOT, page_keys(ROOT, tokens, PAGE)[0]) == []
    index.check()
