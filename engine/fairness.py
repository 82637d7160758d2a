"""Fairness: whose turn it is between clients, what is kept for newcomers, who gives way.

Clients share the system by weight. Each has a queue of its own, ordered by (priority, arrival, key),
so a priority orders the requests of one client and never overtakes another's. Between clients runs
start-time fair queueing (Goyal, Vin and Cheng, "Start-time Fair Queuing", SIGCOMM 1996), over tokens
as in the virtual token counter (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024):

    start  = finish of its last request, while it has others that wait
             max(now, finish)            when it comes back: no credit for having been away
    finish = start + cost / weight       at each placement, and when it is known what was used
    now    = max(now, start + cost / (2 x weight of all present))

The client with the lowest start is next. `now` is virtual time: the start of what was placed last, as
in SFQ, creeping on by half of what ideal sharing would have given everybody. Without that, a stream of
names never heard of, all starting at `now`, would hold it still and everybody else back for ever;
with all of it, a newcomer would start level with a flood instead of before it.

What a request will generate is not known when it is placed: its client pays what its requests have
generated lately, and the difference at the end.

What a client owes when it leaves is at most the cost of its last request, and forgotten when `now` has
passed it, or when nobody is there. A new scheduler knows of no past at all.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from engine.ids import SequenceKey


EXPECT_OVER = 4
"""Requests over which a client's expected tokens are averaged, the latest counting most."""


class Fairness(msgspec.Struct, frozen=True):
    """What the operator says about clients."""

    weights: dict[str, float] = {}
    """Shares of the clients that do not have 1; positive."""
    reserve: float = 0.125
    """Share of the slots that only clients without a slot may take."""
    bypasses: int = 8
    """Placements of others that may pass a client whose next request does not fit the free pages.

    After so many nobody behind it is placed, so that running ones end and it fits: a large request
    is delayed by small ones of others, not starved.
    """
    expected: int = 256
    """Tokens that a request is taken to generate while nothing is known of its client."""
    look_past: int = 32
    """Clients whose next request does not fit that are looked past for one that does: a message's cost."""

    def weight(self, client: str) -> float:
        """The client's share, relative to others; one of both key and user may be listed by either."""
        key, _, user = client.partition("/")
        for name in (client, user, key):
            if name in self.weights and (name or not client):
                return self.weights[name]
        return 1.0

    def reserved(self, slots: int) -> int:
        """How many of so many slots are kept: at least one, but never the only one."""
        if slots < 2 or not self.reserve:
            return 0
        return max(1, int(slots * self.reserve))


class Ticket(NamedTuple):
    """A request's place among those of its client: the lowest goes first."""

    priority: int
    arrival: float
    key: SequenceKey


@dataclass(slots=True, eq=False)
class Client:
    """Somebody who asks, while there is anything of theirs here or owed by them."""

    name: str
    weight: float
    expected: float
    """Tokens that its next request is taken to generate."""
    waiting: list[Ticket] = field(default_factory=list)
    """Those that may be placed, sorted."""
    active: int = 0
    """Requests that hold slots."""
    start: float = 0.0
    finish: float = 0.0
    bypassed: int = 0
    """Placements that passed it since it was placed last, because its pages were not there."""
    rank: tuple[float, float, str] | None = None
    """Its place in the order of clients; None while nothing of it waits."""
    owes: bool = False
    """Whether the heap of those who left knows it."""

    @property
    def present(self) -> bool:
        """Whether it waits for or holds anything."""
        return bool(self.waiting) or self.active > 0


class FairQueue:
    """All that may be placed, in the order of turns. A change costs two bisections."""

    def __init__(self, fairness: Fairness) -> None:
        self.fairness = fairness
        self.now = 0.0
        """Virtual time, in tokens a unit of weight."""
        self._clients: dict[str, Client] = {}
        self._order: list[tuple[float, float, str]] = []
        self._left: list[tuple[float, str]] = []
        self._present = 0
        self._weight = 0.0
        """Of those present."""

    def at(self, turn: int) -> Client | None:
        """The client whose turn is after so many others, or None: no more are waiting."""
        return self._clients[self._order[turn][2]] if turn < len(self._order) else None

    # ── changes ───────────────────────────────────────────────────────────────────────────────

    def wait(self, name: str, ticket: Ticket) -> None:
        """A request may be placed from now on."""
        client = self._arrived(name)
        if not client.waiting:
            client.start, client.bypassed = max(self.now, client.finish), 0
        insort(client.waiting, ticket)
        self._ranked(client)

    def withdraw(self, name: str, ticket: Ticket) -> None:
        """A request does not wait any more, or not now, and was not placed."""
        client = self._clients[name]
        del client.waiting[bisect_left(client.waiting, ticket)]
        self._ranked(client)
        self._depart(client)

    def place(self, client: Client, cost: float) -> None:
        """The client's next request takes its turn; it holds slots already."""
        del client.waiting[0]
        client.bypassed = 0
        client.finish = client.start + cost / client.weight
        everybody = max(self._weight, client.weight)  # sums of floats drift
        self.now = max(self.now, client.start + cost / (2 * everybody))
        client.start = client.finish
        self._ranked(client)
        while self._left and self._left[0][0] <= self.now:
            self._forget(self._clients[heapq.heappop(self._left)[1]])

    def settle(self, name: str, expected: int, generated: int) -> None:
        """A request ended: its client pays for what was generated instead of what was expected.

        Whoever has waited all the time goes on where it would be, had it paid that at once; who was
        away begins at `now` as ever.
        """
        client = self._clients[name]
        client.expected += (generated - client.expected) / EXPECT_OVER
        late = (generated - expected) / client.weight
        client.finish += late
        if client.waiting:
            client.start += late
            self._ranked(client)

    def hold(self, name: str) -> None:
        """A request of the client holds slots."""
        self._arrived(name).active += 1

    def release(self, name: str) -> None:
        """A request of the client does not hold slots any more."""
        client = self._clients[name]
        client.active -= 1
        self._depart(client)

    # ── upkeep ────────────────────────────────────────────────────────────────────────────────

    def _ranked(self, client: Client) -> None:
        """Put the client where its start and its first request belong; ties go to the oldest."""
        rank = (client.start, client.waiting[0].arrival, client.name) if client.waiting else None
        if rank != client.rank:
            if client.rank is not None:
                del self._order[bisect_left(self._order, client.rank)]
            if rank is not None:
                insort(self._order, rank)
            client.rank = rank

    def _arrived(self, name: str) -> Client:
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = Client(name, self.fairness.weight(name), self.fairness.expected)
        if not client.present:
            self._present += 1
            self._weight += client.weight
        return client

    def _depart(self, client: Client) -> None:
        if client.present:
            return
        self._present -= 1
        self._weight -= client.weight
        if not self._present:
            self._clients.clear()
            self._left.clear()
            self.now = self._weight = 0.0
        elif not client.owes:
            client.owes = True
            heapq.heappush(self._left, (client.finish, client.name))

    def _forget(self, client: Client) -> None:
        """What it owed when it left is due: forget it, unless it came back or owes more by now."""
        client.owes = False
        if client.present:
            return
        if client.finish > self.now:
            client.owes = True
            heapq.heappush(self._left, (client.finish, client.name))
        else:
            del self._clients[client.name]

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    @property
    def clients(self) -> int:
        """Clients that wait for or hold something."""
        return self._present

    @property
    def clients_waiting(self) -> int:
        """Clients with something that may be placed."""
        return len(self._order)

    def tickets(self) -> set[tuple[str, Ticket]]:
        """All that may be placed."""
        return {(client.name, ticket) for client in self._clients.values() for ticket in client.waiting}

    def check(self) -> None:
        clients = self._clients.values()
        present = [client for client in clients if client.present]
        assert len(present) == self._present
        assert abs(sum(client.weight for client in present) - self._weight) < 1e-6
        assert self._order == sorted(client.rank for client in clients if client.rank is not None)
        assert sorted(name for _, name in self._left) == sorted(c.name for c in clients if c.owes)
        for client in clients:
            assert client.active >= 0
            assert client.present or client.owes, f"{client.name!r} has left and is remembered for ever"
            assert client.waiting == sorted(client.waiting)
            assert (client.rank is None) == (not client.waiting)
            if client.rank is not None:
                assert client.rank == (client.start, client.waiting[0].arrival, client.name)
                assert client.finish <= client.start


class Claim(NamedTuple):
    """What a request holds, when pages have run out."""

    ticket: Ticket
    client: str
    pages: int


def give_way(claims: Iterable[Claim], fairness: Fairness) -> Iterator[Claim]:
    """All that may have to give way, in this order; one never does.

    The client that holds the most pages for its weight gives first, of its requests the one whose
    turn would be last: so none gives way to one of its own client that should go after it.
    The one that never does is the oldest among the first of each client. It stays that until it ends,
    or until one is placed that is older, or goes before it with its own client: there are finitely
    many of those, so something always ends. (A client that gave all comes back with its first.)
    """
    holders: dict[str, list[Claim]] = {}
    for claim in sorted(claims):
        holders.setdefault(claim.client, []).append(claim)
    if not holders:
        return
    safe = min((held[0] for held in holders.values()), key=lambda claim: claim.ticket[1:])
    holders[safe.client].remove(safe)
    pages = {name: sum(claim.pages for claim in held) for name, held in holders.items()}
    pages[safe.client] += safe.pages
    while holders := {name: held for name, held in holders.items() if held}:
        name = max(
            holders, key=lambda name: (pages[name] / fairness.weight(name), holders[name][-1].ticket[1:])
        )
        claim = holders[name].pop()
        pages[name] -= claim.pages
        yield claim
