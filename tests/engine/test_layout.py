"""The shared segments: what is stored is read back at the limits of every field, and nothing else."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import page_table as page_table_of

from engine.chain import KEY_BYTES
from engine.ids import COUNTER_BITS, MAX_EPOCH, owner_of, pack_request
from engine.layout import MASK32, NO_KEY, WORD, Owner, PageTable, Seal, TokenLogArena, Vitals
from engine.lifecycle import IllegalTransition, PageState
from engine.shapes import PageRef, PageShape

BITS_16 = st.integers(0, 2**16 - 1)
BITS_32 = st.integers(0, 2**32 - 1)
BITS_64 = st.integers(0, 2**64 - 1)
OWNERS = st.builds(Owner, BITS_16, BITS_32)


def page_table(pool: int = 0) -> PageTable:
    """Three pages of four tokens."""
    return page_table_of(3, pool=pool)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────


def test_zeros_are_free_pages_of_the_first_generation() -> None:
    table = page_table()
    for page in range(3):
        assert table.record(page) == (0, PageState.FREE, Owner(0, 0), 0, 0, 0, 0, 0)
        assert table.ref(page) == PageRef(0, page, 0)


@given(
    owner=OWNERS,
    heir=OWNERS,
    request=BITS_64,
    choice=BITS_16,
    term=BITS_32,
    later=BITS_32,
    block=BITS_32,
    valid=BITS_32,
    page=st.integers(0, 2),
)
def test_a_page_shows_what_was_written_and_its_neighbours_nothing(
    owner: Owner,
    heir: Owner,
    request: int,
    choice: int,
    term: int,
    later: int,
    block: int,
    valid: int,
    page: int,
) -> None:
    table = page_table()
    ref = table.lease(page, owner)
    assert table.record(page) == (0, PageState.LEASED, owner, 0, 0, 0, 0, 0)
    table.open(page, request, choice, term, block)
    assert table.record(page) == (0, PageState.OPEN, owner, request, choice, term, block, 0)
    table.fill(page, valid)
    table.fill(page, valid)
    assert table.record(page) == (0, PageState.OPEN, owner, request, choice, term, block, valid)
    table.seal(page)
    table.adopt(page, heir, later)
    assert table.record(page) == (0, PageState.SEALED, heir, request, choice, later, block, valid)
    assert (table.state(page), table.owner(page), table.ref(page)) == (PageState.SEALED, heir, ref)
    table.free(page)
    assert table.state(page) is PageState.FREE
    assert table.ref(page).generation == 1
    # The next life begins with nothing of the last one.
    table.lease(page, owner)
    assert table.record(page) == (1, PageState.LEASED, owner, 0, 0, 0, 0, 0)
    for other in {0, 1, 2} - {page}:
        assert not any(table.words[other * table.WORDS : (other + 1) * table.WORDS])


def test_the_first_owner_stays_on_record_after_an_adoption() -> None:
    table = page_table()
    table.lease(1, Owner(5, 6))
    table.open(1, 1, 0, 1, 0)
    table.adopt(1, Owner(7, 8), 2)
    assert (table.owner(1), table.origin(1)) == (Owner(7, 8), Owner(5, 6))


def test_a_name_means_one_life_of_a_page() -> None:
    table = page_table(pool=4)
    ref = table.lease(2, Owner(1, 1))
    assert ref == PageRef(4, 2, 0)
    assert table.is_current(ref)
    table.free(2)
    assert not table.is_current(ref)
    assert table.is_current(PageRef(4, 2, 1))
    for wrong in (PageRef(0, 2, 1), PageRef(4, 3, 0), PageRef(4, -1, 0), PageRef(4, 2, 2)):
        assert not table.is_current(wrong)


def test_the_generation_wraps_within_its_bits() -> None:
    table = page_table()
    table.words[1 * table.WORDS] = MASK32 << 32
    assert table.lease(1, Owner(1, 1)).generation == MASK32
    table.free(1)
    assert table.words[1 * table.WORDS] == 0
    assert table.record(1).generation == 0


def test_a_page_is_not_freed_twice() -> None:
    """Field report 5: the second free raises, and changes nothing."""
    table = page_table()
    table.lease(0, Owner(1, 1))
    table.free(0)
    before = bytes(table.words.cast("B"))
    with pytest.raises(IllegalTransition):
        table.free(0)
    assert bytes(table.words.cast("B")) == before


@pytest.mark.parametrize("action", ["open", "seal"])
def test_a_free_page_cannot_be_used(action: str) -> None:
    table = page_table()
    with pytest.raises(IllegalTransition):
        table.open(0, 1, 0, 1, 0) if action == "open" else table.seal(0)
    assert table.state(0) is PageState.FREE


def test_a_view_holds_no_state_of_its_own() -> None:
    shape = (3, 4, 5)
    buffer = memoryview(bytearray(PageTable.size(*shape)))
    first, second = PageTable(buffer, *shape), PageTable(buffer, *shape)
    first.lease(1, Owner(4, 9))
    assert second.owner(1) == Owner(4, 9)
    first.open(1, 1, 0, 1, 0)
    first.seal(1, SEAL)
    assert second.sealed(1) == SEAL
    first.claim(Owner(4, 9))[2] = 1
    assert second.held(2)
    assert second.holding() == [Owner(4, 9)]


# ── seals ─────────────────────────────────────────────────────────────────────────────────────

TOKENS = 4
SEAL = Seal(b"k" * KEY_BYTES, b"p" * KEY_BYTES, bytes(range(16)), 7)
KEYS = st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES)
SEALS = st.builds(Seal, KEYS, KEYS, st.binary(min_size=4 * TOKENS, max_size=4 * TOKENS), st.none() | BITS_32)


@given(SEALS, st.integers(0, 2))
def test_a_seal_says_what_the_page_holds_and_nothing_of_its_neighbours(seal: Seal, page: int) -> None:
    table = page_table()
    table.lease(page, Owner(1, 1))
    table.open(page, 1, 0, 1, 0)
    for other in {0, 1, 2} - {page}:
        table.lease(other, Owner(2, 2))
        table.open(other, 2, 0, 2, 0)
        table.seal(other, SEAL)
    table.fill(page, TOKENS)
    table.seal(page, seal)
    assert table.sealed(page) == seal
    assert table.record(page) == (0, PageState.SEALED, Owner(1, 1), 1, 0, 1, 0, TOKENS)
    assert [table.sealed(other) for other in range(3) if other != page] == [SEAL, SEAL]


def test_a_page_without_a_seal_cannot_be_found_and_inherits_none() -> None:
    """Field report 13: a stale key does not come back to life with the next use of the page."""
    table = page_table()
    for seal in (SEAL, None):
        table.lease(0, Owner(1, 1))
        assert table.sealed(0)[:2] == (NO_KEY, NO_KEY)
        table.open(0, 1, 0, 1, 0)
        table.seal(0, seal)
        table.free(0)
    table.lease(0, Owner(1, 1))
    table.open(0, 1, 0, 1, 0)
    table.seal(0)
    key, parent, _, checksum = table.sealed(0)
    assert (key, parent, checksum) == (NO_KEY, NO_KEY, None)


def test_a_seal_is_complete_before_the_page_is_sealed() -> None:
    """Whoever dies while it seals leaves an open page behind, which nobody finds."""

    class Dies(Exception):
        pass

    class Words:
        """Words that stop taking stores after a while."""

        def __init__(self, words: Any, most: int) -> None:
            self.words, self.left = words, most

        def __getitem__(self, at: int | slice) -> Any:
            return self.words[at]

        def __setitem__(self, at: int | slice, value: Any) -> None:
            if not self.left:
                raise Dies
            self.left -= 1
            self.words[at] = value

    for stores in range(10):
        table = page_table()
        table.lease(1, Owner(1, 1))
        table.open(1, 1, 0, 1, 0)
        words = table.words
        table.words = Words(words, stores)  # type: ignore[assignment]
        try:
            table.seal(1, SEAL)
        except Dies:
            table.words = words
            assert table.state(1) is PageState.OPEN
        else:
            assert stores == 4
            break
    assert table.sealed(1) == SEAL


# ── holders ───────────────────────────────────────────────────────────────────────────────────


def test_zeros_are_pages_that_nobody_holds() -> None:
    table = page_table()
    assert table.holding() == []
    assert not any(map(table.held, range(3)))
    assert table.holders(Owner(5, 1)) is None


@given(
    rows=st.dictionaries(
        st.tuples(st.integers(0, 4), st.integers(1, 2)), st.sets(st.integers(0, 6)), max_size=6
    )
)
def test_each_incarnation_has_a_row_of_its_own(rows: dict[tuple[int, int], set[int]]) -> None:
    """Of two of one actor that follow each other, too: the later one starts before the other is cleared."""
    table = page_table_of(7, actors=5)
    owners = {Owner(*who): pages for who, pages in rows.items()}
    for owner, pages in owners.items():
        row = table.claim(owner)
        for page in pages:
            row[page] = 1
    for owner, pages in owners.items():
        row = table.holders(owner)
        assert row is not None
        assert {page for page, holds in enumerate(row) if holds} == pages
    assert sorted(table.holding()) == sorted(owner for owner, pages in owners.items() if pages)
    for page in range(7):
        assert table.held(page) == any(page in pages for pages in owners.values())
    assert not any(table.words), "rows are no part of the records"


def test_the_next_but_one_takes_the_row_empty() -> None:
    table = page_table()
    table.claim(Owner(3, 1))[0] = 1
    table.claim(Owner(3, 2))[1] = 1
    assert sorted(table.holding()) == [Owner(3, 1), Owner(3, 2)]
    assert bytes(table.claim(Owner(3, 3))) == bytes(3)
    assert table.holders(Owner(3, 1)) is None
    assert [table.held(page) for page in range(3)] == [False, True, False]
    assert table.holding() == [Owner(3, 2)]


def test_a_table_has_room_for_all_its_parts_and_no_more() -> None:
    size = PageTable.size(5, 4, 3)
    buffer = memoryview(bytearray(size + 16))
    table = PageTable(buffer, 5, 4, 3)
    for page in range(5):
        table.lease(page, Owner(2, MASK32))
        table.open(page, 2**64 - 1, 2**16 - 1, MASK32, MASK32)
        table.fill(page, MASK32)
        table.seal(page, Seal(b"\xff" * 16, b"\xff" * 16, b"\xff" * 16, MASK32))
    for ordinal in range(3):
        for epoch in (MASK32, MASK32 - 1):
            table.claim(Owner(ordinal, epoch))[:] = b"\xff" * 5
    assert not any(buffer[size:])
    assert all(map(table.held, range(5)))
    assert all(table.sealed(page).checksum == MASK32 for page in range(5))
    with pytest.raises((IndexError, ValueError)):
        table.claim(Owner(3, 1))


@given(st.integers(1, 64), st.integers(0, 5000))
def test_pages_for_is_the_least_number_that_suffices(tokens: int, positions: int) -> None:
    pages = PageShape(tokens, 2, 2, 4, "float16").pages_for(positions)
    assert pages * tokens >= positions > (pages - 1) * tokens


def test_bytes_of_a_page() -> None:
    shape = PageShape(16, 30, 3, 64, "float32")
    assert shape.page_bytes == 16 * 30 * 2 * 3 * 64 * 4
    assert PageShape(16, 30, 3, 64, "bfloat16").page_bytes * 2 == shape.page_bytes


# ── request ids ───────────────────────────────────────────────────────────────────────────────


@given(st.integers(0, 255), st.integers(1, MAX_EPOCH), BITS_32)
def test_a_request_id_names_its_owner_and_is_unique(gateway: int, epoch: int, counter: int) -> None:
    request = pack_request(gateway, epoch, counter)
    assert 0 < request < 2**64
    assert owner_of(request) == (gateway, epoch)
    assert request & (1 << COUNTER_BITS) - 1 == counter


@pytest.mark.parametrize(
    "parts", [(-1, 1, 0), (256, 1, 0), (0, 0, 0), (0, MAX_EPOCH + 1, 0), (0, 1, -1), (0, 1, 2**32)]
)
def test_a_request_id_out_of_range_is_refused(parts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="out of range"):
        pack_request(*parts)


# ── token logs ────────────────────────────────────────────────────────────────────────────────


def arena(slots: int = 3, capacity: int = 9) -> TokenLogArena:
    return TokenLogArena(memoryview(bytearray(slots * TokenLogArena.slot_bytes(capacity))), slots, capacity)


def test_zeros_are_free_slots() -> None:
    logs = arena()
    assert [logs.read(slot) for slot in range(3)] == [None] * 3


@given(
    slot=st.integers(0, 2),
    request=st.integers(1, 2**64 - 1),
    choice=BITS_32,
    terms=st.lists(BITS_32, max_size=3),
    tokens=st.lists(BITS_32, max_size=9),
    prompt=st.integers(0, 9),
    parameters=st.binary(max_size=40) | st.just(b"\xff" * TokenLogArena.PARAMETER_BYTES),
)
@settings(max_examples=50)
def test_a_log_shows_what_was_committed_and_its_neighbours_nothing(
    slot: int,
    request: int,
    choice: int,
    terms: list[int],
    tokens: list[int],
    prompt: int,
    parameters: bytes,
) -> None:
    logs = arena()
    prompt = min(prompt, len(tokens))
    logs.open(slot, request, choice, tuple(tokens[:prompt]), parameters)
    for term in terms:
        logs.set_term(slot, term)
    for token in tokens[prompt:]:
        logs.append(slot, token)
    term = terms[-1] if terms else 0
    assert logs.read(slot) == (request, choice, term, prompt, tuple(tokens), parameters)
    assert [logs.read(other) for other in range(3) if other != slot] == [None, None]
    stride = logs.stride
    for other in range(3):
        if other != slot:
            assert not any(logs._bytes[other * stride : (other + 1) * stride])


def test_a_slot_in_use_is_not_opened_again() -> None:
    logs = arena()
    logs.open(0, 1, 0, (1,), b"")
    with pytest.raises(ValueError, match="in use"):
        logs.open(0, 2, 0, (2,), b"")
    record = logs.read(0)
    assert record is not None
    assert record.request == 1


@pytest.mark.parametrize(
    ("prompt", "parameters"), [((0,) * 10, b""), ((), b"x" * (TokenLogArena.PARAMETER_BYTES + 1))]
)
def test_an_admission_record_that_does_not_fit_is_refused(prompt: tuple[int, ...], parameters: bytes) -> None:
    logs = arena()
    with pytest.raises(ValueError, match="too large"):
        logs.open(1, 1, 0, prompt, parameters)
    assert logs.read(1) is None


def test_a_full_log_takes_no_more_and_a_bad_token_is_not_counted() -> None:
    logs = arena()
    logs.open(1, 7, 0, tuple(range(8)), b"")
    with pytest.raises(ValueError):
        logs.append(1, 2**32)
    record = logs.read(1)
    assert record is not None
    assert record.tokens == tuple(range(8))
    logs.append(1, 8)
    with pytest.raises(ValueError, match="full"):
        logs.append(1, 9)
    assert logs.read(2) is None


def test_a_record_is_valid_only_once_its_request_is_stored() -> None:
    """A gateway that dies while it opens a log leaves a free slot behind."""

    class Dies(Exception):
        pass

    class Words:
        """Words that stop taking stores after a while."""

        def __init__(self, words: Any, most: int) -> None:
            self.words, self.left = words, most

        def __getitem__(self, at: int) -> int:
            return self.words[at]  # type: ignore[no-any-return]

        def __setitem__(self, at: int, value: int) -> None:
            if not self.left:
                raise Dies
            self.left -= 1
            self.words[at] = value

    complete = None
    for stores in range(10):
        logs = arena()
        words = logs._words
        logs._words = Words(words, stores)  # type: ignore[assignment]
        try:
            logs.open(0, 3, 1, (5, 6), b"p")
        except Dies:
            assert TokenLogArena(words.cast("B"), 3, 9).read(0) is None
        else:
            complete = logs.read(0)
            break
    assert complete == (3, 1, 0, 2, (5, 6), b"p")


@given(st.integers(1, 10**6))
def test_slots_are_aligned_and_large_enough(capacity: int) -> None:
    size = TokenLogArena.slot_bytes(capacity)
    assert size % 64 == 0
    used = TokenLogArena.HEADER_WORDS * WORD + TokenLogArena.PARAMETER_BYTES + 4 * capacity
    assert used <= size < used + 64


# ── vitals ────────────────────────────────────────────────────────────────────────────────────


def vitals(actors: int = 3) -> Vitals:
    return Vitals(memoryview(bytearray(actors * Vitals.BYTES)), actors)


def test_zeros_are_actors_that_never_lived() -> None:
    fresh = vitals()
    for actor in range(3):
        assert (fresh.epoch(actor), fresh.heartbeat(actor), fresh.statistics(actor)) == (0, 0, {})


def test_epochs_and_beats_count_for_each_actor_alone() -> None:
    counters = vitals()
    assert [counters.next_epoch(1) for _ in range(3)] == [1, 2, 3]
    counters.beat(1)
    counters.beat(1)
    counters.publish(1, {"x": 1})
    assert (counters.epoch(1), counters.heartbeat(1), counters.statistics(1)) == (3, 2, {"x": 1})
    for actor in (0, 2):
        assert (counters.epoch(actor), counters.heartbeat(actor), counters.statistics(actor)) == (0, 0, {})


FIGURES = st.dictionaries(
    st.text(max_size=10), st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False), max_size=20
)


@given(st.lists(FIGURES, min_size=1, max_size=4))
def test_the_last_statistics_are_shown(published: list[dict[str, int | float]]) -> None:
    shown = vitals()
    for figures in published:
        shown.publish(1, figures)
    assert shown.statistics(1) == published[-1]


@given(st.integers(1, 400), st.integers(1, 60))
@settings(max_examples=50)
def test_statistics_that_do_not_fit_are_cut_from_the_end(count: int, width: int) -> None:
    shown = vitals()
    figures: dict[str, int | float] = {f"{n:0{width}}": n for n in range(count)}
    shown.publish(1, figures)
    seen = shown.statistics(1)
    room = Vitals.BYTES - Vitals.STATISTICS_AT
    assert list(seen.items()) == list(figures.items())[: len(seen)]
    if len(seen) < count:
        more = dict(list(figures.items())[: len(seen) + 1])
        assert len(msgspec.msgpack.encode(more)) > room, "more would have fitted"
    assert shown.statistics(2) == {}
    assert shown.epoch(2) == 0


def test_a_torn_publication_is_not_shown_and_the_next_one_is() -> None:
    """The writer dies while it writes: readers see nothing rather than half of it."""
    shown = vitals()
    shown.publish(1, {"a": 1})
    lock = Vitals.BYTES // WORD + 2
    shown._words[lock] |= 1
    shown._bytes[Vitals.BYTES + Vitals.STATISTICS_AT] ^= 0xFF
    assert shown.statistics(1) == {}
    shown.publish(1, {"b": 2})
    assert shown.statistics(1) == {"b": 2}
    assert shown._words[lock] % 2 == 0


def test_a_reader_that_is_overtaken_reads_again() -> None:
    shown = vitals()
    shown.publish(1, {"a": 1})
    real = shown._bytes

    class Overtaken:
        """Publishes between the reader's two looks at the lock, once."""

        def __getitem__(self, at: slice) -> memoryview:
            body = bytes(real[at])
            if shown._bytes is not real:
                shown._bytes = real
                shown.publish(1, {"b": 2})
            return memoryview(body)

    shown._bytes = Overtaken()  # type: ignore[assignment]
    assert shown.statistics(1) == {"b": 2}
