"""The allocator: who may write which page, which pages are found again, and when a page is free.

    a page is in one state (`engine.pages`), and what it holds is in the page table
    leased pages of a worker ≤ granted − consumed       (a worker consumes before it says so)

All durable state is the page table in shared memory. A restarted allocator rebuilds free list, index and
holders by scanning it and asks nobody that is dead; only leases and unfinished searches it hears anew from
those who live. What its predecessor may have granted and nobody holds yet is safe: it evicts nothing until
every worker that it found alive has introduced itself, and after that no word of the predecessor counts.

**Pages of a dead worker.** Sealed ones stay where they are: nobody writes them, and whoever continues a
request finds them by their tokens. Its writable set (leases, open tails) is quarantined until two things are
known. A hand-over may be on its way, and a decode worker may adopt the pages just as they are freed: so
every live worker is asked to adopt nothing more from the dead incarnation (a fence). And its threads may
still write, stopped or not: `gone` says whether all that could are proven to have ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from engine.core import Send, Statistics
from engine.fetching import Fetches
from engine.ids import Incarnation
from engine.layout import Owner, PageTable
from engine.leases import Leases
from engine.lifecycle import PageState
from engine.messages import (
    Drain,
    FencePassed,
    FenceWanted,
    FetchEnded,
    FileKeys,
    LeaseReturned,
    LeaseWanted,
    NobodyGivesWay,
    PagesDoubted,
    PagesHeld,
    PagesReleased,
    PagesSealed,
    PinWanted,
    PoolFact,
    PrefixFact,
    PrefixWanted,
    ReadEnded,
    ReadWanted,
    Roster,
    SpillEnded,
    Stop,
)
from engine.pages import WRITABLE, Pages
from engine.pinned import Pinned, Reads
from engine.prefixes import Prefixes

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Mapping, Sequence

    from engine.eviction import EvictionPolicy
    from engine.messages import Member, ToAllocator
    from engine.prefix_cache import PrefixCache
    from engine.shapes import PageRef

WRITERS = ("worker", "replicator")


@dataclass(slots=True)
class Departed:
    """An incarnation that was declared dead, until its pages are nobody's."""

    fences: set[Incarnation] = field(default_factory=set)
    """Workers that may still adopt from it."""
    gone: bool = False
    """None of its threads can write any more."""


class Allocator:
    """Leases, shares, releases and reclaims the pages of one pool."""

    def __init__(
        self,
        table: PageTable,
        ordinals: Mapping[str, int],
        policy: EvictionPolicy,
        gone: Callable[[Owner], bool] = lambda owner: True,
        *,
        tells: bool = False,
    ) -> None:
        """`gone(owner)`: whether every thread of a dead incarnation that could write has ended, by proof.

        `tells`: there are other hosts, and the scheduler hears which pages are found here.
        """
        self.table = table
        self._gone = gone
        self._ordinals = dict(ordinals)
        self._names = {ordinal: name for name, ordinal in ordinals.items()}
        self._pages = Pages(table, policy)
        self._found = self._pages.owners()
        """Whose pages the table shows: those of them who are not in the first roster are dead."""
        self._leases = Leases(self._pages)
        self._fetches = Fetches(self._pages)
        self._prefixes = Prefixes(self._pages, self._fetches, self._ordinals)
        self._pinned = Pinned(self._pages)
        self._reads = Reads(self._pages)
        self._pages.cache.tells = tells
        self._writers: dict[Incarnation, str] = {}
        self._strangers: set[Incarnation] = set()
        """Workers that a predecessor may have granted pages, and that have not said what they hold."""
        self._departed: dict[Incarnation, Departed] = {}
        self._doubted: set[PageRef] = set()
        self._seen_roster = False
        self._told_free = -1
        self.stale_releases = 0
        self.reclaimed = 0

    @property
    def cache(self) -> PrefixCache:
        """The pages that are found by their tokens."""
        return self._pages.cache

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        dead = [writer for writer in down if writer in self._writers]
        for member in up:
            if member.kind in WRITERS:
                self._writers[member.incarnation] = member.kind
        if not self._seen_roster:
            self._seen_roster = True
            self._strangers = set(self._workers)
            dead += self._lost_before(up)
        dead += [lost for lost in self._superseded(up) if lost not in dead]
        sends: list[Send] = []
        for writer in dead:
            sends += self._lose(writer, now)
        for member in up:
            # After its last life was lost, which may be told at once.
            if member.kind == "replicator":
                self._fetches.replicator = (member.incarnation, self._owner(member.incarnation))
                self._fetches.ordinal = member.ordinal
        self._pinned.lose(down)
        for departed in self._departed.values():
            departed.fences.difference_update(dead)
        for writer in dead:
            sends += [Send(worker, FenceWanted(writer)) for worker in sorted(self._departed[writer].fences)]
        self._reclaim()
        self._see_strangers()
        if any(member.kind == "scheduler" for member in up):
            self._told_free = -1
            self._leases.exhausted_told = False
            if self.cache.tells:
                sends.append(Send("scheduler", self.cache.all()))
        return sends + self._grant()

    def handle(self, source: Incarnation, message: ToAllocator, now: float) -> list[Send]:
        """Take one message; the answers are leases, prefixes, fences and facts for the scheduler."""
        sends: list[Send] = []
        match message:
            case LeaseWanted():
                if not self._leases.want(source, message):
                    return []
            case PagesHeld():
                match self._writers.get(source):
                    case "worker":
                        sends = self._introduced(source, message)
                    case "replicator":
                        self._fetched_for_others(source, message, now)
                    case _:
                        return []
            case LeaseReturned():
                self._leases.returned(source, message)
                self._release(source, message.pages)
            case PagesReleased():
                self._release(source, message.pages)
            case PagesSealed():
                sends = self._prefixes.sealed(source, message, now)
            case PrefixWanted():
                if source in self._writers:
                    sends = self._prefixes.want(source, message, now)
            case PrefixFact():
                sends = self._prefixes.fact(source, message, now)
            case FencePassed():
                if message.dead in self._departed:
                    self._departed[message.dead].fences.discard(source)
                    self._reclaim()
            case FetchEnded():
                sends = self._fetch_ended(message, now)
            case SpillEnded():
                self._fetches.spill_ended(message)
            case FileKeys():
                if source in self._writers:
                    self._fetches.in_file(message)
            case PinWanted():
                sends = [Send(source, fact) for fact in self._pinned.want(source, message, now)]
            case NobodyGivesWay():
                sends = [Send(gateway, fact) for gateway, fact in self._pinned.give_way()]
                # Its pages may be held by others too: then the next one is asked for.
                self._leases.exhausted_told = not sends
            case ReadWanted():
                sends = [Send(source, self._reads.want(source, message, now))]
            case ReadEnded():
                self._reads.ended(source, message.ticket)
            case Roster() | Drain() | Stop():
                return []
            case _:
                assert_never(message)
        return sends + self._grant()

    def tick(self, now: float) -> list[Send]:
        """Look again for what nobody tells: whether the dead are gone, and what has run out.

        Due while `waits_for_proof`, and at `deadline`.
        """
        over = [self._pinned.expire(now), self._reads.expire(now), self._reclaim()]
        return self._grant() if any(over) else []

    @property
    def waits_for_proof(self) -> bool:
        """Whether pages are in quarantine because a dead worker is not proven gone."""
        return any(not departed.gone for departed in self._departed.values())

    def deadline(self) -> float | None:
        """When the next pin of a client or a reader runs out."""
        times = (self._pinned.deadline(), self._reads.deadline())
        return min((time for time in times if time is not None), default=None)

    # ── who is there ──────────────────────────────────────────────────────────────────────────

    @property
    def _workers(self) -> list[Incarnation]:
        """The living workers."""
        return sorted(writer for writer, kind in self._writers.items() if kind == "worker")

    def _owner(self, writer: Incarnation) -> Owner:
        return Owner(self._ordinals[writer.name], writer.epoch)

    def _introduced(self, worker: Incarnation, held: PagesHeld) -> list[Send]:
        """A worker has said what it holds; what it let go of before, it has told nobody who lives."""
        self._leases.introduced(worker, held)
        self._pinned.identities[worker] = held.identity
        self._strangers.discard(worker)
        self._see_strangers()
        self._pages.look_at_all()
        # Its release of others, or the grant that would have told it, died with the last allocator; or it
        # took them over after it spoke. Only the worker can tell, so it is asked once more.
        named = {*held.leased, *held.used}
        rest = tuple(page for page in self._pages.writable_by(self._owner(worker)) if page not in named)
        self._doubted.update(rest)
        return [Send(worker, PagesDoubted(rest))] if rest else []

    def _fetched_for_others(self, replicator: Incarnation, held: PagesHeld, now: float) -> None:
        """What a predecessor had fetched has landed by now or will not, unless the replicator names it."""
        owner, coming = self._owner(replicator), {*held.leased, *self._fetches.targets()}
        for page in self._pages.in_state(PageState.SEALED):
            if self.table.owner(page) == owner and page not in self.cache:
                self.cache.add(page, now)
                self._pages.let_go(page)
        for ref in self._pages.writable_by(owner):
            if ref not in coming:
                self._put_back(ref.index)

    def _see_strangers(self) -> None:
        if not self._strangers and not self._pages.may_evict:
            self._pages.may_evict = True
            self._pages.look_at_all()

    def _lost_before(self, up: Sequence[Member]) -> list[Incarnation]:
        """Who owns pages by the table, and is not there any more."""
        alive = {Owner(member.ordinal, member.epoch) for member in up}
        lost = sorted(owner for owner in self._found - alive if owner.ordinal in self._names)
        return [Incarnation(self._names[owner.ordinal], owner.epoch) for owner in lost]

    def _superseded(self, up: Sequence[Member]) -> list[Incarnation]:
        """Whose next life has begun, and who has pages by the table: it may never have been in a roster here.

        Whoever is in no roster and has no successor may be too new for the one that is there now.
        """
        newest = {member.ordinal: member.epoch for member in up if member.kind in WRITERS}
        if not newest:
            return []
        old = sorted(owner for owner in self._pages.owners() if owner.epoch < newest.get(owner.ordinal, 0))
        lost = [Incarnation(self._names[owner.ordinal], owner.epoch) for owner in old]
        return [dead for dead in lost if dead not in self._departed]

    def _lose(self, dead: Incarnation, now: float) -> list[Send]:
        """A writer was declared dead: what it was doing is over, what it could write is quarantined."""
        kind = self._writers.pop(dead, "worker")
        self._leases.lose(dead)
        self._pinned.identities.pop(dead, None)
        self._strangers.discard(dead)
        self._departed[dead] = Departed(set(self._workers) if kind == "worker" else set())
        owner = self._owner(dead)
        for page in self._pages.in_state(PageState.SEALED):
            # Sealed and never announced: the next one with these tokens shall find it.
            if self.table.owner(page) == owner:
                self.cache.add(page, now)
        self._fetches.lose(dead)
        return self._prefixes.lose(dead, now)

    def _reclaim(self) -> bool:
        """Free what the dead held, of those from whom nobody adopts any more and who are proven gone."""
        for dead, departed in self._departed.items():
            departed.gone = departed.gone or self._gone(self._owner(dead))
        done = [dead for dead, departed in self._departed.items() if departed.gone and not departed.fences]
        for dead in done:
            del self._departed[dead]
            owner = self._owner(dead)
            for ref in self._pages.writable_by(owner):
                self._put_back(ref.index)
                self.reclaimed += 1
            row = self.table.holders(owner)
            if row is not None:
                row[:] = bytes(len(row))
        if done:
            self._pages.look_at_all()
        return bool(done)

    # ── pages ─────────────────────────────────────────────────────────────────────────────────

    def _put_back(self, page: int) -> None:
        self._doubted.discard(self.table.ref(page))
        self._pages.put_back(page)

    def _release(self, source: Incarnation, pages: tuple[PageRef, ...]) -> None:
        owner = self._owner(source)
        # Whoever gave way may have had nothing that others do not hold too: then somebody else must.
        self._leases.exhausted_told = self._leases.exhausted_told and not pages
        for ref in pages:
            page = ref.index
            if not self.table.is_current(ref):
                self.stale_releases += 1
            elif self.table.state(page) is PageState.SEALED:
                self._pages.let_go(page)
            elif self.table.state(page) in WRITABLE and self.table.owner(page) == owner:
                self._put_back(page)
            else:
                self.stale_releases += 1

    def _fetch_ended(self, message: FetchEnded, now: float) -> list[Send]:
        fetch = self._fetches.ended(message, self._prefixes.fillings, now)
        if fetch is None:
            return []
        sends = self._prefixes.end(fetch.name, now)
        self._fetches.settle(fetch)
        return sends

    def _grant(self) -> list[Send]:
        sends = self._leases.grant(self._owner)
        if not self._departed and not self._strangers and not self._fetches.busy:
            # Else pages come back of themselves.
            sends += self._leases.relieve()
        sends += self._fetches.spill()
        free = self._pages.available
        step = max(1, self.table.pages // 64)
        if abs(free - self._told_free) >= step or (free == 0) != (self._told_free == 0):
            self._told_free = free
            costs = self._fetches.costs.told() if self.cache.tells else (0.0, 0.0)
            sends.append(Send("scheduler", PoolFact(self.table.pages, free, *costs)))
        if self.cache.tells and (news := self.cache.news()) is not None:
            sends.append(Send("scheduler", news))
        return sends

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def census(self) -> Counter[str]:
        """Every page once: free, cached, held, leased, open or quarantined."""
        return self._pages.census({self._owner(dead) for dead in self._departed})

    def check(self) -> None:
        self._pages.check(map(self._owner, self._workers))
        self._prefixes.check()
        self._leases.check(self._owner, self._doubted)
        self._pinned.check()
        assert sum(self.census().values()) == self.table.pages

    def statistics(self) -> Statistics:
        census = self.census()
        return {
            "pages_total": self.table.pages,
            "pages_free": census["free"],
            "pages_cached": census["cached"],
            "pages_leased": census["leased"],
            "pages_open": census["open"],
            "pages_sealed": census["held"],
            "pages_quarantined": census["quarantined"],
            "pages_reclaimed": self.reclaimed,
            "stale_releases": self.stale_releases,
            "fences_waiting": len(self._departed),
            **self._prefixes.statistics(),
            **self._fetches.statistics(),
            **self._pinned.statistics(),
            **self._reads.statistics(),
            **self.cache.statistics(),
        }
