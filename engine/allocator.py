"""The allocator: who may write which page, which pages are found again, and when a page is free.

    free + cached + used + quarantined = total          (every page is one of them; `census` counts)
      cached       sealed, found by its tokens, held by nobody: leased anew when no page is free
      used         leased or open in the hands of a living worker, or held by one
      quarantined  leased or open in the hands of a dead one that is not proven gone
    leased pages of a worker ≤ granted − consumed       (a worker consumes before it says so)
    a page is freed once: a release names its generation, and freeing raises it

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

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from engine.chain import Chain
from engine.core import Send, Statistics
from engine.filling import Filling, Fillings
from engine.ids import Incarnation
from engine.layout import Owner, PageTable
from engine.lifecycle import PageState
from engine.messages import (
    Cached,
    Drain,
    FencePassed,
    FenceWanted,
    FetchEnded,
    FileKeys,
    LeaseGranted,
    LeaseRecall,
    LeaseReturned,
    LeaseWanted,
    PagesDoubted,
    PagesHeld,
    PagesReleased,
    PagesSealed,
    PinFact,
    PinWanted,
    PoolExhausted,
    PoolFact,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
    Roster,
    SpillEnded,
    Stop,
)
from engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from engine.eviction import EvictionPolicy
    from engine.messages import Member, ToAllocator
    from engine.shapes import PageRef

WRITERS = ("worker", "replicator")


@dataclass(slots=True)
class LeaseAccount:
    """What one worker was granted, in absolute counts over its life."""

    granted: int
    consumed: int
    ahead: int = 0
    need: int = 0
    recalled: bool = False

    @property
    def outstanding(self) -> int:
        """Granted pages that the worker has not said it used."""
        return self.granted - self.consumed

    @property
    def spare(self) -> bool:
        """It has more than will be used at once: taking what is needed there would move the need."""
        return self.outstanding > self.need

    @property
    def starving(self) -> bool:
        """A sequence of the worker stands still for want of a page."""
        return self.need > 0 and self.outstanding == 0


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
    ) -> None:
        """`gone(owner)`: whether every thread of a dead incarnation that could write is proven to have ended."""
        self.table = table
        self.cache = PrefixCache(table, policy)
        self._gone = gone
        self._ordinals = dict(ordinals)
        self._names = {ordinal: name for name, ordinal in ordinals.items()}
        self._free: deque[int] = deque()
        self._accounts: dict[Incarnation, LeaseAccount] = {}
        self._writers: dict[Incarnation, str] = {}
        self._strangers: set[Incarnation] = set()
        """Workers that a predecessor may have granted pages, and that have not said what they hold."""
        self._identities: dict[Incarnation, str] = {}
        self._departed: dict[Incarnation, Departed] = {}
        self._fillings = Fillings()
        self._found: set[Owner] = set()
        self._doubted: set[PageRef] = set()
        self._seen_roster = False
        self._told_free = -1
        self._exhausted_told = False
        self._clock = 0.0
        self.stale_releases = 0
        self.reclaimed = 0
        self.pages_hit = 0
        self.pages_awaited = 0
        self._scan()

    def _scan(self) -> None:
        self._found.update(self.table.holding())
        for page in range(self.table.pages):
            state = self.table.state(page)
            if state is PageState.FREE:
                self._free.append(page)
                continue
            if state is PageState.SEALED:
                self.cache.add(page, 0.0)
            else:
                self._found.add(self.table.owner(page))

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        self._clock = now
        sends: list[Send] = []
        dead = [writer for writer in down if writer in self._writers]
        for member in up:
            if member.kind in WRITERS:
                self._writers[member.incarnation] = member.kind
        if not self._seen_roster:
            self._seen_roster = True
            self._strangers = set(self._workers)
            alive = {Owner(member.ordinal, member.epoch) for member in up}
            lost = [owner for owner in sorted(self._found) if owner not in alive and owner.ordinal in self._names]
            dead += [Incarnation(self._names[owner.ordinal], owner.epoch) for owner in lost]
        for writer in dead:
            sends += self._lose(writer)
        for departed in self._departed.values():
            departed.fences.difference_update(dead)
        workers = self._workers
        for writer in dead:
            if self._departed[writer].fences:
                sends += [Send(worker, FenceWanted(writer)) for worker in workers]
        self._reclaim()
        if any(member.kind == "scheduler" for member in up):
            self._told_free = -1
            self._exhausted_told = False
        return sends + self._grant()

    @property
    def _workers(self) -> list[Incarnation]:
        """The living workers."""
        return sorted(writer for writer, kind in self._writers.items() if kind == "worker")

    def handle(self, source: Incarnation, message: ToAllocator, now: float) -> list[Send]:
        """Take one message; the answers are leases, prefixes, fences and facts for the scheduler."""
        self._clock = now
        sends: list[Send] = []
        match message:
            case LeaseWanted():
                account = self._accounts.get(source)
                if account is None:
                    return []
                account.consumed = max(account.consumed, message.consumed)
                account.ahead, account.need = message.ahead, message.need
                # Whoever gave way may have had no page: a changed want is all that shows it.
                self._exhausted_told = False
            case PagesHeld():
                if source not in self._writers:
                    return []
                granted = message.consumed + len(message.leased)
                self._accounts[source] = LeaseAccount(granted, message.consumed)
                self._identities[source] = message.identity
                self._strangers.discard(source)
                self._look_at_all()
                sends = self._ask_for_rest(source, {*message.leased, *message.used})
            case LeaseReturned():
                account = self._accounts.get(source)
                if account is not None:
                    account.consumed = max(account.consumed, message.consumed)
                    account.ahead, account.recalled = message.ahead, False
                    account.need = min(account.need, message.ahead)
                self._release(source, message.pages)
            case PagesReleased():
                self._release(source, message.pages)
            case PagesSealed():
                sends = self._sealed(source, message)
            case PrefixWanted():
                sends = self._want_prefix(source, message)
            case PrefixFact():
                sends = self._prefix_fact(source, message)
            case FencePassed():
                if message.dead in self._departed:
                    self._departed[message.dead].fences.discard(source)
                    self._reclaim()
            case Roster() | Drain() | Stop():
                return []
            case FetchEnded() | SpillEnded() | FileKeys() | PinWanted():
                return []
            case _:
                assert_never(message)
        return sends + self._grant()

    def tick(self, now: float) -> list[Send]:
        """Look again for what nobody tells: whether the dead are gone. Due while `waits_for_proof`."""
        self._clock = now
        return self._grant() if self._reclaim() else []

    @property
    def waits_for_proof(self) -> bool:
        """Whether pages are in quarantine only because a dead worker is not proven gone."""
        return any(not departed.gone for departed in self._departed.values())

    # ── pages ─────────────────────────────────────────────────────────────────────────────────

    def _owner(self, worker: Incarnation) -> Owner:
        return Owner(self._ordinals[worker.name], worker.epoch)

    def _put_back(self, page: int) -> None:
        self._doubted.discard(self.table.ref(page))
        self.table.free(page)
        self._free.append(page)
        self._exhausted_told = False

    def _release(self, source: Incarnation, pages: tuple[PageRef, ...]) -> None:
        owner = self._owner(source)
        # Whoever gave way may have had nothing that others do not hold too: then somebody else must.
        self._exhausted_told = False
        for ref in pages:
            page = ref.index
            if not self.table.is_current(ref):
                self.stale_releases += 1
            elif self.table.state(page) is PageState.SEALED:
                self._let_go(page)
            elif self.table.state(page) is not PageState.FREE and self.table.owner(page) == owner:
                self._put_back(page)
            else:
                self.stale_releases += 1

    def _let_go(self, page: int) -> None:
        """A sealed page has one holder less: it stays in the cache, or is free when it cannot be found."""
        if page in self.cache:
            self.cache.look(page)
        elif not self.cache.held(page):
            self._put_back(page)

    def _look_at_all(self) -> None:
        """A worker introduced itself: what it let go of before, it has told nobody who lives."""
        for page in range(self.table.pages):
            if self.table.state(page) is PageState.SEALED:
                self._let_go(page)

    def _take(self, count: int) -> list[int]:
        """So many pages that are nobody's, evicted if need be; fewer when there are not so many."""
        missing = count - len(self._free)
        if missing > 0 and not self._strangers:
            for page in self.cache.evict(missing):
                self._put_back(page)
        return [self._free.popleft() for _ in range(min(count, len(self._free)))]

    @property
    def _available(self) -> int:
        """Pages that could be leased now."""
        return len(self._free) + (0 if self._strangers else self.cache.idle)

    # ── the dead ──────────────────────────────────────────────────────────────────────────────

    def _lose(self, dead: Incarnation) -> list[Send]:
        """A writer was declared dead: what it was doing is over, what it could write is quarantined."""
        kind = self._writers.pop(dead, "worker")
        self._accounts.pop(dead, None)
        self._strangers.discard(dead)
        self._exhausted_told = False
        fences = set(self._workers) if kind == "worker" else set()
        self._departed[dead] = Departed(fences)
        owner = self._owner(dead)
        for page in range(self.table.pages):
            # Sealed and never announced: the next one with these tokens shall find it.
            if self.table.state(page) is PageState.SEALED and self.table.owner(page) == owner:
                self.cache.add(page, self._clock)
        sends: list[Send] = []
        for name in self._fillings.of(dead):
            sends += self._end_filling(name)
        return sends

    def _reclaim(self) -> bool:
        """Free what the dead held, of those from whom nobody adopts any more and who are proven gone."""
        for dead, departed in self._departed.items():
            departed.gone = departed.gone or self._gone(self._owner(dead))
        done = [dead for dead, departed in self._departed.items() if departed.gone and not departed.fences]
        if not done:
            return False
        owners = {self._owner(dead) for dead in done}
        held: set[int] = set()
        for dead in done:
            del self._departed[dead]
            row = self.table.holders(self._owner(dead))
            if row is not None:
                held |= {page for page, holds in enumerate(row) if holds}
                row[:] = bytes(len(row))
        for page in range(self.table.pages):
            state = self.table.state(page)
            if state in (PageState.LEASED, PageState.OPEN) and self.table.owner(page) in owners:
                self._put_back(page)
                self.reclaimed += 1
            elif state is PageState.SEALED and (page in held or self.table.owner(page) in owners):
                self._let_go(page)
        return True

    def _ask_for_rest(self, source: Incarnation, held: set[PageRef]) -> list[Send]:
        """Ask for the pages that a worker may write by the table but did not name.

        Its release of them, or the grant that would have told it, died with the last allocator; or
        it took them over after it spoke. Only the worker can tell, so it is asked once more.
        """
        owner = self._owner(source)
        rest = tuple(
            self.table.ref(page)
            for page in range(self.table.pages)
            if self.table.state(page) in (PageState.LEASED, PageState.OPEN) and self.table.owner(page) == owner
        )
        rest = tuple(page for page in rest if page not in held)
        self._doubted.update(rest)
        return [Send(source, PagesDoubted(rest))] if rest else []

    # ── prefixes ──────────────────────────────────────────────────────────────────────────────

    def _want_prefix(self, source: Incarnation, message: PrefixWanted) -> list[Send]:
        if source not in self._writers:
            return []
        name = (source, message.key, message.term)
        self._fillings.end(name)
        size = 4 * self.table.page_tokens
        chain = Chain.resume(message.root, self.table.page_tokens, message.tokens[: message.have * size])
        filling = Filling(name, message.tokens, chain, waits=message.seeks)
        if not message.seeks:
            self._fillings.put(filling)
            return []
        count = len(message.tokens) // size
        found = self.cache.find(message.root, message.tokens, count, self._clock)[message.have :]
        filling.go_to(message.have + len(found))
        self._fillings.put(filling)
        return self._answer(filling, found)

    def _answer(self, filling: Filling, found: list[int]) -> list[Send]:
        """Grant what was found, and say whether to wait for more or to fill the next page."""
        filling.waits = self._fillings.filled_by_another(filling)
        self.pages_hit += len(found)
        self.pages_awaited += filling.waits
        filling.granted += len(found)
        filling.pinned += found
        self.cache.pin(found)
        refs = tuple(self.table.ref(page) for page in found)
        source, key, term = filling.name
        grant = PrefixGranted(key, term, refs, self._where_from(filling, found), filling.waits)
        return [Send(source, grant)]

    def _where_from(self, filling: Filling, pages: Iterable[int]) -> Cached:
        """Tokens of the pages by where they were when this one asked."""
        mine = self._ordinals[filling.source.name]
        memory = worker = 0
        for page in pages:
            here = self.table.origin(page).ordinal == mine
            memory, worker = memory + here, worker + (not here)
        size = self.table.page_tokens
        return Cached(memory * size, worker * size)

    def _sealed(self, source: Incarnation, message: PagesSealed) -> list[Send]:
        last = -1
        for ref in message.pages:
            if self.table.is_current(ref):
                self.cache.add(ref.index, self._clock)
                last = self.table.block(ref.index)
        filling = self._fillings.get((source, message.key, message.term))
        if filling is None or filling.waits:
            return []
        most = len(filling.tokens) // (4 * self.table.page_tokens)
        return self._wake(self._fillings.advance(filling, min(last + 1, most)))

    def _wake(self, waiters: Iterable[Filling]) -> list[Send]:
        """Those who waited look again; the first that finds nobody who goes on does so itself."""
        sends: list[Send] = []
        for filling in waiters:
            if self._fillings.get(filling.name) is not filling:
                continue
            found = self._next_found(filling)
            if found or not self._fillings.filled_by_another(filling):
                self._fillings.advance(filling, filling.chain.pages + len(found))
                sends += self._answer(filling, found)
        return sends

    def _next_found(self, filling: Filling) -> list[int]:
        """Cached pages from where a filling stands, by looking at one after the other."""
        found: list[int] = []
        chain = filling.chain.copy()
        size = 4 * self.table.page_tokens
        while tokens := filling.tokens[chain.pages * size : (chain.pages + 1) * size]:
            parent = chain.parent
            page = self.cache.index.find(chain.append(tokens))
            if page is None or self.cache.index.tokens_of(page) != tokens:
                break
            if self.cache.index.parent_of(page) != parent:
                break
            found.append(page)
        if found:
            self.cache.policy.hit(found, self._clock)
        return found

    def _prefix_fact(self, source: Incarnation, message: PrefixFact) -> list[Send]:
        name = (source, message.key, message.term)
        filling = self._fillings.get(name)
        if filling is None:
            return []
        taken = max(0, min(message.taken, filling.granted) - filling.taken)
        filling.taken += taken
        self._unpin(filling.pinned[:taken])
        del filling.pinned[:taken]
        return [] if message.filling else self._end_filling(name)

    def _end_filling(self, name: tuple[Incarnation, object, int]) -> list[Send]:
        filling, waiters = self._fillings.end(name)  # type: ignore[arg-type]
        if filling is not None:
            self._unpin(filling.pinned)
        return self._wake(waiters)

    def _unpin(self, pages: Iterable[int]) -> None:
        for page in self.cache.unpin(pages):
            if page not in self.cache and self.table.state(page) is PageState.SEALED:
                self._put_back(page)

    # ── leases ────────────────────────────────────────────────────────────────────────────────

    def _grant(self) -> list[Send]:
        sends: list[Send] = []
        # Who starves goes first, else a recalled lease would go back; then who has least, so that a
        # hungry worker cannot starve another one.
        order = sorted(self._accounts.items(), key=lambda item: (not item[1].starving, item[1].outstanding))
        for worker, account in order:
            wanted = account.consumed + account.ahead - account.granted
            if wanted > 0 and self._available:
                owner = self._owner(worker)
                pages = tuple(self.table.lease(page, owner) for page in self._take(wanted))
                account.granted += len(pages)
                sends.append(Send(worker, LeaseGranted(pages)))
        sends += self._relieve()
        free = self._available
        step = max(1, self.table.pages // 64)
        if abs(free - self._told_free) >= step or (free == 0) != (self._told_free == 0):
            self._told_free = free
            sends.append(Send("scheduler", PoolFact(self.table.pages, free)))
        return sends

    def _relieve(self) -> list[Send]:
        """Recall spare leases for a starving worker; when there are none, the scheduler must preempt."""
        starving = next((worker for worker, account in self._accounts.items() if account.starving), None)
        if starving is None or self._available or self._departed or self._strangers:
            return []
        spare = [(worker, account) for worker, account in self._accounts.items() if account.spare]
        sends = []
        for worker, account in spare:
            if not account.recalled:
                account.recalled = True
                sends.append(Send(worker, LeaseRecall()))
        if sends or any(account.recalled for _, account in spare) or self._exhausted_told:
            return sends
        self._exhausted_told = True
        return [Send("scheduler", PoolExhausted(starving))]

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def census(self) -> Counter[str]:
        """Every page once: free, cached, used (leased, open or held) or quarantined."""
        quarantined = {self._owner(dead) for dead in self._departed}
        count: Counter[str] = Counter(free=0, cached=0, leased=0, open=0, held=0, quarantined=0)
        for page in range(self.table.pages):
            state = self.table.state(page)
            if state is PageState.FREE:
                count["free"] += 1
            elif state is PageState.SEALED:
                count["cached" if self.cache.is_idle(page) else "held"] += 1
            elif self.table.owner(page) in quarantined:
                count["quarantined"] += 1
            else:
                count["leased" if state is PageState.LEASED else "open"] += 1
        return count

    def check(self) -> None:
        table = self.table
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        leased: Counter[Owner] = Counter()
        for page in range(table.pages):
            state = table.state(page)
            assert (state is PageState.FREE) == (page in free), f"page {page} is {state.name}"
            if state is PageState.LEASED and table.ref(page) not in self._doubted:
                leased[table.owner(page)] += 1
        for worker, account in self._accounts.items():
            assert account.outstanding >= 0, f"{worker} consumed more than it was granted"
            assert leased[self._owner(worker)] <= account.outstanding, f"{worker} holds uncounted leases"
        self.cache.check()
        self._fillings.check()
        assert sum(self.census().values()) == table.pages

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
            "prefixes_filling": len(self._fillings),
            "pages_hit": self.pages_hit,
            "prefixes_awaited": self.pages_awaited,
            **self.cache.statistics(),
        }
