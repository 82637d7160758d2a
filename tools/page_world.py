"""How full the pages of a pool are while many requests run: all real cores, no kernels, no clock.

    Ledger (gateway) ── Scheduler ── Allocator over a page table ── a Worker that fills, a Worker that decodes

are the cores of `engine` as a launch of `local` has them; messages pass at once, and a step computes nothing,
so that what remains is who holds which page. Time is counted in rows: a step takes as long as it has rows.
Prompts are filled before anybody decodes on: memory or slots are what limits, never the speed of filling.

A step is looked at while it runs: its pages are open and its slots not yet valid, and the leases that the
next one will need have been granted. That is when most is allocated that is not used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.allocator import Allocator
from engine.core import Send
from engine.eviction import CostAware
from engine.ids import Incarnation
from engine.layout import PageTable, TokenLogArena
from engine.ledger import Closed, Ledger
from engine.lifecycle import PageState, SequenceState
from engine.messages import Member
from engine.sampling import GREEDY
from engine.scheduler import Scheduler
from engine.worker import Worker, WorkerLimits
from tools.bench_load import BenchFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from engine.batching import Plan
    from engine.ledger import Effect

WAITING = 16
"""Requests that wait for a place at most, so that there is always one that may take it."""
TOKEN = 1
"""What everybody samples: prompts have no page in common, so neither have their answers."""


class Length(NamedTuple):
    """What a request is here."""

    input: int
    output: int

    @property
    def positions(self) -> int:
        """Slots that it takes at its end: the last token's keys and values are never computed."""
        return self.input + self.output - 1


class Setup(NamedTuple):
    """A pool and the workers over it; what is not said is as in a topology without that key."""

    page_tokens: int
    pages: int
    decode_slots: int
    prefill_slots: int = 8
    step_tokens: int = 64
    """Rows of a step that fills."""
    lease_ahead: int = 4


class Moment(NamedTuple):
    """A look at a step that runs."""

    rows: int
    """How long it takes."""
    sequences: int
    """On workers, whether they have a page or wait for their first."""
    with_pages: int
    decoding: int
    """Of those with pages, also who stands still for want of one more; none in a step that fills."""
    allocated: int
    """Slots of all pages that are neither free nor cached."""
    used: int
    """Slots whose keys and values are there."""


@dataclass(slots=True)
class Mean:
    """What moments add up to."""

    weight: int = 0
    total: float = 0.0
    most: float = 0.0

    def add(self, weight: int, value: float) -> None:
        """For so long it was so much."""
        self.weight += weight
        self.total += weight * value
        self.most = max(self.most, value)

    @property
    def value(self) -> float:
        """The mean; BenchFailed when there was nothing."""
        if not self.weight:
            raise BenchFailed("nothing was sampled: the trace has too few requests for a steady state")
        return self.total / self.weight


class PageWorld:
    """All cores over one pool."""

    def __init__(self, setup: Setup, lengths: Sequence[Length]) -> None:
        self.setup = setup
        self.longest = max(length.input + length.output for length in lengths)
        if self.longest > (setup.pages - 1) * setup.page_tokens:
            raise BenchFailed(f"{setup.pages} pages do not hold a request of {self.longest} tokens")
        names = ("scheduler", "allocator", "gateway", "prefill", "decode")
        size = PageTable.size(setup.pages, setup.page_tokens, len(names))
        self.table = PageTable(memoryview(bytearray(size)), setup.pages, setup.page_tokens, len(names))
        self._words = np.frombuffer(self.table.words, np.uint64).reshape(-1, PageTable.WORDS)
        ordinals = {name: ordinal for ordinal, name in enumerate(names)}
        self.allocator = Allocator(self.table, ordinals, CostAware(setup.pages))
        self.scheduler = Scheduler(setup.page_tokens)
        slots = setup.decode_slots + WAITING
        arena = memoryview(bytearray(slots * TokenLogArena.slot_bytes(self.longest)))
        me = {name: Incarnation(name, 1) for name in names}
        self.ledger = Ledger(
            me["gateway"],
            ordinals["gateway"],
            TokenLogArena(arena, slots, self.longest),
            range(slots),
        )
        self.workers = {
            name: Worker(me[name], ordinals[name], self.table, self._limits(name))
            for name in ("prefill", "decode")
        }
        self.cores: dict[str, Scheduler | Allocator | Ledger | Worker] = {
            "scheduler": self.scheduler,
            "allocator": self.allocator,
            "gateway": self.ledger,
            **self.workers,
        }
        self.rows = 0
        self.ended = 0
        self._left: Iterator[Length] = iter(lengths)
        self._opened = 0
        self.exhausted = False
        """No request is left that could be sent."""
        self._queue: deque[tuple[Incarnation, Send]] = deque()
        members = [
            Member(name, "worker" if name in self.workers else name, ordinal, 1, "", True)  # type: ignore[arg-type]
            for name, ordinal in ordinals.items()
        ]
        for name, core in self.cores.items():
            others = [member for member in members if member.name != name]
            self._act(me[name], core.peers(others, [], 0.0))
        self._deliver()

    def _limits(self, role: str) -> WorkerLimits:
        setup = self.setup
        fills = role == "prefill"
        return WorkerLimits(
            prefill_slots=setup.prefill_slots if fills else 0,
            decode_slots=0 if fills else setup.decode_slots,
            step_tokens=setup.step_tokens if fills else setup.decode_slots,
            page_tokens=setup.page_tokens,
            lease_ahead=setup.lease_ahead,
        )

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def _act(self, source: Incarnation, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._queue.append((source, effect))
            elif isinstance(effect, Closed):
                if effect.error is not None:
                    raise BenchFailed(f"a request failed: {effect.error}")
                self.ledger.release([effect.key])
                self.ended += 1

    def _deliver(self) -> None:
        while self._queue:
            source, send = self._queue.popleft()
            name = send.to if isinstance(send.to, str) else send.to.name
            core = self.cores.get(name)
            if core is not None:  # there is no replicator
                handled = core.handle(source, send.message, float(self.rows))  # type: ignore[arg-type]
                self._act(Incarnation(name, 1), handled)

    # ── requests and steps ────────────────────────────────────────────────────────────────────

    def _submit(self) -> None:
        """Keep enough requests open that nobody's place stays empty."""
        while not self.exhausted and self._opened - self.ended < self.setup.decode_slots + WAITING:
            length = next(self._left, None)
            if length is None:
                self.exhausted = True
                return
            first = 2 + self._opened * self.longest
            prompt = tuple(range(first, first + length.input))
            _, effects = self.ledger.open(
                prompt,
                length.input + length.output,
                (),
                GREEDY,
                float(self.rows),
                client=f"user:{self._opened}",
            )
            self._opened += 1
            self._act(self.ledger.me, effects)
            self._deliver()

    def _step(self, name: str, looked: Callable[[Moment], object]) -> bool:
        """One step of a worker, looked at while it runs; False when there is nothing to compute."""
        worker = self.workers[name]
        plan = None
        while plan is None:
            leases = len(worker.lease)
            plan, sends = worker.plan()
            self._act(worker.me, sends)
            self._deliver()
            if plan is None and len(worker.lease) <= leases:
                return False
            # else it had no page, and has one now
        looked(self.look(plan))
        self.rows += plan.rows
        sampled = [TOKEN] * sum(piece.samples for piece in plan.slices)
        self._act(worker.me, worker.complete(plan, sampled, float(self.rows)))
        self._deliver()
        return True

    def look(self, plan: Plan) -> Moment:
        """How the pool is during a step."""
        states = self._words[:, 0] & np.uint64(0xFF)
        held = np.zeros(len(states), np.bool_)
        for owner in self.table.holding():
            row = self.table.holders(owner)
            if row is not None:
                held |= np.frombuffer(row, np.uint8) != 0
        writable = (states == PageState.LEASED) | (states == PageState.OPEN)
        pages = int((writable | held).sum())
        sequences = [s for worker in self.workers.values() for s in worker.sequences]
        decoding = sum(s.state is SequenceState.DECODE and bool(s.pages) for s in sequences)
        return Moment(
            plan.rows,
            len(sequences),
            sum(bool(sequence.pages) for sequence in sequences),
            decoding if any(s.state is SequenceState.DECODE for s, *_ in plan.slices) else 0,
            pages * self.setup.page_tokens,
            sum(sequence.computed for sequence in sequences),
        )

    def run(self, looked: Callable[[Moment], object], took: Callable[[int], object]) -> None:
        """Answer all requests; `looked` sees every step, `took` hears how many have ended since."""
        told = 0
        while True:
            self._submit()
            stepped = self._step("prefill", looked) or self._step("decode", looked)
            took(self.ended - told)
            told = self.ended
            if not stepped:
                if self.exhausted and self.ended == self._opened:
                    return
                raise BenchFailed(f"nothing goes on, and {self._opened - self.ended} requests are open")

    def check(self) -> None:
        """Every core's invariants, and that nothing is left when all requests have ended."""
        for core in self.cores.values():
            core.check()
        if self.exhausted and self.ended == self._opened:
            census = self.allocator.census()
            assert census["free"] + census["cached"] == self.setup.pages, dict(census)


# ── what is made of it ────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Waste:
    """Of a pool in which a constant number of requests run."""

    mean: Mean = field(default_factory=Mean)
    static: Mean = field(default_factory=Mean)
    """If each had the slots of the longest."""
    steps: int = 0


def waste(
    setup: Setup, lengths: Sequence[Length], took: Callable[[int], object] = lambda number: None
) -> Waste:
    """(allocated − used) / allocated slots while `setup.decode_slots` requests run, over all their steps."""
    world = PageWorld(setup, lengths)
    found = Waste()

    def looked(moment: Moment) -> None:
        if moment.sequences == setup.decode_slots and not world.exhausted:
            found.steps += 1
            found.mean.add(moment.rows, 1 - moment.used / moment.allocated)
            found.static.add(moment.rows, 1 - moment.used / (moment.sequences * world.longest))

    world.run(looked, took)
    world.check()
    return found


class Room(NamedTuple):
    """How many sequences a pool holds."""

    sequences: Mean
    length: Mean
    """Slots that a sequence has in use, over all of them."""
    static: int
    """If each had the slots of the longest."""
    preemptions: int


def room(
    setup: Setup, lengths: Sequence[Length], took: Callable[[int], object] = lambda number: None
) -> Room:
    """How many sequences decode at once, when there are always more than there is room for.

    The mean over the steps that decode: there is one whenever no prompt can be filled any more. What decodes
    in the first of them began at once, so none counts before as many requests have ended.
    """
    world = PageWorld(setup, lengths)
    sequences, used, first = Mean(), Mean(), 0

    def looked(moment: Moment) -> None:
        nonlocal first
        if not moment.decoding:
            return
        if moment.sequences >= setup.decode_slots:
            raise BenchFailed(f"the pool holds more sequences than there are slots, {setup.decode_slots}")
        first = first or moment.decoding
        if world.ended >= first and not world.exhausted:
            sequences.add(1, moment.decoding)
            used.add(1, moment.used / moment.with_pages)

    world.run(looked, took)
    world.check()
    static = setup.pages * setup.page_tokens // world.longest
    return Room(sequences, used, static, world.scheduler.preemptions)
