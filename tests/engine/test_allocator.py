"""The allocator: one owner a page, freed once, and whoever starves is relieved or somebody is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from allocator_desk import (
    KEY,
    ORDINALS,
    PAGE,
    ROOT,
    SCHEDULER,
    A,
    B,
    C,
    Desk,
    exhausted,
    granted,
    lease,
    member,
    owner,
    recalled,
    seals,
    use,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tables import OldestFirst, page_table

from engine.allocator import Allocator
from engine.chain import token_bytes
from engine.core import Send
from engine.ids import Incarnation, SequenceKey
from engine.lifecycle import PageState
from engine.messages import (
    Cached,
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
    PagesSealed,
    PoolExhausted,
    PoolFact,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
    Roster,
    Stop,
)
from engine.shapes import PageRef

if TYPE_CHECKING:
    from engine.layout import Owner

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


# ── the prefix cache ──────────────────────────────────────────────────────────────────────────


def test_what_is_sealed_and_released_is_found_and_makes_room() -> None:
    desk = Desk(4, A, B)
    pages = desk.fill(A, [*[1] * PAGE, *[2] * PAGE, *[3] * PAGE])
    assert desk.census() == {"free": 1, "held": 3}
    desk.let_go(A, *pages)
    assert desk.census() == {"free": 1, "cached": 3}
    log = [*[1] * PAGE, *[2] * PAGE, 9]
    assert desk.seek(B, log).pages == pages[:2]
    assert len(lease(desk, A, 4)) == 2, "what is free, and the one that nobody was granted"
    assert not desk.table.is_current(pages[2]), "children first"
    assert desk.figures()["pages_evicted"] == 1


def test_a_page_is_kept_from_the_grant_until_the_last_who_took_it_lets_go() -> None:
    desk = Desk(1, A, B, C)
    [page] = desk.fill(A, [1] * PAGE)
    desk.let_go(A, page)
    log = [1] * 5
    grants = [desk.seek(worker, log) for worker in (A, B)]
    assert [grant.pages for grant in grants] == [(page,), (page,)]
    assert not granted(desk.want(C, 1))
    desk.tell(B, PrefixFact(grants[1].key, 1, 0, False))
    assert not granted(desk.want(C, 1)), "b was cancelled before it came; a may still take it"
    assert not granted(desk.take(A, grants[0]))
    assert not granted(desk.tell(A, PrefixFact(grants[0].key, 1, 1, False)))
    assert desk.census() == {"held": 1}
    assert len(granted(desk.let_go(A, page))["c@1"]) == 1


def test_of_two_pages_with_the_same_tokens_one_is_cached_and_the_other_free_when_let_go() -> None:
    """Two that were filled side by side; whichever is released first."""
    for order in ((A, B), (B, A)):
        desk = Desk(2, A, B)
        pages = {worker: desk.fill(worker, [1] * PAGE)[0] for worker in (A, B)}
        for worker in order:
            desk.let_go(worker, pages[worker])
        assert desk.census() == {"free": 1, "cached": 1}
        assert desk.seek(A, [1] * 5).pages == (pages[A],)


def test_a_page_without_a_key_is_free_when_its_last_holder_lets_go() -> None:
    desk = Desk(1, A, B)
    [page] = lease(desk, A, 1)
    use(desk, page)
    desk.table.seal(page.index)
    desk.tell(A, PagesSealed(KEY, 1, (page,)))
    desk.rows[B][page.index] = 1
    desk.let_go(A, page)
    assert desk.census() == {"held": 1}
    desk.let_go(B, page)
    assert desk.census() == {"free": 1}


def test_a_release_that_overtakes_the_announcement_frees_the_page_once() -> None:
    """A filled it and handed it over; b's word came before a's."""
    desk = Desk(2, A, B)
    [page] = lease(desk, A, 1)
    use(desk, page)
    desk.table.seal(page.index, seals([1] * PAGE)[0])
    desk.rows[A][page.index] = 0
    desk.tell(B, PagesReleased((page,)))
    desk.tell(A, PagesSealed(KEY, 1, (page,)))
    desk.tell(A, PagesReleased((page,)))
    assert desk.census() == {"free": 2}
    assert desk.seek(B, [1] * 5).pages == ()


def test_salts_do_not_meet() -> None:
    desk = Desk(4, A, B)
    desk.fill(A, [1] * PAGE)
    assert desk.seek(B, [1] * 5, salt="tenant").pages == ()
    assert len(desk.seek(B, [1] * 5, number=10).pages) == 1


def test_where_a_page_was_is_said_with_it() -> None:
    """Memory: what an earlier life of the same worker filled, too."""
    desk = Desk(4, A, B)
    log = [*[1] * PAGE, *[2] * PAGE, 3]
    mine = desk.fill(A, log[:PAGE])
    theirs = lease(desk, B, 1)
    use(desk, *theirs, worker=B)
    desk.table.seal(theirs[0].index, seals(log)[1])
    desk.tell(B, PagesSealed(KEY, 1, theirs))
    assert desk.seek(A, log).cached == Cached(memory=PAGE, worker=PAGE)
    assert desk.seek(A, log, have=1, number=10).cached == Cached(worker=PAGE)
    desk.let_go(A, *mine)
    again = Incarnation("a", 2)
    desk.peers([again], [A])
    desk.rows[again] = desk.table.claim(owner(again))
    desk.tell(again, PagesHeld((), (), 0))
    assert desk.seek(again, log).cached == Cached(memory=PAGE, worker=PAGE)


def test_a_wish_that_is_said_twice_pins_once() -> None:
    """Field report 8: said again in the same name it replaces the first, which nobody can end any more."""
    desk = Desk(2, A, B)
    [page] = desk.fill(A, [1] * PAGE)
    desk.seek(B, [1] * 9)
    assert desk.seek(A, [1] * 9, number=7).more, "it waits for what b fills"
    grant = desk.seek(B, [1] * 9)
    desk.take(B, grant, filling=False)
    desk.tell(A, PrefixFact(SequenceKey(7, 0), 1, 0, False))
    desk.let_go(B, page)
    desk.let_go(A, page)
    assert desk.census() == {"free": 1, "cached": 1}
    assert desk.figures()["prefixes_filling"] == 0
    assert desk.figures()["pages_pinned"] == 0


def test_the_census_counts_every_page_once() -> None:
    desk = Desk(9, A, B, C)
    desk.gone = set()
    one, two, *_ = desk.fill(A, [*[1] * PAGE, *[2] * PAGE, 3])
    desk.let_go(A, two)
    lease(desk, A, 1)
    use(desk, *lease(desk, B, 2)[:1], worker=B)
    desk.peers([], [B])
    assert desk.census() == {"free": 3, "cached": 1, "held": 1, "leased": 1, "open": 1, "quarantined": 2}
    figures = desk.figures()
    names = ("free", "cached", "sealed", "leased", "open", "quarantined")
    assert sum(figures[f"pages_{name}"] for name in names) == figures["pages_total"] == 9
    assert desk.table.is_current(one)


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
    use(desk, *lease(desk, B, 1), worker=B)
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
        assert exhausted(desk.tell(A, FencePassed(C))) == 0
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


def test_exhaustion_is_said_again_when_who_gave_way_had_only_what_others_hold() -> None:
    desk = Desk(1, A, B)
    [page] = desk.fill(A, list(range(PAGE)))
    desk.take(B, desk.seek(B, list(range(PAGE + 1))), filling=False)
    assert exhausted(desk.want(A, 1, consumed=1, need=1)) == 1
    assert exhausted(desk.let_go(B, page)) == 1, "a holds it still, and starves"


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


@pytest.mark.parametrize("first", ["fences", "proof"])
def test_what_the_dead_could_write_waits_for_fences_and_proof(first: str) -> None:
    """Field report 14: no page is used again while somebody may still write it. In either order."""
    desk = Desk(4, A, B)
    desk.gone = set()
    desk.fill(A, [1] * 6)
    lease(desk, A, 1)
    assert desk.census() == {"free": 1, "held": 1, "open": 1, "leased": 1}
    desk.peers([], [A])
    assert desk.census() == {"free": 1, "held": 1, "quarantined": 2}
    assert desk.core.waits_for_proof
    assert len(lease(desk, B, 4)) == 1
    for event in ("fences", "proof") if first == "fences" else ("proof", "fences"):
        assert desk.figures()["pages_quarantined"] == 2
        if event == "fences":
            desk.tell(B, FencePassed(A))
        else:
            assert desk.core.tick(0.0) == []
            desk.gone.add(owner(A))
            granted_then = granted(desk.core.tick(1.0))
            desk.core.check()
            assert len(granted_then.get("b@1", ())) == (3 if first == "fences" else 0)
    assert not desk.core.waits_for_proof
    assert desk.census() == {"leased": 4}, "b wanted four: what is found by its tokens makes room"
    assert desk.figures()["pages_reclaimed"] == 2


def test_a_starving_worker_does_not_preempt_for_what_the_dead_will_leave() -> None:
    desk = Desk(2, A, B)
    desk.gone = set()
    lease(desk, A, 2)
    desk.peers([], [A])
    desk.tell(B, FencePassed(A))
    assert not exhausted(desk.want(B, 1, need=1))
    desk.gone.add(owner(A))
    assert len(granted(desk.core.tick(0.0))["b@1"]) == 1


def test_sealed_pages_of_the_dead_are_found_at_once() -> None:
    """Before any fence or proof: nobody writes them. Also those that it had no time to announce."""
    desk = Desk(6, A, B, C)
    desk.gone = set()
    log = [*[1] * PAGE, *[2] * PAGE, 3]
    said, unsaid, _ = lease(desk, A, 3)
    use(desk, said, unsaid)
    for page, seal in zip((said, unsaid), seals(log), strict=True):
        desk.table.seal(page.index, seal)
    desk.tell(A, PagesSealed(KEY, 1, (said,)))
    assert desk.seek(B, log).pages == (said,)
    desk.peers([], [A])
    assert desk.seek(C, log).pages == (said, unsaid)


def test_a_page_that_only_the_dead_hold_is_idle_when_they_are_gone() -> None:
    desk = Desk(2, A, B)
    desk.gone = set()
    [page] = desk.fill(A, [1] * PAGE)
    desk.take(B, desk.seek(B, [1] * 5), filling=False)
    desk.let_go(A, page)
    desk.peers([], [B])
    desk.tell(A, FencePassed(B))
    assert desk.census() == {"free": 1, "held": 1}, "b's row is not cleared: it may be at work"
    desk.gone.add(owner(B))
    desk.core.tick(0.0)
    assert desk.census() == {"free": 1, "cached": 1}
    assert len(lease(desk, A, 2)) == 2


MOMENTS = ["leased", "open", "sealed", "granted", "taken", "waits", "fills", "nothing"]
SHOWN = ["leased", "open", "sealed", "taken"]
"""What the page table shows."""


@pytest.mark.parametrize("when", MOMENTS)
@pytest.mark.parametrize("also", ["nobody", "allocator", "allocator, before"])
def test_whoever_dies_whenever_all_comes_back(when: str, also: str) -> None:
    """Field reports 3 and 9: once proven and fenced, without a free page and without a time-out."""
    desk = Desk(4, A, B)
    log = [*[1] * PAGE, *[2] * PAGE, 3]
    if when in ("granted", "taken", "waits"):
        pages = desk.fill(B, log[:PAGE])
        if when == "waits":
            desk.seek(B, log, number=5)
        grant = desk.seek(A, log)
        assert grant.more == (when == "waits")
        if when == "taken":
            desk.take(A, grant)
        desk.let_go(B, *pages)
    elif when == "fills":
        desk.seek(A, log)
    elif when != "nothing":
        pages = lease(desk, A, 3)
        if when != "leased":
            use(desk, *pages)
        if when == "sealed":
            desk.table.seal(pages[0].index, seals(log)[0])
    spare = lease(desk, B, 4)
    desk.want(B, len(spare), desk.consumed[B])
    assert desk.figures()["pages_free"] == 0
    desk.gone = {owner(A)}
    if also == "allocator, before":
        desk.start(A, B)
    if also == "allocator":
        assert (Send(B, FenceWanted(A)) in desk.start(B)) == (when in SHOWN)
    else:
        assert Send(B, FenceWanted(A)) in desk.peers([], [A])
    if also != "nobody":
        desk.tell(B, PagesHeld(spare, (), desk.consumed[B]))
    desk.tell(B, FencePassed(A))
    consumed = desk.consumed[B] + len(spare)
    desk.tell(B, LeaseReturned(spare, consumed, 0))
    desk.tell(B, PrefixFact(SequenceKey(5, 0), 1, 0, False))
    census = desk.core.census()
    assert census["free"] + census["cached"] == 4
    assert len(granted(desk.want(B, 4, consumed))["b@1"]) == 4


# ── restarts ──────────────────────────────────────────────────────────────────────────────────


def test_a_restarted_allocator_finds_every_page_again() -> None:
    """One page lease, one open, one sealed, one that only the table knows, one of a dead worker."""
    first = Desk(8, A, B)
    held = lease(first, A, 4)
    [orphan] = lease(first, B, 1)
    table = first.table
    use(first, *held[1:3])
    table.seal(held[2].index)
    core = Allocator(table, ORDINALS, OldestFirst())
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


def test_a_new_allocator_evicts_nothing_before_all_have_said_what_they_hold() -> None:
    """Its predecessor may have granted it a moment ago, and the grant may still be taken."""
    desk = Desk(2, A, B)
    [page] = desk.fill(A, [1] * PAGE)
    desk.let_go(A, page)
    assert desk.census() == {"free": 1, "cached": 1}
    grant = desk.seek(B, [1] * 5)
    desk.start(A, B)
    desk.tell(A, PagesHeld((), (), 1))
    assert len(granted(desk.want(A, 2, consumed=1, need=2))["a@1"]) == 1, "what is free may go"
    assert not exhausted(desk.want(A, 3, consumed=1, need=3)), "and nobody gives way yet"
    # It arrives before the new roster, so it is taken, and said of itself what it holds.
    desk.rows[B][page.index] = 1
    assert grant.pages == (page,)
    desk.tell(B, PagesHeld((), (page,), 0))
    assert desk.table.is_current(page)
    assert desk.census() == {"held": 1, "leased": 1}


def test_a_twin_that_a_predecessor_may_have_granted_is_not_freed_before_all_have_spoken() -> None:
    """Of two pages with the same tokens the scan finds one, and the predecessor knew the other."""
    desk = Desk(2, A, B)
    [found], [twin] = desk.fill(A, [1] * PAGE), desk.fill(B, [1] * PAGE)
    assert found.index < twin.index
    for worker, page in ((A, found), (B, twin)):
        desk.rows[worker][page.index] = 0
    desk.start(A, B)
    desk.tell(A, PagesHeld((), (), 1))
    assert desk.table.is_current(twin)
    desk.rows[B][twin.index] = 1
    desk.tell(B, PagesHeld((), (twin,), 1))
    assert desk.census() == {"cached": 1, "held": 1}
    desk.let_go(B, twin)
    assert desk.census() == {"cached": 1, "free": 1}


def test_who_died_unknown_to_a_new_allocator_holds_up_nobody() -> None:
    desk = Desk(2, A, B)
    [page] = desk.fill(A, [1] * PAGE)
    desk.let_go(A, page)
    desk.start(A, B)
    desk.tell(A, PagesHeld((), (), 1))
    assert len(granted(desk.want(A, 2, consumed=1))["a@1"]) == 1
    assert len(granted(desk.peers([], [B]))["a@1"]) == 1


@pytest.mark.parametrize("state", ["leased", "open", "cached", "twin"])
def test_a_release_that_died_with_the_old_allocator_is_made_good(state: str) -> None:
    """Field report 8: what nobody has any more does not pile up."""
    desk = Desk(3, A, B)
    if state == "twin":
        desk.fill(B, [1] * PAGE)
    if state in ("leased", "open"):
        pages = lease(desk, A, 1)
        if state == "open":
            use(desk, *pages)
            desk.rows[A][pages[0].index] = 0
    else:
        [page] = desk.fill(A, [1] * PAGE)
        desk.rows[A][page.index] = 0
    desk.start(A, B)
    used = tuple(p for p in map(desk.table.ref, range(3)) if desk.rows[B][p.index])
    doubts = [send.message for send in desk.tell(A, PagesHeld((), (), 1)) if send.to == A]
    desk.tell(B, PagesHeld((), used, 1))
    if state in ("leased", "open"):
        assert doubts == [PagesDoubted(pages)]
        desk.tell(A, PagesReleased(pages))
    assert desk.core.census()["free"] + desk.core.census()["cached"] == 3 - len(used)


@pytest.mark.parametrize("scan", ["before", "after"])
@pytest.mark.parametrize("roster", ["first", "next"])
def test_who_took_over_and_died_unknown_is_found_when_its_next_life_comes(scan: str, roster: str) -> None:
    """It lived between two rosters; or a new allocator waited for its first one. Alone it may be too new."""
    desk = Desk(3, A, B)
    sealed, tail = desk.fill(A, [1] * 6)
    heir = Incarnation("c", 1)
    row = desk.table.claim(owner(heir))
    core = Allocator(desk.table, ORDINALS, OldestFirst())
    if scan == "before":
        core.peers([member(SCHEDULER), member(A), member(B)], (), 0.0)
        core.handle(B, PagesHeld((), (), 0), 0.0)
    for page in (sealed, tail):
        row[page.index] = 1
        desk.rows[A][page.index] = 0
    desk.table.adopt(tail.index, owner(heir), 2)
    if roster == "next":
        core.peers([] if scan == "before" else [member(SCHEDULER), member(A), member(B)], (), 0.0)
        core.handle(A, PagesHeld((), (), 2), 0.0)
        assert desk.table.is_current(tail)
        assert core.census()["cached"] == 0
    later = Incarnation("c", 2)
    desk.table.claim(owner(later))
    everybody = [] if scan == "before" or roster == "next" else [SCHEDULER, A, B]
    sends = core.peers([member(one) for one in (*everybody, later)], (), 0.0)
    assert Send(A, FenceWanted(heir)) in sends
    for worker in (A, B, later):
        core.handle(worker, FencePassed(heir), 0.0)
        core.handle(worker, PagesHeld((), (), 2 if worker == A else 0), 0.0)
        core.check()
    assert core.census()["free"] + core.census()["cached"] == 3


@pytest.mark.parametrize("message", [Drain(), Stop(), Roster((1, 1), ())])
def test_what_is_the_shells_own_changes_nothing(message: Drain | Stop | Roster) -> None:
    assert Desk(1, A).tell(A, message) == []


# ── against a naive model ─────────────────────────────────────────────────────────────────────


@dataclass
class Holder:
    """What one worker has, by its own account."""

    row: memoryview
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
    """Workers that lease, use, seal, adopt, find, release (twice, too), die; an allocator that dies.

    Of the dead, some are proven gone later. Tokens are few, so that pages with the same ones abound.
    """

    @initialize(pages=st.integers(1, 10))
    def begin(self, pages: int) -> None:
        self.pages = pages
        self.table = page_table(pages, PAGE)
        self.epochs = dict.fromkeys("abc", 0)
        self.workers: dict[Incarnation, Holder] = {}
        self.ghosts: dict[Incarnation, set[PageRef]] = {}
        self.fences: set[tuple[Incarnation, Incarnation]] = set()
        self.gone: set[Owner] = set()
        self.released: list[tuple[Incarnation, PageRef]] = []
        self.asked: list[int] = []
        self.told = False
        self.start_allocator([])

    def start_allocator(self, order: list[Incarnation]) -> None:
        self.core = Allocator(self.table, ORDINALS, OldestFirst(), self.gone.__contains__)
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

    def writable(self) -> dict[PageRef, Incarnation]:
        """Who may write each page."""
        pages: dict[PageRef, Incarnation] = {}
        for worker, holder in self.workers.items():
            mine = (page for page in holder.used if self.table.state(page.index) is PageState.OPEN)
            for page in (*holder.leased, *mine, *holder.arriving):
                assert page not in pages, "two may write it"
                pages[page] = worker
        return pages

    def in_use(self) -> set[PageRef]:
        """What some worker has, to write or to read, and what a dead one may still write."""
        pages = set(self.writable())
        for holder in self.workers.values():
            pages.update(holder.used)
        for dead, theirs in self.ghosts.items():
            if self.haunts(dead):
                pages |= theirs
                # What a hand-over took from it is marked in its row too, until it is proven gone.
                row = self.table.holders(owner(dead)) or ()
                marked = (page for page, holds in enumerate(row) if holds)
                pages |= {
                    self.table.ref(page) for page in marked if self.table.state(page) is PageState.SEALED
                }
        return pages

    def haunts(self, dead: Incarnation) -> bool:
        """Somebody may adopt from it, or it may write."""
        return self.fenced(dead) or owner(dead) not in self.gone

    def check_found(self, pages: tuple[PageRef, ...]) -> None:
        """They are a prefix of what was asked for: all tokens, from the first on."""
        parent = ROOT
        for block, page in enumerate(pages):
            assert self.table.is_current(page)
            seal = self.table.sealed(page.index)
            tokens = token_bytes([self.asked[block]] * PAGE)
            assert (seal.tokens, seal.parent) == (tokens, parent), "a page of another log"
            parent = seal.key

    def act(self, sends: list[Send]) -> None:
        found: list[tuple[Incarnation, PrefixFact]] = []
        for send in sends:
            worker, message = send.to, send.message
            match message:
                case LeaseGranted(pages=pages):
                    assert isinstance(worker, Incarnation)
                    taken = {page.index for page in self.in_use()}
                    assert taken.isdisjoint(page.index for page in pages), "a page has two owners"
                    self.workers[worker].arriving += pages
                    self.workers[worker].granted += len(pages)
                case FenceWanted(dead=dead):
                    assert isinstance(worker, Incarnation)
                    self.fences.add((worker, dead))
                case PrefixGranted(key=key, term=term, pages=pages, more=more):
                    assert isinstance(worker, Incarnation)
                    assert not more, "nobody fills anything here for longer than a message"
                    self.check_found(pages)
                    holder = self.workers[worker]
                    new = [page for page in pages if page not in holder.used]
                    holder.used += new
                    for page in new:
                        holder.row[page.index] = 1
                    found.append((worker, PrefixFact(key, term, len(pages), False)))
                case PoolExhausted(starving=starving):
                    assert self.workers[starving].starving
                    assert not self.told, "told twice, and nothing had changed"
                    self.told = True
        for worker, fact in found:
            self.tell(worker, fact)
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

    @rule(name=st.sampled_from("abc"), data=st.data())
    def lives_or_dies(self, name: str, data: st.DataObject) -> None:
        """The next one starts when the last one is gone."""
        old = Incarnation(name, self.epochs[name])
        if old in self.workers:
            holder = self.workers.pop(old)
            self.ghosts[old] = {*holder.leased, *holder.used, *holder.arriving}
            if data.draw(st.booleans()):
                self.gone.add(owner(old))
            self.fences = {pair for pair in self.fences if pair[0] != old}
            self.peers([], [old])
            return
        if self.epochs[name] and owner(old) not in self.gone:
            self.prove_gone(old)
        self.epochs[name] += 1
        new = Incarnation(name, self.epochs[name])
        self.workers[new] = Holder(self.table.claim(owner(new)))
        self.peers([new], [])
        self.introduce(new)

    def prove_gone(self, dead: Incarnation) -> None:
        # One that was restarted may not know of this death, and then it has nothing new to say.
        self.told = self.told and not self.core.waits_for_proof
        self.gone.add(owner(dead))
        self.act(self.core.tick(0.0))
        assert not self.core.waits_for_proof or any(owner(d) not in self.gone for d in self.ghosts)

    @precondition(lambda self: any(owner(dead) not in self.gone for dead in self.ghosts))
    @rule(data=st.data())
    def proof_comes(self, data: st.DataObject) -> None:
        left = sorted(dead for dead in self.ghosts if owner(dead) not in self.gone)
        self.prove_gone(data.draw(st.sampled_from(left)))

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
            holder.row[page.index] = 1
            self.table.open(page.index, 1, 0, 1, len(holder.used))
            holder.used.append(page)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        worker = self.some_worker(data)
        used = self.workers[worker].used
        pages = tuple(used[: data.draw(st.integers(0, len(used)))])
        self.forget(worker, pages)
        self.release(worker, pages)

    def forget(self, worker: Incarnation, pages: tuple[PageRef, ...]) -> None:
        holder = self.workers[worker]
        for page in pages:
            holder.row[page.index] = 0
            holder.used.remove(page)

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), blocks=st.lists(st.integers(0, 1), min_size=1, max_size=3), says=st.booleans())
    def seal(self, data: st.DataObject, blocks: list[int], says: bool) -> None:
        """The open pages of a worker become the first ones of a log; or it dies before it says so."""
        worker = self.some_worker(data)
        used = self.workers[worker].used
        opened = [page for page in used if self.table.state(page.index) is PageState.OPEN][: len(blocks)]
        log = [token for token in blocks for _ in range(PAGE)]
        for page, seal in zip(opened, seals(log), strict=False):
            self.table.seal(page.index, seal)
        if says:
            self.tell(worker, PagesSealed(KEY, 1, tuple(opened)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), blocks=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def find(self, data: st.DataObject, blocks: list[int]) -> None:
        worker = self.some_worker(data)
        self.asked = blocks
        tokens = token_bytes([token for token in blocks for _ in range(PAGE)])
        self.tell(worker, PrefixWanted(KEY, 1, ROOT, tokens, 0, True))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def forget_and_die_before_it_is_said(self, data: st.DataObject) -> None:
        """A release is lost with the allocator that it was said to."""
        worker = self.some_worker(data)
        self.forget(worker, tuple(self.workers[worker].used))
        self.start_allocator(data.draw(st.permutations(sorted(self.workers))))

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
        before = bytes(self.table.words.cast("B")), self.core.census()
        self.told = False
        self.act(self.core.handle(source, PagesReleased((page, page)), 0.0))
        assert (bytes(self.table.words.cast("B")), self.core.census()) == before

    @precondition(lambda self: len(self.workers) > 1)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        source = self.some_worker(data)
        target = data.draw(st.sampled_from(sorted(set(self.workers) - {source})))
        theirs = self.workers[target]
        pages = tuple(self.workers[source].used)
        for page in pages:
            theirs.row[page.index] = 1
            if page not in theirs.used:
                theirs.used.append(page)
            if self.table.state(page.index) is PageState.OPEN:
                self.table.adopt(page.index, owner(target), 2)
        self.forget(source, pages)
        sealed = tuple(page for page in pages if self.table.state(page.index) is PageState.SEALED)
        self.release(source, sealed)

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), adopts=st.booleans())
    def pass_fence(self, data: st.DataObject, adopts: bool) -> None:
        worker, dead = data.draw(st.sampled_from(sorted(self.fences)))
        if adopts:
            # A hand-over of the dead was on its way and came before the fence.
            for page in sorted(self.ghosts[dead]):
                if self.table.is_current(page) and self.table.state(page.index) is PageState.OPEN:
                    assert self.table.owner(page.index) == owner(dead)
                    self.workers[worker].row[page.index] = 1
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
    def every_page_is_accounted_for(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        census = self.core.census()
        assert sum(census.values()) == self.pages
        for page, worker in self.writable().items():
            assert self.table.is_current(page)
            assert self.table.owner(page.index) == owner(worker)
        in_use = {page for page in self.in_use() if self.table.is_current(page)}
        for holder in self.workers.values():
            assert in_use.issuperset(holder.used), "a page was freed under its reader"
        for dead, theirs in self.ghosts.items():
            if self.haunts(dead):
                assert all(map(self.table.is_current, theirs)), "a page was freed that the dead may write"
        assert len(in_use) + census["free"] + census["cached"] == self.pages, "a page leaked"

    @invariant()
    def nobody_starves_unheard(self) -> None:
        if hasattr(self, "core") and any(holder.starving for holder in self.workers.values()):
            waits = any(map(self.haunts, self.ghosts))
            assert self.told or waits, "somebody starves, and nobody was asked"
            census = self.core.census()
            assert waits or census["free"] == census["cached"] == 0

    def teardown(self) -> None:
        """When fences are passed, the dead gone and workers idle, the whole pool is free or cached."""
        if not hasattr(self, "core"):
            return
        for worker, dead in sorted(self.fences):
            self.fences.discard((worker, dead))
            self.tell(worker, FencePassed(dead))
        self.gone |= {owner(dead) for dead in self.ghosts}
        self.act(self.core.tick(0.0))
        # Twice: while some still starve, others are asked for leases and want new ones.
        for worker in 2 * sorted(self.workers):
            holder = self.workers[worker]
            holder.said_consumed, holder.need, self.told = holder.consumed, 0, False
            self.tell(worker, LeaseWanted(holder.consumed, 0, 0))
        for worker, holder in self.workers.items():
            self.receive(worker)
            pages = tuple(holder.used)
            self.forget(worker, pages)
            self.release(worker, pages)
            self.give_back(worker, ahead=0)
        self.core.check()
        census = self.core.census()
        assert census["free"] + census["cached"] == self.pages
        assert not self.core.waits_for_proof


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
