"""Who reads pages without owning them: the file below, other hosts, clients that keep a prefix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocator_desk import ORDINALS, REPLICATOR, SCHEDULER, A, B, Desk, granted, owner, seals, use

from engine.chain import token_bytes
from engine.ids import Incarnation
from engine.messages import (
    FileKeys,
    Member,
    NobodyGivesWay,
    PinFact,
    PinWanted,
    PoolExhausted,
    ReadEnded,
    ReadGranted,
    ReadWanted,
    SpillEnded,
    SpillWanted,
)
from engine.pinned import READ_S
from engine.shapes import PageRef

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
    assert len(granted(desk.want(B, 8))["b@1"]) == 4
    assert len(granted(desk.tell(REPLICATOR, ReadEnded(pages[2:])))["b@1"]) == 2
    desk.tell(REPLICATOR, ReadEnded((wrong, *pages[2:])))
    assert desk.core.deadline() == READ_S
    assert len(granted(desk.core.tick(READ_S))["b@1"]) == 2
    assert desk.core.deadline() is None
    desk.core.check()


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
