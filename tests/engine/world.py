"""All pure cores in one world without I/O: messages in queues, pages that remember what was written.

The world delivers, kills and restarts in whatever order a test says. Its "model" is a hash of the
token log as read back *from the pages*, so that a page used twice, freed too early, shared or handed
over wrongly changes the tokens of somebody, and of the index of the choice, so that a mix-up of the
choices of one request does.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.allocator import Allocator
from engine.core import Send
from engine.ids import Incarnation, SequenceKey
from engine.layout import TokenLogArena
from engine.ledger import Closed, Committed, Ledger, LedgerFull
from engine.messages import Member, Roster
from engine.sampling import GREEDY
from engine.scheduler import Scheduler
from engine.worker import Worker, WorkerLimits
from tables import OldestFirst, page_table

if TYPE_CHECKING:
    from engine.batching import Plan

PAGE_TOKENS = 4
SLOTS = 8
CAPACITY = 64
VOCABULARY = 1000
STOP_TOKEN = 7


def next_token(log: list[int], choice: int) -> int:
    """The world's model: any function of the whole log and, as with a temperature, of the choice."""
    digest = hashlib.blake2b(repr((log, choice)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def expected(prompt: tuple[int, ...], limit: int, choice: int = 0) -> list[int]:
    """The log that a choice must end with, whatever happens around it."""
    log = list(prompt)
    while len(log) < limit:
        log.append(next_token(log, choice))
        if log[-1] == STOP_TOKEN:
            break
    return log


@dataclass
class Alive:
    """One incarnation of one actor, and what it knows of the others."""

    member: Member
    core: Allocator | Scheduler | Ledger | Worker
    seen: dict[str, Member] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    version: int = 0
    step: Plan | None = None


class World:
    """A gateway, a scheduler, an allocator, and workers of the given roles."""

    def __init__(self, roles: dict[str, str], pages: int) -> None:
        self.roles = roles
        self.names = ["scheduler", "allocator", "gateway", *roles]
        self.pages = pages
        self.table = page_table(pages, PAGE_TOKENS)
        self.arena = TokenLogArena(
            memoryview(bytearray(SLOTS * TokenLogArena.slot_bytes(CAPACITY))), SLOTS, CAPACITY
        )
        self.pool: dict[tuple[int, int], tuple[int, int]] = {}
        self.epochs = dict.fromkeys(self.names, 0)
        self.alive: dict[str, Alive] = {}
        self.queues: dict[tuple[Incarnation, Incarnation], deque[object]] = {}
        self.rosters: dict[Incarnation, deque[Roster]] = {}
        self.version = 0
        self.now = 0.0
        self.open: dict[SequenceKey, tuple[tuple[int, ...], int]] = {}
        self.logs: dict[SequenceKey, list[int]] = {}
        self.failures: list[Closed] = []
        for name in self.names:
            self.start(name)

    # ── birth and death ───────────────────────────────────────────────────────────────────────

    def start(self, name: str) -> None:
        """Start the next incarnation of an actor; the roster goes to everybody, in its own time."""
        self.epochs[name] += 1
        ordinal = self.names.index(name)
        me = Incarnation(name, self.epochs[name])
        kind = "worker" if name in self.roles else name
        core: Allocator | Scheduler | Ledger | Worker
        if name == "scheduler":
            core = Scheduler(PAGE_TOKENS)
        elif name == "allocator":
            core = Allocator(self.table, {n: i for i, n in enumerate(self.names)}, OldestFirst())
        elif name == "gateway":
            core = Ledger(me, ordinal, self.arena, range(SLOTS))
            adopted = {entry.key: entry for entries in core.adopted.values() for entry in entries}
            assert all(entry.log == self.logs[key] for key, entry in adopted.items())
            self.open = {key: asked for key, asked in self.open.items() if key in adopted}
        else:
            role = self.roles[name]
            limits = WorkerLimits(
                prefill_slots=2 if role in ("prefill", "both") else 0,
                decode_slots=3 if role in ("decode", "both") else 0,
                step_tokens=6,
                page_tokens=PAGE_TOKENS,
                lease_ahead=1,
            )
            core = Worker(me, ordinal, self.table, limits)
        self.alive[name] = Alive(Member(name, kind, ordinal, me.epoch, "", True), core)  # type: ignore[arg-type]
        self.rosters[me] = deque()
        self._announce()

    def kill(self, name: str) -> None:
        """End an actor. A running step may have written any part of its rows."""
        actor = self.alive.pop(name)
        self.rosters.pop(actor.member.incarnation)
        if actor.step is not None:
            for piece in actor.step.slices[::2]:
                self._write(piece)
        self._announce()

    def _announce(self) -> None:
        self.version += 1
        roster = Roster((1, self.version), tuple(actor.member for actor in self.alive.values()))
        for actor in self.alive.values():
            self.rosters[actor.member.incarnation].append(roster)

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def deliverable(self) -> list[tuple[Incarnation, Incarnation] | Incarnation]:
        """What could be delivered next: the head of a queue, or a roster."""
        choices: list[tuple[Incarnation, Incarnation] | Incarnation] = [
            actor.member.incarnation
            for actor in self.alive.values()
            if self.rosters[actor.member.incarnation]
        ]
        for (source, target), queue in self.queues.items():
            actor = self.alive.get(target.name)
            if actor is None or actor.member.incarnation != target or not queue:
                continue
            known = actor.seen.get(source.name)
            waits = (known is None or known.epoch != source.epoch) and source.epoch > actor.newest.get(
                source.name, 0
            )
            if not waits:
                choices.append((source, target))
        return sorted(choices, key=repr)

    def deliver(self, choice: tuple[Incarnation, Incarnation] | Incarnation) -> None:
        """Deliver one roster or one message."""
        if isinstance(choice, Incarnation):
            self._deliver_roster(self.alive[choice.name], self.rosters[choice].popleft())
            return
        source, target = choice
        message = self.queues[choice].popleft()
        actor = self.alive[target.name]
        known = actor.seen.get(source.name)
        if known is not None and known.epoch == source.epoch:
            self._act(actor, actor.core.handle(source, message, self.now))  # type: ignore[arg-type]

    def _deliver_roster(self, actor: Alive, roster: Roster) -> None:
        listed = {m.name: m for m in roster.members if m.name != actor.member.name}
        down = [m.incarnation for m in actor.seen.values() if listed.get(m.name) != m]
        up = [m for m in listed.values() if actor.seen.get(m.name) != m]
        actor.seen = listed
        for member in listed.values():
            actor.newest[member.name] = max(member.epoch, actor.newest.get(member.name, 0))
        self._act(actor, actor.core.peers(up, down, self.now))

    def _act(self, actor: Alive, effects: list[object]) -> None:
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    name = to if isinstance(to, str) else to.name
                    member = actor.seen.get(name)
                    if member is not None and (isinstance(to, str) or member.incarnation == to):
                        edge = (actor.member.incarnation, member.incarnation)
                        self.queues.setdefault(edge, deque()).append(message)
                case Committed(key=key, token=token):
                    self.logs[key].append(token)
                case Closed(key=key):
                    prompt, limit = self.open.pop(key)
                    if effect.reason is None:
                        self.failures.append(effect)
                    else:
                        assert self.logs[key] == expected(prompt, limit, key.choice)
                    self._release(key.request)

    # ── what clients and workers do ───────────────────────────────────────────────────────────

    @property
    def gateway(self) -> Ledger | None:
        """The living gateway's core."""
        actor = self.alive.get("gateway")
        return None if actor is None else actor.core  # type: ignore[return-value]

    def submit(
        self,
        prompt: tuple[int, ...],
        limit: int,
        *,
        n: int = 1,
        client: str = "",
        priority: int = 0,
        keepsake: bytes = b"",
    ) -> tuple[SequenceKey, ...]:
        """A client asks for n choices; none when nobody is there or there is no room."""
        if self.gateway is None:
            return ()
        self.now += 1.0
        try:
            keys, effects = self.gateway.open(
                prompt,
                limit,
                (STOP_TOKEN,),
                GREEDY,
                self.now,
                n=n,
                client=client,
                priority=priority,
                keepsake=keepsake,
            )
        except LedgerFull:
            return ()
        for key in keys:
            self.open[key] = (prompt, limit)
            self.logs[key] = list(prompt)
        self._act(self.alive["gateway"], effects)  # type: ignore[arg-type]
        return keys

    def cancel(self, key: SequenceKey) -> None:
        """A client does not want one choice any more."""
        if self.gateway is not None and self.open.pop(key, None) is not None:
            self._act(self.alive["gateway"], self.gateway.cancel(key))  # type: ignore[arg-type]
            self._release(key.request)

    def _release(self, request: int) -> None:
        """The client has everything when all choices have ended, and not before."""
        if self.gateway is not None and not any(key.request == request for key in self.open):
            self.gateway.release([key for key in self.logs if key.request == request])

    def begin_step(self, name: str) -> bool:
        """A worker plans its next step; False when it is dead, busy or has nothing to do."""
        actor = self.alive.get(name)
        if actor is None or actor.step is not None:
            return False
        assert isinstance(actor.core, Worker)
        plan, sends = actor.core.plan()
        self._act(actor, sends)  # type: ignore[arg-type]
        actor.step = plan
        return plan is not None

    def end_step(self, name: str) -> bool:
        """The step's rows are written and its tokens sampled."""
        actor = self.alive.get(name)
        if actor is None or actor.step is None:
            return False
        assert isinstance(actor.core, Worker)
        plan, actor.step = actor.step, None
        tokens = [self._write(piece) for piece in plan.slices]
        sampled = [token for token, piece in zip(tokens, plan.slices, strict=True) if piece.samples]
        self._act(actor, actor.core.complete(plan, sampled, self.now))  # type: ignore[arg-type]
        return True

    def _write(self, piece) -> int:  # type: ignore[no-untyped-def]
        """Write the rows into the pages, then read the whole log back from them."""
        sequence = piece.sequence
        for position in range(piece.start, piece.start + piece.length):
            page = sequence.pages[position // PAGE_TOKENS]
            self.pool[page.index, position % PAGE_TOKENS] = (position, sequence.log[position])
        log = []
        for position in range(piece.start + piece.length):
            page = sequence.pages[position // PAGE_TOKENS]
            where, token = self.pool.get((page.index, position % PAGE_TOKENS), (-1, -1))
            log.append(token if where == position else -1)
        return next_token(log, sequence.spec.sampling.choice)

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Every core's invariants."""
        for actor in self.alive.values():
            actor.core.check()

    def settle(self, most: int = 100_000) -> None:
        """Deliver and compute until nothing is left to do; everybody must be alive by then."""
        for name in self.names:
            if name not in self.alive:
                self.start(name)
        for _ in range(most):
            progress = False
            for choice in self.deliverable():
                if choice in self.deliverable():
                    self.deliver(choice)
                    progress = True
            for name in self.roles:
                progress |= self.end_step(name)
                progress |= self.begin_step(name)
            self.check()
            if not progress and not self.deliverable():
                break
        else:
            raise AssertionError("the world does not settle")
        self.check()
        assert not self.open, f"requests that never ended: {self.open}"
        for name, actor in self.alive.items():
            figures = actor.core.statistics()
            for what in ("requests", "sequences", "fences_waiting"):
                assert figures.get(what, 0) == 0, f"{name} still has {what} = {figures[what]}"
            if name == "gateway":
                assert figures["log_slots_free"] == SLOTS, figures
            if name == "allocator":
                assert figures["pages_free"] + figures["pages_cached"] == self.pages, figures
