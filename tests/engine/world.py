"""All pure cores in one world without I/O: messages in queues, pages that remember what was written.

The world delivers, kills and restarts in whatever order a test says. Its "model" is a hash of the
token log as read back *from the pages*, so that a page used twice, freed too early, shared or handed
over wrongly changes the tokens of somebody, and of the index of the choice, so that a mix-up of the
choices of one request does. A row also remembers the identity of its worker and the salt of its request.

A worker that is killed may be a ghost for a while: nobody lists it any more, but it goes on with what it
knows, or writes anything into the pages that it could write, until it is proven gone.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tables import OldestFirst, page_table

from engine.allocator import WRITERS, Allocator
from engine.chain import token_bytes
from engine.core import Send
from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner, TokenLogArena
from engine.ledger import Closed, Committed, Ledger, LedgerFull
from engine.lifecycle import PageState, SequenceState
from engine.messages import LeaseGranted, Member, PrefixGranted, Roster
from engine.sampling import GREEDY
from engine.scheduler import Scheduler
from engine.worker import Worker, WorkerLimits

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from engine.batching import Plan
    from engine.shapes import PageRef

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


def prompt_of(family: int, length: int) -> tuple[int, ...]:
    """Prompts of one family begin alike; families part after a page, and one at once."""
    shared = 0 if family == 2 else PAGE_TOKENS + 1
    return tuple(n if n < shared else 100 * (family + 1) + n for n in range(length))


@dataclass
class Alive:
    """One incarnation of one actor, and what it knows of the others."""

    member: Member
    me: Incarnation
    core: Allocator | Scheduler | Ledger | Worker
    seen: dict[str, Member] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)
    version: int = 0
    step: Plan | None = None
    mad: bool = False
    """A ghost that has written at random: it does nothing that makes sense any more."""
    touched: bool = True
    """Something has been said to it, or by it, since it was checked."""
    idle: bool = False
    """It had no step to begin, and nothing has been said to it since."""


class World:
    """A gateway, a scheduler, an allocator, and workers of the given roles."""

    def __init__(
        self,
        roles: dict[str, str],
        pages: int,
        identity: Callable[[Incarnation], str] = lambda worker: "",
        others: Iterable[str] = (),
    ) -> None:
        """`identity`: what the keys and values of a worker depend on. `others`: actors of a subclass."""
        self.identity = identity
        self.roles = roles
        self.names = ["scheduler", "allocator", "gateway", *roles, *others]
        self.pages = pages
        self.table = page_table(pages, PAGE_TOKENS)
        self.arena = TokenLogArena(
            memoryview(bytearray(SLOTS * TokenLogArena.slot_bytes(CAPACITY))), SLOTS, CAPACITY
        )
        self.pool: dict[tuple[int, int], tuple[int, int, str, str]] = {}
        """Position, token, identity and salt of each row that was written, by page and slot."""
        self.epochs = dict.fromkeys(self.names, 0)
        self.alive: dict[str, Alive] = {}
        self.ghosts: dict[Incarnation, Alive] = {}
        self.queues: dict[tuple[Incarnation, Incarnation], deque[object]] = {}
        self.rosters: dict[Incarnation, deque[Roster]] = {}
        self.version = 0
        self.checked: tuple[bytes, ...] = ()
        """The page table as it was when all were checked."""
        self.now = 0.0
        self.open: dict[SequenceKey, tuple[tuple[int, ...], int]] = {}
        self.logs: dict[SequenceKey, list[int]] = {}
        self.failures: list[Closed] = []
        self.cancelled: set[SequenceKey] = set()
        """One of several choices is taken over by the next gateway all the same, with the others."""
        for name in self.names:
            self.start(name)

    # ── birth and death ───────────────────────────────────────────────────────────────────────

    def start(self, name: str) -> None:
        """Start the next incarnation of an actor; the roster goes to everybody, in its own time."""
        for ghost in [ghost for ghost in self.ghosts if ghost.name == name]:
            self.prove_gone(ghost)
        self.epochs[name] += 1
        me = Incarnation(name, self.epochs[name])
        core = self._core(me, self.names.index(name))
        member = Member(name, self._kind(name), self.names.index(name), me.epoch, "", True)  # type: ignore[arg-type]
        self.alive[name] = Alive(member, me, core)
        self.rosters[me] = deque()
        self._announce()

    def _kind(self, name: str) -> str:
        return "worker" if name in self.roles else name

    def _core(self, me: Incarnation, ordinal: int) -> Allocator | Scheduler | Ledger | Worker:
        core: Allocator | Scheduler | Ledger | Worker
        if me.name == "scheduler":
            core = Scheduler(PAGE_TOKENS)
        elif me.name == "allocator":
            ordinals = {n: i for i, n in enumerate(self.names)}
            core = Allocator(self.table, ordinals, OldestFirst(), self._is_gone)
        elif me.name == "gateway":
            core = Ledger(me, ordinal, self.arena, range(SLOTS))
            adopted = {entry.key: entry for entries in core.adopted.values() for entry in entries}
            assert all(entry.log == self.logs[key] for key, entry in adopted.items())
            self.open = {key: asked for key, asked in self.open.items() if key in adopted}
        else:
            role = self.roles[me.name]
            limits = WorkerLimits(
                prefill_slots=2 if role in ("prefill", "both") else 0,
                decode_slots=3 if role in ("decode", "both") else 0,
                step_tokens=6,
                page_tokens=PAGE_TOKENS,
                lease_ahead=1,
            )
            core = Worker(me, ordinal, self.table, limits)
            core.identity = self.identity(me)
        return core

    def kill(self, name: str, *, ghost: bool = False) -> None:
        """End an actor. A running step may have written any part of its rows.

        A `ghost` writes pages and is thought dead, and may write until it is proven gone.
        """
        actor = self.alive.pop(name)
        if ghost and self._kind(name) in WRITERS:
            self.ghosts[actor.me] = actor
        else:
            self.rosters.pop(actor.me)
            if actor.step is not None:
                for piece in actor.step.slices[::2]:
                    self._write(actor.core, piece)
        self._announce()

    def prove_gone(self, ghost: Incarnation) -> None:
        """The last thread of a ghost has ended; nobody but the allocator asks."""
        del self.ghosts[ghost]
        self.rosters.pop(ghost)
        self._announce()

    def _is_gone(self, owner: Owner) -> bool:
        return not any(Owner(a.member.ordinal, a.member.epoch) == owner for a in self.ghosts.values())

    def go_mad(self, ghost: Incarnation) -> None:
        """It writes into everything that it may write, by what it knows: poison for whoever reads it."""
        actor = self.ghosts[ghost]
        actor.mad = True
        for page in self._writable(actor.core):
            for slot in range(PAGE_TOKENS):
                self.pool[page.index, slot] = (-2, -2, "", "")

    @staticmethod
    def _writable(core: Worker) -> set[PageRef]:
        """The pages that a worker may write, as far as it knows."""
        pages = set(core.lease.held())
        for sequence in core.sequences:
            if sequence.state is not SequenceState.OFFERED and not sequence.seeks:
                pages.update(sequence.pages[sequence.computed // PAGE_TOKENS :])
        return pages

    def _announce(self) -> None:
        self.version += 1
        members = tuple(actor.member for actor in self.alive.values())
        roster = Roster((1, self.version), members, tuple(sorted(self.ghosts)))
        for edge in [edge for edge in self.queues if not self._lives(edge[1]) and edge[1] not in self.ghosts]:
            del self.queues[edge]
        for actor in self.alive.values():
            self.rosters[actor.me].append(roster)

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def _actor(self, incarnation: Incarnation) -> Alive | None:
        """Whoever can take a message: one that lives, or a ghost that has not gone mad."""
        actor = self.alive.get(incarnation.name)
        if actor is not None and actor.me.epoch == incarnation.epoch:
            return actor
        ghost = self.ghosts.get(incarnation)
        return None if ghost is None or ghost.mad else ghost

    def deliverable(self, *, ghosts: bool = False) -> list[tuple[Incarnation, Incarnation] | Incarnation]:
        """What could be delivered next: the head of a queue, or a roster; to ghosts, or to who lives."""
        choices: list[tuple[Incarnation, Incarnation] | Incarnation] = [
            incarnation
            for incarnation, rosters in self.rosters.items()
            if rosters and (incarnation in self.ghosts) == ghosts and self._actor(incarnation) is not None
        ]
        choices += [
            edge
            for edge, queue in self.queues.items()
            if queue and (edge[1] in self.ghosts) == ghosts and self._may_hear(*edge)
        ]
        return choices

    def _may_hear(self, source: Incarnation, target: Incarnation) -> bool:
        """Whether the roster of the target has come to the source; what is of a dead one is dropped."""
        actor = self._actor(target)
        # Whoever it knows now is the newest that it has known, or older.
        return actor is not None and source.epoch <= actor.newest.get(source.name, 0)

    def deliver(self, choice: tuple[Incarnation, Incarnation] | Incarnation) -> None:
        """Deliver one roster or one message."""
        if isinstance(choice, Incarnation):
            actor = self._actor(choice)
            assert actor is not None
            self._deliver_roster(actor, self.rosters[choice].popleft())
            return
        source, target = choice
        message = self.queues[choice].popleft()
        actor = self._actor(target)
        assert actor is not None
        known = actor.seen.get(source.name)
        if known is not None and known.epoch == source.epoch:
            if isinstance(message, PrefixGranted) and self._lives(source) and self._lives(target):
                self._check_hit(actor, message)
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
        actor.touched, actor.idle = True, False
        if not effects:
            return
        lives = self._lives(actor.me)
        for effect in effects:
            match effect:
                case Send(to=to, message=message):
                    if lives and isinstance(message, LeaseGranted):
                        self._check_lease(message.pages)
                    name = to if isinstance(to, str) else to.name
                    member = actor.seen.get(name)
                    if member is not None and (isinstance(to, str) or member.epoch == to.epoch):
                        edge = (actor.me, member.incarnation)
                        self.queues.setdefault(edge, deque()).append(message)
                case Committed(key=key, token=token):
                    self.logs[key].append(token)
                case Closed(key=key) if key in self.cancelled and key not in self.open:
                    self._release(key.request)
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
        salt: str = "",
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
                cache_salt=salt,
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
            self.cancelled.add(key)
            self._act(self.alive["gateway"], self.gateway.cancel(key))  # type: ignore[arg-type]
            self._release(key.request)

    def _release(self, request: int) -> None:
        """The client has everything when all choices have ended, and not before."""
        if self.gateway is not None and not any(key.request == request for key in self.open):
            self.gateway.release([key for key in self.logs if key.request == request])
            self.alive["gateway"].touched = True

    def _worker(self, which: str | Incarnation) -> Alive | None:
        return self.alive.get(which) if isinstance(which, str) else self._actor(which)

    def begin_step(self, which: str | Incarnation) -> bool:
        """A worker plans its next step; False when it is dead, busy or has nothing to do."""
        actor = self._worker(which)
        if actor is None or actor.step is not None or actor.idle:
            return False
        assert isinstance(actor.core, Worker)
        plan, sends = actor.core.plan()
        self._act(actor, sends)  # type: ignore[arg-type]
        actor.step = plan
        actor.idle = plan is None and not sends
        return plan is not None

    @property
    def computing(self) -> list[str | Incarnation]:
        """Who has steps: workers, dead or alive, and ghosts."""
        return [*sorted(self.roles), *sorted(self.ghosts)]

    def advance(self, which: str | Incarnation) -> bool:
        """One half of a step; False when there is none."""
        return self.end_step(which) or self.begin_step(which)

    def compute(self) -> bool:
        """Every living worker ends a step and begins the next; whether there was any."""
        progress = False
        for name in self.roles:
            progress |= self.end_step(name)
            progress |= self.begin_step(name)
        return progress

    def end_step(self, which: str | Incarnation) -> bool:
        """The step's rows are written and its tokens sampled."""
        actor = self._worker(which)
        if actor is None or actor.step is None:
            return False
        assert isinstance(actor.core, Worker)
        plan, actor.step = actor.step, None
        for fork in plan.forks:
            for slot in range(PAGE_TOKENS):
                row = self.pool.get((fork.source.index, slot))
                if row is not None:
                    self.pool[fork.target.index, slot] = row
        tokens = [self._write(actor.core, piece) for piece in plan.slices]
        sampled = [token for token, piece in zip(tokens, plan.slices, strict=True) if piece.samples]
        self._act(actor, actor.core.complete(plan, sampled, self.now))  # type: ignore[arg-type]
        return True

    def _write(self, core, piece) -> int:  # type: ignore[no-untyped-def]
        """Write the rows into the pages, then read the whole log back from them."""
        sequence = piece.sequence
        kind = (core.identity, sequence.spec.cache_salt)
        for position in range(piece.start, piece.start + piece.length):
            page = sequence.pages[position // PAGE_TOKENS]
            self.pool[page.index, position % PAGE_TOKENS] = (position, sequence.log[position], *kind)
        log = self._read(sequence.pages, 0, piece.start + piece.length, kind)
        return next_token(log, sequence.spec.sampling.choice)

    def _read(self, pages: Iterable[PageRef], start: int, count: int, kind: tuple[str, str]) -> list[int]:
        """The tokens of so many positions from `start` on; −1 where the row of another one is."""
        log = []
        slots = ((page.index, slot) for page in pages for slot in range(PAGE_TOKENS))
        for position, place in zip(range(start, start + count), slots, strict=False):
            where, token, *of = self.pool.get(place, (-1, -1, "", ""))
            log.append(token if (where, *of) == (position, *kind) else -1)
        return log

    # ── what must never be ────────────────────────────────────────────────────────────────────

    def _lives(self, incarnation: Incarnation) -> bool:
        actor = self.alive.get(incarnation.name)
        return actor is not None and actor.me.epoch == incarnation.epoch

    def _check_hit(self, actor: Alive, message: PrefixGranted) -> None:
        """What a worker is granted is sealed, and has the tokens of the log: all of them, and of its kind."""
        assert isinstance(actor.core, Worker)
        seeking = [
            s for s in actor.core.sequences if (s.key, s.term) == (message.key, message.term) and s.seeks
        ]
        for sequence in seeking:
            start = len(sequence.pages) * PAGE_TOKENS
            count = len(message.pages) * PAGE_TOKENS
            for page in message.pages:
                assert self.table.is_current(page), f"{page} was freed between the grant and its taking"
                assert self.table.state(page.index) is PageState.SEALED
            found = self._read(message.pages, start, count, (actor.core.identity, sequence.spec.cache_salt))
            assert tuple(found) == sequence.spec.log[start : start + count], "a page of another log"
            assert start + count < len(sequence.spec.log), "the last token is always computed"
            assert message.cached.tokens == count

    def _check_lease(self, pages: Iterable[PageRef]) -> None:
        """Nobody has, or may write, what is leased: neither who lives nor a ghost."""
        leased = {page.index for page in pages}
        for actor in (*self.alive.values(), *self.ghosts.values()):
            if not isinstance(actor.core, Worker):
                continue
            may_write = {page.index for page in self._writable(actor.core)}
            assert leased.isdisjoint(may_write), f"{actor.me} may write what is leased"
            for sequence in actor.core.sequences:
                # What is offered may have been taken, and even freed, before the offerer hears of it.
                if sequence.state is not SequenceState.OFFERED:
                    read = {page.index for page in sequence.pages}
                    assert leased.isdisjoint(read), f"{actor.me} reads what is leased"
        for (source, target), queue in self.queues.items():
            if self._lives(source) and self._lives(target) and source.name == "allocator":
                seen = self.alive[target.name].seen.get("allocator")
                if seen is None or seen.epoch > source.epoch:
                    continue
                for message in queue:
                    if isinstance(message, PrefixGranted) and self._wants(target, message):
                        granted = {page.index for page in message.pages}
                        assert leased.isdisjoint(granted), f"{target} was granted what is leased"

    def _wants(self, target: Incarnation, message: PrefixGranted) -> bool:
        core = self.alive[target.name].core
        assert isinstance(core, Worker)
        return any((s.key, s.term) == (message.key, message.term) and s.seeks for s in core.sequences)

    def tick(self) -> bool:
        """The allocator asks whether the dead are gone, as long as it waits for that."""
        actor = self.alive.get("allocator")
        if actor is None or not actor.core.waits_for_proof:  # type: ignore[union-attr]
            return False
        self._act(actor, actor.core.tick(self.now))  # type: ignore[union-attr]
        return True

    # ── at random ─────────────────────────────────────────────────────────────────────────────

    def busy(self, order: random.Random, count: int, *, restarts: float = 0.0) -> None:
        """So many deliveries and half steps, of the living and of ghosts, in any order.

        With `restarts` the dead are started again, so often, if they are known to be gone.
        """
        for _ in range(count):
            chance = order.random()
            if restarts and order.random() < restarts:
                haunted = {ghost.name for ghost in self.ghosts}
                dead = sorted(set(self.names) - set(self.alive) - haunted)
                if dead:
                    self.start(order.choice(dead))
            choices = self.deliverable(ghosts=bool(self.ghosts) and chance < 0.2)
            if choices and chance < 0.65:
                self.deliver(order.choice(choices))
                continue
            if chance > 0.97:
                self.tick()
            self.advance(order.choice(self.computing))

    # ── the end ───────────────────────────────────────────────────────────────────────────────

    def check_found(self) -> None:
        """Whatever can be found holds what its seal says."""
        if "allocator" not in self.alive:
            return
        core = self.alive["allocator"].core
        assert isinstance(core, Allocator)
        table = self.table
        for page in range(self.pages):
            if page in core.cache:
                seal = table.sealed(page)
                rows = [self.pool[page, slot] for slot in range(PAGE_TOKENS)]
                assert token_bytes([row[1] for row in rows]) == seal.tokens, f"page {page} was written since"
                first = table.block(page) * PAGE_TOKENS
                assert [row[0] for row in rows] == list(range(first, first + PAGE_TOKENS))
                assert len({row[2:] for row in rows}) == 1

    def check(self) -> None:
        """Every core's invariants. One that nothing has been said to is as it was, if the page table is."""
        shown = self._shown()
        for actor in (*self.alive.values(), *self.ghosts.values()):
            if (actor.touched or shown != self.checked) and not actor.mad:
                actor.core.check()
                actor.touched = False
        self.checked = shown

    def _shown(self) -> tuple[bytes, ...]:
        """The page table, but for how far open pages are filled."""
        table, words = self.table, self.table.words
        records = [words[word :: table.WORDS].tobytes() for word in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10)]
        return (*records, table._tokens.tobytes(), table._epochs.tobytes(), table._rows.tobytes())

    def settle(self, most: int = 100_000) -> None:
        """Deliver and compute until nothing is left to do; everybody must be alive by then."""
        for name in self.names:
            if name not in self.alive:
                self.start(name)
        self.go_on(most)
        assert not self.open, f"requests that never ended: {self.open}"
        for name, actor in self.alive.items():
            figures = actor.core.statistics()
            for what in ("requests", "sequences", "fences_waiting"):
                assert figures.get(what, 0) == 0, f"{name} still has {what} = {figures[what]}"
            if name == "gateway":
                assert figures["log_slots_free"] == SLOTS, figures
            if name == "allocator":
                assert figures["pages_free"] + figures["pages_cached"] == self.pages, figures

    def go_on(self, most: int = 100_000, *, slow: tuple[str, str] | None = None) -> None:
        """Deliver and compute until nothing happens any more; nothing comes over a `slow` link meanwhile."""
        for _ in range(most):
            progress = self.tick()
            for choice in (choices := self._fast(slow)):
                # What was delivered before may have changed who is heard.
                if isinstance(choice, Incarnation) or self._may_hear(*choice):
                    self.deliver(choice)
            progress |= self.compute()
            self.check()
            # Who plans a step may say something without one.
            if not (choices or progress or self._fast(slow)):
                return
        raise AssertionError("the world does not settle")

    def _fast(self, slow: tuple[str, str] | None) -> list[tuple[Incarnation, Incarnation] | Incarnation]:
        """What could be delivered over all links but that one."""
        if slow is None:
            return self.deliverable()
        return [
            choice
            for choice in self.deliverable()
            if isinstance(choice, Incarnation) or (choice[0].name, choice[1].name) != slow
        ]
