"""Who reads pages without owning them: the file below, other hosts, clients that keep a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from allocator_desk import ORDINALS, REPLICATOR, ROOT, SCHEDULER, A, B, Desk, granted, owner, seals, use
from tables import page_table

from engine.chain import token_bytes
from engine.ids import Incarnation, SequenceKey
from engine.layout import Seal
from engine.lifecycle import PageState
from engine.messages import (
    Cached,
    FetchEnded,
    FetchWanted,
    FileKeys,
    HandOverAccepted,
    LeaseGranted,
    Member,
    NobodyGivesWay,
    PagesHeld,
    PagesReleased,
    PinFact,
    PinWanted,
    PoolExhausted,
    PrefixGranted,
    PrefixWanted,
    ReadEnded,
    ReadGranted,
    ReadWanted,
    SequenceSpec,
    SpillEnded,
    SpillWanted,
    StartPrefill,
)
from engine.pinned import READ_S
from engine.sampling import GREEDY
from engine.shapes import PageRef
from engine.worker import Worker, WorkerLimits

if TYPE_CHECKING:
    from engine.core import Send

FRONT = Incarnation("front", 1)


def desk_with_file(pages: int) -> Desk:
    desk = Desk(pages, A, B)
    desk.rows[REPLICATOR] = desk.table.claim(owner(REPLICATOR))
    desk.peers([REPLICATOR], [])
    desk.tell(REPLICATOR, FileKeys((), (), whole=True))
    return desk


def spilled(sends: list[Send]) -> tuple[PageRef, ...]:
    return tuple(
        page for send in sends if isinstance(send.message, SpillWanted) for page in send.message.pages
    )


def log_of(first: int, length: int) -> list[int]:
    return list(range(first, first + length))


# ── the file ──────────────────────────────────────────────────────────────────────────────────


def test_what_goes_next_is_written_before_it_goes_and_stays_until_it_was() -> None:
    desk = desk_with_file(16)
    pages = desk.fill(A, log_of(0, 60))
    assert spilled(desk.let_go(A, *pages)) == pages[::-1], "one page is free; leaves first"
    assert len(granted(desk.want(B, 16))["b@1"]) == 1, "what is being written is not leased"
    sends = desk.tell(REPLICATOR, FileKeys(tuple(seal.key for seal in seals(log_of(0, 60))), (), whole=False))
    assert spilled(sends) == ()
    sends = desk.tell(REPLICATOR, SpillEnded(pages))
    assert len(granted(sends)["b@1"]) == 15
    assert desk.figures()["pages_in_file"] == 15


def test_what_the_file_does_not_keep_it_is_not_offered_again() -> None:
    """A full disk, or a file of few slots: else the two would talk of the same pages for ever."""
    desk = desk_with_file(16)
    pages = desk.fill(A, log_of(0, 60))
    offered = spilled(desk.let_go(A, *pages))
    assert spilled(desk.tell(REPLICATOR, SpillEnded(offered))) == ()
    assert spilled(desk.want(B, 0)) == ()
    keys = [seal.key for seal in seals(log_of(0, 60))]
    desk.tell(REPLICATOR, FileKeys(tuple(keys[:3]), (), whole=False))
    given_up = desk.tell(REPLICATOR, FileKeys((), tuple(keys[:3]), whole=False))
    assert spilled(given_up) == (), "for others that were written after them"
    again = desk.tell(REPLICATOR, FileKeys((), (), whole=True))
    assert spilled(again) == ()
    desk.peers([], [REPLICATOR])
    second = Incarnation("replicator", 2)
    desk.peers([], [])
    desk.core.peers([_replicator(2)], [], 0.0)
    assert len(spilled(desk.tell(second, FileKeys((), (), whole=True)))) == 15, "a new one is asked anew"


def _replicator(epoch: int) -> Member:
    return Member("replicator", "replicator", ORDINALS["replicator"], epoch, "", True)


# ── fetches ───────────────────────────────────────────────────────────────────────────────────


def want_fetch(desk: Desk, worker: Incarnation, log: list[int], number: int = 9) -> FetchWanted:
    """A worker seeks a log, whose pages are all in the file."""
    desk.tell(REPLICATOR, FileKeys(tuple(seal.key for seal in seals(log)), (), whole=True))
    wanted = PrefixWanted(SequenceKey(number, 0), 1, ROOT, token_bytes(log), 0, True)
    [fetch] = [s.message for s in desk.tell(worker, wanted) if isinstance(s.message, FetchWanted)]
    assert isinstance(fetch, FetchWanted)
    return fetch


def land(desk: Desk, fetch: FetchWanted, count: int) -> None:
    """The replicator publishes the first pages of a fetch."""
    for page in fetch.pages[:count]:
        desk.table.open(page.target.index, 0, 0, 0, page.block)
        desk.table.seal(page.target.index, Seal(page.key, page.parent, page.tokens, None))


def test_what_is_found_is_not_evicted_to_make_room_for_what_is_fetched_behind_it() -> None:
    desk = desk_with_file(4)
    found = desk.fill(A, log_of(0, 8))
    desk.let_go(A, *found)
    desk.want(B, 2)
    desk.tell(REPLICATOR, SpillEnded(found))
    desk.tell(REPLICATOR, FileKeys((seals(log_of(0, 12))[2].key,), (), whole=True))
    assert desk.seek(A, log_of(0, 13)).pages == found
    assert all(desk.table.state(page.index) is PageState.SEALED for page in found)


@pytest.mark.parametrize("left", [0, 1])
def test_no_more_is_fetched_than_there_is_room_for(left: int) -> None:
    """A ghost has taken what it was granted before: that seems to be room, and is none."""
    desk = desk_with_file(4)
    desk.gone = set()
    pages = desk.fill(A, log_of(0, 16)[: 4 * (3 + left)])
    desk.let_go(A, *pages)
    desk.want(A, 1 - left, consumed=3 + left)
    desk.tell(REPLICATOR, SpillEnded(pages))
    desk.peers([], [B])
    for page in pages[:3]:
        desk.rows[B][page.index] = 1
    tokens = token_bytes(log_of(100, 12))
    desk.tell(REPLICATOR, FileKeys(tuple(seal.key for seal in seals(log_of(100, 12))), (), whole=True))
    sends = desk.tell(A, PrefixWanted(SequenceKey(9, 0), 1, ROOT, tokens, 0, True))
    assert [len(send.message.pages) for send in sends if isinstance(send.message, FetchWanted)] == [1] * left
    assert [send.message.more for send in sends if isinstance(send.message, PrefixGranted)] == [bool(left)]


def test_what_a_dead_allocator_had_fetched_is_found_or_free_when_the_replicator_says_so() -> None:
    """Else its targets would be the replicator's until that dies."""
    desk = desk_with_file(12)
    fetch = want_fetch(desk, A, log_of(0, 16))
    targets = tuple(page.target for page in fetch.pages)
    desk.start(A, B, REPLICATOR)
    own = want_fetch(desk, A, log_of(100, 12))
    desk.tell(REPLICATOR, PagesHeld(targets, (), 0))
    assert desk.census() == {"free": 5, "leased": 7}, "it may write them"
    land(desk, fetch, 2)
    desk.tell(REPLICATOR, PagesHeld((), (), 0))
    assert desk.census() == {"free": 7, "cached": 2, "leased": 3}
    assert desk.seek(B, log_of(0, 9)).pages == targets[:2]
    desk.tell(REPLICATOR, PagesHeld((), (), 0))
    land(desk, own, 3)
    desk.tell(REPLICATOR, FetchEnded(own.ticket, 3, 0.1))
    assert desk.figures()["pages_from_file"] == 3


def test_what_a_dead_allocator_had_fetched_and_others_have_filled_since_is_free() -> None:
    desk = desk_with_file(4)
    fetch = want_fetch(desk, A, log_of(0, 4))
    desk.start(A, B, REPLICATOR)
    for worker in (A, B):
        desk.tell(worker, PagesHeld((), (), 0))
    [twin] = desk.fill(B, log_of(0, 4))
    land(desk, fetch, 1)
    desk.tell(REPLICATOR, PagesHeld((), (), 0))
    assert desk.census() == {"free": 3, "held": 1}
    assert desk.table.is_current(twin)


def test_the_end_of_a_fetch_that_a_dead_allocator_wanted_is_not_that_of_another() -> None:
    """Its pages would be free while they are being written."""
    desk = desk_with_file(12)
    before = want_fetch(desk, A, log_of(0, 16))
    desk.start(A, B, REPLICATOR)
    now = want_fetch(desk, A, log_of(100, 12))
    desk.tell(REPLICATOR, FetchEnded(before.ticket, 0, 0.1))
    assert desk.figures()["pages_fetching"] == 3
    assert all(desk.table.state(page.target.index) is PageState.LEASED for page in now.pages)


@pytest.mark.parametrize("at_once", [False, True])
def test_what_a_dead_replicator_was_asked_for_is_over(at_once: bool) -> None:
    """Also when its death and its next life are told in one roster."""
    desk = desk_with_file(16)
    pages = desk.fill(A, log_of(0, 48))
    fetch = want_fetch(desk, B, log_of(100, 12))
    assert desk.figures()["pages_fetching"] == len(fetch.pages) == 3
    assert len(spilled(desk.let_go(A, *pages))) == 12
    if at_once:
        desk.core.peers([_replicator(2)], [REPLICATOR], 0.0)
    else:
        desk.peers([], [REPLICATOR])
        desk.core.peers([_replicator(2)], [], 0.0)
    desk.core.check()
    figures = desk.figures()
    assert (figures["pages_fetching"], figures["pages_spilling"], figures["pages_pinned"]) == (0, 0, 0)
    assert figures["pages_in_file"] == 0, "until the new one says what there is"
    assert desk.census() == {"free": 4, "cached": 12}


# ── other hosts ───────────────────────────────────────────────────────────────────────────────


def test_pages_that_are_read_stay_until_the_reader_lets_go_or_runs_out_of_time() -> None:
    desk = desk_with_file(8)
    pages = desk.fill(A, log_of(0, 16))
    desk.let_go(A, *pages)
    keys = tuple(seal.key for seal in seals(log_of(0, 16)))
    wrong = PageRef(0, pages[0].index, pages[0].generation + 1)
    ask = ReadWanted(7, (*pages, wrong), (*keys, keys[0]))
    [answer] = [s.message for s in desk.tell(REPLICATOR, ask) if isinstance(s.message, ReadGranted)]
    assert answer == ReadGranted(7, (True, True, True, True, False))
    swapped = ReadWanted(8, pages[:1], keys[1:2])
    [answer] = [s.message for s in desk.tell(REPLICATOR, swapped) if isinstance(s.message, ReadGranted)]
    assert answer == ReadGranted(8, (False,)), "another page has this key"
    half = ReadWanted(9, pages[:2], keys[:2])
    [answer] = [s.message for s in desk.tell(REPLICATOR, half) if isinstance(s.message, ReadGranted)]
    assert answer == ReadGranted(9, (True, True))
    assert len(granted(desk.want(B, 8))["b@1"]) == 4
    assert len(granted(desk.tell(REPLICATOR, ReadEnded(7)))["b@1"]) == 2
    desk.tell(REPLICATOR, ReadEnded(7))
    desk.tell(REPLICATOR, ReadEnded(8))
    desk.tell(A, ReadEnded(9))
    assert desk.core.deadline() == READ_S, "nobody gives back what another one reads"
    assert len(granted(desk.core.tick(READ_S))["b@1"]) == 2
    assert desk.core.deadline() is None
    desk.core.check()


def test_a_tail_that_was_handed_over_to_another_host_is_let_go_of() -> None:
    """Nobody adopts it there: what is less than a page is computed anew."""
    table = page_table(4)
    me, there, front = Incarnation("a", 1), Incarnation("b", 1), Incarnation("front", 1)
    worker = Worker(me, ORDINALS["a"], table, WorkerLimits(1, 0, 16, 4, 3), host="here")
    members = [Member("front", "gateway", 1, 1, "", True), Member("b", "worker", ORDINALS["b"], 1, "", True)]
    worker.peers(members, (), 0.0)
    worker.handle(SCHEDULER, LeaseGranted(tuple(table.lease(page, owner(me)) for page in range(3))), 0.0)
    key = SequenceKey(1, 0)
    spec = SequenceSpec(key, front, 0.0, tuple(range(11)), 20, (), GREEDY, 11)
    worker.handle(front, StartPrefill(1, spec, there), 0.0)
    worker.handle(SCHEDULER, PrefixGranted(key, 1, (), Cached(), False), 0.0)
    plan, _ = worker.plan()
    assert plan is not None
    worker.complete(plan, [], 0.0)
    [released] = worker.handle(there, HandOverAccepted(key, 2), 0.0)
    assert released.message == PagesReleased(tuple(map(table.ref, range(3))))
    worker.check()


# ── clients ───────────────────────────────────────────────────────────────────────────────────


def pin(name: str, log: list[int], until: float = 100.0) -> PinWanted:
    return PinWanted(name, "", token_bytes(log), until)


def facts(sends: list[Send]) -> list[PinFact]:
    return [send.message for send in sends if isinstance(send.message, PinFact)]


def test_a_pin_outlives_pressure_and_ends_at_its_time_or_with_its_gateway() -> None:
    desk = Desk(16, A, B)
    pages = desk.fill(A, log_of(0, 32))
    assert facts(desk.tell(FRONT, pin("kept", log_of(0, 32)))) == [PinFact("kept", 8)]
    desk.let_go(A, *pages)
    assert len(granted(desk.want(B, 16))["b@1"]) == 8
    assert desk.core.deadline() == 100.0
    assert len(granted(desk.core.tick(100.0))["b@1"]) == 8
    desk.core.check()


def test_a_pin_that_would_not_fit_is_refused_before_it_is_filled() -> None:
    desk = Desk(16, A, B)
    desk.fill(A, log_of(0, 24))
    assert facts(desk.tell(FRONT, pin("kept", log_of(0, 24)))) == [PinFact("kept", 6)]
    [fact] = facts(desk.tell(FRONT, pin("more", log_of(500, 12))))
    assert (fact.pages, fact.refused) == (0, "6 pages are pinned, 3 more would pass the 8 that may be")
    assert facts(desk.tell(FRONT, pin("again", log_of(0, 32)))) == [PinFact("again", 6)], "most of it is kept"


def test_the_newest_pin_gives_way_when_nobody_else_can() -> None:
    """A request that was let in is never left standing."""
    desk = Desk(16, A, B)
    for first in (0, 100):
        pages = desk.fill(A, log_of(first, 16))
        desk.tell(FRONT, pin(f"from {first}", log_of(first, 16)))
        desk.let_go(A, *pages)
    use(desk, *granted(desk.want(B, 8))["b@1"], worker=B)
    sends = desk.want(B, 12, consumed=8, need=4)
    assert [send.to for send in sends if isinstance(send.message, PoolExhausted)] == ["scheduler"]
    sends = desk.tell(SCHEDULER, NobodyGivesWay())
    assert [(send.to, send.message) for send in sends if isinstance(send.message, PinFact)] == [
        (FRONT, PinFact("from 100", 0, "its pages were needed for a request"))
    ]
    assert len(granted(sends)["b@1"]) == 4
    assert desk.figures()["pages_kept"] == 4
    assert facts(desk.tell(SCHEDULER, NobodyGivesWay()))[0].name == "from 0"
    assert desk.tell(SCHEDULER, NobodyGivesWay()) == []
