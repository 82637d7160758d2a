"""Batching: every position is computed once and in order, whatever the chunks, budgets and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import page_table

from engine.batching import (
    MOST_PASSED,
    BatchLimits,
    Lease,
    Plan,
    Sequence,
    advance_sequence,
    chain_of,
    deal_rows,
    full_pages,
    plan_step,
)
from engine.batching import (
    adopt as adopt_with_chain,
)
from engine.batching import (
    begin as begin_with_chain,
)
from engine.chain import chain_root, page_keys, token_bytes
from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner, Seal
from engine.lifecycle import PageState, SequenceEvent
from engine.messages import SequenceSpec
from engine.sampling import GREEDY
from engine.shapes import PageRef

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE = 4
ROOT = chain_root("model", "salt")
OWNER = Owner(5, 1)
ME = Incarnation("w", 1)
GATEWAY = Incarnation("front", 1)


def spec(number: int, length: int, client: str = "", priority: int = 0) -> SequenceSpec:
    return SequenceSpec(
        SequenceKey(number, 0),
        GATEWAY,
        float(number),
        tuple(range(length)),
        1000,
        (),
        GREEDY,
        length,
        client=client,
        priority=priority,
    )


def begin(
    asked: SequenceSpec, term: int, decode: Incarnation, filled: int = 0, pages: Iterable[PageRef] = ()
) -> Sequence:
    chain = chain_of(ROOT, asked.log, filled, PAGE)
    return begin_with_chain(asked, term, decode, chain, filled, pages)


def adopt(asked: SequenceSpec, term: int, me: Incarnation, filled: int, pages: Iterable[PageRef]) -> Sequence:
    chain = chain_of(ROOT, asked.log, filled, PAGE)
    return adopt_with_chain(asked, term, me, chain, filled, pages)


class Bench:
    """A table and leased pages for one worker."""

    def __init__(self, pages: int = 200, leased: int | None = None) -> None:
        self.table = page_table(pages, PAGE)
        self.holds = self.table.claim(OWNER)
        self.lease = Lease()
        self.next = 0
        self.grant(pages if leased is None else leased)

    def grant(self, count: int) -> None:
        self.lease.add([self.table.lease(self.next + n, OWNER) for n in range(count)])
        self.next += count

    def plan(self, sequences: list[Sequence], step_tokens: int = 6, decode_slots: int = 8) -> Plan:
        limits = BatchLimits(PAGE, decode_slots, step_tokens)
        return plan_step(sequences, self.lease, self.table, limits, self.holds)

    def run(self, plan: Plan) -> list[PageRef]:
        """Compute a plan; what it sealed."""
        sealed: list[PageRef] = []
        full = full_pages(plan, PAGE)
        checksums = {page.index: 1000 + page.index for page in full}
        for piece in plan.slices:
            assert piece.length > 0
            assert piece.start == piece.sequence.computed, "a gap or a repetition"
            assert piece.start + piece.length <= len(piece.sequence.pages) * PAGE, "no page under a row"
            sealed += advance_sequence(piece, self.table, checksums)
            if piece.samples:
                piece.sequence.log.append(0)
        assert sealed == full, "what is full when the step is computed was known before"
        return sealed


def decoding(number: int, length: int, bench: Bench) -> Sequence:
    """A sequence that was handed over, filled up to its last token."""
    filler = begin(spec(number, length), 1, ME)
    while filler.computed < filler.end:
        bench.run(bench.plan([filler]))
    return adopt(filler.spec, 2, ME, filler.computed, filler.pages)


# ── one sequence ──────────────────────────────────────────────────────────────────────────────


@given(st.integers(1, 60), st.integers(1, 70))
def test_chunks_of_any_size_fill_the_same_positions(length: int, step_tokens: int) -> None:
    """Rows 0 … P − 2 in order, then P − 1 is the first row that samples."""
    bench = Bench()
    sequence = begin(spec(1, length), 1, ME)
    rows: list[int] = []
    steps = 0
    while sequence.computed < sequence.end:
        plan = bench.plan([sequence], step_tokens)
        [piece] = plan.slices
        assert plan.rows == piece.length <= step_tokens
        assert not piece.samples
        rows += range(piece.start, piece.start + piece.length)
        bench.run(plan)
        steps += 1
    assert rows == list(range(length - 1))
    assert steps == -(-(length - 1) // step_tokens)
    assert len(sequence.pages) == -(-(length - 1) // PAGE), "pages come only as tokens come"
    assert bench.plan([sequence], step_tokens).slices == ()
    sequence.move(SequenceEvent.ADOPT)
    for n in range(5):
        [piece] = bench.plan([sequence], step_tokens).slices
        assert (piece.start, piece.length, piece.samples) == (length - 1 + n, 1, True)
        bench.run(Plan((piece,), 0))
    assert len(sequence.pages) == -(-(length + 4) // PAGE)


def test_a_prompt_of_one_token_has_nothing_to_fill() -> None:
    bench = Bench()
    sequence = begin(spec(1, 1), 1, ME)
    assert bench.plan([sequence]).slices == ()
    assert sequence.pages == []
    first = adopt(sequence.spec, 2, ME, 0, ())
    [piece] = bench.plan([first]).slices
    assert (piece.start, piece.length, piece.samples) == (0, 1, True)


@pytest.mark.parametrize("length", [PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 1])
def test_prompts_at_the_edge_of_a_page(length: int) -> None:
    bench = Bench()
    sequence = decoding(1, length, bench)
    assert len(sequence.pages) == -(-(length - 1) // PAGE)
    bench.run(bench.plan([sequence]))
    assert len(sequence.pages) == -(-length // PAGE)


@given(st.integers(1, 40), st.integers(1, 40))
def test_pages_are_sealed_once_when_all_their_slots_are_valid(length: int, step_tokens: int) -> None:
    bench = Bench()
    sequence = begin(spec(1, length), 7, ME)
    sealed: list[PageRef] = []
    while sequence.computed < sequence.end:
        sealed += bench.run(bench.plan([sequence], step_tokens))
        assert sealed == sequence.pages[: sequence.computed // PAGE]
        for block, page in enumerate(sequence.pages):
            assert bench.holds[page.index] == 1, "held before anything is written"
            record = bench.table.record(page.index)
            assert (record.request, record.term, record.block) == (1, 7, block)
            assert record.valid == min(PAGE, sequence.computed - block * PAGE)
            assert record.state is (PageState.SEALED if record.valid == PAGE else PageState.OPEN)


@given(st.integers(1, 90), st.integers(1, 40), st.integers(0, 9))
def test_what_a_page_is_sealed_with_tells_what_it_holds(length: int, step_tokens: int, more: int) -> None:
    """Whatever the chunks; generated tokens, too."""
    bench = Bench()
    sequence = begin(spec(1, length), 7, ME)
    while sequence.computed < sequence.end:
        bench.run(bench.plan([sequence], step_tokens))
    sequence.move(SequenceEvent.ADOPT)
    for _ in range(more):
        bench.run(bench.plan([sequence], step_tokens))
    full = sequence.computed // PAGE
    tokens = token_bytes(sequence.log[: full * PAGE])
    keys = page_keys(ROOT, tokens, PAGE)
    for block, page in enumerate(sequence.pages[:full]):
        parent = keys[block - 1] if block else ROOT
        own = tokens[4 * PAGE * block : 4 * PAGE * (block + 1)]
        assert bench.table.sealed(page.index) == Seal(keys[block], parent, own, 1000 + page.index)
    assert (sequence.chain.pages, sequence.chain.parent) == (full, keys[-1] if keys else ROOT)


def test_a_page_whose_bytes_nobody_summed_has_no_checksum() -> None:
    bench = Bench()
    sequence = begin(spec(1, 9), 1, ME)
    [piece] = bench.plan([sequence], step_tokens=8).slices
    first, second = advance_sequence(piece, bench.table, {sequence.pages[1].index: 0})
    assert bench.table.sealed(first.index).checksum is None
    assert bench.table.sealed(second.index).checksum == 0


def test_what_seeks_computes_nothing() -> None:
    bench = Bench()
    seeking, other = begin(spec(1, 9), 1, ME), begin(spec(2, 5), 1, ME)
    seeking.seeks = True
    plan = bench.plan([seeking, other], step_tokens=8)
    assert [(piece.sequence.key.request, piece.length) for piece in plan.slices] == [(2, 4)]
    assert seeking.pages == []
    assert bench.plan([seeking]) == Plan((), 0), "and nothing is missing for it"


# ── many sequences ────────────────────────────────────────────────────────────────────────────


def test_decode_rows_come_before_prefill_chunks() -> None:
    bench = Bench()
    older = begin(spec(1, 20), 1, ME)
    decoders = [decoding(2, 5, bench), decoding(3, 5, bench)]
    plan = bench.plan([older, *decoders], step_tokens=6)
    assert [(piece.sequence.key.request, piece.length, piece.samples) for piece in plan.slices] == [
        (2, 1, True),
        (3, 1, True),
        (1, 4, False),
    ]


def test_prefill_chunks_go_oldest_first() -> None:
    bench = Bench()
    sequences = [begin(spec(n, 5), 1, ME) for n in range(3)]
    plan = bench.plan(sequences, step_tokens=6)
    assert [(piece.sequence.key.request, piece.length) for piece in plan.slices] == [(0, 4), (1, 2)]


def test_a_choice_that_shares_pages_samples_behind_the_rows_that_it_does_not() -> None:
    bench = Bench()
    sibling = decoding(1, 11, bench)
    choice = begin(spec(2, 11), 1, ME, 8, sibling.pages[:2])
    choice.move(SequenceEvent.ADOPT)
    plan = bench.plan([choice, begin(spec(3, 9), 1, ME)], step_tokens=2)
    [piece] = plan.slices
    assert (piece.start, piece.length, piece.samples) == (8, 2, False)
    assert bench.run(plan) == []
    plan = bench.plan([choice, begin(spec(3, 9), 1, ME)], step_tokens=2)
    assert [(piece.start, piece.length, piece.samples) for piece in plan.slices] == [
        (10, 1, True),
        (0, 1, False),
    ]
    assert choice.pages[2] not in sibling.pages
    assert bench.table.record(choice.pages[2].index).request == 2


def test_no_more_sequences_decode_than_there_are_slots() -> None:
    bench = Bench()
    decoders = [decoding(n, 3, bench) for n in range(4)]
    plan = bench.plan(decoders, decode_slots=2)
    assert [piece.sequence.key.request for piece in plan.slices] == [0, 1]


def test_the_doomed_compute_nothing() -> None:
    bench = Bench()
    sequence = begin(spec(1, 9), 1, ME)
    sequence.doomed = True
    assert bench.plan([sequence]) == Plan((), 0)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    step_tokens=st.integers(1, 40),
    grants=st.lists(st.integers(0, 3), max_size=30),
)
def test_budget_order_and_pages_whatever_the_supply(
    lengths: list[int], step_tokens: int, grants: list[int]
) -> None:
    """Who has pages goes on, who has none stands still and is counted, and in the end all is filled."""
    bench = Bench(400, leased=0)
    sequences = [begin(spec(n, length), 1, ME) for n, length in enumerate(lengths)]
    for grant in [*grants, *[100]]:
        bench.grant(grant)
        held = len(bench.lease)
        before = {id(sequence): len(sequence.pages) for sequence in sequences}
        plan = bench.plan(sequences, step_tokens)
        assert plan.rows <= step_tokens
        taken = sum(len(sequence.pages) - before[id(sequence)] for sequence in sequences)
        assert taken == held - len(bench.lease)
        unfilled = [s for s in sequences if s.computed < s.end]
        assert not unfilled or plan.slices or plan.missing, "nothing runs and nothing is missing"
        assert not (plan.missing and len(bench.lease)), "something is missing beside a lease"
        bench.run(plan)
    for _ in range(sum(lengths)):
        bench.run(bench.plan(sequences, step_tokens))
    assert [sequence.computed for sequence in sequences] == [length - 1 for length in lengths]
    pages = [page for sequence in sequences for page in sequence.pages]
    assert len(pages) == len(set(pages))


def test_missing_counts_the_pages_for_want_of_which_rows_wait() -> None:
    bench = Bench(20, leased=1)
    sequences = [begin(spec(1, 6), 1, ME), begin(spec(2, 9), 1, ME)]
    plan = bench.plan(sequences, step_tokens=20)
    assert [(piece.sequence.key.request, piece.length) for piece in plan.slices] == [(1, 4)]
    assert plan.missing == 1 + 2


# ── clients in turns ──────────────────────────────────────────────────────────────────────────


def dealt(sequences: list[Sequence], rows: int) -> list[tuple[int, int]]:
    return [(sequence.key.request, count) for sequence, count in deal_rows(sequences, rows)]


def test_the_client_that_lacks_the_fewest_goes_first() -> None:
    flood = [begin(spec(n, 6, "flood"), 1, ME) for n in range(3)]
    quiet = [begin(spec(n, 6, "quiet"), 1, ME) for n in (7, 8)]
    assert dealt([*flood, *quiet], 16) == [(7, 5), (8, 5), (0, 5), (1, 1)]
    assert dealt([*flood, *quiet], 7) == [(7, 5), (8, 2)]
    assert dealt([*flood, *quiet], 0) == []
    long = begin(spec(9, 99, "long"), 1, ME)
    assert dealt([long, *flood], 16)[0] == (0, 5)


def test_of_clients_that_lack_the_same_the_oldest_goes_first() -> None:
    sequences = [begin(spec(n, 9, str(n)), 1, ME) for n in range(3)]
    assert dealt(sequences, 10) == [(0, 8), (1, 2)]


def test_who_is_passed_over_too_often_goes_first() -> None:
    """Others' short prompts come without an end; a long one, or a flood, is delayed and not starved."""
    bench = Bench(1000)
    long = [begin(spec(0, 41, "long"), 1, ME), begin(spec(1, 41, "long"), 1, ME)]
    steps = got = 0
    while long[0].behind:
        short = [begin(spec(100 + 2 * steps + n, 9, f"short {n}"), 1, ME) for n in range(2)]
        before = long[0].computed
        bench.run(bench.plan([*long, *short], step_tokens=8))
        steps += 1
        got += long[0].computed > before
        assert long[0].passed <= MOST_PASSED
    assert (steps, got) == (5 * (MOST_PASSED + 1), 5)


def test_a_clients_own_prompt_that_lacks_the_fewest_goes_first() -> None:
    """Else a short prompt of people without names would wait for a long one that came before."""
    long, middle, short = (begin(spec(n, length, "a"), 1, ME) for n, length in enumerate([99, 20, 5]))
    assert dealt([long, middle, short], 30) == [(2, 4), (1, 19), (0, 7)]
    urgent = begin(spec(9, 99, "a", -1), 1, ME)
    assert dealt([long, middle, short, urgent], 30) == [(9, 30)]


def test_a_clients_own_prompt_that_is_outrun_too_often_goes_first() -> None:
    bench = Bench(1000)
    long = begin(spec(0, 41, "a"), 1, ME)
    steps = got = 0
    while long.behind:
        short = [begin(spec(100 + 2 * steps + n, 9, "a"), 1, ME) for n in range(2)]
        before = long.computed
        bench.run(bench.plan([long, *short], step_tokens=8))
        steps += 1
        got += long.computed > before
        assert long.outrun <= MOST_PASSED
        assert not long.passed
    # The last eight rows are as few as theirs, and it came first.
    assert (steps, got) == (4 * (MOST_PASSED + 1) + 1, 5)


def test_a_client_that_gets_nothing_outruns_nobody() -> None:
    bench = Bench(1000)
    mine = [begin(spec(n, 60, "a"), 1, ME) for n in range(2)]
    bench.run(bench.plan([*mine, begin(spec(9, 9, "b"), 1, ME)], step_tokens=8))
    assert [(sequence.passed, sequence.outrun) for sequence in mine] == [(1, 0), (1, 0)]
    bench.run(bench.plan(mine, step_tokens=8))
    assert [(sequence.passed, sequence.outrun) for sequence in mine] == [(0, 0), (0, 1)]


def test_a_clients_own_prompts_of_one_length_go_by_priority_then_by_arrival() -> None:
    sequences = [begin(spec(n, 4, "a", priority), 1, ME) for n, priority in enumerate([5, 0, 5, -1, 0])]
    assert [number for number, _ in dealt(sequences, 100)] == [3, 1, 4, 0, 2]
    other = begin(spec(9, 4, "b", 7), 1, ME)
    assert [number for number, _ in dealt([*sequences, other], 100)] == [9, 3, 1, 4, 0, 2]


@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from("abc"), st.integers(-1, 1)), min_size=1, max_size=9
    ),
    rows=st.integers(0, 60),
)
def test_rows_are_dealt_whole_and_in_order(prompts: list[tuple[int, str, int]], rows: int) -> None:
    sequences = [
        begin(spec(n, length, client, priority), 1, ME)
        for n, (length, client, priority) in enumerate(prompts)
    ]
    shares = deal_rows(sequences, rows)
    counts = {sequence.key: count for sequence, count in shares}
    assert len(counts) == len(shares), "one slice a sequence"
    assert all(0 < count <= sequence.behind for sequence, count in shares)
    assert sum(counts.values()) == min(rows, sum(sequence.behind for sequence in sequences))
    clients = {client: [s for s in sequences if s.spec.client == client] for _, client, _ in prompts}
    hungry = [client for client, line in clients.items() if any(sequence.behind for sequence in line)]
    lacks = {client: sum(sequence.behind for sequence in clients[client]) for client in hungry}
    got = {client: sum(counts.get(sequence.key, 0) for sequence in clients[client]) for client in hungry}
    for client in hungry:
        fewer = [other for other in hungry if lacks[other] < lacks[client]]
        assert not got[client] or all(got[other] == lacks[other] for other in fewer)
        line = clients[client]
        line.sort(key=lambda s: (s.spec.priority, s.behind, s.key))
        unfilled = [s for s in line if counts.get(s.key, 0) < s.behind]
        assert all(s.key not in counts for s in unfilled[1:]), "a later one before an earlier one is full"


@pytest.mark.parametrize("length", [17, 101])
def test_a_flood_of_prompts_hardly_delays_a_quiet_client(length: int) -> None:
    """However long the flood's prompts are, and though all of them came before."""

    def steps(crowd: list[Sequence]) -> int:
        bench = Bench(1000)
        quiet = begin(spec(99, length, "quiet"), 1, ME)
        count = 0
        while quiet.behind:
            bench.run(bench.plan([*crowd, quiet], step_tokens=8))
            count += 1
        return count

    flood = [begin(spec(n, 100, "flood"), 1, ME) for n in range(20)]
    assert steps([]) == (length - 1 + 7) // 8
    assert steps(flood) <= steps([]) + steps([]) // MOST_PASSED


# ── leases ────────────────────────────────────────────────────────────────────────────────────


def test_leases_are_used_oldest_first_and_counted_as_consumed() -> None:
    lease = Lease()
    pages = [PageRef(0, n, 0) for n in range(5)]
    lease.add(pages)
    assert lease.take() == pages[0]
    assert lease.consumed == 1
    assert set(lease.give_back(keep=3)) == {pages[4]}
    assert lease.consumed == 2
    assert lease.held() == tuple(pages[1:4])
    assert lease.give_back(keep=9) == ()
    assert len(lease.give_back(keep=0)) == 3
    assert (lease.consumed, len(lease)) == (5, 0)
    with pytest.raises(IndexError):
        lease.take()
    assert lease.consumed == 5
