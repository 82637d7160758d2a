"""The scheduler: who runs next and where. Soft state only.

It holds nothing that it could not be told again: gateways restate every open request to a new
scheduler, workers their slots, the allocator how full the pool is. A slot is taken from the moment
a request is placed until its gateway says that the request moved on or ended, or died itself; the
slots of a worker are an absolute number, so that no crash can leak one.

    placed on w (prefilling) ≤ prefill_slots(w)        placed for w (either stage) ≤ decode_slots(w)
    placed of a client that holds slots  ⇒  as many of either kind as are reserved are still free
    placed beside a sibling on w         ⇒  no prefill slot is taken: w has the pages of the prompt

Clients take turns (`engine.fairness`), each with its first request. Who may not go now is passed:
a client that holds slots when only reserved ones are left, and one whose request does not fit the
free pages. The latter is passed a bounded number of times, then it holds back those behind it; and
within a client nothing is passed. So short requests cannot starve a long one either way. Choices
that wait for a sibling's prompt are not in the queue at all (`engine.siblings`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, assert_never

import msgspec

from engine.chain import chain_root, page_keys
from engine.core import Send, Statistics
from engine.fairness import Claim, Fairness, FairQueue, Ticket, give_way
from engine.messages import (
    Drain,
    NobodyGivesWay,
    PagesCached,
    Place,
    PoolExhausted,
    PoolFact,
    Preempt,
    RequestEnded,
    RequestFact,
    Roster,
    Stop,
    WorkerFact,
)
from engine.placement import ClusterCache, HostLoad, offers
from engine.siblings import Siblings
from engine.slots import Slots

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.fairness import Client
    from engine.ids import Incarnation, SequenceKey
    from engine.messages import Member, ToScheduler
    from engine.placement import Offer
    from engine.shapes import PageRef
    from engine.slots import Free


class Bill(NamedTuple):
    """What a client pays for a choice when it is placed, in tokens."""

    length: int
    """Of the log then."""
    prompt: int
    """What has to be computed of it: next to nothing beside a sibling."""
    output: int
    """What will likely be generated."""


@dataclass(slots=True, eq=False)
class Entry:
    """An open choice."""

    fact: RequestFact
    source: Incarnation
    """The gateway that says so; it may have taken the request over from its former life."""
    queued: bool = False
    """It may be placed."""
    bill: Bill | None = None
    """What its client has paid; what is placed again because it gave way does not pay again."""
    beside: bool = False
    """It was placed beside a sibling."""
    pages: int = 0
    """What it was expected to take when it was placed."""
    host: str = ""
    """Where it was placed, if it is."""
    keys: dict[str, list[bytes]] = field(default_factory=dict)
    """Of its full pages, by what keys and values depend on beside the tokens."""

    @property
    def active(self) -> bool:
        """Whether it holds slots."""
        return self.fact.stage != "waiting"

    @property
    def ticket(self) -> Ticket:
        """Its place among those of its client."""
        return Ticket(self.fact.priority, self.fact.arrival, self.fact.key)

    @property
    def slots(self) -> tuple[Incarnation | None, Incarnation | None]:
        """The workers of which it holds a prefill slot and a decode slot."""
        needs_prefill = self.fact.stage == "prefilling" and not self.beside
        return self.fact.prefill if needs_prefill else None, self.fact.decode


@dataclass(slots=True)
class Pool:
    """The pages of one host, as far as a placement is concerned."""

    fact: PoolFact | None = None
    active: int = 0
    """Sequences that were placed there."""
    promised: int = 0
    """Pages of those in prefill: the pool may still count them as free."""
    exhausted: bool = False
    """Somebody starves, and nobody was known that could give way."""

    @property
    def free(self) -> int:
        """Free pages, less those promised to prompts and one for the growth of everybody."""
        return 0 if self.fact is None else self.fact.free - self.promised - self.active

    def has(self, pages: int) -> bool:
        """Whether so many pages are free now, beside what is promised already.

        Growth while decoding is not reserved: when the pool runs out, somebody gives way. A request
        that is alone always goes.
        """
        return self.fact is not None and (not self.active or pages <= self.free)


class Turn(NamedTuple):
    """What is placed next."""

    client: Client
    entry: Entry
    where: tuple[Incarnation, Incarnation]
    """The workers that prefill and decode."""
    beside: bool
    starved: list[Client]
    """Those before it whose pages are not there."""
    elsewhere: str = ""
    """Another host that has more of its pages,"""
    elsewhere_pages: tuple[PageRef, ...] = ()
    """and these."""


class Scheduler:
    """Admission and placement over the pools of all hosts."""

    def __init__(
        self, page_tokens: int, fairness: Fairness | None = None, hosts: Mapping[str, str] | None = None
    ) -> None:
        """`hosts`: the host of each worker and allocator, by name; of those it does not name there is one."""
        self.page_tokens = page_tokens
        self._hosts = dict(hosts or {})
        self.fairness = fairness or Fairness()
        self._entries: dict[SequenceKey, Entry] = {}
        self._gateways: set[Incarnation] = set()
        self._slots = Slots()
        self._queue = FairQueue(self.fairness)
        self._siblings = Siblings()
        self._pools: defaultdict[str, Pool] = defaultdict(Pool)
        self._cluster = ClusterCache()
        self._identities: dict[str, str] = {}
        """What keys and values of each host depend on beside the tokens, as its workers say."""
        self._stages: Counter[str] = Counter()
        self.placements = 0
        self.placements_beside = 0
        self.preemptions = 0
        self.bypasses = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        for dead in down:
            self._slots.died(dead)
            if dead.name.startswith("allocator"):
                self._cluster.lose(self._host(dead))
            if dead in self._gateways:
                self._gateways.discard(dead)
                for entry in [entry for entry in self._entries.values() if entry.source == dead]:
                    self._forget(entry)
        self._gateways |= {member.incarnation for member in up if member.kind == "gateway"}
        # Requests placed on the dead stay where they are until their gateway takes them back.
        return self._place()

    def handle(self, source: Incarnation, message: ToScheduler, now: float) -> list[Send]:
        """Take one message; the answers are placements."""
        match message:
            case RequestFact():
                known = self._entries.get(message.key)
                if source not in self._gateways or (known is not None and known.fact.term > message.term):
                    return []
                self._told(known, Entry(message, source))
                exhausted = [pool for pool in self._pools.items() if pool[1].exhausted]
                if exhausted:
                    sends = [send for host, _ in exhausted for send in self._preempt(host)]
                    return [*sends, *self._place()]
            case RequestEnded():
                known = self._entries.get(message.key)
                if known is not None and known.source == source:
                    if message.length is not None:
                        self._settle(known, message.length)
                    self._forget(known)
            case WorkerFact():
                if self._slots.offered(
                    source, message.prefill_slots, message.decode_slots, self._host(source)
                ):
                    for key, entry in self._entries.items():
                        if entry.active:
                            self._slots.occupy(key, *entry.slots)
                self._identities[self._host(source)] = message.identity
            case PagesCached():
                self._cluster.told(self._host(source), message)
                return []
            case PoolFact():
                pool = self._pools[self._host(source)]
                pool.fact = message
                pool.exhausted = pool.exhausted and message.free == 0
            case PoolExhausted():
                host = self._host(source)
                self._pools[host].exhausted = True
                return self._preempt(host) or [Send(source, NobodyGivesWay())]
            case Roster() | Drain() | Stop():
                return []
            case _:
                assert_never(message)
        return self._place()

    def _host(self, actor: Incarnation | None) -> str:
        return "" if actor is None else self._hosts.get(actor.name, "")

    # ── what is known ─────────────────────────────────────────────────────────────────────────

    def _told(self, known: Entry | None, entry: Entry) -> None:
        """Take what a gateway says of a choice, in place of what was known."""
        fact = entry.fact
        if known is not None:
            entry.bill = known.bill
            entry.beside = known.beside and entry.active
        self._slots.vacate(fact.key)
        self._enter(entry)
        self._admit(fact.key.request)
        if known is not None:
            # After the new one came in, or its client would have left for a moment.
            self._leave(known)

    def _forget(self, entry: Entry) -> None:
        key = entry.fact.key
        del self._entries[key]
        self._siblings.drop(key)
        self._admit(key.request)
        self._slots.vacate(key)
        self._leave(entry)

    def _enter(self, entry: Entry) -> None:
        fact = entry.fact
        self._entries[fact.key] = entry
        self._siblings.put(fact)
        self._stages[fact.stage] += 1
        if entry.active:
            entry.pages = self._pages(fact, entry.beside)
            entry.host = self._host(fact.decode or fact.prefill)
            pool = self._pools[entry.host]
            pool.active += 1
            pool.promised += entry.pages * (fact.stage == "prefilling")
            self._queue.hold(fact.client)
            self._slots.occupy(fact.key, *entry.slots)

    def _leave(self, entry: Entry) -> None:
        fact = entry.fact
        self._stages[fact.stage] -= 1
        if entry.queued:
            entry.queued = False
            self._queue.withdraw(fact.client, entry.ticket)
        if entry.active:
            pool = self._pools[entry.host]
            pool.active -= 1
            pool.promised -= entry.pages * (fact.stage == "prefilling")
            self._queue.release(fact.client)

    def _admit(self, request: int) -> None:
        """Queue the choices of a request that may be placed, then hold the others back."""
        for key, may in sorted(self._siblings.waiting(request).items(), key=lambda choice: not choice[1]):
            entry = self._entries[key]
            if entry.queued != may:
                entry.queued = may
                change = self._queue.wait if may else self._queue.withdraw
                change(entry.fact.client, entry.ticket)

    # ── placement ─────────────────────────────────────────────────────────────────────────────

    def _place(self) -> list[Send]:
        sends: list[Send] = []
        while (turn := self._next()) is not None:
            sends.append(self._placed(turn))
        return sends

    def _next(self) -> Turn | None:
        """Whose turn it is of those that can be placed, and where; those that cannot are passed."""
        free, turn = self._slots.free(), 0
        starved: list[Client] = []
        while self._open(free) and (client := self._queue.at(turn)) is not None:
            entry = self._entries[client.waiting[0].key]
            sibling = self._sibling_place(entry.fact)
            beside = sibling is not None
            turn += 1
            if not self._may_hold(client, free, beside):
                continue
            pages = self._pages(entry.fact, beside)
            hosts = [self._host(sibling)] if beside else [*self._pools]
            hosts = [host for host in hosts if self._pools[host].has(pages)]
            if not hosts:
                if client.bypassed >= self.fairness.bypasses or len(starved) == self.fairness.look_past:
                    break
                starved.append(client)
                continue
            if sibling is not None:
                return Turn(client, entry, (sibling, sibling), beside, starved)
            if entry.fact.tokens and len(self._pools) > 1:
                found = self._best_host(entry, hosts)
                if found is not None:
                    where, offer = found
                    pages_there = self._pages_of(entry, offer)
                    return Turn(client, entry, where, beside, starved, offer.elsewhere, pages_there)
            elif (at := self._slots.where(entry.fact.excluding, hosts)) is not None:
                return Turn(client, entry, at, beside, starved)
        return None

    def _best_host(
        self, entry: Entry, hosts: Sequence[str]
    ) -> tuple[tuple[Incarnation, Incarnation], Offer] | None:
        """The host where its first token is there soonest, of those with free slots."""
        loads = [self._load(host) for host in hosts if self._slots.prefill_workers(host)]
        wanted = -(-entry.fact.length // self.page_tokens)
        # Of workers with other numerics the pages are others, and none is moved from or to them.
        groups = {load.host: self._identities.get(load.host, "") for load in loads}
        made: list[Offer] = []
        for identity in sorted(set(groups.values())):
            same = [load for load in loads if groups[load.host] == identity]
            # Also of hosts where nobody could fill it now: their pages outlive their workers.
            others = {host for host, known in self._identities.items() if known == identity} - set(groups)
            made += offers(same, self._cluster, self._keys(entry, identity), wanted, sorted(others))
        for offer in sorted(made, key=lambda offer: (offer.seconds, offer.host)):
            where = self._slots.where(entry.fact.excluding, hosts, offer.host)
            if where is not None:
                return where, offer
        return None

    def _load(self, host: str) -> HostLoad:
        pool = self._pools[host]
        workers = max(1, self._slots.prefill_workers(host))
        load = HostLoad(host, (pool.promised + pool.active / self.page_tokens) / workers)
        if pool.fact is not None:
            load.page_fill_s = pool.fact.page_fill_s or load.page_fill_s
            load.page_fetch_s = pool.fact.page_fetch_s or load.page_fetch_s
        return load

    def _keys(self, entry: Entry, identity: str) -> list[bytes]:
        """Of the pages that could be found: the last token is always computed."""
        if identity not in entry.keys:
            fact = entry.fact
            whole = (fact.length - 1) // self.page_tokens * self.page_tokens
            root = chain_root(identity, fact.salt)
            entry.keys[identity] = page_keys(root, fact.tokens[: 4 * whole], self.page_tokens)
        return entry.keys[identity]

    def _pages_of(self, entry: Entry, offer: Offer) -> tuple[PageRef, ...]:
        if not offer.elsewhere:
            return ()
        keys = self._keys(entry, self._identities.get(offer.host, ""))
        return self._cluster.pages(offer.elsewhere, keys[: offer.elsewhere_pages])

    def _placed(self, turn: Turn) -> Send:
        entry, (prefill, decode) = turn.entry, turn.where
        waited = entry.fact
        for client in turn.starved:
            client.bypassed += 1
        self._stages["waiting"] -= 1
        entry.queued, entry.beside = False, turn.beside
        entry.fact = msgspec.structs.replace(
            waited,
            term=waited.term + 1,
            stage="prefilling",
            prefill=prefill,
            decode=decode,
            excluding=(),
            tokens=b"",
        )
        self._enter(entry)
        if entry.bill is None:
            entry.bill = self._bill(waited, turn)
            self._queue.place(turn.client, entry.bill.prompt + entry.bill.output)
        else:
            # It has paid; one token moves the turn on.
            self._queue.place(turn.client, 1)
        self.placements += 1
        self.placements_beside += turn.beside
        self.bypasses += len(turn.starved)
        place = Place(waited.key, waited.term, prefill, decode, turn.elsewhere, turn.elsewhere_pages)
        return Send(entry.source, place)

    def _bill(self, fact: RequestFact, turn: Turn) -> Bill:
        likely = max(1, round(turn.client.expected))
        return Bill(fact.length, 1 if turn.beside else fact.length, min(fact.limit - fact.length, likely))

    def _settle(self, entry: Entry, length: int) -> None:
        """A choice that ended with so many tokens in its log costs what it generated."""
        if entry.bill is not None:
            self._queue.settle(entry.fact.client, entry.bill.output, length - entry.bill.length)

    # ── whether there is room ─────────────────────────────────────────────────────────────────

    def _open(self, free: Free) -> bool:
        """Whether anybody at all could be placed: what makes most messages cheap under load."""
        slots = free.decode > 0 and (free.prefill > 0 or bool(self._siblings.sharing))
        return slots and any(pool.has(1) for pool in self._pools.values())

    def _may_hold(self, client: Client, free: Free, beside: bool) -> bool:
        """Whether there are slots that this client may take."""
        prefill, decode = free.prefill, free.decode
        if client.active:
            prefill -= self.fairness.reserved(free.prefill_slots)
            decode -= self.fairness.reserved(free.decode_slots)
        return decode > 0 and (beside or prefill > 0)

    def _sibling_place(self, fact: RequestFact) -> Incarnation | None:
        """A worker with a free slot where a sibling decodes, or None."""
        request = fact.key.request
        if request not in self._siblings.sharing:
            return None
        return self._slots.where_of(self._siblings.places(request), fact.excluding)

    def _pages(self, fact: RequestFact, beside: bool) -> int:
        shared = (self._siblings.shortest(fact.key.request) - 1) // self.page_tokens if beside else 0
        return max(1, -(-fact.length // self.page_tokens) - shared)

    def _preempt(self, host: str) -> list[Send]:
        """Some on a host give way (`engine.fairness` says who) until one surely had pages of its own.

        One that is still in prefill may have had none yet, and of two siblings one reads the other's:
        then nothing would be freed, and everybody stand still.
        """
        active = [entry for entry in self._entries.values() if entry.active and entry.host == host]
        choices = Counter(entry.fact.key.request for entry in active)
        claims = [Claim(entry.ticket, entry.fact.client, entry.pages) for entry in active]
        sends: list[Send] = []
        for claim in give_way(claims, self.fairness):
            key = claim.ticket.key
            entry = self._entries[key]
            self._pools[host].exhausted = False
            self.preemptions += 1
            sends.append(Send(entry.source, Preempt(key, entry.fact.term)))
            choices[key.request] -= 1
            if entry.fact.stage == "decoding" and not choices[key.request]:
                break
        return sends

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def check(self) -> None:
        entries = self._entries.values()
        self._slots.check({key: entry.slots for key, entry in self._entries.items() if entry.active})
        self._queue.check()
        queued = {(entry.fact.client, entry.ticket) for entry in entries if entry.queued}
        assert queued == self._queue.tickets()
        assert not any(entry.active for entry in entries if entry.queued)
        assert all(entry.source in self._gateways for entry in entries), "an entry outlived its gateway"
        stages = Counter(entry.fact.stage for entry in entries)
        assert stages == +self._stages, f"counted {self._stages}, there are {stages}"
        for host, pool in self._pools.items():
            placed = [entry for entry in entries if entry.active and entry.host == host]
            assert pool.active == len(placed)
            assert pool.promised == sum(e.pages for e in placed if e.fact.stage == "prefilling")

    def statistics(self) -> Statistics:
        return {
            "requests": len(self._entries),
            "requests_waiting": self._stages["waiting"],
            "requests_prefilling": self._stages["prefilling"],
            "requests_decoding": self._stages["decoding"],
            "workers": len(self._slots),
            "clients": self._queue.clients,
            "clients_waiting": self._queue.clients_waiting,
            "placements": self.placements,
            "placements_beside": self.placements_beside,
            "preemptions": self.preemptions,
            "bypasses": self.bypasses,
            **self._cluster.statistics(),
        }
