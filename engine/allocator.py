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

from engine.chain import Chain, chain_root
from engine.core import Send, Statistics
from engine.fetching import Fetch, FetchCosts, Missing
from engine.filling import Filling, Fillings
from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner, PageTable
from engine.lifecycle import PageState
from engine.messages import (
    Cached,
    Drain,
    FencePassed,
    FenceWanted,
    FetchEnded,
    FetchWanted,
    FileKeys,
    LeaseGranted,
    LeaseRecall,
    LeaseReturned,
    LeaseWanted,
    PagesDoubted,
    PagesHeld,
    PageSource,
    PagesReleased,
    PagesSealed,
    PageWanted,
    PinFact,
    PinWanted,
    PoolExhausted,
    PoolFact,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
    Roster,
    SpillEnded,
    SpillWanted,
    Stop,
)
from engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from engine.eviction import EvictionPolicy
    from engine.fetching import Kind
    from engine.filling import FillingName
    from engine.messages import Member, ToAllocator
    from engine.shapes import PageRef

WRITERS = ("worker", "replicator")

PINNED_MOST = 0.5
"""Of the pool, what clients may pin together."""

SPILL_BELOW = 1 / 8
"""Of the pool: when fewer pages are free, those that go next are kept in the file."""

SPILLS_MOST = 16
"""Pages that are being written to the file at once: they cannot be leased meanwhile."""

FILE = PageSource("file")


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
class Pin:
    """Pages that a client wants kept."""

    pages: list[int]
    until: float


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
        """`gone(owner)`: whether every thread of a dead incarnation that could write has ended, by proof."""
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
        self._costs = FetchCosts()
        self._fetches: dict[int, Fetch] = {}
        self._ticket = 0
        self._landed: dict[int, Kind] = {}
        """Pages that came by the fetch that just ended, and from where."""
        self._in_file: set[bytes] | None = None
        """Keys of the pages that the file holds; None: there is no file, or nobody has said yet."""
        self._spilling: set[PageRef] = set()
        self._pins: dict[tuple[Incarnation, str], Pin] = {}
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
        self.pages_fetched: dict[Kind, int] = {"file": 0, "host": 0}
        self.pages_spilled = 0
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
            lost = [
                owner for owner in sorted(self._found) if owner not in alive and owner.ordinal in self._names
            ]
            dead += [Incarnation(self._names[owner.ordinal], owner.epoch) for owner in lost]
        for writer in dead:
            sends += self._lose(writer)
        for name in [name for name in self._pins if name[0] in down]:
            self._unpin(self._pins.pop(name).pages)
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
            case FetchEnded():
                sends = self._fetch_ended(message)
            case SpillEnded():
                ended = self._spilling & set(message.pages)
                self._spilling -= ended
                self._unpin(page.index for page in ended)
                self.pages_spilled += len(ended)
            case FileKeys():
                if source in self._writers:
                    known = set() if message.whole else self._in_file or set()
                    self._in_file = (known - set(message.removed)) | set(message.added)
            case PinWanted():
                sends = self._pin(source, message, now)
            case _:
                assert_never(message)
        return sends + self._grant()

    def tick(self, now: float) -> list[Send]:
        """Look again for what nobody tells: whether the dead are gone, and what has run out.

        Due while `waits_for_proof`, and at `deadline`.
        """
        self._clock = now
        over = [name for name, pin in self._pins.items() if pin.until <= now]
        for name in over:
            self._unpin(self._pins.pop(name).pages)
        return self._grant() if self._reclaim() or over else []

    def deadline(self) -> float | None:
        """When the next pin runs out."""
        return min((pin.until for pin in self._pins.values()), default=None)

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
        if kind == "replicator":
            self._in_file = None
            self._unpin(page.index for page in self._spilling)
            self._spilling.clear()
        for ticket in [ticket for ticket, fetch in self._fetches.items() if fetch.name[0] == dead]:
            self._unpin(self._fetches.pop(ticket).targets)
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
            if self.table.state(page) in (PageState.LEASED, PageState.OPEN)
            and self.table.owner(page) == owner
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
        filling = Filling(
            name,
            message.tokens,
            chain,
            waits=message.seeks,
            elsewhere=message.elsewhere,
            elsewhere_pages=message.elsewhere_pages,
            since=self._clock,
        )
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
        fetches = [] if self._fillings.filled_by_another(filling) else self._fetch(filling)
        filling.waits = self._fillings.filled_by_another(filling)
        filling.since = self._clock
        self.pages_hit += len(found)
        self.pages_awaited += filling.waits
        filling.granted += len(found)
        filling.pinned += found
        self.cache.pin(found)
        refs = tuple(self.table.ref(page) for page in found)
        source, key, term = filling.name
        grant = PrefixGranted(key, term, refs, self._where_from(filling, found), filling.waits)
        return [Send(source, grant), *fetches]

    def _where_from(self, filling: Filling, pages: Iterable[int]) -> Cached:
        """Tokens of the pages by where they were when this one asked."""
        mine = self._ordinals[filling.source.name]
        count: Counter[str] = Counter()
        for page in pages:
            here = "memory" if self.table.origin(page).ordinal == mine else "worker"
            count[self._landed.get(page, here)] += 1
        size = self.table.page_tokens
        return Cached(*(count[where] * size for where in ("memory", "worker", "host", "file")))

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
        before, pages = filling.chain.pages, min(last + 1, most)
        self._costs.fill.saw(pages - before, self._clock - filling.since)
        filling.since = self._clock
        return self._wake(self._fillings.advance(filling, pages))

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

    def _end_filling(self, name: FillingName) -> list[Send]:
        filling, waiters = self._fillings.end(name)
        if filling is not None:
            self._unpin(filling.pinned)
        return self._wake(waiters)

    def _unpin(self, pages: Iterable[int]) -> None:
        for page in self.cache.unpin(pages):
            if page not in self.cache and self.table.state(page) is PageState.SEALED:
                self._put_back(page)

    # ── from below and beside ─────────────────────────────────────────────────────────────────

    @property
    def _replicator(self) -> Incarnation | None:
        """The living replicator."""
        return next((writer for writer, kind in self._writers.items() if kind == "replicator"), None)

    def _fetch(self, filling: Filling) -> list[Send]:
        """Have the next pages brought, if somebody has them and that is faster than to fill them."""
        replicator = self._replicator
        if replicator is None or not filling.next_page:
            return []
        wishes: tuple[tuple[Kind, PageSource | None], ...] = (("file", FILE), ("host", filling.elsewhere))
        for kind, source in wishes:
            pages = [] if source is None else self._missing(filling, kind)[: self._available]
            if source is not None and self._costs.pays(kind, len(pages)):
                return [self._start_fetch(replicator, filling, source, pages)]
        return []

    def _missing(self, filling: Filling, kind: Kind) -> list[Missing]:
        """The pages from where a filling stands that a source has, one behind the other."""
        if (kind == "file" and not self._in_file) or (kind == "host" and not filling.elsewhere_pages):
            return []
        pages: list[Missing] = []
        chain = filling.chain.copy()
        size = chain.page_bytes
        while tokens := filling.tokens[chain.pages * size : (chain.pages + 1) * size]:
            parent, block = chain.parent, chain.pages
            key = chain.append(tokens)
            if kind == "file" and self._in_file is not None and key not in self._in_file:
                break
            if kind == "host" and block >= filling.elsewhere_pages:
                break
            pages.append(Missing(key, parent, tokens, block))
        return pages

    def _start_fetch(
        self, replicator: Incarnation, filling: Filling, source: PageSource, pages: list[Missing]
    ) -> Send:
        owner = self._owner(replicator)
        targets = tuple(self._take(len(pages)))
        refs = [self.table.lease(page, owner) for page in targets]
        # Pinned, since what has arrived is nobody's until the fetch has ended.
        self.cache.pin(targets)
        self._ticket += 1
        name = (replicator, SequenceKey(self._ticket, 0), 0)
        end = (pages[-1].block + 1) * filling.chain.page_bytes
        self._fillings.put(Filling(name, filling.tokens[:end], filling.chain.copy()))
        self._fetches[self._ticket] = Fetch(name, source, tuple(pages), targets)
        wanted = tuple(PageWanted(*page, ref) for page, ref in zip(pages, refs, strict=True))
        return Send(replicator, FetchWanted(self._ticket, source, wanted))

    def _fetch_ended(self, message: FetchEnded) -> list[Send]:
        fetch = self._fetches.pop(message.ticket, None)
        if fetch is None:
            return []
        kind = fetch.source.kind
        landed = min(message.landed, len(fetch.targets))
        for page in fetch.targets[:landed]:
            self.cache.add(page, self._clock)
            self._landed[page] = kind
        if kind == "file" and self._in_file is not None:
            self._in_file.difference_update(missing.key for missing in fetch.pages[landed:])
        self._costs.fetch[kind].saw(landed, message.seconds)
        self.pages_fetched[kind] += landed
        if kind == "host" and landed < len(fetch.targets):
            for filling in self._fillings:
                if filling.elsewhere == fetch.source:
                    # It has less than was thought: whoever asks it again would wait for nothing.
                    filling.elsewhere_pages = min(filling.elsewhere_pages, fetch.pages[landed].block)
        sends = self._end_filling(fetch.name)
        self._landed.clear()
        self._unpin(fetch.targets)
        for page in fetch.targets[landed:]:
            if self.table.state(page) is not PageState.FREE and page not in self.cache:
                self._put_back(page)
        return sends

    def _spill(self) -> list[Send]:
        """When pages become scarce, have those that go next written to the file before they go."""
        replicator = self._replicator
        room = SPILLS_MOST - len(self._spilling)
        if replicator is None or self._in_file is None or room <= 0:
            return []
        if len(self._free) >= SPILL_BELOW * self.table.pages:
            return []
        known = self._in_file
        pages = [p for p in self.cache.coming(SPILLS_MOST) if self.cache.index.key_of(p) not in known][:room]
        if not pages:
            return []
        refs = tuple(self.table.ref(page) for page in pages)
        self.cache.pin(pages)
        self._spilling.update(refs)
        return [Send(replicator, SpillWanted(refs))]

    def _pin(self, source: Incarnation, message: PinWanted, now: float) -> list[Send]:
        """Keep the cached pages of a prefix for a client of a gateway, or let go of them."""
        name = (source, message.name)
        before = self._pins.pop(name, None)
        if before is not None:
            self._unpin(before.pages)
        if not message.tokens or message.until <= now:
            return []
        size = 4 * self.table.page_tokens
        most = len(message.tokens) // size
        found: list[int] = []
        for identity in sorted(set(self._identities.values())):
            root = chain_root(identity, message.salt)
            pages = self.cache.find(root, message.tokens, most, now)
            found = max(found, pages, key=len)
        pinned = {page for pin in self._pins.values() for page in pin.pages}
        limit = int(PINNED_MOST * self.table.pages)
        if len(pinned | set(found)) > limit:
            said = f"{len(pinned)} pages are pinned, {len(found)} more would pass the {limit} that may be"
            return [Send(source, PinFact(message.name, 0, said))]
        self.cache.pin(found)
        self._pins[name] = Pin(found, message.until)
        return [Send(source, PinFact(message.name, len(found)))]

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
        sends += self._spill()
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
        if self._fetches or self._spilling:
            # What they hold comes back of itself, and whoever waits for them may be the one to give way.
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
            "pages_fetching": sum(len(fetch.targets) for fetch in self._fetches.values()),
            **{f"pages_from_{kind}": count for kind, count in self.pages_fetched.items()},
            "pages_in_file": len(self._in_file or ()),
            "pages_spilling": len(self._spilling),
            "pages_spilled": self.pages_spilled,
            "prefixes_pinned": len(self._pins),
            **self._costs.statistics(),
            **self.cache.statistics(),
        }
