"""The allocator: who may write which page, and when a page is free again.

    free + leased + open + sealed = total               (every page is in one state)
    leased pages of a worker ≤ granted − consumed       (a worker consumes before it says so)
    a page is freed once: a release names its generation, and freeing raises it

All durable state is the page table in shared memory. A restarted allocator rebuilds the rest from
it and from what the workers say they hold.

**Pages of a dead worker.** A hand-over may be on its way when the prefill worker dies, and the
decode worker may adopt the pages just as the allocator frees them. So the allocator first asks
every live worker to adopt nothing more from the dead incarnation (a fence); when all have passed
it (or died), whatever the dead one still owns can be freed. The roster declares an incarnation
dead only when its process has been reaped, so none of its threads can still write.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from engine.core import Send, Statistics
from engine.ids import Incarnation
from engine.layout import Owner, PageTable
from engine.lifecycle import PageState
from engine.messages import (
    Drain,
    FencePassed,
    FenceWanted,
    LeaseGranted,
    LeaseRecall,
    LeaseReturned,
    LeaseWanted,
    PagesDoubted,
    PagesHeld,
    PagesReleased,
    PoolExhausted,
    PoolFact,
    Roster,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.messages import Member, ToAllocator
    from engine.shapes import PageRef


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


class Allocator:
    """Leases, releases and reclaims the pages of one pool."""

    def __init__(self, table: PageTable, ordinals: Mapping[str, int]) -> None:
        self.table = table
        self._ordinals = dict(ordinals)
        self._names = {ordinal: name for name, ordinal in ordinals.items()}
        self._free: deque[int] = deque()
        self._accounts: dict[Incarnation, LeaseAccount] = {}
        self._workers: set[Incarnation] = set()
        self._fences: dict[Incarnation, set[Incarnation]] = {}
        self._found: set[Owner] = set()
        self._doubted: set[PageRef] = set()
        self._seen_roster = False
        self._told_free = -1
        self._exhausted_told = False
        self.stale_releases = 0
        self.reclaimed = 0
        for page in range(table.pages):
            if table.state(page) is PageState.FREE:
                self._free.append(page)
            else:
                self._found.add(table.owner(page))

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        sends: list[Send] = []
        self._workers |= {member.incarnation for member in up if member.kind == "worker"}
        dead = [worker for worker in down if worker in self._workers]
        self._workers.difference_update(dead)
        for worker in dead:
            self._accounts.pop(worker, None)
            self._exhausted_told = False
        if not self._seen_roster:
            self._seen_roster = True
            alive = {Owner(member.ordinal, member.epoch) for member in up}
            dead += [
                Incarnation(self._names[owner.ordinal], owner.epoch)
                for owner in sorted(self._found)
                if owner not in alive
            ]
        for fence in list(self._fences):
            self._fences[fence] -= set(dead)
        for worker in dead:
            self._fences[worker] = set(self._workers)
            sends += [Send(other, FenceWanted(worker)) for other in sorted(self._workers)]
        self._reclaim()
        if any(member.kind == "scheduler" for member in up):
            self._told_free = -1
            self._exhausted_told = False
        return sends + self._grant()

    def handle(self, source: Incarnation, message: ToAllocator, now: float) -> list[Send]:
        """Take one message; the answers are leases, fences and facts for the scheduler."""
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
                if source not in self._workers:
                    return []
                granted = message.consumed + len(message.leased)
                self._accounts[source] = LeaseAccount(granted, message.consumed)
                return self._ask_for_rest(source, {*message.leased, *message.used})
            case LeaseReturned():
                account = self._accounts.get(source)
                if account is not None:
                    account.consumed = max(account.consumed, message.consumed)
                    account.ahead, account.recalled = message.ahead, False
                    account.need = min(account.need, message.ahead)
                self._release(source, message.pages)
            case PagesReleased():
                self._release(source, message.pages)
            case FencePassed():
                if message.dead in self._fences:
                    self._fences[message.dead].discard(source)
                    self._reclaim()
            case Roster() | Drain() | Stop():
                return []
            case _:
                assert_never(message)
        return self._grant()

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
        for ref in pages:
            if (
                self.table.is_current(ref)
                and self.table.owner(ref.index) == owner
                and self.table.state(ref.index) is not PageState.FREE
            ):
                self._put_back(ref.index)
            else:
                self.stale_releases += 1

    def _reclaim(self) -> None:
        done = [worker for worker, waiting in self._fences.items() if not waiting]
        owners = {self._owner(worker) for worker in done}
        for worker in done:
            del self._fences[worker]
        if not owners:
            return
        for page in range(self.table.pages):
            if self.table.state(page) is not PageState.FREE and self.table.owner(page) in owners:
                self._put_back(page)
                self.reclaimed += 1

    def _ask_for_rest(self, source: Incarnation, held: set[PageRef]) -> list[Send]:
        """Ask for the pages that a worker owns by the table but did not name.

        Its release of them, or the grant that would have told it, died with the last allocator; or
        it took them over after it spoke. Only the worker can tell, so it is asked once more.
        """
        owner = self._owner(source)
        rest = tuple(
            self.table.ref(page)
            for page in range(self.table.pages)
            if self.table.state(page) is not PageState.FREE and self.table.owner(page) == owner
        )
        rest = tuple(page for page in rest if page not in held)
        self._doubted.update(rest)
        return [Send(source, PagesDoubted(rest))] if rest else []

    def _grant(self) -> list[Send]:
        sends: list[Send] = []
        # Who starves goes first, else a recalled lease would go back; then who has least, so that a
        # hungry worker cannot starve another one.
        order = sorted(self._accounts.items(), key=lambda item: (not item[1].starving, item[1].outstanding))
        for worker, account in order:
            wanted = account.consumed + account.ahead - account.granted
            if wanted > 0 and self._free:
                owner = self._owner(worker)
                pages = tuple(
                    self.table.lease(self._free.popleft(), owner) for _ in range(min(wanted, len(self._free)))
                )
                account.granted += len(pages)
                sends.append(Send(worker, LeaseGranted(pages)))
        sends += self._relieve()
        free = len(self._free)
        step = max(1, self.table.pages // 64)
        if abs(free - self._told_free) >= step or (free == 0) != (self._told_free == 0):
            self._told_free = free
            sends.append(Send("scheduler", PoolFact(self.table.pages, free)))
        return sends

    def _relieve(self) -> list[Send]:
        """Recall spare leases for a starving worker; when there are none, the scheduler must preempt."""
        starving = next((worker for worker, account in self._accounts.items() if account.starving), None)
        if starving is None or self._free or self._fences:
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

    def statistics(self) -> Statistics:
        states = Counter(self.table.state(page) for page in range(self.table.pages))
        return {
            "pages_total": self.table.pages,
            "pages_free": states[PageState.FREE],
            "pages_cached": 0,
            "pages_leased": states[PageState.LEASED],
            "pages_open": states[PageState.OPEN],
            "pages_sealed": states[PageState.SEALED],
            "pages_reclaimed": self.reclaimed,
            "stale_releases": self.stale_releases,
            "fences_waiting": len(self._fences),
        }
