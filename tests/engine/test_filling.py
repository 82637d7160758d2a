"""Prefixes on their way: what one fills the others wait for, and somebody always goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from allocator_desk import PAGE, REPLICATOR, ROOT, A, B, C, Desk, lease, owner, seals
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.chain import Chain, chain_root, token_bytes
from engine.filling import Filling, Fillings
from engine.ids import Incarnation, SequenceKey
from engine.messages import (
    Cached,
    FencePassed,
    FetchEnded,
    FetchWanted,
    FileKeys,
    PagesHeld,
    PagesReleased,
    PagesSealed,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
)

if TYPE_CHECKING:
    from engine.core import Send
    from engine.shapes import PageRef


def log_of(*blocks: int) -> list[int]:
    """A log of these pages, each of one token, and one token more."""
    return [*(block for block in blocks for _ in range(PAGE)), 99]


class Host:
    """A desk, and workers that seek and fill under any names."""

    def __init__(self, pages: int = 40, workers: tuple[Incarnation, ...] = (A, B, C)) -> None:
        self.desk = Desk(pages, *workers)
        self.logs: dict[int, list[int]] = {}
        self.pages: dict[int, list[PageRef]] = {}
        self.waits: dict[int, bool] = {}
        self.at: dict[int, Incarnation] = {}

    def want(self, number: int, worker: Incarnation, log: list[int], *, salt: str = "") -> list[int]:
        """A sequence seeks; returns whom the answers reach."""
        self.logs[number], self.pages[number], self.at[number] = log, [], worker
        tokens = token_bytes(log[: (len(log) - 1) // PAGE * PAGE])
        wanted = PrefixWanted(SequenceKey(number, 0), 1, chain_root("", salt), tokens, 0, True)
        return self.hear(self.desk.tell(worker, wanted))

    def hear(self, sends: list[Send]) -> list[int]:
        """Everybody takes what it was granted."""
        reached = []
        for send in sends:
            if isinstance(send.message, PrefixGranted):
                number = send.message.key.request
                if number not in self.at:
                    # It waited for another one of its dead worker.
                    continue
                assert send.to == self.at[number]
                reached.append(number)
                self.pages[number] += send.message.pages
                self.waits[number] = send.message.more
                for page in send.message.pages:
                    self.desk.rows[self.at[number]][page.index] = 1
                # Whatever it has was granted, as long as it waits.
                fact = PrefixFact(send.message.key, 1, len(self.pages[number]), True)
                reached += self.hear(self.desk.tell(self.at[number], fact))
        return reached

    def fill(self, number: int, count: int = 1) -> list[int]:
        """It fills its next pages and announces them."""
        desk, worker = self.desk, self.at[number]
        assert not self.waits[number], "it was told to wait"
        pages = lease(desk, worker, count)
        for block, page in enumerate(pages, start=len(self.pages[number])):
            desk.rows[worker][page.index] = 1
            desk.table.open(page.index, number, 0, 1, block)
            desk.table.seal(page.index, seals(self.logs[number])[block])
        self.pages[number] += pages
        desk.consumed[worker] += count
        desk.want(worker, 0, desk.consumed[worker])
        return self.hear(desk.tell(worker, PagesSealed(SequenceKey(number, 0), 1, pages)))

    def end(self, number: int, *, keeps: bool = False) -> list[int]:
        """It is filled, or dropped."""
        worker = self.at[number]
        reached = self.hear(self.desk.tell(worker, PrefixFact(SequenceKey(number, 0), 1, 99, False)))
        if not keeps:
            pages = tuple(self.pages[number])
            others = [p for n, ps in self.pages.items() if n != number and self.at[n] == worker for p in ps]
            pages = tuple(page for page in pages if page not in others)
            for page in pages:
                self.desk.rows[worker][page.index] = 0
            self.desk.tell(worker, PagesReleased(pages))
        for of in (self.logs, self.pages, self.waits, self.at):
            del of[number]
        return reached


# ── compute once ──────────────────────────────────────────────────────────────────────────────


def test_the_second_of_two_equal_prompts_waits_for_the_first_ones_pages() -> None:
    """On another worker, and without a copy."""
    host = Host()
    assert host.want(1, A, log_of(1, 2, 3)) == [1]
    assert host.want(2, B, log_of(1, 2, 3)) == [2]
    assert host.waits == {1: False, 2: True}
    assert host.fill(1) == [2]
    assert host.pages[2] == host.pages[1][:1]
    assert host.waits[2]
    assert host.fill(1, 2) == [2]
    assert host.pages[2] == host.pages[1]
    assert not host.waits[2], "it has all that it could have"
    assert host.desk.census() == {"free": 37, "held": 3}


def test_several_wait_for_one_and_each_hears_of_each_page_once() -> None:
    host = Host()
    host.want(1, A, log_of(1, 2))
    for number, worker in ((2, A), (3, B), (4, C)):
        host.want(number, worker, log_of(1, 2))
    assert sorted(host.fill(1)) == [2, 3, 4]
    assert sorted(host.fill(1)) == [2, 3, 4]
    assert host.pages[2] == host.pages[3] == host.pages[4] == host.pages[1]
    assert host.desk.figures()["pages_indexed"] == 2


def test_who_comes_later_gets_what_is_there_and_waits_for_the_rest() -> None:
    host = Host()
    host.want(1, A, log_of(1, 2, 3))
    host.fill(1)
    host.want(2, B, log_of(1, 2, 3))
    assert (host.pages[2], host.waits[2]) == (host.pages[1], True)
    host.fill(1, 2)
    assert host.pages[2] == host.pages[1]


@pytest.mark.parametrize("filled", [0, 1, 2])
def test_who_waits_goes_on_where_a_dropped_filler_stood(filled: int) -> None:
    """And of several one fills, and the others wait for it."""
    host = Host()
    host.want(1, A, log_of(1, 2, 3))
    host.want(2, B, log_of(1, 2, 3))
    host.want(3, C, log_of(1, 2, 3))
    if filled:
        host.fill(1, filled)
    assert host.end(1) == [2]
    assert (host.waits[2], host.waits[3]) == (False, True)
    assert len(host.pages[2]) == filled
    assert host.fill(2, 3 - filled) == [3]
    assert host.pages[3] == host.pages[2]


def test_who_waits_goes_on_when_the_filler_dies() -> None:
    """At once, with what the dead one had sealed; also what it had no time to announce."""
    host = Host()
    host.want(1, A, log_of(1, 2, 3))
    host.want(2, B, log_of(1, 2, 3))
    said = host.fill(1)
    assert said == [2]
    [unsaid] = lease(host.desk, A, 1)
    host.desk.table.open(unsaid.index, 1, 0, 1, 1)
    host.desk.table.seal(unsaid.index, seals(log_of(1, 2, 3))[1])
    assert host.hear(host.desk.peers([], [A])) == [2]
    assert (host.pages[2], host.waits[2]) == ([host.pages[1][0], unsaid], False)


def test_a_dead_waiter_wakes_nobody_and_holds_nothing() -> None:
    host = Host()
    host.want(1, A, log_of(1, 2))
    host.want(2, B, log_of(1, 2))
    assert host.hear(host.desk.peers([], [B])) == []
    for worker in (A, C):
        host.desk.tell(worker, FencePassed(B))
    del host.logs[2]
    assert host.fill(1, 2) == []
    host.end(1)
    assert host.desk.census() == {"free": 38, "cached": 2}
    assert host.desk.figures()["prefixes_filling"] == 0


def test_who_parts_from_the_filler_fills_its_own_and_others_may_wait_for_it() -> None:
    """Two logs that begin alike: the page behind the fork is nobody's but its own."""
    host = Host()
    host.want(1, A, log_of(1, 2, 3))
    host.want(2, B, log_of(1, 7, 8))
    host.want(3, C, log_of(1, 7, 8))
    assert host.waits == {1: False, 2: True, 3: True}
    assert sorted(host.fill(1)) == [2, 3]
    assert host.waits == {1: False, 2: False, 3: True}
    assert host.fill(2, 2) == [3]
    assert host.pages[3] == host.pages[2]
    assert host.fill(1, 2) == []


def test_a_shorter_log_waits_as_far_as_it_goes_and_a_longer_one_goes_on() -> None:
    host = Host()
    host.want(1, A, log_of(1, 2))
    host.want(2, B, log_of(1))
    host.want(3, C, log_of(1, 2, 3, 4))
    assert sorted(host.fill(1)) == [2, 3]
    assert (len(host.pages[2]), host.waits[2]) == (1, False)
    assert host.waits[3]
    assert host.fill(1) == [3]
    assert (len(host.pages[3]), host.waits[3]) == (2, False), "the filler is at its end: it fills the rest"
    host.want(4, A, log_of(1, 2, 3, 4))
    assert (len(host.pages[4]), host.waits[4]) == (2, True)


def test_nobody_waits_for_a_page_of_another_salt() -> None:
    host = Host()
    host.want(1, A, log_of(1, 2))
    host.want(2, B, log_of(1, 2), salt="tenant")
    assert host.waits == {1: False, 2: False}
    assert host.fill(1) == []


def test_who_waited_for_pages_that_cannot_be_found_fills_them_itself() -> None:
    """They were full and are another log's by their keys, or were freed before the word of them came."""
    host = Host()
    host.want(1, A, log_of(1, 2))
    host.want(2, B, log_of(1, 2))
    [page] = lease(host.desk, A, 1)
    host.desk.rows[A][page.index] = 1
    host.desk.table.open(page.index, 1, 0, 1, 0)
    host.desk.table.seal(page.index)
    assert host.hear(host.desk.tell(A, PagesSealed(SequenceKey(1, 0), 1, (page,)))) == [2]
    assert (host.pages[2], host.waits[2]) == ([], False)


def test_what_was_cached_meanwhile_by_somebody_else_is_found_when_the_filler_ends() -> None:
    """Page 1 by a third one that did not wait: it filled before it asked (an allocator died between)."""
    host = Host()
    host.want(1, A, log_of(1, 2))
    host.want(2, B, log_of(1, 2))
    third = host.desk.fill(C, log_of(1, 2)[:8])
    assert host.end(1) == [2]
    assert (tuple(host.pages[2]), host.waits[2]) == (third, False)


def test_after_a_restart_fillers_are_known_before_who_waits_and_the_other_way_round() -> None:
    log = log_of(1, 2, 3)
    tokens = token_bytes(log[:-1])
    for order in ((1, 2), (2, 1)):
        host = Host()
        host.want(1, A, log)
        host.want(2, B, log)
        host.fill(1)
        host.desk.start(A, B)
        for number in order:
            worker, have = host.at[number], len(host.pages[number])
            held = tuple(host.pages[number])
            host.desk.tell(worker, PagesHeld((), held, host.desk.consumed[worker]))
            wanted = PrefixWanted(SequenceKey(number, 0), 1, ROOT, tokens, have, number == 2)
            sends = host.desk.tell(worker, wanted)
            answers = [send.message for send in sends if isinstance(send.message, PrefixGranted)]
            if number == 2:
                # Who waits and is heard first is told to fill: the same page is filled twice, once.
                assert answers == [PrefixGranted(SequenceKey(2, 0), 1, (), Cached(), order == (1, 2))]
        host.desk.core.check()
        host.waits = {1: False, 2: order == (1, 2)}
        reached = host.hear(host.desk.tell(A, PrefixFact(SequenceKey(1, 0), 1, 0, False)))
        assert reached == ([2] if order == (1, 2) else [])


@pytest.mark.parametrize("how", ["never begins", "half of it", "the replicator dies", "the file goes"])
def test_who_waits_for_a_fetch_that_fails_fills_the_pages_itself(how: str) -> None:
    """Field report 2: nobody waits for ever for what does not come; what was leased for it is free again."""
    host = Host(workers=(A, B))
    desk = host.desk
    desk.rows[REPLICATOR] = desk.table.claim(owner(REPLICATOR))
    desk.peers([REPLICATOR], [])
    known = seals(log_of(1, 2, 3))
    desk.tell(REPLICATOR, FileKeys(tuple(seal.key for seal in known), (), True))
    log = log_of(1, 2, 3)
    tokens = token_bytes(log[:-1])
    host.logs[1], host.pages[1], host.at[1] = log, [], A
    sends = desk.tell(A, PrefixWanted(SequenceKey(1, 0), 1, ROOT, tokens, 0, True))
    host.hear(sends)
    [wanted] = [send.message for send in sends if isinstance(send.message, FetchWanted)]
    assert isinstance(wanted, FetchWanted)
    assert [page.key for page in wanted.pages] == [seal.key for seal in known]
    host.want(2, B, log)
    assert host.waits == {1: True, 2: True}
    landed = 0
    if how == "half of it":
        landed = 1
        page = wanted.pages[0].target
        desk.table.open(page.index, 0, 0, 0, 0)
        desk.table.seal(page.index, known[0])
    if how == "the replicator dies":
        assert host.hear(desk.peers([], [REPLICATOR])) == [1]
    elif how == "the file goes":
        host.hear(desk.tell(REPLICATOR, FileKeys((), (), True)))
        assert host.hear(desk.tell(REPLICATOR, FetchEnded(wanted.ticket, 0, 0.1))) == [1]
    else:
        assert sorted(host.hear(desk.tell(REPLICATOR, FetchEnded(wanted.ticket, landed, 0.1)))) == (
            [1, 2] if landed else [1]
        )
    for worker in (A, B):
        desk.tell(worker, FencePassed(REPLICATOR))
    assert host.waits == {1: False, 2: True}
    assert [len(host.pages[number]) for number in (1, 2)] == [landed, landed]
    assert desk.core.census()["free"] == 40 - landed
    assert host.fill(1, 3 - landed) == [2]
    assert host.pages[2] == host.pages[1]
    assert host.hear(desk.tell(REPLICATOR, FetchEnded(wanted.ticket, 3, 0.1))) == [], "said too late"


# ── the book of fillings ──────────────────────────────────────────────────────────────────────


def filling(number: int, *blocks: int, waits: bool = False, pages: int = 0) -> Filling:
    tokens = token_bytes(log_of(*blocks)[:-1])
    chain = Chain.resume(ROOT, PAGE, tokens[: pages * 4 * PAGE])
    return Filling((A, SequenceKey(number, 0), 1), tokens, chain, waits)


def test_only_who_fills_the_same_page_is_waited_for() -> None:
    book = Fillings()
    first = filling(1, 1, 2)
    book.put(first)
    assert book.filled_by_another(filling(2, 1, 5)), "the next page is the same"
    assert not book.filled_by_another(first), "nobody waits for itself"
    assert not book.filled_by_another(filling(2, 3)), "another page at the same place"
    assert not book.filled_by_another(filling(2, 1, 2, pages=1)), "another place"
    assert not book.filled_by_another(filling(2, 1, pages=1)), "it has all"
    waiting = filling(3, 1, waits=True)
    book.put(waiting)
    book.end(first.name)
    assert not book.filled_by_another(filling(2, 1)), "who waits fills nothing"


def test_moving_on_returns_who_waited_there_and_the_chain_goes_along() -> None:
    book = Fillings()
    first, second = filling(1, 1, 2, 3), filling(2, 1, 2, waits=True)
    book.put(first)
    book.put(second)
    assert book.advance(first, 2) == [second]
    assert (first.chain.pages, first.next_page) == (2, token_bytes([3] * PAGE))
    assert first.chain.parent == Chain.resume(ROOT, PAGE, first.tokens[: 8 * PAGE]).parent
    assert book.advance(first, 1) == [], "never back"
    assert first.chain.pages == 2
    assert book.end(second.name) == (second, [])
    assert book.end(second.name) == (None, [])
    assert (len(book), book.of(A), book.of(B)) == (1, [first.name], [])
    assert [ahead.block for ahead in first.ahead()] == [2]


# ── anything, in any order ────────────────────────────────────────────────────────────────────


PAGES = 70


class Machine(RuleBasedStateMachine):
    """Few tokens, so that logs begin alike; prompts come, are filled, dropped, die.

    The naive rules: who is told to go on has nobody before it with the same next page, who waits has
    somebody; what is granted is the log's; and each page of a log is filled once while anybody holds it.
    """

    @initialize()
    def begin(self) -> None:
        self.host = Host(PAGES)
        self.number = 0
        self.dead: set[Incarnation] = set()

    def living(self) -> list[Incarnation]:
        return [worker for worker in (A, B, C) if worker not in self.dead]

    @precondition(lambda self: len(self.dead) < 3)
    @rule(data=st.data(), blocks=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def want(self, data: st.DataObject, blocks: list[int]) -> None:
        self.number += 1
        assert self.number in self.host.want(
            self.number, data.draw(st.sampled_from(self.living())), log_of(*blocks)
        )

    def fillers(self) -> list[int]:
        host = self.host
        return [
            n
            for n, waits in host.waits.items()
            if not waits and len(host.pages[n]) < len(host.logs[n]) // PAGE
        ]

    @precondition(lambda self: self.fillers())
    @rule(data=st.data(), most=st.integers(1, 3))
    def fill(self, data: st.DataObject, most: int) -> None:
        number = data.draw(st.sampled_from(self.fillers()))
        left = len(self.host.logs[number]) // PAGE - len(self.host.pages[number])
        self.host.fill(number, min(most, left))

    @precondition(lambda self: self.host.logs)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.host.end(data.draw(st.sampled_from(sorted(self.host.logs))))

    @precondition(lambda self: len(self.dead) < 2)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        host = self.host
        worker = data.draw(st.sampled_from(self.living()))
        self.dead.add(worker)
        for number in [number for number, at in host.at.items() if at == worker]:
            for of in (host.logs, host.pages, host.waits, host.at):
                del of[number]
        host.hear(host.desk.peers([], [worker]))
        for other in self.living():
            host.hear(host.desk.tell(other, FencePassed(worker)))

    @invariant()
    def somebody_goes_on_and_nobody_twice(self) -> None:
        if not hasattr(self, "host"):
            return
        host = self.host
        standing: dict[tuple[int, ...], list[bool]] = {}
        for number, log in host.logs.items():
            have = len(host.pages[number])
            assert [host.desk.table.sealed(page.index) for page in host.pages[number]] == seals(log)[:have]
            if have < len(log) // PAGE:
                place = tuple(log[: (have + 1) * PAGE])
                standing.setdefault(place, []).append(host.waits[number])
            else:
                assert not host.waits[number]
        for place, waits in standing.items():
            assert waits.count(False) == 1, f"{place} is filled by {waits.count(False)}"

    @invariant()
    def nothing_is_filled_twice(self) -> None:
        if hasattr(self, "host"):
            assert self.host.desk.figures()["duplicates"] == 0

    def teardown(self) -> None:
        if not hasattr(self, "host"):
            return
        for number in sorted(self.host.logs):
            self.host.end(number)
        desk = self.host.desk
        assert desk.figures()["prefixes_filling"] == 0
        assert desk.core.census()["free"] + desk.core.census()["cached"] == PAGES


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
