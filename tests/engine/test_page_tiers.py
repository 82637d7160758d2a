"""The pages of a host, a file below them and another host beside it, under everything that can happen.

The real cores run in `world.World`; the replicator, the file and the other host are naive: dictionaries of
rows by their keys. A page comes and goes slot by slot, and at each slot somebody may die, a disk be full,
a checksum be wrong. Clients pin prefixes by the real core of gateways (`engine.pins`), the other host reads
pages here, and whatever it has read whole it has. So it is known at every moment

    what a page holds      also of one that was written to the file and fetched, on another host and back
    who reads or writes it the file, the other host, clients: nothing of theirs is leased to anybody
    what is on its way     whoever waits for a page is told that it is there, or that it will not come

and every request has the tokens that it must have without any cache.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tables import OldestFirst
from world import PAGE_TOKENS, World, prompt_of

from engine.allocator import Allocator
from engine.chain import Chain, chain_root, page_keys, token_bytes
from engine.core import Send
from engine.eviction import LRU, CostAware
from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner, Seal
from engine.lifecycle import PageState, PinState
from engine.messages import (
    FetchEnded,
    FetchWanted,
    FileKeys,
    LeaseGranted,
    PagesHeld,
    Place,
    ReadEnded,
    ReadGranted,
    ReadWanted,
    SpillEnded,
    SpillWanted,
)
from engine.pinned import READ_S
from engine.pins import Cease, Fill, Pins, Prefix, Settled
from engine.shapes import PageRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from world import Alive

    from engine.messages import Member

ROLES = {
    "local": {"prefill": "prefill", "decode": "decode"},
    "unified": {"both": "both"},
    "two": {"both-1": "both", "both-2": "both"},
}
DOORS = ("front", "back")
POLICIES = {"oldest": lambda pages: OldestFirst(), "lru": lambda pages: LRU(), "cost": CostAware}
SALTS = ["", "", "tenant"]
FILE_PAGES = 40
"""What the file holds at most."""
STEP_S = 0.05
"""For half a step of a worker: to fill is slower than to fetch."""
NOBODY = Incarnation("", 0)


class Stored(NamedTuple):
    """A page that is not in memory here."""

    tokens: bytes
    parent: bytes
    rows: tuple[tuple[int, int, str, str], ...]


# ── the replicator ────────────────────────────────────────────────────────────────────────────


@dataclass
class Fetch:
    """Pages that are being brought."""

    asker: Incarnation
    wanted: FetchWanted
    landed: int = 0
    begun: bool = False
    """The next one is half written."""


@dataclass
class Spill:
    """Pages that are being written to the file."""

    asker: Incarnation
    pages: tuple[PageRef, ...]
    at: int = 0
    seal: Seal | None = None
    """Of the page that is half read."""
    rows: list[tuple[int, int, str, str]] = field(default_factory=list)


@dataclass
class Read:
    """Pages that the other host reads."""

    ticket: int
    pages: tuple[PageRef, ...]
    keys: tuple[bytes, ...]
    granter: Incarnation = NOBODY
    until: float = 0.0
    there: tuple[bool, ...] = ()
    rows: list[tuple[tuple[int, int, str, str], ...]] = field(default_factory=list)


class Copier:
    """The replicator, naively: one thing at a time, in any order, and any of it may go wrong."""

    def __init__(self, me: Incarnation, owner: Owner, world: Tiers) -> None:
        self.me = me
        self.owner = owner
        self.world = world
        self.fetches: list[Fetch] = []
        self.spills: list[Spill] = []
        self.reads: list[Read] = []
        self.told: set[bytes] = set()
        self.tickets = 0
        self.allocator = NOBODY
        self.done: dict[str, int] = dict.fromkeys(("fetched", "failed", "spilled", "given", "late"), 0)

    # ── messages ──────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        if any(dead.name == "allocator" for dead in down):
            self.reads = [read for read in self.reads if read.there]
        for member in up:
            if member.name == "allocator":
                self.allocator = member.incarnation
                self.told = set(self.world.file)
                keys = FileKeys(tuple(sorted(self.told)), (), whole=True)
                return [self.held(), Send("allocator", keys)]
        return []

    def held(self) -> Send:
        """What is being fetched, for whichever allocator."""
        targets = (page.target for fetch in self.fetches for page in fetch.wanted.pages)
        return Send("allocator", PagesHeld(tuple(targets), (), 0))

    def handle(self, source: Incarnation, message: object, now: float) -> list[Send]:
        match message:
            case FetchWanted():
                self.fetches.append(Fetch(source, message))
            case SpillWanted():
                self.spills.append(Spill(source, message.pages))
            case ReadGranted():
                for read in self.reads:
                    if read.ticket == message.ticket:
                        read.granter, read.there = source, message.there
        return []

    def news(self) -> list[Send]:
        """What has changed in the file."""
        keys = set(self.world.file)
        added, removed = keys - self.told, self.told - keys
        self.told = keys
        if not added and not removed:
            return []
        return [Send("allocator", FileKeys(tuple(sorted(added)), tuple(sorted(removed)), whole=False))]

    # ── work ──────────────────────────────────────────────────────────────────────────────────

    def work(self) -> list[Send] | None:
        """A little of something; None when there is nothing to do."""
        reads = [read for read in self.reads if read.there]
        if not self.fetches and not self.spills and not reads:
            return None
        match self.world.luck.choice([*self.fetches, *self.spills, *reads]):
            case Fetch() as fetch:
                return self._fetch(fetch)
            case Spill() as spill:
                return self._spill(spill)
            case Read() as read:
                return self._read(read)
        raise AssertionError

    def _fetch(self, fetch: Fetch) -> list[Send]:
        world, pages = self.world, fetch.wanted.pages
        page = pages[fetch.landed]
        target = page.target.index
        assert world.table.is_current(page.target), "a page was freed that is being fetched"
        assert (world.table.state(target), world.table.owner(target)) == (PageState.LEASED, self.owner)
        if not fetch.begun:
            fetch.begun = True
            world.spoil([page.target], PAGE_TOKENS // 2)
            return []
        fetch.begun = False
        store = world.file if fetch.wanted.source.kind == "file" else world.other
        stored = store.get(page.key)
        if page.source is not None and page.source != world.refs.get(page.key):
            stored = None
        if stored is not None and world.luck.random() < 0.15:
            # Its checksum is wrong: whatever came is nothing.
            world.spoil([page.target])
            del store[page.key]
            stored = None
        if stored is not None and (stored.tokens, stored.parent) == (page.tokens, page.parent):
            for slot, row in enumerate(stored.rows):
                world.pool[target, slot] = row
            world.table.open(target, 0, 0, 0, page.block)
            world.table.fill(target, PAGE_TOKENS)
            world.table.seal(target, Seal(page.key, page.parent, page.tokens, None))
            fetch.landed += 1
            self.done["fetched"] += 1
            if fetch.landed < len(pages):
                return []
        else:
            self.done["failed"] += 1
        self.fetches.remove(fetch)
        ended = FetchEnded(fetch.wanted.ticket, fetch.landed, 0.002 * fetch.landed)
        late = [] if fetch.asker == self.allocator else [self.held()]
        return [*self.news(), Send("allocator", ended), *late]

    def _spill(self, spill: Spill) -> list[Send]:
        world, table = self.world, self.world.table
        page = spill.pages[spill.at]
        if spill.seal is None and table.is_current(page) and table.state(page.index) is PageState.SEALED:
            spill.seal = table.sealed(page.index)
            spill.rows = [world.row(page, slot) for slot in range(PAGE_TOKENS // 2)]
            return []
        seal, spill.seal = spill.seal, None
        if seal is not None:
            rows = spill.rows + [world.row(page, slot) for slot in range(PAGE_TOKENS // 2, PAGE_TOKENS)]
            # Written, and of the same life afterwards; or the disk was full.
            if table.is_current(page) and world.luck.random() < 0.8:
                world.store(seal, rows)
                self.done["spilled"] += 1
        spill.at += 1
        if spill.at < len(spill.pages):
            return []
        self.spills.remove(spill)
        return [*self.news(), Send(spill.asker, SpillEnded(spill.pages))]

    def read(self, pages: Iterable[tuple[PageRef, bytes]]) -> Send:
        """The other host wants these."""
        self.tickets += 1
        refs, keys = zip(*pages, strict=True)
        self.reads.append(Read(self.tickets, refs, keys, until=self.world.now + READ_S))
        return Send("allocator", ReadWanted(self.tickets, refs, keys))

    def _read(self, read: Read) -> list[Send]:
        world, table = self.world, self.world.table
        if len(read.rows) < len(read.pages):
            page = read.pages[len(read.rows)]
            read.rows.append(tuple(world.row(page, slot) for slot in range(PAGE_TOKENS)))
            return []
        self.reads.remove(read)
        for page, key, there, rows in zip(read.pages, read.keys, read.there, read.rows, strict=True):
            valid = table.is_current(page) and table.state(page.index) is PageState.SEALED
            self.done["late"] += there and not valid
            if there and valid:
                seal = table.sealed(page.index)
                assert seal.key == key
                world.other[key] = Stored(seal.tokens, seal.parent, rows)
                world.refs.setdefault(key, PageRef(0, len(world.refs), 1))
                self.done["given"] += 1
        return [Send(read.granter, ReadEnded(read.ticket))]

    def writes(self) -> set[PageRef]:
        """What it may still write."""
        return {page.target for fetch in self.fetches for page in fetch.wanted.pages[fetch.landed :]}

    def check(self) -> None:
        assert all(fetch.landed < len(fetch.wanted.pages) for fetch in self.fetches)

    def statistics(self) -> dict[str, int]:
        return {"sequences": len(self.fetches) + len(self.spills) + sum(bool(r.there) for r in self.reads)}


# ── gateways ──────────────────────────────────────────────────────────────────────────────────


class Door:
    """A gateway that pins prefixes; its requests are the world's."""

    def __init__(self, pins: Pins) -> None:
        self.pins = pins

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[object]:
        return list(self.pins.peers(up))

    def handle(self, source: Incarnation, message: object, now: float) -> list[object]:
        return list(self.pins.handle(message))  # type: ignore[arg-type]

    def check(self) -> None:
        self.pins.check()

    def statistics(self) -> dict[str, int]:
        return {}


# ── all of them ───────────────────────────────────────────────────────────────────────────────


class Tiers(World):
    """A world with a replicator, a file, another host, and two gateways that pin."""

    def __init__(self, topology: str, pages: int, policy: str, seed: int) -> None:
        self.luck = random.Random(seed)
        self.policy = POLICIES[policy]
        self.file: dict[bytes, Stored] = {}
        self.other: dict[bytes, Stored] = {}
        self.refs: dict[bytes, PageRef] = {}
        """What is thought to be on the other host, and what it was there."""
        self.seen: dict[bytes, PageRef] = {}
        """What the other host thinks that is here."""
        self.salts: dict[SequenceKey, str] = {}
        self.fills: dict[SequenceKey, tuple[Incarnation, str]] = {}
        alone = len(ROLES[topology]) == 1
        super().__init__(
            ROLES[topology],
            pages,
            lambda worker: f"model {worker.epoch % 2}" if alone else "model",
            others=("replicator", *DOORS),
        )

    def _kind(self, name: str) -> str:
        return "gateway" if name in DOORS else super()._kind(name)

    def _core(self, me: Incarnation, ordinal: int):  # type: ignore[no-untyped-def]
        if me.name == "replicator":
            return Copier(me, Owner(ordinal, me.epoch), self)
        if me.name in DOORS:
            return Door(Pins(me, ordinal, PAGE_TOKENS))
        if me.name == "allocator":
            ordinals = {name: number for number, name in enumerate(self.names)}
            return Allocator(self.table, ordinals, self.policy(self.pages), self._is_gone, tells=True)
        return super()._core(me, ordinal)

    def core(self, name: str):  # type: ignore[no-untyped-def]
        """Of a living actor, or None."""
        actor = self.alive.get(name)
        return None if actor is None else actor.core

    # ── rows ──────────────────────────────────────────────────────────────────────────────────

    def row(self, page: PageRef, slot: int) -> tuple[int, int, str, str]:
        return self.pool.get((page.index, slot), (-1, -1, "", ""))

    def spoil(self, pages: Iterable[PageRef], slots: int = PAGE_TOKENS) -> None:
        """What was there can be read no more."""
        for page in pages:
            for slot in range(slots):
                self.pool[page.index, slot] = (-2, -2, "", "")

    def store(self, seal: Seal, rows: Iterable[tuple[int, int, str, str]]) -> None:
        """Into the file; the oldest goes."""
        self.file.pop(seal.key, None)
        self.file[seal.key] = Stored(seal.tokens, seal.parent, tuple(rows))
        if len(self.file) > FILE_PAGES:
            del self.file[next(iter(self.file))]

    def fill_elsewhere(self, prompt: tuple[int, ...], salt: str) -> None:
        """The other host computes a prompt."""
        for identity in {self.identity(Incarnation(name, self.epochs[name])) for name in self.roles}:
            chain = Chain(chain_root(identity, salt), PAGE_TOKENS)
            for start in range(0, len(prompt) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
                parent, tokens = chain.parent, token_bytes(prompt[start : start + PAGE_TOKENS])
                key = chain.append(tokens)
                rows = tuple((p, prompt[p], identity, salt) for p in range(start, start + PAGE_TOKENS))
                self.other[key] = Stored(tokens, parent, rows)
                self.refs.setdefault(key, PageRef(0, len(self.refs), 1))

    def forget_elsewhere(self, order: random.Random) -> None:
        """The other host evicts some of what it has: nobody here knows."""
        for key in order.sample(sorted(self.other), len(self.other) // 3):
            del self.other[key]

    # ── who does what ─────────────────────────────────────────────────────────────────────────

    @staticmethod
    def _writable(core):  # type: ignore[no-untyped-def]
        return core.writes() if isinstance(core, Copier) else World._writable(core)

    def submit(self, prompt: tuple[int, ...], limit: int, **wish) -> tuple[SequenceKey, ...]:  # type: ignore[no-untyped-def]
        keys = super().submit(prompt, limit, **wish)
        self.salts.update(dict.fromkeys(keys, wish.get("salt", "")))
        return keys

    def _act(self, actor: Alive, effects: list[object]) -> None:
        kept: list[object] = []
        lives = self._lives(actor.me)
        for effect in effects:
            match effect:
                case Send(to=to, message=Place() as place):
                    kept.append(Send(to, self._elsewhere(place)))
                    continue
                case Send(message=FetchWanted(pages=pages)) if lives:
                    self._leased([page.target for page in pages])
                case Send(message=LeaseGranted(pages=pages)) if lives:
                    self._check_lease(pages)
                    self._leased(pages)
                case Fill():
                    self._fill(actor, effect)
                    continue
                case Cease(name=name):
                    for key in [k for k, of in self.fills.items() if of == (actor.me, name)]:
                        del self.fills[key]
                        self.cancel(key)
                    continue
                case Settled():
                    continue
            kept.append(effect)
        super()._act(actor, kept)

    def _elsewhere(self, place: Place) -> Place:
        """As a scheduler of several hosts would say it; what it knows may be old."""
        log = self.logs[place.key]
        root = chain_root(self.identity(place.prefill), self.salts.get(place.key, ""))
        whole = (len(log) - 1) // PAGE_TOKENS * PAGE_TOKENS
        keys = page_keys(root, token_bytes(log[:whole]), PAGE_TOKENS)
        known = next((n for n, key in enumerate(keys) if key not in self.refs), len(keys))
        if not known:
            return place
        pages = tuple(self.refs[key] for key in keys[:known])
        return msgspec.structs.replace(place, elsewhere="there", elsewhere_pages=pages)

    def _leased(self, pages: Iterable[PageRef]) -> None:
        """Nobody reads these, nor writes them: what is leased holds nothing."""
        pages = set(pages)
        assert pages.isdisjoint(self._used_by_copiers()), "a page is leased that is being read or fetched"
        self.spoil(pages)

    def _used_by_copiers(self) -> set[PageRef]:
        """What the file and the other host may read or write, as long as the allocator must know it."""
        used: set[PageRef] = set()
        allocator = self.alive["allocator"].me
        for actor in (*self.alive.values(), *self.ghosts.values()):
            if not isinstance(actor.core, Copier):
                continue
            used |= actor.core.writes()
            if not self._lives(actor.me):
                continue
            used |= {p for spill in actor.core.spills if spill.asker == allocator for p in spill.pages}
            for read in actor.core.reads:
                if read.granter == allocator and self.now < read.until:
                    used |= {p for p, found in zip(read.pages, read.there, strict=True) if found}
            for message in self.queues.get((allocator, actor.me), ()):
                if isinstance(message, FetchWanted):
                    used |= {page.target for page in message.pages}
                elif isinstance(message, SpillWanted):
                    used |= set(message.pages)
        return used

    def _fill(self, actor: Alive, fill: Fill) -> None:
        keys = self.submit(fill.prompt, len(fill.prompt) + 1, salt=fill.prefix.salt)
        me = actor.me
        if keys:
            self.fills[keys[0]] = me, fill.name
        else:
            self._act(actor, list(actor.core.pins.filled(fill.name, self.now, "no room")))

    def see_doors(self) -> bool:
        """Gateways hear of the requests that filled for them, and of the time."""
        over = [key for key in self.fills if key not in self.open]
        for key in over:
            door, name = self.fills.pop(key)
            if self._lives(door):
                failed = "" if len(self.logs[key]) % PAGE_TOKENS == 2 else "it was lost"
                actor = self.alive[door.name]
                self._act(actor, list(actor.core.pins.filled(name, self.now, failed)))
        for name in DOORS:
            if name in self.alive:
                actor = self.alive[name]
                self._act(actor, list(actor.core.pins.tick(self.now)))
        return bool(over)

    def tick(self) -> bool:
        progress = self.see_doors()
        actor = self.alive.get("allocator")
        if actor is None:
            return progress
        due = actor.core.deadline()
        if actor.core.waits_for_proof or (due is not None and due <= self.now):
            self._act(actor, actor.core.tick(self.now))
            return True
        return progress

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    @property
    def computing(self) -> list[str | Incarnation]:
        return [*super().computing, "replicator"]

    def compute(self) -> bool:
        return self.advance("replicator") | super().compute()

    def advance(self, which: str | Incarnation) -> bool:
        actor = self._worker(which)
        if actor is None or not isinstance(actor.core, Copier):
            return actor is not None and super().advance(which)
        sends = actor.core.work()
        if sends is not None:
            self._act(actor, list(sends))
        return sends is not None

    def end_step(self, which: str | Incarnation) -> bool:
        ended = super().end_step(which)
        self.now += STEP_S * ended
        return ended

    def deliver(self, choice: tuple[Incarnation, Incarnation] | Incarnation) -> None:
        if isinstance(choice, Incarnation) and self.luck.random() < 0.5:
            # A death and a birth may be told at once.
            rosters = self.rosters[choice]
            for _ in range(self.luck.randint(0, len(rosters) - 1)):
                rosters.popleft()
        super().deliver(choice)

    def read_here(self, order: random.Random) -> None:
        """The other host wants pages that it knows of: some are there, and some were."""
        core, copier = self.core("allocator"), self.alive.get("replicator")
        if core is not None:
            self.seen.update(
                {core.cache.index.key_of(page): self.table.ref(page) for page in core.cache.index}
            )
        if copier is None or not self.seen:
            return
        keys = order.sample(sorted(self.seen), min(len(self.seen), order.randint(1, 4)))
        self._act(copier, [copier.core.read((self.seen[key], key) for key in keys)])

    def pin(self, door: str, prompt: tuple[int, ...], salt: str, ttl_s: int) -> None:
        actor = self.alive.get(door)
        if actor is not None and len(prompt) >= PAGE_TOKENS:
            _, effects = actor.core.pins.open(Prefix(prompt, ttl_s, salt), self.now)
            self._act(actor, list(effects))

    def unpin(self, door: str, order: random.Random) -> None:
        actor = self.alive.get(door)
        if actor is not None and actor.core.pins.pins:
            self._act(actor, list(actor.core.pins.release(order.choice(actor.core.pins.pins).name)))

    # ── what must never be ────────────────────────────────────────────────────────────────────

    def check_all(self) -> None:
        """All that is true at every moment."""
        self.check()
        self.check_found()
        for stored in (*self.file.values(), *self.other.values()):
            assert token_bytes([row[1] for row in stored.rows]) == stored.tokens
            assert len({row[2:] for row in stored.rows}) == 1
        if "allocator" in self.alive:
            used = self._used_by_copiers()
            assert all(map(self.table.is_current, used)), "a page was freed that is read or fetched"
            for name in DOORS:
                if name in self.alive:
                    self._check_pins(self.alive[name])

    def _check_pins(self, door: Alive) -> None:
        """What a client was told is kept is there, as long as no word of it is under way."""
        allocator = self.alive["allocator"]
        pair = allocator.me, door.me
        quiet = not self.queues.get(pair) and not self.queues.get(pair[::-1])
        knows = door.seen.get("allocator") == allocator.member
        if not (quiet and knows and allocator.seen.get(door.member.name) == door.member):
            return
        for pin in door.core.pins.pins:
            if pin.state is PinState.SETTLED and pin.pages and self.now < pin.until:
                tokens = token_bytes(pin.prefix.tokens[: pin.pages * PAGE_TOKENS])
                found = 0
                for identity in ("model", "model 0", "model 1"):
                    keys = page_keys(chain_root(identity, pin.prefix.salt), tokens, PAGE_TOKENS)
                    found = max(found, sum(allocator.core.cache.index.find(key) is not None for key in keys))
                assert found == pin.pages, "a page was freed that a client has pinned"

    def settle(self, most: int = 100_000) -> None:
        """Nobody waits for the end of a pin: only for readers that say nothing, and those run out."""
        for name in self.names:
            if name not in self.alive:
                self.start(name)
        self.go_on(most)
        self.pass_time(READ_S)
        self.go_on(most)
        assert not self.open, f"requests that never ended: {self.open}"
        for name in DOORS:
            for pin in self.core(name).pins.pins:
                self._act(self.alive[name], list(self.core(name).pins.release(pin.name)))
        super().settle(most)
        figures = self.core("allocator").statistics()
        for what in ("pages_fetching", "pages_spilling", "pages_pinned", "pages_read", "pages_kept"):
            assert figures[what] == 0, f"{what} = {figures[what]} are left"
        known = self.core("scheduler").statistics()["pages_known"]
        assert known == figures["pages_indexed"], "the scheduler knows other pages than there are"


# ── anything, in any order ────────────────────────────────────────────────────────────────────

FAMILIES = st.integers(0, 5)
LENGTHS = st.integers(1, 30)
SEEDS = st.integers(0, 2**32)
LONGEST = 10
"""Pages of the longest request: one that does not fit the pool is not let in."""
SPARED = ("gateway", "scheduler", *DOORS)


def some_prompt(order: random.Random) -> tuple[int, ...]:
    return prompt_of(order.randint(0, 5), order.randint(4, 30))


def fetch(world: Tiers, order: random.Random) -> None:
    """A prompt that the other host has comes here: most of it is fetched."""
    prompt, salt = prompt_of(order.randint(6, 99), order.randint(8, 30)), order.choice(SALTS)
    world.fill_elsewhere(prompt, salt)
    world.submit(prompt[: order.randint(5, 30)], 34, n=order.choice([1, 1, 2]), salt=salt, keepsake=b"kept")


def until_pages_move(world: Tiers, order: random.Random) -> None:
    """Until some are on their way from elsewhere, or to the file; and a little longer."""
    fetch(world, order)
    for _ in range(150):
        copier = world.core("replicator")
        if copier is not None and (copier.fetches or (copier.spills and order.random() < 0.1)):
            break
        world.busy(order, 1)
    world.busy(order, order.randint(0, 12))


def kill(world: Tiers, order: random.Random, victims: set[str], *, ghost: bool) -> None:
    """They die; and some of them live again before anybody has heard of it."""
    for name in sorted(victims & set(world.alive)):
        world.kill(name, ghost=ghost)
        if order.random() < 0.4:
            world.start(name)


def live(world: Tiers, order: random.Random, count: int) -> None:
    """So many times whatever may happen: mostly work, and now and then a death, alone or with others."""
    for _ in range(count):
        chance = order.random()
        if chance < 0.12:
            prompt = some_prompt(order)
            world.submit(
                prompt,
                len(prompt) + order.randint(1, 6),
                n=order.choice([1, 1, 2, 3]),
                salt=order.choice(SALTS),
                keepsake=order.choice([b"", b"kept"]),
            )
        elif chance < 0.13 and world.open:
            world.cancel(order.choice(sorted(world.open)))
        elif chance < 0.16:
            fetch(world, order)
        elif chance < 0.17:
            world.forget_elsewhere(order)
        elif chance < 0.20:
            world.read_here(order)
        elif chance < 0.22:
            world.pin(order.choice(DOORS), some_prompt(order), order.choice(SALTS), order.randint(1, 60))
        elif chance < 0.23:
            world.unpin(order.choice(DOORS), order)
        elif chance < 0.24:
            world.pass_time(order.choice([0.1, 1.0, READ_S]))
        elif chance < 0.265:
            victims = {order.choice([*sorted(world.roles), *SPARED, "allocator", "replicator", "replicator"])}
            if order.random() < 0.3:
                victims |= set(order.sample(["allocator", "replicator", *sorted(world.roles)], 2))
            if order.random() < 0.5:
                until_pages_move(world, order)
            kill(world, order, victims, ghost=order.random() < 0.7)
        elif chance < 0.285 and world.ghosts:
            ghost = order.choice(sorted(world.ghosts))
            if order.random() < 0.3:
                world.go_mad(ghost)
            else:
                world.prove_gone(ghost)
        else:
            world.busy(order, 12, restarts=0.05)


@pytest.mark.parametrize("topology", ROLES)
def test_whatever_happens_no_page_is_lost_and_none_is_wrong(topology: str) -> None:
    """Thousands of steps; every so often all is started again, and then nothing may be left."""
    for seed in range(6):
        order = random.Random(f"{topology} {seed}")
        world = Tiers(topology, order.randint(LONGEST, 26), order.choice(sorted(POLICIES)), seed)
        for _ in range(2):
            for _ in range(40):
                live(world, order, 5)
                world.check_all()
            world.settle()
            world.check_all()


class Machine(RuleBasedStateMachine):
    """Requests that share and fork, pages that go down and come back, pins, readers; and all may die."""

    @initialize(
        topology=st.sampled_from(sorted(ROLES)),
        pages=st.integers(LONGEST, 26),
        policy=st.sampled_from(sorted(POLICIES)),
        seed=SEEDS,
    )
    def begin(self, topology: str, pages: int, policy: str, seed: int) -> None:
        self.world = Tiers(topology, pages, policy, seed)
        live(self.world, random.Random(seed), 100)

    @rule(
        family=FAMILIES,
        length=LENGTHS,
        more=st.integers(1, 8),
        n=st.sampled_from([1, 1, 2, 3]),
        salt=st.sampled_from(SALTS),
        keepsake=st.sampled_from([b"", b"kept"]),
        seed=SEEDS,
    )
    def submit(
        self, family: int, length: int, more: int, n: int, salt: str, keepsake: bytes, seed: int
    ) -> None:
        self.world.submit(prompt_of(family, length), length + more, n=n, salt=salt, keepsake=keepsake)
        self.world.submit(prompt_of(0, length + 2), length + 2 + more, salt=salt, keepsake=keepsake)
        self.world.busy(random.Random(seed), 60, restarts=0.05)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), seed=SEEDS)
    def cancel(self, data: st.DataObject, seed: int) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.open))))
        self.world.busy(random.Random(seed), 20, restarts=0.05)

    @rule(family=FAMILIES, length=LENGTHS, salt=st.sampled_from(SALTS), forgets=st.booleans(), seed=SEEDS)
    def elsewhere(self, family: int, length: int, salt: str, forgets: bool, seed: int) -> None:
        """The other host fills a prompt, and evicts some of what it has: nobody here knows."""
        self.world.fill_elsewhere(prompt_of(family, length), salt)
        if forgets:
            self.world.forget_elsewhere(random.Random(seed))

    @rule(seed=SEEDS)
    def read(self, seed: int) -> None:
        order = random.Random(seed)
        self.world.read_here(order)
        self.world.busy(order, 20, restarts=0.05)

    @rule(
        door=st.sampled_from(DOORS),
        family=FAMILIES,
        length=LENGTHS,
        salt=st.sampled_from(SALTS),
        ttl_s=st.integers(1, 60),
    )
    def pin(self, door: str, family: int, length: int, salt: str, ttl_s: int) -> None:
        self.world.pin(door, prompt_of(family, length), salt, ttl_s)

    @rule(door=st.sampled_from(DOORS), seed=SEEDS)
    def unpin(self, door: str, seed: int) -> None:
        self.world.unpin(door, random.Random(seed))

    @rule(seconds=st.sampled_from([0.1, 1.0, READ_S]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @rule(seed=SEEDS, count=st.integers(10, 150))
    def go_on(self, seed: int, count: int) -> None:
        self.world.busy(random.Random(seed), count, restarts=0.05)

    @rule(seed=SEEDS, count=st.integers(5, 25))
    def live(self, seed: int, count: int) -> None:
        live(self.world, random.Random(seed), count)

    @rule(
        data=st.data(),
        who=st.sampled_from(
            [
                "worker",
                "replicator",
                "replicator",
                "allocator",
                "worker, replicator",
                "allocator, replicator",
                "worker, allocator",
                "door",
                "gateway",
                "scheduler",
                "all",
            ]
        ),
        ghost=st.sampled_from([True, True, False]),
        moves=st.booleans(),
        seed=SEEDS,
        count=st.integers(0, 100),
    )
    def die(self, data: st.DataObject, who: str, ghost: bool, moves: bool, seed: int, count: int) -> None:
        """Alone or together, while pages come and go; and what the others do then."""
        world, order = self.world, random.Random(seed)
        if moves:
            until_pages_move(world, order)
        named = ("allocator", "replicator", "gateway", "scheduler")
        victims = {name for name in named if name in who or who == "all"}
        workers = sorted(set(world.roles) & set(world.alive))
        if who.startswith("worker"):
            victims |= {data.draw(st.sampled_from(workers))} if workers else set()
        elif who == "all":
            victims |= set(workers)
        elif who == "door":
            victims = {data.draw(st.sampled_from(DOORS))}
        kill(world, order, victims, ghost=ghost)
        world.busy(order, count, restarts=0.1)

    @precondition(lambda self: self.world.ghosts)
    @rule(data=st.data(), how=st.sampled_from(["mad", "gone"]), seed=SEEDS)
    def ghost(self, data: st.DataObject, how: str, seed: int) -> None:
        ghost: Incarnation = data.draw(st.sampled_from(sorted(self.world.ghosts)))
        if how == "mad":
            self.world.go_mad(ghost)
        else:
            self.world.prove_gone(ghost)
        self.world.busy(random.Random(seed), 60, restarts=0.1)

    @invariant()
    def all_is_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check_all()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.all_is_sound()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    # A failure prints its whole story anyway; shrinking one takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
