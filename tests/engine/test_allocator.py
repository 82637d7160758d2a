"""The allocator: one owner a page, freed once, and whoever starves is relieved or somebody is told."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.allocator import Allocator
from engine.core import Send
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
    Member,
    PagesDoubted,
    PagesHeld,
    PagesReleased,
    PoolExhausted,
    PoolFact,
    Roster,
    Stop,
)
from engine.shapes import PageRef

ORDINALS = {"scheduler": 2, "a": 5, "b": 6, "c": 7}
A, B, C = (Incarnation(name, 1) for name in "abc")
SCHEDULER = Incarnation("scheduler", 1)


def member(incarnation: Incarnation) -> Member:
    kind = "scheduler" if incarnation.name == "scheduler" else "worker"
    return Member(incarnation.name, kind, ORDINALS[incarnation.name], incarnation.epoch, "", True)  # type: ignore[arg-type]


def owner(incarnation: Incarnation) -> Owner:
    return Owner(ORDINALS[incarnation.name], incarnation.epoch)


class Desk:
    """An allocator over a table, and what it said last."""

    def __init__(self, pages: int, *workers: Incarnation, table: PageTable | None = None) -> None:
        self.table = table or PageTable(memoryview(bytearray(pages * PageTable.BYTES)), pages)
        self.core = Allocator(self.table, ORDINALS)
        self.core.check()
        self.peers([SCHEDULER, *workers], [])
        for worker in workers:
            self.tell(worker, PagesHeld((), (), 0))

    def peers(self, up: list[Incarnation], down: list[Incarnation]) -> list[Send]:
        sends = self.core.peers([member(incarnation) for incarnation in up], down, 0.0)
        self.core.check()
        return sends

    def tell(self, source: Incarnation, message: object) -> list[Send]:
        sends = self.core.handle(source, message, 0.0)  # type: ignore[arg-type]
        self.core.check()
        return sends

    def want(self, worker: Incarnation, ahead: int, consumed: int = 0, need: int = 0) -> list[Send]:
        return self.tell(worker, LeaseWanted(consumed, ahead, need))

    def figures(self) -> dict[str, int | float]:
        return self.core.statistics()


def granted(sends: list[Send]) -> dict[str, tuple[PageRef, ...]]:
    return {str(s.to): s.message.pages for s in sends if isinstance(s.message, LeaseGranted)}


def recalled(sends: list[Send]) -> list[str]:
    return [str(send.to) for send in sends if isinstance(send.message, LeaseRecall)]


def exhausted(sends: list[Send]) -> int:
    return sum(isinstance(send.message, PoolExhausted) for send in sends)


def lease(desk: Desk, worker: Incarnation, ahead: int, need: int = 0) -> tuple[PageRef, ...]:
    """What a worker that has consumed nothing is granted for its want."""
    return granted(desk.want(worker, ahead, 0, need)).get(str(worker), ())


def use(desk: Desk, *pages: PageRef) -> None:
    """The owner fills them."""
    for block, page in enumerate(pages):
        desk.table.open(page.index, 1, 0, 1, block)


# ── leases ────────────────────────────────────────────────────────────────────────────────────


def test_leases_are_what_is_wanted_ahead_of_what_was_consumed() -> None:
    desk = Desk(10, A)
    pages = lease(desk, A, 4)
    assert len(pages) == 4
    assert lease(desk, A, 4) == (), "it has them ahead"
    use(desk, *pages[:3])
    assert len(granted(desk.want(A, 4, consumed=3))["a@1"]) == 3
    assert granted(desk.want(A, 2, consumed=3)) == {}
    assert len(granted(desk.want(A, 5, consumed=1))["a@1"]) == 1, "a late word does not take back the 3"


def test_a_stranger_gets_nothing() -> None:
    desk = Desk(10, A)
    assert lease(desk, B, 4) == ()
    assert desk.tell(B, PagesHeld((), (), 0)) == []
    assert lease(desk, B, 4) == (), "it was declared dead, or is not ready yet"


def test_who_has_least_goes_first() -> None:
    desk = Desk(8, A, B)
    lease(desk, A, 4)
    desk.tell(A, PagesReleased(()))
    lease(desk, B, 2)
    sends = desk.want(A, 8)
    assert len(granted(sends)["a@1"]) == 2
    assert granted(desk.want(B, 8)) == {}


def test_the_scheduler_hears_when_the_pool_changes_much_or_runs_dry() -> None:
    desk = Desk(128, A)
    told = [s.message for s in desk.want(A, 1) if isinstance(s.message, PoolFact)]
    assert told == [], "one page of 128 is no news"
    told = [s.message for s in desk.want(A, 20) if isinstance(s.message, PoolFact)]
    assert told == [PoolFact(128, 108)]
    told = [s.message for s in desk.want(A, 128) if isinstance(s.message, PoolFact)]
    assert told == [PoolFact(128, 0)]
    [fact] = [s.message for s in desk.peers([Incarnation("scheduler", 2)], [SCHEDULER])]
    assert fact == PoolFact(128, 0), "a new one is told at once"


# ── releases ──────────────────────────────────────────────────────────────────────────────────


def test_a_page_is_freed_once() -> None:
    """Field report 5: the second free is counted and does nothing, even when the page has a new life."""
    desk = Desk(2, A, B)
    pages = lease(desk, A, 1)
    desk.tell(A, LeaseReturned(pages, 1, 0))
    assert desk.figures()["pages_free"] == 2
    desk.tell(A, PagesReleased(pages))
    assert desk.figures()["stale_releases"] == 1
    assert desk.figures()["pages_free"] == 2
    assert len(lease(desk, B, 2)) == 2
    desk.tell(A, PagesReleased(pages))
    desk.tell(B, PagesReleased(pages))
    assert desk.figures()["pages_free"] == 0
    assert desk.figures()["stale_releases"] == 3


@pytest.mark.parametrize("ref", [PageRef(0, 99, 0), PageRef(0, -1, 0), PageRef(1, 0, 0), PageRef(0, 3, 0)])
def test_a_release_of_what_is_no_page_of_ours_is_stale(ref: PageRef) -> None:
    desk = Desk(4, A)
    lease(desk, A, 2)
    desk.tell(A, PagesReleased((ref,)))
    assert desk.figures()["stale_releases"] == 1
    assert desk.figures()["pages_free"] == 2


def test_only_the_owner_releases() -> None:
    desk = Desk(4, A, B)
    pages = lease(desk, A, 2)
    desk.tell(B, PagesReleased(pages))
    assert desk.figures()["pages_free"] == 2
    desk.table.open(pages[0].index, 1, 0, 1, 0)
    desk.table.adopt(pages[0].index, owner(B), 2)
    desk.tell(A, PagesReleased(pages))
    assert desk.figures()["pages_free"] == 3
    desk.tell(B, PagesReleased(pages))
    assert desk.figures()["pages_free"] == 4


# ── starvation ────────────────────────────────────────────────────────────────────────────────


def test_spare_leases_are_recalled_once_and_go_to_who_starves() -> None:
    desk = Desk(4, A, B)
    pages = lease(desk, A, 4)
    sends = desk.want(B, 3, need=1)
    assert recalled(sends) == ["a@1"]
    assert not exhausted(sends)
    sends = desk.want(B, 4, need=2)
    assert not recalled(sends), "one is on its way"
    assert not exhausted(sends)
    sends = desk.tell(A, LeaseReturned(pages, 4, 4))
    assert {name: len(refs) for name, refs in granted(sends).items()} == {"b@1": 4}, "not back to a"


def test_what_will_be_used_at_once_is_not_recalled() -> None:
    """Else a last page could go to and fro between two workers that stand still."""
    desk = Desk(1, A, B)
    assert len(lease(desk, A, 4, need=2)) == 1
    sends = desk.want(B, 4, need=1)
    assert not recalled(sends)
    assert exhausted(sends) == 1


def test_an_idle_worker_does_not_starve() -> None:
    desk = Desk(2, A, B)
    pages = lease(desk, A, 1, need=1)
    use(desk, *lease(desk, B, 1))
    assert not exhausted(desk.tell(A, LeaseReturned(pages, 1, 0)))
    sends = desk.want(B, 1, consumed=1)
    assert len(granted(sends)["b@1"]) == 1
    assert not exhausted(sends)


def test_exhaustion_is_said_once_until_something_changes() -> None:
    desk = Desk(2, A, B)
    pages = lease(desk, A, 2)
    for page in pages:
        desk.table.open(page.index, 1, 0, 1, page.index)
    assert exhausted(desk.want(A, 1, consumed=2)) == 0
    assert exhausted(desk.want(B, 1, need=1)) == 1
    for _ in range(3):
        assert exhausted(desk.tell(A, PagesReleased(()))) == 0
        assert exhausted(desk.peers([C], [])) == 0
    # A page came back, went to who starved, and was not enough.
    sends = desk.tell(A, PagesReleased(pages[:1]))
    assert len(granted(sends)["b@1"]) == 1
    desk.table.open(pages[0].index, 2, 0, 1, 0)
    assert exhausted(desk.want(B, 2, consumed=1, need=1)) == 1


def test_exhaustion_is_said_again_when_who_gave_way_had_no_page() -> None:
    """Else everybody would wait for a page that nobody is going to give back."""
    desk = Desk(1, A, B)
    [page] = lease(desk, A, 1)
    desk.table.open(page.index, 1, 0, 1, 0)
    assert exhausted(desk.want(A, 2, consumed=1, need=1)) == 1
    assert exhausted(desk.want(B, 1, need=1)) == 1
    assert exhausted(desk.want(B, 0)) == 1, "b gave way: a still starves"


def test_exhaustion_is_said_to_a_new_scheduler_and_after_a_death() -> None:
    desk = Desk(1, A, B)
    [page] = lease(desk, A, 1)
    desk.table.open(page.index, 1, 0, 1, 0)
    assert exhausted(desk.want(A, 2, consumed=1, need=1)) == 1
    assert exhausted(desk.peers([Incarnation("scheduler", 2)], [SCHEDULER])) == 1
    assert exhausted(desk.peers([], [B])) == 0, "first the fence: b's pages may relieve"
    assert exhausted(desk.tell(A, FencePassed(B))) == 1


# ── deaths ────────────────────────────────────────────────────────────────────────────────────


def test_pages_of_the_dead_wait_for_every_fence() -> None:
    desk = Desk(4, A, B, C)
    pages = lease(desk, A, 2)
    for block, page in enumerate(pages):
        desk.table.open(page.index, 1, 0, 1, block)
    sends = desk.peers([], [A])
    assert sends == [Send(B, FenceWanted(A)), Send(C, FenceWanted(A))]
    # The hand-over was on its way: b adopts before it passes the fence.
    desk.table.adopt(pages[0].index, owner(B), 2)
    desk.tell(B, FencePassed(A))
    desk.tell(B, FencePassed(A))
    assert desk.figures()["pages_free"] == 2
    desk.tell(C, FencePassed(A))
    assert desk.figures()["pages_free"] == 3, "what b adopted is b's"
    assert desk.figures()["pages_reclaimed"] == 1
    assert desk.figures()["fences_waiting"] == 0


def test_a_fence_does_not_wait_for_the_dead() -> None:
    desk = Desk(4, A, B)
    lease(desk, A, 2)
    lease(desk, B, 2)
    desk.peers([], [A])
    desk.peers([], [B])
    assert desk.figures()["pages_free"] == 4
    assert desk.figures()["fences_waiting"] == 0


def test_the_dead_are_granted_nothing() -> None:
    desk = Desk(4, A, B)
    desk.peers([], [A])
    desk.tell(A, PagesHeld((), (), 0))
    assert lease(desk, A, 4) == ()
    assert len(lease(desk, B, 4)) == 4


# ── restarts ──────────────────────────────────────────────────────────────────────────────────


def test_a_restarted_allocator_finds_every_page_again() -> None:
    """One page lease, one open, one sealed, one that only the table knows, one of a dead worker."""
    first = Desk(8, A, B)
    held = lease(first, A, 4)
    [orphan] = lease(first, B, 1)
    table = first.table
    table.open(held[1].index, 1, 0, 1, 0)
    table.open(held[2].index, 1, 0, 1, 1)
    table.seal(held[2].index)
    core = Allocator(table, ORDINALS)
    core.check()
    assert next(s.message for s in core.peers([member(SCHEDULER), member(A)], (), 0.0)) == FenceWanted(B)
    core.handle(A, FencePassed(B), 0.0)
    assert not table.is_current(orphan)
    sends = core.handle(A, PagesHeld(held[:1], held[1:3], 2), 0.0)
    assert sends == [Send(A, PagesDoubted(held[3:]))]
    assert core._doubted == set(held[3:])
    core.handle(A, PagesReleased(held[3:]), 0.0)
    assert not core._doubted
    core.check()
    assert core.statistics()["pages_free"] == 5
    core.handle(A, LeaseWanted(2, 1, 0), 0.0)
    assert core.statistics()["pages_leased"] == 1, "it had one ahead already"


@pytest.mark.parametrize("message", [Drain(), Stop(), Roster((1, 1), ())])
def test_what_is_the_shells_own_changes_nothing(message: Drain | Stop | Roster) -> None:
    assert Desk(1, A).tell(A, message) == []


# ── against a naive model ─────────────────────────────────────────────────────────────────────


@dataclass
class Holder:
    """What one worker has, by its own account."""

    leased: list[PageRef] = field(default_factory=list)
    used: list[PageRef] = field(default_factory=list)
    arriving: list[PageRef] = field(default_factory=list)
    """Granted by the living allocator and not received yet."""
    consumed: int = 0
    said_consumed: int = 0
    granted: int = 0
    need: int = 0
    known: bool = False

    @property
    def starving(self) -> bool:
        return self.known and self.need > 0 and self.granted == self.said_consumed


class Machine(RuleBasedStateMachine):
    """Workers that lease, use, adopt, release (twice, too), die; an allocator that dies."""

    @initialize(pages=st.integers(1, 10))
    def begin(self, pages: int) -> None:
        self.pages = pages
        self.table = PageTable(memoryview(bytearray(pages * PageTable.BYTES)), pages)
        self.epochs = dict.fromkeys("abc", 0)
        self.workers: dict[Incarnation, Holder] = {}
        self.ghosts: dict[Incarnation, set[PageRef]] = {}
        self.fences: set[tuple[Incarnation, Incarnation]] = set()
        self.released: list[tuple[Incarnation, PageRef]] = []
        self.told = False
        self.start_allocator([])

    def start_allocator(self, order: list[Incarnation]) -> None:
        self.core = Allocator(self.table, ORDINALS)
        self.told = False
        self.fences.clear()
        for holder in self.workers.values():
            holder.arriving.clear()
            holder.known = False
        self.peers([SCHEDULER, *order], [])
        for worker in order:
            self.introduce(worker)

    def introduce(self, worker: Incarnation) -> None:
        holder = self.workers[worker]
        holder.known, holder.need, holder.said_consumed = True, 0, holder.consumed
        holder.granted = holder.consumed + len(holder.leased)
        self.tell(worker, PagesHeld(tuple(holder.leased), tuple(holder.used), holder.consumed))

    def peers(self, up: list[Incarnation], down: list[Incarnation]) -> None:
        if down:
            self.told = False
        self.act(self.core.peers([member(incarnation) for incarnation in up], down, 0.0))

    def tell(self, source: Incarnation, message: object) -> None:
        self.act(self.core.handle(source, message, 0.0))  # type: ignore[arg-type]

    def held(self) -> dict[PageRef, Incarnation]:
        """Who holds or may still write each page."""
        pages: dict[PageRef, Incarnation] = {}
        for worker, holder in self.workers.items():
            for page in (*holder.leased, *holder.used, *holder.arriving):
                assert page not in pages, "held twice"
                pages[page] = worker
        return pages

    def act(self, sends: list[Send]) -> None:
        for send in sends:
            worker, message = send.to, send.message
            match message:
                case LeaseGranted(pages=pages):
                    assert isinstance(worker, Incarnation)
                    taken = {page.index for page in self.held()}
                    taken |= {p.index for d, pages_ in self.ghosts.items() if self.fenced(d) for p in pages_}
                    assert taken.isdisjoint(page.index for page in pages), "a page has two owners"
                    self.workers[worker].arriving += pages
                    self.workers[worker].granted += len(pages)
                case FenceWanted(dead=dead):
                    assert isinstance(worker, Incarnation)
                    self.fences.add((worker, dead))
                case PoolExhausted(starving=starving):
                    assert self.workers[starving].starving
                    assert not self.told, "told twice, and nothing had changed"
                    self.told = True
        # Recalls and doubts are answered at once, when everything else of the answer has been noted.
        for send in sends:
            worker, message = send.to, send.message
            if isinstance(message, LeaseRecall):
                assert isinstance(worker, Incarnation)
                self.receive(worker)
                self.give_back(worker, ahead=2 + self.workers[worker].need)
            elif isinstance(message, PagesDoubted):
                assert isinstance(worker, Incarnation)
                holder = self.workers[worker]
                mine = {*holder.leased, *holder.used}
                self.release(worker, tuple(page for page in message.pages if page not in mine))

    def fenced(self, dead: Incarnation) -> bool:
        return any(pending == dead for _, pending in self.fences)

    def release(self, worker: Incarnation, pages: tuple[PageRef, ...]) -> None:
        self.told = self.told and not pages
        self.released += [(worker, page) for page in pages]
        self.tell(worker, PagesReleased(pages))

    def give_back(self, worker: Incarnation, ahead: int) -> None:
        holder = self.workers[worker]
        keep = holder.need if ahead else 0
        pages = tuple(holder.leased[keep:])
        del holder.leased[keep:]
        holder.consumed += len(pages)
        holder.said_consumed = holder.consumed
        holder.need = min(holder.need, ahead)
        self.told = self.told and not pages
        self.released += [(worker, page) for page in pages]
        self.tell(worker, LeaseReturned(pages, holder.consumed, ahead))

    def receive(self, worker: Incarnation) -> None:
        holder = self.workers[worker]
        holder.leased += holder.arriving
        holder.arriving.clear()

    def some_worker(self, data: st.DataObject) -> Incarnation:
        return data.draw(st.sampled_from(sorted(self.workers)))

    @rule(name=st.sampled_from("abc"))
    def lives_or_dies(self, name: str) -> None:
        old = Incarnation(name, self.epochs[name])
        if old in self.workers:
            holder = self.workers.pop(old)
            self.ghosts[old] = {*holder.leased, *holder.used, *holder.arriving}
            self.fences = {pair for pair in self.fences if pair[0] != old}
            self.peers([], [old])
            return
        self.epochs[name] += 1
        new = Incarnation(name, self.epochs[name])
        self.workers[new] = Holder()
        self.peers([new], [])
        self.introduce(new)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), ahead=st.integers(1, 4), need=st.integers(0, 2), late=st.integers(0, 1))
    def want(self, data: st.DataObject, ahead: int, need: int, late: int) -> None:
        worker = self.some_worker(data)
        holder = self.workers[worker]
        holder.said_consumed = max(holder.said_consumed, holder.consumed - late)
        holder.need = need
        self.told = False
        self.tell(worker, LeaseWanted(holder.consumed - late, ahead + need, need))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), count=st.integers(1, 3))
    def use(self, data: st.DataObject, count: int) -> None:
        worker = self.some_worker(data)
        self.receive(worker)
        holder = self.workers[worker]
        for _ in range(min(count, len(holder.leased))):
            page = holder.leased.pop(0)
            holder.consumed += 1
            self.table.open(page.index, 1, 0, 1, len(holder.used))
            holder.used.append(page)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        worker = self.some_worker(data)
        used = self.workers[worker].used
        pages = tuple(used[: data.draw(st.integers(0, len(used)))])
        del used[: len(pages)]
        self.release(worker, pages)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def go_idle(self, data: st.DataObject) -> None:
        worker = self.some_worker(data)
        self.receive(worker)
        self.give_back(worker, ahead=0)

    @precondition(lambda self: self.released and self.workers)
    @rule(data=st.data())
    def release_again(self, data: st.DataObject) -> None:
        """By whoever did, or by somebody else: nothing may come of it."""
        source, page = data.draw(st.sampled_from(self.released))
        if data.draw(st.booleans()):
            source = self.some_worker(data)
        before = bytes(self.table.words.cast("B"))
        sends = self.core.handle(source, PagesReleased((page, page)), 0.0)
        assert sends == []
        assert bytes(self.table.words.cast("B")) == before

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        source = self.some_worker(data)
        target = data.draw(st.sampled_from(sorted(set(self.workers) - {source})))
        while self.workers[source].used:
            page = self.workers[source].used.pop()
            self.table.adopt(page.index, owner(target), 2)
            self.workers[target].used.append(page)

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), adopts=st.booleans())
    def pass_fence(self, data: st.DataObject, adopts: bool) -> None:
        worker, dead = data.draw(st.sampled_from(sorted(self.fences)))
        if adopts:
            # A hand-over of the dead was on its way and came before the fence.
            for page in sorted(self.ghosts[dead]):
                if self.table.is_current(page) and self.table.state(page.index) is PageState.OPEN:
                    assert self.table.owner(page.index) == owner(dead)
                    self.table.adopt(page.index, owner(worker), 3)
                    self.workers[worker].used.append(page)
                    self.ghosts[dead].discard(page)
                    break
        self.fences.discard((worker, dead))
        self.tell(worker, FencePassed(dead))

    @rule(data=st.data())
    def allocator_restarts(self, data: st.DataObject) -> None:
        self.start_allocator(data.draw(st.permutations(sorted(self.workers))))

    @rule()
    def scheduler_restarts(self) -> None:
        self.told = False
        self.peers([Incarnation("scheduler", 2)], [SCHEDULER])

    @invariant()
    def every_page_has_one_owner(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        figures = self.core.statistics()
        parts = [figures[f"pages_{state}"] for state in ("free", "leased", "open", "sealed")]
        assert sum(parts) == figures["pages_total"] == self.pages
        held = self.held()
        for page, worker in held.items():
            assert self.table.is_current(page)
            assert self.table.owner(page.index) == owner(worker)
            assert self.table.state(page.index) is not PageState.FREE
        ghosts = sum(
            self.table.is_current(page)
            for dead in self.ghosts
            if self.fenced(dead)
            for page in self.ghosts[dead]
        )
        assert len(held) + ghosts + figures["pages_free"] == self.pages, "a page leaked"

    @invariant()
    def nobody_starves_unheard(self) -> None:
        if hasattr(self, "core") and any(holder.starving for holder in self.workers.values()):
            assert self.told or self.fences, "somebody starves, and nobody was asked"
            assert self.fences or self.core.statistics()["pages_free"] == 0

    def teardown(self) -> None:
        """When all fences are passed and all workers idle, the whole pool is free."""
        if not hasattr(self, "core"):
            return
        for worker, dead in sorted(self.fences):
            self.fences.discard((worker, dead))
            self.tell(worker, FencePassed(dead))
        # Twice: while some still starve, others are asked for leases and want new ones.
        for worker in 2 * sorted(self.workers):
            holder = self.workers[worker]
            holder.said_consumed, holder.need, self.told = holder.consumed, 0, False
            self.tell(worker, LeaseWanted(holder.consumed, 0, 0))
        for worker, holder in self.workers.items():
            self.receive(worker)
            pages, holder.used = tuple(holder.used), []
            self.release(worker, pages)
            self.give_back(worker, ahead=0)
        self.core.check()
        assert self.core.statistics()["pages_free"] == self.pages


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
