"""Continuous batching: which rows the next step computes, decided anew at every iteration.

A sequence is always at one of two tasks: filling positions that are in its log but not in its
pages, and, when it has reached the end of the log, sampling the next token.

    PREFILL   computed ≤ len(log) − 1      rows computed … len(log) − 2, nothing sampled
    DECODE    computed ≤ len(log) − 1      rows computed … len(log) − 1, the last one sampled

so that the first decode row computes position P − 1 and there is one source of tokens, with or
without a prefill before it. (A choice that shares its sibling's pages decodes from the first page on
that it does not share: its first slice has more rows than one.) Rows of decoding sequences come first;
prefill chunks fill what is left of the step, which the clients share evenly.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.chain import Chain, token_bytes
from engine.layout import Seal
from engine.lifecycle import SEQUENCE, SequenceEvent, SequenceState, advance
from engine.messages import Cached

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from collections.abc import Sequence as Tokens

    from engine.ids import Incarnation, SequenceKey
    from engine.layout import PageTable
    from engine.messages import SequenceSpec
    from engine.shapes import PageRef


MOST_PASSED = 8
NOTHING_CACHED = Cached()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request while a worker holds its pages.

    pages[b] holds positions b·page_tokens … ; len(pages) = ceil(computed / page_tokens), plus the
    pages of a step that is running.
    """

    spec: SequenceSpec
    term: int
    decode: Incarnation
    """Who decodes it after the prefill."""
    state: SequenceState
    log: list[int]
    chain: Chain
    """Of its full pages, as far as they are computed."""
    computed: int = 0
    pages: list[PageRef] = field(default_factory=list)
    running: bool = False
    """Its rows are in the step that is being computed: its pages may not be released now."""
    doomed: bool = False
    """To be dropped as soon as it does not run."""
    passed: int = 0
    """Steps in a row in which its client got no row while it was filling."""
    outrun: int = 0
    """Steps in which its client's rows went to others of its prompts, since it got some."""
    seeks: bool = False
    """It waits for the allocator's word on pages that are there, or on their way: nothing is computed."""
    forks: bool = False
    """It may go on from a copy of the page that a sibling is writing."""
    known: bool = False
    """The allocator counts it as one that is being filled."""
    taken: int = 0
    """Granted pages that it took, since it last told the allocator of itself."""
    cached: Cached = NOTHING_CACHED
    """Tokens of its log whose pages were found."""

    @property
    def key(self) -> SequenceKey:
        """Request and choice."""
        return self.spec.key

    @property
    def end(self) -> int:
        """The position behind the last one that its present task computes."""
        return len(self.log) - (self.state is SequenceState.PREFILL)

    @property
    def behind(self) -> int:
        """Rows that its present task has still to compute."""
        return self.end - self.computed

    @property
    def stops_wait(self) -> bool:
        """Fewer tokens were generated than the least number: the next one must not be a stop token."""
        spec = self.spec
        return spec.min_tokens > 0 and len(self.log) - spec.prompt_length < spec.min_tokens

    def move(self, event: SequenceEvent) -> None:
        """Advance in the transition table."""
        self.state = advance(SEQUENCE, self.state, event)


class Slice(NamedTuple):
    """Consecutive rows of one sequence in one step."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    """The last row is followed by a sampled token."""


class Lease:
    """Pages that a worker took ahead, so that no token waits for the allocator."""

    def __init__(self) -> None:
        self._pages: deque[PageRef] = deque()
        self.consumed = 0

    def __len__(self) -> int:
        return len(self._pages)

    def add(self, pages: Iterable[PageRef]) -> None:
        """Pages were granted."""
        self._pages.extend(pages)

    def take(self) -> PageRef:
        """Use the oldest lease; IndexError when there is none."""
        page = self._pages.popleft()
        self.consumed += 1
        return page

    def give_back(self, keep: int) -> tuple[PageRef, ...]:
        """All leases but `keep` of them, which count as consumed from now on."""
        pages = tuple(self._pages.pop() for _ in range(max(0, len(self._pages) - keep)))
        self.consumed += len(pages)
        return pages

    def held(self) -> tuple[PageRef, ...]:
        """The leases not used yet."""
        return tuple(self._pages)


class PageFork(NamedTuple):
    """A page that is copied before the step: from there on each of the two sequences writes its own."""

    sibling: Sequence
    source: PageRef
    target: PageRef


class Plan(NamedTuple):
    """One step."""

    slices: tuple[Slice, ...]
    missing: int
    """Pages for want of which sequences stand still."""
    forks: tuple[PageFork, ...] = ()
    """To be copied first; a sibling's slots that are copied are not written in this step."""

    @property
    def rows(self) -> int:
        """Rows over all slices."""
        return sum(piece.length for piece in self.slices)


class BatchLimits(NamedTuple):
    """What bounds a step."""

    page_tokens: int
    decode_slots: int
    step_tokens: int
    """Rows of a step at most."""


def plan_step(
    sequences: Iterable[Sequence], lease: Lease, table: PageTable, limits: BatchLimits, holds: memoryview
) -> Plan:
    """Choose the rows of the next step and open the pages that they need; `holds` is the worker's row.

    `sequences` come oldest first. Pages are opened only as tokens come. A sequence for which there
    is no page stands still in this step; whoever can go on with the rows it was dealt does.
    """
    budget = limits.step_tokens
    slices: list[Slice] = []
    forks: list[PageFork] = []
    missing = 0

    def compute(sequence: Sequence, count: int) -> None:
        nonlocal budget, missing
        room = _make_room(sequence, count, lease, table, holds)
        if room < count:
            missing += -(-(count - room) // limits.page_tokens)
            count = room
        if count > 0:
            samples = sequence.state is SequenceState.DECODE and count == sequence.behind
            slices.append(Slice(sequence, sequence.computed, count, samples))
            budget -= count

    runnable = [sequence for sequence in sequences if not sequence.doomed and not sequence.seeks]
    decoding = [s for s in runnable if s.state is SequenceState.DECODE]
    for sequence in decoding[: limits.decode_slots]:
        if sequence.forks and budget and len(lease):
            forks += fork_page(sequence, decoding, lease, table, holds)
        compute(sequence, min(sequence.behind, budget))
    filling = [sequence for sequence in runnable if sequence.state is SequenceState.PREFILL]
    dealt = deal_rows(filling, budget)
    for sequence, count in dealt:
        compute(sequence, count)
    served = {sequence.spec.client for sequence, _ in dealt}
    fed = {sequence.key for sequence, _ in dealt}
    for sequence in filling:
        if sequence.spec.client not in served:
            sequence.passed += 1
        else:
            sequence.passed = 0
            sequence.outrun = 0 if sequence.key in fed else sequence.outrun + 1
    return Plan(tuple(slices), missing, tuple(forks))


def fork_page(
    sequence: Sequence, siblings: Iterable[Sequence], lease: Lease, table: PageTable, holds: memoryview
) -> list[PageFork]:
    """Copy on write: take over the begun page of a sibling as far as the two logs are equal.

    The sibling goes on writing its own; what it has computed of the page is a function of the log.
    """
    sequence.forks = False
    size, start = table.page_tokens, sequence.computed
    block = start // size
    for sibling in siblings:
        end = min(sibling.computed, len(sequence.log) - 1, (block + 1) * size - 1)
        same = sibling.key.request == sequence.key.request and sibling is not sequence
        if same and end > start and sibling.log[:end] == sequence.log[:end]:
            page = _open_page(sequence, lease, table, holds)
            table.fill(page.index, end - start)
            sequence.computed = end
            return [PageFork(sibling, sibling.pages[block], page)]
    return []


def deal_rows(filling: Iterable[Sequence], rows: int) -> list[tuple[Sequence, int]]:
    """How many of a step's rows each prompt gets: who lacks the fewest goes first.

    First of clients, then of a client's prompts of one priority. So a flood of prompts, or a long one, does
    not delay a short one by more than the step that is running; a client, or a prompt, that has been passed
    over for MOST_PASSED steps goes before that.
    (Schrage, "A Proof of the Optimality of the Shortest Remaining Processing Time Discipline", 1968.)

    `filling` come oldest first.
    """
    lines: dict[str, list[Sequence]] = {}
    for sequence in filling:
        if sequence.behind:
            lines.setdefault(sequence.spec.client, []).append(sequence)

    def urgency(line: list[Sequence]) -> tuple[int, int]:
        passed = max(sequence.passed for sequence in line)
        lacks = sum(sequence.behind for sequence in line)
        return (-passed, 0) if passed >= MOST_PASSED else (0, lacks)

    dealt = []
    for line in sorted(lines.values(), key=urgency):
        for portion in _portions(line, rows):
            dealt.append(portion)
            rows -= portion[1]
    return dealt


def _portions(line: list[Sequence], rows: int) -> Iterator[tuple[Sequence, int]]:
    """One client's rows, to its prompts one after the other."""

    def turn(sequence: Sequence) -> tuple[int, int, int]:
        if sequence.outrun >= MOST_PASSED:
            return sequence.spec.priority, -sequence.outrun, 0
        return sequence.spec.priority, 0, sequence.behind

    for sequence in sorted(line, key=lambda s: (*turn(s), s.spec.arrival, s.key)):
        count = min(sequence.behind, rows)
        if count == 0:
            return
        yield sequence, count
        rows -= count


def _make_room(sequence: Sequence, count: int, lease: Lease, table: PageTable, holds: memoryview) -> int:
    """Open the pages for `count` more positions, as far as leases go; the positions there is room for."""
    page_tokens = table.page_tokens
    needed = -(-(sequence.computed + count) // page_tokens) - len(sequence.pages)
    for _ in range(min(needed, len(lease))):
        _open_page(sequence, lease, table, holds)
    return len(sequence.pages) * page_tokens - sequence.computed


def _open_page(sequence: Sequence, lease: Lease, table: PageTable, holds: memoryview) -> PageRef:
    """Use a lease as the next page of a sequence."""
    page, key = lease.take(), sequence.key
    holds[page.index] = 1
    table.open(page.index, key.request, key.choice, sequence.term, len(sequence.pages))
    sequence.pages.append(page)
    return page


def full_pages(plan: Plan, page_tokens: int) -> list[PageRef]:
    """The pages that are full when the step is computed."""
    full = []
    for piece in plan.slices:
        end = piece.start + piece.length
        full += piece.sequence.pages[piece.start // page_tokens : end // page_tokens]
    return full


def advance_sequence(piece: Slice, table: PageTable, checksums: Mapping[int, int]) -> list[PageRef]:
    """Record that the rows of a slice were computed; returns the pages that became full.

    Metadata is published here, before any token that depends on it is sent. `checksums` are of the bytes
    of full pages, by their indexes, as far as somebody computed them.
    """
    sequence, page_tokens = piece.sequence, table.page_tokens
    first = sequence.computed // page_tokens
    sequence.computed += piece.length
    sealed = []
    for block in range(first, len(sequence.pages)):
        valid = min(page_tokens, sequence.computed - block * page_tokens)
        page = sequence.pages[block]
        table.fill(page.index, valid)
        if valid == page_tokens:
            tokens = token_bytes(sequence.log[block * page_tokens : (block + 1) * page_tokens])
            parent, key = sequence.chain.parent, sequence.chain.append(tokens)
            table.seal(page.index, Seal(key, parent, tokens, checksums.get(page.index)))
            sealed.append(page)
    return sealed


def chain_of(root: bytes, log: Tokens[int], filled: int, page_tokens: int) -> Chain:
    """The chain of a log behind its full pages, as far as positions are filled."""
    return Chain.resume(root, page_tokens, token_bytes(log[: filled - filled % page_tokens]))


def begin(
    spec: SequenceSpec,
    term: int,
    decode: Incarnation,
    chain: Chain,
    filled: int = 0,
    pages: Iterable[PageRef] = (),
) -> Sequence:
    """A sequence that starts with nothing computed but the full pages that it shares."""
    return Sequence(spec, term, decode, SequenceState.PREFILL, list(spec.log), chain, filled, list(pages))


def adopt(
    spec: SequenceSpec, term: int, me: Incarnation, chain: Chain, filled: int, pages: Iterable[PageRef]
) -> Sequence:
    """A sequence that was handed over: it decodes from `filled` on."""
    return Sequence(spec, term, me, SequenceState.DECODE, list(spec.log), chain, filled, list(pages))
