"""Continuous batching: which rows the next step computes, decided anew at every iteration.

A sequence is always at one of two tasks: filling positions that are in its log but not in its
pages, and, when it has reached the end of the log, sampling the next token.

    PREFILL   computed ≤ len(log) − 1      rows computed … len(log) − 2, nothing sampled
    DECODE    computed ≤ len(log) − 1      rows computed … len(log) − 1, the last one sampled

so that the first decode row computes position P − 1 and there is one source of tokens, with or
without a prefill before it. Rows of decoding sequences come first; prefill chunks fill what is
left of the step, oldest request first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from engine.lifecycle import SEQUENCE, SequenceEvent, SequenceState, advance

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.ids import Incarnation, SequenceKey
    from engine.layout import PageTable
    from engine.messages import SequenceSpec
    from engine.shapes import PageRef


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
    computed: int = 0
    pages: list[PageRef] = field(default_factory=list)
    running: bool = False
    """Its rows are in the step that is being computed: its pages may not be released now."""
    doomed: bool = False
    """To be dropped as soon as it does not run."""

    @property
    def key(self) -> SequenceKey:
        """Request and choice."""
        return self.spec.key

    @property
    def end(self) -> int:
        """The position behind the last one that its present task computes."""
        return len(self.log) - (self.state is SequenceState.PREFILL)

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


class Plan(NamedTuple):
    """One step."""

    slices: tuple[Slice, ...]
    missing: int
    """Pages for want of which sequences stand still."""

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


def plan_step(sequences: Iterable[Sequence], lease: Lease, table: PageTable, limits: BatchLimits) -> Plan:
    """Choose the rows of the next step and open the pages that they need.

    `sequences` come oldest first. Pages are opened only as tokens come. A sequence for which there
    is no page stands still in this step; whoever can go on does.
    """
    budget = limits.step_tokens
    slices: list[Slice] = []
    missing = 0
    runnable = [sequence for sequence in sequences if not sequence.doomed]
    decoding = [s for s in runnable if s.state is SequenceState.DECODE][: limits.decode_slots]
    filling = [s for s in runnable if s.state is SequenceState.PREFILL]
    for sequence in (*decoding, *filling):
        count = min(sequence.end - sequence.computed, budget)
        if count <= 0:
            continue
        needed = -(-(sequence.computed + count) // limits.page_tokens) - len(sequence.pages)
        for _ in range(min(needed, len(lease))):
            page = lease.take()
            table.open(
                page.index, sequence.key.request, sequence.key.choice, sequence.term, len(sequence.pages)
            )
            sequence.pages.append(page)
        room = len(sequence.pages) * limits.page_tokens - sequence.computed
        if room < count:
            missing += -(-(count - room) // limits.page_tokens)
            count = room
        if count > 0:
            samples = sequence.state is SequenceState.DECODE and sequence.computed + count == len(
                sequence.log
            )
            slices.append(Slice(sequence, sequence.computed, count, samples))
            budget -= count
    return Plan(tuple(slices), missing)


def advance_sequence(piece: Slice, table: PageTable, page_tokens: int) -> list[PageRef]:
    """Record that the rows of a slice were computed; returns the pages that became full.

    Metadata is published here, before any token that depends on it is sent.
    """
    sequence = piece.sequence
    first = sequence.computed // page_tokens
    sequence.computed += piece.length
    sealed = []
    for block in range(first, len(sequence.pages)):
        valid = min(page_tokens, sequence.computed - block * page_tokens)
        page = sequence.pages[block]
        table.fill(page.index, valid)
        if valid == page_tokens:
            table.seal(page.index)
            sealed.append(page)
    return sealed


def begin(spec: SequenceSpec, term: int, decode: Incarnation) -> Sequence:
    """A sequence that starts with nothing computed."""
    return Sequence(spec, term, decode, SequenceState.PREFILL, list(spec.log))


def adopt(spec: SequenceSpec, term: int, me: Incarnation, filled: int, pages: Iterable[PageRef]) -> Sequence:
    """A sequence that was handed over: it decodes from `filled` on."""
    return Sequence(spec, term, me, SequenceState.DECODE, list(spec.log), filled, list(pages))
