"""The worker: each page is released once however a sequence ends, and positions go up by one."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tables import page_table

from engine.chain import chain_root, page_keys, token_bytes
from engine.core import Send
from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner
from engine.lifecycle import PageState, SequenceState
from engine.messages import (
    Cached,
    Cancel,
    Drain,
    FencePassed,
    FenceWanted,
    HandOver,
    HandOverAccepted,
    HandOverRefused,
    LeaseGranted,
    LeaseRecall,
    LeaseReturned,
    LeaseWanted,
    Member,
    PagesDoubted,
    PagesHeld,
    PagesReleased,
    PagesSealed,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
    Roster,
    SequenceLost,
    SequenceSpec,
    StartPrefill,
    StepTokens,
    Stop,
    TermAccepted,
    WorkerFact,
)
from engine.sampling import GREEDY
from engine.worker import Worker, WorkerLimits

if TYPE_CHECKING:
    from engine.batching import Plan, Sequence
    from engine.shapes import PageRef

PAGE = 4
ME, OTHER = Incarnation("me", 1), Incarnation("other", 1)
FRONT, ALLOCATOR, SCHEDULER = (Incarnation(name, 1) for name in ("front", "allocator", "scheduler"))
KINDS = {
    "me": "worker",
    "other": "worker",
    "front": "gateway",
    "allocator": "allocator",
    "scheduler": "scheduler",
}
MINE, THEIRS = Owner(5, 1), Owner(6, 1)
STOP_TOKEN = 99
PAGES = 500


def member(incarnation: Incarnation) -> Member:
    return Member(incarnation.name, KINDS[incarnation.name], 0, incarnation.epoch, "", True)  # type: ignore[arg-type]


def spec_of(
    number: int, length: int, limit: int = 100, *, choice: int = 0, more: tuple[int, ...] = ()
) -> SequenceSpec:
    """A choice with a prompt of that length, and with `more` tokens if it had begun elsewhere."""
    log = (*range(length), *more)
    return SequenceSpec(
        SequenceKey(number, choice), FRONT, float(number), log, limit, (STOP_TOKEN,), GREEDY, length
    )


class Desk:
    """A worker, the pages of its host, and an allocator that grants what is wanted at once.

    With `answers` it also says to every prompt that none of its pages are there.
    """

    def __init__(
        self,
        role: str = "both",
        *,
        supply: bool = True,
        answers: bool = True,
        step_tokens: int = 6,
        prefix_cache: bool = True,
    ) -> None:
        self.table = page_table(PAGES, PAGE)
        limits = WorkerLimits(
            prefill_slots=8 if role != "decode" else 0,
            decode_slots=8 if role != "prefill" else 0,
            step_tokens=step_tokens,
            page_tokens=PAGE,
            lease_ahead=2,
            prefix_cache=prefix_cache,
        )
        self.supply = supply
        self.answers = answers
        self.owned: set[PageRef] = set()
        """What the worker has to release, or to pass on."""
        self.freed: Counter[PageRef] = Counter()
        self.fillings: dict[tuple[SequenceKey, int], PrefixWanted] = {}
        """What the allocator was told of prompts that are filled."""
        self.core = Worker(ME, MINE.ordinal, self.table, limits)
        self.peers([OTHER, FRONT, ALLOCATOR, SCHEDULER])

    # Pages are leased, adopted and freed here as an allocator and a peer would.

    def _lease(self, owner: Owner) -> PageRef:
        page = next(page for page in range(PAGES) if self.table.state(page) is PageState.FREE)
        return self.table.lease(page, owner)

    def grant(self, count: int) -> None:
        pages = tuple(self._lease(MINE) for _ in range(count))
        self.owned |= set(pages)
        self.core.handle(ALLOCATOR, LeaseGranted(pages), 0.0)

    def filled_by_other(self, number: int, filled: int, term: int) -> tuple[PageRef, ...]:
        pages = tuple(self._lease(THEIRS) for _ in range(-(-filled // PAGE)))
        for block, page in enumerate(pages):
            self.table.open(page.index, number, 0, term, block)
            valid = min(PAGE, filled - block * PAGE)
            self.table.fill(page.index, valid)
            if valid == PAGE:
                self.table.seal(page.index)
        return pages

    def act(self, sends: list[Send]) -> list[Send]:
        for send in sends:
            match send.message:
                case PagesReleased(pages=pages) | LeaseReturned(pages=pages):
                    for page in pages:
                        self.freed[page] += 1
                        assert page in self.owned, "released twice, or what is another's"
                        self.owned.remove(page)
                        assert self.table.is_current(page)
                        if self.table.state(page.index) is not PageState.SEALED:
                            # What is sealed stays in the cache.
                            self.table.free(page.index)
                case PrefixWanted() as wanted:
                    self.fillings[wanted.key, wanted.term] = wanted
                case PrefixFact(filling=False) as fact:
                    del self.fillings[fact.key, fact.term]
        self.core.check()
        known = {(sequence.key, sequence.term) for sequence in self.core.sequences if sequence.known}
        assert self.fillings.keys() == known, "the allocator thinks that something else is filled"
        answered = list(sends)
        for send in sends:
            match send.message:
                case LeaseWanted(ahead=ahead) if self.supply:
                    self.grant(max(0, ahead - len(self.core.lease)))
                case PrefixWanted(key=key, term=term, seeks=True) if self.answers:
                    answered += self.tell(ALLOCATOR, PrefixGranted(key, term, (), Cached(), False))
        return answered

    def peers(self, up: list[Incarnation], down: list[Incarnation] | None = None) -> list[Send]:
        return self.act(self.core.peers([member(one) for one in up], down or [], 0.0))

    def tell(self, source: Incarnation, message: object) -> list[Send]:
        return self.act(self.core.handle(source, message, 0.0))  # type: ignore[arg-type]

    def start(
        self,
        number: int = 1,
        length: int = 6,
        *,
        term: int = 1,
        decode: Incarnation = ME,
        limit: int = 100,
        choice: int = 0,
        more: tuple[int, ...] = (),
    ) -> list[Send]:
        spec = spec_of(number, length, limit, choice=choice, more=more)
        return self.tell(FRONT, StartPrefill(term, spec, decode))

    def hand_over(self, number: int = 1, length: int = 6, *, term: int = 2, limit: int = 100) -> list[Send]:
        pages = self.filled_by_other(number, length - 1, term - 1)
        sends = self.core.handle(
            OTHER, HandOver(term, spec_of(number, length, limit), length - 1, pages), 0.0
        )
        if sent(sends, HandOverAccepted):
            self.owned |= set(pages)
        return self.act(sends)

    def find(self, message: PrefixWanted, count: int, *, more: bool = False) -> list[Send]:
        """The allocator finds so many pages of another worker, behind those that the prompt has."""
        pages = self.filled_by_other(99, (message.have + count) * PAGE, 1)[message.have :]
        return self.give(message, pages, more=more)

    def give(self, message: PrefixWanted, pages: tuple[PageRef, ...], *, more: bool = False) -> list[Send]:
        self.owned |= set(pages)
        cached = Cached(worker=len(pages) * PAGE)
        return self.tell(ALLOCATOR, PrefixGranted(message.key, message.term, pages, cached, more))

    def accept(self, message: HandOver) -> list[Send]:
        """The other worker takes the pages over: all are held there, and the open tail is its own."""
        for page in message.pages:
            if self.table.state(page.index) is PageState.OPEN:
                self.table.adopt(page.index, THEIRS, message.term)
                self.owned.remove(page)
        return self.tell(OTHER, HandOverAccepted(message.spec.key, message.term))

    def plan(self) -> Plan | None:
        plan, sends = self.core.plan()
        self.act(sends)
        return plan

    def complete(self, plan: Plan, token: int = 3) -> list[Send]:
        return self.act(self.core.complete(plan, [token for piece in plan.slices if piece.samples], 0.0))

    def step(self, token: int = 3) -> list[Send]:
        """One step, after the lease for it came."""
        for _ in range(3):
            plan = self.plan()
            if plan is not None:
                return self.complete(plan, token)
        raise AssertionError("nothing to compute")

    def sequence(self, choice: int) -> Sequence:
        """What is here of a choice of request 1."""
        [found] = [s for s in self.core.sequences if s.key == SequenceKey(1, choice)]
        return found

    def all_is_released(self) -> None:
        """Idle, it holds nothing, and everything it ever had went back or on, once."""
        assert self.plan() is None
        assert len(self.core.lease) == 0
        assert not self.core.sequences
        assert not self.owned
        assert self.table.holding() == []


def sent(sends: list[Send], kind: type) -> list[object]:
    return [send.message for send in sends if isinstance(send.message, kind)]


KEY = SequenceKey(1, 0)


# ── a life ────────────────────────────────────────────────────────────────────────────────────


def test_it_says_what_may_be_placed_here_and_what_it_holds() -> None:
    desk = Desk("prefill")
    desk.start(decode=OTHER)
    desk.plan()
    sends = desk.peers([Incarnation("scheduler", 2), Incarnation("allocator", 2)])
    assert sent(sends, WorkerFact) == [WorkerFact(8, 0)]
    [held] = sent(sends, PagesHeld)
    assert isinstance(held, PagesHeld)
    used = [page for sequence in desk.core.sequences for page in sequence.pages]
    assert (set(held.leased), set(held.used)) == (set(desk.core.lease.held()), set(used))
    assert held.consumed == desk.core.lease.consumed


def test_a_worker_that_decodes_what_it_filled() -> None:
    desk = Desk()
    desk.start(length=6, limit=9)
    assert sent(desk.step(), TermAccepted) == [TermAccepted(KEY, 2)]
    positions, finishes = [], []
    for _ in range(3):
        [step] = sent(desk.step(), StepTokens)
        assert isinstance(step, StepTokens)
        [row] = step.rows
        assert (row.key, row.term, row.token) == (KEY, 2, 3)
        positions.append(row.position)
        finishes.append(row.finish)
    assert (positions, finishes) == ([6, 7, 8], [None, None, "length"])
    desk.all_is_released()


def test_a_stop_token_ends_a_sequence() -> None:
    desk = Desk()
    desk.start()
    desk.step()
    [step] = sent(desk.step(STOP_TOKEN), StepTokens)
    assert isinstance(step, StepTokens)
    assert step.rows[0].finish == "stop"
    desk.all_is_released()


def test_a_prompt_of_one_token_is_accepted_at_once() -> None:
    desk = Desk()
    assert sent(desk.start(length=1), TermAccepted) == [TermAccepted(KEY, 2)]
    [step] = sent(desk.step(STOP_TOKEN), StepTokens)
    assert isinstance(step, StepTokens)
    assert step.rows[0].position == 1
    desk.all_is_released()


def test_a_prompt_of_one_token_is_handed_over_without_pages() -> None:
    desk = Desk("prefill")
    [message] = sent(desk.start(length=1, decode=OTHER), HandOver)
    assert isinstance(message, HandOver)
    assert (message.filled, message.pages) == (0, ())
    desk = Desk("decode")
    assert sent(desk.hand_over(length=1), HandOverAccepted)
    desk.step(STOP_TOKEN)
    desk.all_is_released()


@pytest.mark.parametrize("length", [PAGE, PAGE + 1, 2 * PAGE + 1])
def test_a_hand_over_carries_the_block_table_and_costs_no_page(length: int) -> None:
    desk = Desk("prefill", step_tokens=100)
    desk.start(length=length, decode=OTHER)
    sends = desk.step()
    [message] = sent(sends, HandOver)
    assert isinstance(message, HandOver)
    assert (message.term, message.filled, len(message.pages)) == (2, length - 1, -(-(length - 1) // PAGE))
    full = message.pages[: (length - 1) // PAGE]
    news = PagesSealed(KEY, 1, full)
    sealed = [send for send in sends if isinstance(send.message, PagesSealed)]
    assert sealed == ([Send("allocator", news), Send("replicator", news)] if full else [])
    # The tail is the other's by now; what is sealed both held until now.
    assert desk.accept(message) == ([Send("allocator", PagesReleased(full))] if full else [])
    desk.all_is_released()


def test_metadata_is_published_before_the_token_that_depends_on_it() -> None:
    desk = Desk()
    desk.start(length=PAGE)
    desk.step()
    plan = desk.plan()
    assert plan is not None
    page = plan.slices[0].sequence.pages[0]
    assert desk.table.record(page.index).valid == PAGE - 1
    desk.complete(plan)
    assert desk.table.record(page.index).valid == PAGE
    assert desk.table.state(page.index) is PageState.SEALED


def test_tokens_of_one_step_go_to_each_gateway_in_one_message() -> None:
    desk = Desk()
    for number in range(3):
        desk.start(number, length=1)
    [step] = sent(desk.step(), StepTokens)
    assert isinstance(step, StepTokens)
    assert [row.key.request for row in step.rows] == [0, 1, 2]


def test_a_row_at_fault_ends_its_sequence_and_no_other() -> None:
    desk = Desk()
    desk.start(1, length=1)
    desk.start(2, length=1)
    desk.grant(2)
    plan = desk.plan()
    assert plan is not None
    sends = desk.act(desk.core.complete(plan, [-1, 7], 0.0))
    [lost] = sent(sends, SequenceLost)
    assert isinstance(lost, SequenceLost)
    assert (lost.key.request, lost.term, lost.reason) == (1, 2, "fault")
    [step] = sent(sends, StepTokens)
    assert isinstance(step, StepTokens)
    assert [row.key.request for row in step.rows] == [2]
    desk.tell(FRONT, Cancel(SequenceKey(2, 0), 2))
    desk.all_is_released()


# ── cancels ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_cancel_between_steps_releases_at_once(steps: int) -> None:
    desk = Desk(step_tokens=3)
    desk.start()
    for _ in range(steps):
        desk.step()
    desk.tell(FRONT, Cancel(KEY, 9))
    desk.all_is_released()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_cancel_while_a_step_runs_waits_for_its_rows(steps: int) -> None:
    desk = Desk(step_tokens=3)
    desk.grant(4)
    desk.start()
    for _ in range(steps):
        desk.step()
    plan = desk.plan()
    assert plan is not None
    used = set(plan.slices[0].sequence.pages)
    assert desk.tell(FRONT, Cancel(KEY, 9)) == []
    assert desk.tell(FRONT, Cancel(KEY, 9)) == [], "said again, it changes nothing"
    assert used.isdisjoint(desk.freed)
    sends = desk.complete(plan)
    assert not sent(sends, StepTokens)
    assert not sent(sends, TermAccepted)
    assert used <= set(desk.freed)
    desk.all_is_released()


@pytest.mark.parametrize(("key", "term"), [(SequenceKey(7, 0), 9), (SequenceKey(1, 1), 9), (KEY, 0)])
def test_a_cancel_of_something_else_or_of_an_older_term_is_ignored(key: SequenceKey, term: int) -> None:
    desk = Desk()
    desk.start()
    assert desk.tell(FRONT, Cancel(key, term)) == []
    assert len(desk.core.sequences) == 1


def test_a_later_term_replaces_an_earlier_one_and_never_the_other_way() -> None:
    desk = Desk()
    desk.start(term=1)
    desk.step()
    desk.start(term=4)
    assert [sequence.term for sequence in desk.core.sequences] == [4]
    for late in (1, 3, 4):
        assert desk.start(term=late) == []
    assert [sequence.term for sequence in desk.core.sequences] == [4]
    desk.tell(FRONT, Cancel(KEY, 4))
    desk.all_is_released()


def test_a_later_term_may_start_while_the_earlier_one_runs() -> None:
    desk = Desk()
    desk.grant(2)
    desk.start(term=1)
    plan = desk.plan()
    assert plan is not None
    desk.start(term=4)
    desk.complete(plan)
    assert [sequence.term for sequence in desk.core.sequences] == [4]
    desk.tell(FRONT, Cancel(KEY, 5))
    desk.all_is_released()


def test_who_gives_way_without_a_page_says_that_it_wants_none() -> None:
    """The allocator waits for what is given back; without a word it would wait for ever."""
    desk = Desk(supply=False)
    desk.start()
    assert desk.plan() is None
    desk.tell(FRONT, Cancel(KEY, 9))
    _, sends = desk.core.plan()
    assert sent(sends, LeaseWanted) == [LeaseWanted(0, 0, 0)]
    assert desk.core.plan() == (None, []), "once"
    desk.start(2)
    _, sends = desk.core.plan()
    want = sent(sends, LeaseWanted)
    desk.start(3)
    desk.tell(FRONT, Cancel(SequenceKey(3, 0), 9))
    _, sends = desk.core.plan()
    assert sent(sends, LeaseWanted) == want, "said again, though it came and went between two plans"


# ── hand-overs ────────────────────────────────────────────────────────────────────────────────


def offered() -> tuple[Desk, HandOver]:
    desk = Desk("prefill")
    desk.start(decode=OTHER)
    [message] = sent(desk.step(), HandOver)
    assert isinstance(message, HandOver)
    return desk, message


def test_a_refused_hand_over_releases_and_tells_the_gateway() -> None:
    desk, _ = offered()
    sends = desk.tell(OTHER, HandOverRefused(KEY, 2, "full"))
    assert sent(sends, SequenceLost) == [SequenceLost(KEY, 1, "refused", "full")]
    assert desk.tell(OTHER, HandOverRefused(KEY, 2, "full")) == []
    desk.all_is_released()


@pytest.mark.parametrize("accepted", [True, False])
def test_an_abort_between_offer_and_answer_frees_once(accepted: bool) -> None:
    """Field report 6: the other side may have the pages already, so they stay until it has answered."""
    desk, message = offered()
    assert desk.tell(FRONT, Cancel(KEY, 9)) == []
    assert not set(message.pages) & set(desk.freed)
    if accepted:
        assert desk.accept(message) == [Send("allocator", PagesReleased(message.pages[:1]))]
    else:
        desk.tell(OTHER, HandOverRefused(KEY, 2, "x"))
        assert set(message.pages) <= set(desk.freed)
    desk.all_is_released()


def test_the_death_of_the_decode_worker_releases_what_was_offered() -> None:
    desk, _ = offered()
    desk.peers([], [OTHER])
    desk.all_is_released()


def test_a_fence_counts_as_the_death_and_is_passed_at_once() -> None:
    desk, _ = offered()
    sends = desk.tell(ALLOCATOR, FenceWanted(OTHER))
    assert sends[-1] == Send(ALLOCATOR, FencePassed(OTHER))
    desk.all_is_released()


@pytest.mark.parametrize("how", ["fenced", "dead", "fenced, then dead"])
def test_nothing_is_adopted_from_the_dead(how: str) -> None:
    """What it adopted after the fence would be freed under it. Field report 4: nor is its next life it."""
    desk = Desk("decode")
    if "fenced" in how:
        desk.tell(ALLOCATOR, FenceWanted(OTHER))
    if "dead" in how:
        desk.peers([Incarnation("other", 2)], [OTHER])
    assert desk.hand_over() == []
    assert not desk.core.sequences


def test_a_decode_worker_that_is_not_known_is_refused_at_the_offer() -> None:
    desk = Desk("prefill")
    desk.start(decode=Incarnation("other", 2))
    sends = desk.step()
    assert not sent(sends, HandOver)
    [lost] = sent(sends, SequenceLost)
    assert isinstance(lost, SequenceLost)
    assert (lost.term, lost.reason) == (1, "refused")
    desk.all_is_released()


def test_an_answer_of_somebody_else_or_to_another_term_is_ignored() -> None:
    desk, _ = offered()
    for source, term in ((FRONT, 2), (OTHER, 1), (OTHER, 3)):
        assert desk.tell(source, HandOverAccepted(KEY, term)) == []
        assert desk.tell(source, HandOverRefused(KEY, term, "x")) == []
    assert len(desk.core.sequences) == 1


def test_a_hand_over_is_taken_with_its_pages() -> None:
    desk = Desk("decode")
    sends = desk.hand_over(length=6)
    assert sends == [Send(OTHER, HandOverAccepted(KEY, 2)), Send(FRONT, TermAccepted(KEY, 2))]
    sealed, tail = (desk.table.record(page.index) for page in desk.sequence(0).pages)
    assert (tail.state, tail.owner, tail.term) == (PageState.OPEN, MINE, 2)
    assert (sealed.state, sealed.owner, sealed.term) == (PageState.SEALED, THEIRS, 1), "nobody writes it"
    row = desk.table.holders(MINE)
    assert row is not None
    assert [row[page.index] for page in desk.sequence(0).pages] == [1, 1]
    [step] = sent(desk.step(STOP_TOKEN), StepTokens)
    assert isinstance(step, StepTokens)
    assert step.rows[0].position == 6
    desk.all_is_released()


def test_a_hand_over_said_twice_is_taken_once() -> None:
    desk = Desk("decode")
    desk.hand_over()
    assert sent(desk.hand_over(), HandOverRefused)
    assert len(desk.core.sequences) == 1


@pytest.mark.parametrize("wrong", ["gateway", "role", "count", "generation", "state"])
def test_a_hand_over_that_cannot_be_is_refused_and_nothing_is_touched(wrong: str) -> None:
    desk = Desk("prefill" if wrong == "role" else "decode")
    pages = desk.filled_by_other(1, 5, 1)
    if wrong == "gateway":
        desk.peers([], [FRONT])
    elif wrong == "count":
        pages = pages[:1]
    elif wrong == "generation":
        desk.table.free(pages[1].index)
    elif wrong == "state":
        desk.table.free(pages[1].index)
        pages = (pages[0], desk.table.lease(pages[1].index, THEIRS))
    sends = desk.tell(OTHER, HandOver(2, spec_of(1, 6), 5, pages))
    assert len(sent(sends, HandOverRefused)) == len(sends) == 1
    assert desk.table.owner(pages[0].index) == THEIRS
    assert not desk.core.sequences


def test_the_death_of_its_gateway_ends_a_sequence() -> None:
    desk = Desk()
    desk.grant(2)
    desk.start(1)
    desk.start(2, decode=OTHER)
    desk.step()
    plan = desk.plan()
    desk.peers([], [FRONT])
    if plan is not None:
        desk.complete(plan)
    # What was offered waits for its answer.
    for sequence in desk.core.sequences:
        desk.tell(OTHER, HandOverRefused(sequence.key, sequence.term + 1, "its gateway is gone"))
    desk.all_is_released()


# ── choices of one request ────────────────────────────────────────────────────────────────────


def decoding(role: str = "decode", length: int = 11, *, supply: bool = True) -> Desk:
    """A desk where choice 0 of request 1 decodes."""
    desk = Desk(role, supply=supply, step_tokens=12)
    desk.hand_over(length=length)
    if supply:
        desk.grant(8)
    return desk


@pytest.mark.parametrize("role", ["decode", "both"])
def test_a_choice_shares_the_full_pages_of_a_sibling_that_decodes(role: str) -> None:
    """Also where there are no prefill slots; from the page that the sibling is writing it takes a copy."""
    desk = decoding(role)
    assert desk.start(length=11, choice=1) == [Send(FRONT, TermAccepted(SequenceKey(1, 1), 2))]
    sibling, choice = desk.sequence(0), desk.sequence(1)
    assert choice.pages == sibling.pages[:2]
    assert (choice.state, choice.computed) == (SequenceState.DECODE, 8)
    figures = desk.core.statistics()
    assert (figures["pages_used"], figures["pages_shared"], figures["positions_shared"]) == (3, 2, 8)
    plan = desk.plan()
    assert plan is not None
    assert [(p.sequence.key.choice, p.start, p.length, p.samples) for p in plan.slices] == [
        (0, 10, 1, True),
        (1, 10, 1, True),
    ]
    [fork] = plan.forks
    assert (fork.sibling, fork.source, fork.target) == (sibling, sibling.pages[2], choice.pages[2])
    assert desk.table.record(fork.target.index)[3:] == (1, 1, 2, 2, 2)
    [step] = sent(desk.complete(plan), StepTokens)
    assert isinstance(step, StepTokens)
    assert [(row.key.choice, row.term, row.position) for row in step.rows] == [(0, 2, 11), (1, 2, 11)]
    assert choice.pages[2] != sibling.pages[2], "what is still written is its own"
    desk.step(STOP_TOKEN)
    desk.all_is_released()


@pytest.mark.parametrize(("length", "shared"), [(1, 0), (PAGE, 0), (PAGE + 1, 1), (3 * PAGE, 2), (13, 3)])
@pytest.mark.parametrize("ahead", [0, 5])
def test_what_is_shared_ends_before_the_row_that_samples(length: int, shared: int, ahead: int) -> None:
    """However far ahead the sibling is."""
    desk = decoding(length=length)
    for _ in range(ahead):
        desk.step()
    desk.start(length=length, choice=1)
    choice = desk.sequence(1)
    assert choice.state is SequenceState.DECODE
    assert (len(choice.pages), choice.computed) == (shared, shared * PAGE)
    desk.step(STOP_TOKEN)
    desk.all_is_released()


def test_a_choice_without_a_sibling_that_decodes_here_is_filled_or_refused() -> None:
    desk = decoding()
    desk.hand_over(2, 11)
    [lost] = sent(desk.start(3, 11, choice=1), SequenceLost)
    assert isinstance(lost, SequenceLost)
    assert lost.reason == "refused"
    assert sent(desk.start(length=12, choice=1), SequenceLost), "the same request, with another prompt"
    desk = Desk()
    desk.start(length=11)
    assert not sent(desk.start(length=11, choice=1), SequenceLost)
    assert desk.sequence(1).state is SequenceState.PREFILL
    assert desk.sequence(1).pages == []


@pytest.mark.parametrize("accepted", [True, False])
def test_a_page_that_a_sibling_reads_is_handed_over_and_stays(accepted: bool) -> None:
    """A choice that decodes elsewhere finds the sibling's pages like anybody else."""
    desk = decoding("both")
    desk.answers = False
    [wanted] = sent(desk.start(length=11, choice=1, decode=OTHER), PrefixWanted)
    assert isinstance(wanted, PrefixWanted)
    shared = tuple(desk.sequence(0).pages[:2])
    [message] = sent(desk.give(wanted, shared), HandOver)
    assert isinstance(message, HandOver)
    assert (message.pages, message.filled) == (shared, 8)
    if accepted:
        assert desk.accept(message) == []
    else:
        sends = desk.tell(OTHER, HandOverRefused(SequenceKey(1, 1), 2, "full"))
        assert not sent(sends, PagesReleased)
    assert desk.owned.issuperset(shared)
    desk.step(STOP_TOKEN)
    assert set(shared) <= set(desk.freed)
    desk.all_is_released()


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("running", [False, True])
def test_a_shared_page_is_released_by_the_last_who_reads_it(last: int, running: bool) -> None:
    desk = decoding()
    for choice in (1, 2):
        desk.start(length=11, choice=choice)
    shared = set(desk.sequence(0).pages[:2])
    desk.step()
    plan = desk.plan() if running else None
    for choice in {0, 1, 2} - {last}:
        desk.tell(FRONT, Cancel(SequenceKey(1, choice), 9))
    if plan is not None:
        desk.complete(plan)
    assert desk.core.statistics()["pages_shared"] == 0
    assert shared.isdisjoint(desk.freed)
    plan = desk.plan()
    assert plan is not None
    desk.tell(FRONT, Cancel(SequenceKey(1, last), 9))
    assert shared.isdisjoint(desk.freed), "its step reads them"
    desk.complete(plan)
    assert shared <= set(desk.freed)
    desk.all_is_released()


def test_a_fault_of_one_choice_leaves_the_pages_to_the_others() -> None:
    desk = decoding()
    desk.start(length=11, choice=1)
    plan = desk.plan()
    assert plan is not None
    sends = desk.act(desk.core.complete(plan, [-1, 7], 0.0))
    assert [lost.key.choice for lost in sent(sends, SequenceLost)] == [0]  # type: ignore[attr-defined]
    assert set(desk.sequence(1).pages).isdisjoint(desk.freed)
    desk.step(STOP_TOKEN)
    desk.all_is_released()


def test_the_death_of_the_gateway_releases_shared_pages_once() -> None:
    desk = decoding()
    desk.start(length=11, choice=1)
    plan = desk.plan()
    assert plan is not None
    desk.start(length=11, choice=2)
    desk.peers([], [FRONT])
    desk.complete(plan)
    desk.all_is_released()


def test_a_page_that_is_being_filled_is_not_shared() -> None:
    desk = decoding(length=8)
    desk.start(length=8, choice=1)
    plan = desk.plan()
    assert plan is not None
    assert [(piece.start, piece.length) for piece in plan.slices] == [(7, 1), (7, 1)]
    assert [(fork.source, fork.target) for fork in plan.forks] == [
        (desk.sequence(0).pages[1], desk.sequence(1).pages[1])
    ], "it is copied, as far as it was written before the step"
    desk.start(length=8, choice=2, more=(3, 3))
    assert desk.sequence(2).pages == desk.sequence(0).pages[:1]
    desk.complete(plan)
    desk.start(length=8, choice=3, more=(3, 3))
    assert desk.sequence(3).pages == desk.sequence(0).pages[:2]


def test_a_page_that_is_being_copied_stays_until_the_step_has_read_it() -> None:
    """Its own sequence is cancelled meanwhile."""
    desk = decoding(length=8)
    desk.start(length=8, choice=1)
    plan = desk.plan()
    assert plan is not None
    [fork] = plan.forks
    desk.tell(FRONT, Cancel(KEY, 9))
    assert fork.source not in desk.freed
    desk.complete(plan)
    assert fork.source in desk.freed
    assert fork.target in desk.sequence(1).pages
    desk.step(STOP_TOKEN)
    desk.all_is_released()


def test_a_choice_that_comes_back_shares_what_is_equal_and_is_filled_in_its_turn() -> None:
    """It had generated 9 tokens; of the sibling's 9 the first 2 are the same."""
    desk = decoding("both", length=6)
    for token in (3, 3, 4, 4, 4, 4, 4, 4, 4):
        desk.step(token)
    assert desk.start(length=6, choice=1, more=(3, 3, 5, 5, 5, 5, 5, 5, 5), term=7) == []
    choice = desk.sequence(1)
    assert choice.pages == desk.sequence(0).pages[:2]
    assert (choice.state, choice.computed, choice.behind) == (SequenceState.PREFILL, 8, 6)
    accepted = [*sent(desk.step(), TermAccepted), *sent(desk.step(), TermAccepted)]
    assert accepted == [TermAccepted(SequenceKey(1, 1), 8)]
    assert choice.pages[:2] == desk.sequence(0).pages[:2]
    desk.start(length=6, choice=2, more=(3, 3, 4, 4, 4, 4, 4, 4, 4), term=7)
    assert desk.sequence(2).pages == desk.sequence(0).pages[:3]
    desk.start(length=6, choice=3, more=(3, 3, 5, 5, 5, 5, 5), term=7)
    assert desk.sequence(3).pages == choice.pages[:3], "of two siblings, the one with more in common"
    desk.step(STOP_TOKEN)
    desk.all_is_released()


def test_a_choice_that_gives_way_with_shared_pages_only_says_that_it_gave_nothing() -> None:
    """The allocator waits for what is given back; without a word it would wait for ever."""
    desk = decoding(length=13, supply=False)
    desk.start(length=13, choice=1)
    plan, sends = desk.core.plan()
    assert plan is None
    want = sent(sends, LeaseWanted)
    assert want == [LeaseWanted(0, 2 + 2, 2)]
    desk.start(length=13, choice=2)
    assert desk.tell(FRONT, Cancel(SequenceKey(1, 2), 9)) == []
    _, sends = desk.core.plan()
    assert sent(sends, LeaseWanted) == want, "said again"


def test_a_new_allocator_hears_of_a_shared_page_once() -> None:
    desk = decoding()
    desk.start(length=11, choice=1)
    desk.step()
    [held] = sent(desk.peers([Incarnation("allocator", 2)], [ALLOCATOR]), PagesHeld)
    assert isinstance(held, PagesHeld)
    assert len(held.used) == len(set(held.used)) == 4
    assert set(held.used) == {*desk.sequence(0).pages, *desk.sequence(1).pages}
    desk.tell(FRONT, Cancel(KEY, 9))
    shared = tuple(desk.sequence(1).pages[:2])
    assert desk.tell(ALLOCATOR, PagesDoubted(shared)) == []
    desk.step(STOP_TOKEN)
    desk.all_is_released()


# ── prefixes ──────────────────────────────────────────────────────────────────────────────────


def seeking(length: int = 15, *, role: str = "both", decode: Incarnation = ME) -> tuple[Desk, PrefixWanted]:
    """A desk where a prompt waits for the allocator's word."""
    desk = Desk(role, answers=False, step_tokens=20)
    [wanted] = sent(desk.start(length=length, decode=decode), PrefixWanted)
    assert isinstance(wanted, PrefixWanted)
    return desk, wanted


def rows(plan: Plan | None) -> list[tuple[int, int, int, bool]]:
    assert plan is not None
    return [(p.sequence.key.request, p.start, p.length, p.samples) for p in plan.slices]


@pytest.mark.parametrize("length", range(1, 3 * PAGE + 2))
def test_a_prompt_with_whole_pages_asks_for_them_first(length: int) -> None:
    """Field report 12: never for the page of its last token, which is always computed."""
    desk = Desk(answers=False)
    asked = sent(desk.start(length=length), PrefixWanted)
    whole = (length - 1) // PAGE
    tokens = token_bytes(range(whole * PAGE))
    assert asked == ([PrefixWanted(KEY, 1, chain_root(""), tokens, 0, True)] if whole else [])
    assert desk.sequence(0).seeks == bool(whole)


@pytest.mark.parametrize("length", range(PAGE + 1, 4 * PAGE + 2))
def test_a_full_hit_still_computes_the_last_token_of_the_prompt(length: int) -> None:
    """Field report 12: its logits are nobody's but its own, so its row is computed and sampled."""
    desk, wanted = seeking(length)
    whole = (length - 1) // PAGE
    sends = desk.find(wanted, whole)
    assert sent(sends, TermAccepted) == [TermAccepted(KEY, 2, Cached(worker=whole * PAGE))]
    desk.grant(2)
    assert rows(desk.plan()) == [(1, whole * PAGE, length - whole * PAGE, True)]


@pytest.mark.parametrize("log", [tuple(range(2 * PAGE)), (*range(PAGE), *range(50, 50 + PAGE + 1))])
def test_a_request_that_comes_back_asks_for_all_of_its_log(log: tuple[int, ...]) -> None:
    """Generated tokens are found like those of a prompt."""
    desk = Desk(answers=False)
    [wanted] = sent(desk.start(length=PAGE, more=log[PAGE:], term=5), PrefixWanted)
    assert isinstance(wanted, PrefixWanted)
    assert wanted.tokens == token_bytes(log[: (len(log) - 1) // PAGE * PAGE])


def test_nothing_is_computed_and_no_page_wanted_while_it_seeks() -> None:
    desk, wanted = seeking()
    assert desk.core.plan() == (None, [Send("allocator", LeaseWanted(0, 2, 0))]), "it stands still for none"
    desk.start(2, length=PAGE)
    desk.grant(2)
    assert rows(desk.plan()) == [(2, 0, PAGE - 1, False)], "others go on"
    assert wanted.seeks


@pytest.mark.parametrize("rest", [0, 1, 2])
def test_pages_come_one_after_the_other_until_there_are_no_more(rest: int) -> None:
    """While somebody fills the next one it waits; what nobody has it fills itself."""
    desk, wanted = seeking()
    first, second, third = desk.filled_by_other(99, 3 * PAGE, 1)
    assert desk.give(wanted, (first,), more=True) == [Send("allocator", PrefixFact(KEY, 1, 1, True))]
    assert desk.core.plan()[0] is None
    assert desk.give(wanted, (), more=True) == [Send("allocator", PrefixFact(KEY, 1, 1, True))]
    sends = desk.give(wanted, (second, third)[: 2 - rest])
    assert sends[0] == Send("allocator", PrefixFact(KEY, 1, 3 - rest, True))
    found = (3 - rest) * PAGE
    assert (desk.sequence(0).computed, desk.sequence(0).cached) == (found, Cached(worker=found))
    if rest:
        desk.grant(4)
        [slice_] = rows(desk.plan())
        assert slice_ == (1, found, 14 - found, False)


def test_the_chain_goes_on_behind_the_pages_that_were_found() -> None:
    desk, wanted = seeking()
    desk.find(wanted, 2)
    desk.grant(2)
    [news, _] = sent(desk.step(), PagesSealed)
    assert isinstance(news, PagesSealed)
    [page] = news.pages
    keys = page_keys(chain_root(""), token_bytes(range(12)), PAGE)
    seal = desk.table.sealed(page.index)
    assert (seal.key, seal.parent, seal.tokens) == (keys[2], keys[1], token_bytes(range(8, 12)))


def test_what_found_pages_leave_goes_with_the_first_sampled_row_if_it_is_less_than_a_page() -> None:
    desk, wanted = seeking(length=3 * PAGE)
    assert sent(desk.find(wanted, 2), TermAccepted) == [TermAccepted(KEY, 2, Cached(worker=8))]
    desk.grant(2)
    assert rows(desk.plan()) == [(1, 8, 4, True)]
    desk, wanted = seeking(length=3 * PAGE + 1)
    assert not sent(desk.find(wanted, 2), TermAccepted), "a page is left: it is filled in its turn"
    desk.grant(2)
    assert rows(desk.plan()) == [(1, 8, 4, False)]


def test_found_pages_are_counted_by_where_they_were_and_so_handed_on() -> None:
    desk, wanted = seeking(role="prefill", decode=OTHER)
    one, two, three = desk.filled_by_other(99, 3 * PAGE, 1)
    desk.owned |= {one, two, three}
    desk.tell(ALLOCATOR, PrefixGranted(KEY, 1, (one,), Cached(1, 2, 0, 1), True))
    sends = desk.tell(ALLOCATOR, PrefixGranted(KEY, 1, (two, three), Cached(2, 2, 4, 0), False))
    [message] = sent(sends, HandOver)
    assert isinstance(message, HandOver)
    assert (message.cached, message.filled) == (Cached(3, 4, 4, 1), 12)
    assert wanted.seeks
    desk = Desk("decode")
    pages = desk.filled_by_other(1, 12, 1)
    desk.owned |= set(pages)
    handed = HandOver(2, spec_of(1, 15), 12, pages, message.cached)
    assert sent(desk.tell(OTHER, handed), TermAccepted) == [TermAccepted(KEY, 2, Cached(3, 4, 4, 1))]


@pytest.mark.parametrize("more", [True, False])
@pytest.mark.parametrize("how", ["cancel", "later term", "gateway"])
def test_who_is_dropped_while_it_seeks_releases_what_it_took_and_takes_no_more(more: bool, how: str) -> None:
    desk, wanted = seeking()
    desk.find(wanted, 1, more=True)
    [taken] = desk.sequence(0).pages
    if how == "cancel":
        sends = desk.tell(FRONT, Cancel(KEY, 9))
    elif how == "later term":
        sends = desk.start(length=PAGE, term=7)
    else:
        sends = desk.peers([], [FRONT])
    assert sends[:2] == [
        Send("allocator", PrefixFact(KEY, 1, 1, False)),
        Send("allocator", PagesReleased((taken,))),
    ]
    late = desk.filled_by_other(99, 2 * PAGE, 1)[1:]
    assert desk.tell(ALLOCATOR, PrefixGranted(KEY, 1, late, Cached(), more)) == []
    row = desk.table.holders(MINE)
    assert row is not None
    assert not any(row)
    desk.tell(FRONT, Cancel(KEY, 9))
    desk.all_is_released()


def test_a_new_allocator_is_asked_again_from_where_the_prompt_is() -> None:
    desk, wanted = seeking()
    desk.find(wanted, 1, more=True)
    desk.fillings.clear()
    new = Incarnation("allocator", 2)
    sends = desk.peers([new], [ALLOCATOR])
    [held] = sent(sends, PagesHeld)
    assert isinstance(held, PagesHeld)
    assert held.used == tuple(desk.sequence(0).pages)
    [again] = sent(sends, PrefixWanted)
    assert again == PrefixWanted(KEY, 1, wanted.root, wanted.tokens, 1, True)
    kinds = [type(send.message) for send in sends]
    assert kinds.index(PagesHeld) < kinds.index(PrefixWanted), "who it is comes first"
    # What it takes is counted anew.
    assert isinstance(again, PrefixWanted)
    assert desk.find(again, 1) == [Send("allocator", PrefixFact(KEY, 1, 1, True))]
    assert desk.sequence(0).cached == Cached(worker=2 * PAGE)


@pytest.mark.parametrize("computed", [0, 3, 6, 9])
def test_a_new_allocator_hears_what_is_being_filled(computed: int) -> None:
    """It does not wait for an answer then: whoever has the same tokens waits for it."""
    desk = Desk(step_tokens=3)
    desk.start(length=15)
    desk.grant(4)
    for _ in range(computed // 3):
        desk.step()
    desk.fillings.clear()
    desk.answers = False
    [again] = sent(desk.peers([Incarnation("allocator", 2)], [ALLOCATOR]), PrefixWanted)
    assert again == PrefixWanted(KEY, 1, chain_root(""), token_bytes(range(12)), computed // PAGE, False)
    assert not desk.sequence(0).seeks
    assert desk.plan() is not None


def test_what_is_not_filled_any_more_is_not_said_to_a_new_allocator() -> None:
    desk, _ = offered()
    desk.start(2, length=PAGE - 1)
    assert not sent(desk.peers([Incarnation("allocator", 2)], [ALLOCATOR]), PrefixWanted)


def test_the_end_of_a_filling_is_said_behind_its_pages_and_before_they_are_released() -> None:
    """So that who waits for them finds them, and is not left waiting."""
    desk = Desk("prefill", step_tokens=20)
    desk.start(length=10, decode=OTHER)
    kinds = [type(send.message) for send in desk.step()]
    assert kinds == [PagesSealed, PagesSealed, PrefixFact, HandOver]
    desk = Desk(step_tokens=20)
    desk.grant(4)
    desk.start(length=10)
    plan = desk.plan()
    assert plan is not None
    desk.tell(FRONT, Cancel(KEY, 9))
    kinds = [type(send.message) for send in desk.complete(plan)]
    assert kinds == [PagesSealed, PagesSealed, PrefixFact, PagesReleased], "also of what was cancelled"
    desk.all_is_released()


def test_a_page_that_is_held_here_may_come_in_a_hand_over_too() -> None:
    """One row, one release, by the last who reads it."""
    desk, wanted = seeking(length=9)
    shared = desk.filled_by_other(99, 8, 1)
    desk.give(wanted, shared)
    handed = HandOver(2, spec_of(2, 9), 8, shared)
    assert sent(desk.tell(OTHER, handed), HandOverAccepted)
    assert desk.core.statistics()["pages_shared"] == 2
    desk.tell(FRONT, Cancel(KEY, 9))
    assert not set(shared) & set(desk.freed)
    desk.tell(FRONT, Cancel(SequenceKey(2, 0), 9))
    assert desk.freed == Counter(shared)
    desk.all_is_released()


def test_pages_are_asked_for_by_identity_and_salt() -> None:
    """Field report 13: who depends on something else never meets the same key."""
    roots = set()
    for identity in ("a", "b"):
        desk = Desk(answers=False)
        desk.core.identity = identity
        for number, salt in enumerate(("", "tenant")):
            spec = msgspec.structs.replace(spec_of(number, 6), cache_salt=salt)
            [wanted] = sent(desk.tell(FRONT, StartPrefill(1, spec, ME)), PrefixWanted)
            assert isinstance(wanted, PrefixWanted)
            assert wanted.root == chain_root(identity, salt)
            roots.add(wanted.root)
    assert len(roots) == 4


def test_without_a_prefix_cache_nobody_asks() -> None:
    desk = Desk(answers=False, prefix_cache=False)
    assert desk.start(length=15) == []
    desk.grant(4)
    assert rows(desk.plan()) == [(1, 0, 6, False)]


def test_a_grant_of_what_is_stale_is_not_taken() -> None:
    """It was made by an allocator that died, or to a worker that was thought dead."""
    desk, _ = seeking()
    first, second = desk.filled_by_other(99, 2 * PAGE, 1)
    desk.table.free(second.index)
    sends = desk.tell(ALLOCATOR, PrefixGranted(KEY, 1, (first, second), Cached(worker=8), True))
    assert sends == [Send("allocator", PrefixFact(KEY, 1, 0, True))]
    sequence = desk.sequence(0)
    assert (sequence.pages, sequence.computed, sequence.cached) == ([], 0, Cached())
    desk.grant(4)
    assert rows(desk.plan()) == [(1, 0, 14, False)], "it fills all itself"


# ── leases ────────────────────────────────────────────────────────────────────────────────────


def test_an_idle_worker_holds_no_page_and_says_so_once() -> None:
    desk = Desk(supply=False)
    desk.core.plan()
    desk.grant(3)
    _, sends = desk.core.plan()
    [returned] = sent(sends, LeaseReturned)
    assert isinstance(returned, LeaseReturned)
    assert (len(returned.pages), returned.consumed, returned.ahead) == (3, 3, 0)
    assert desk.core.plan() == (None, [])


def test_the_same_want_is_not_said_twice() -> None:
    desk = Desk(supply=False)
    desk.start(length=6)
    _, sends = desk.core.plan()
    assert sent(sends, LeaseWanted) == [LeaseWanted(0, 2 + 2, 2)]
    assert desk.core.plan() == (None, [])
    desk.grant(1)
    plan, sends = desk.core.plan()
    assert plan is not None
    assert sent(sends, LeaseWanted) == [LeaseWanted(1, 2 + 1, 1)]


def test_a_recall_returns_all_but_what_somebody_stands_still_for() -> None:
    desk = Desk(supply=False)
    desk.start(length=6)
    desk.core.plan()
    desk.grant(5)
    [returned] = sent(desk.tell(ALLOCATOR, LeaseRecall()), LeaseReturned)
    assert isinstance(returned, LeaseReturned)
    assert (len(returned.pages), returned.consumed, returned.ahead) == (3, 3, 2 + 2)
    assert len(desk.core.lease) == 2
    # A new allocator hears the same need, else it would recall what is kept for it, again and again.
    sends = desk.peers([Incarnation("allocator", 2)], [ALLOCATOR])
    assert sent(sends, LeaseWanted) == [LeaseWanted(3, 2 + 2, 2)]
    assert desk.plan() is not None


def test_a_doubted_page_is_released_unless_it_is_held() -> None:
    desk = Desk(supply=False)
    desk.grant(4)
    desk.start(length=6)
    desk.plan()
    lost = desk._lease(MINE)
    desk.owned.add(lost)
    held = (*desk.core.lease.held(), *(page for s in desk.core.sequences for page in s.pages))
    assert len(held) == 4
    assert sent(desk.tell(ALLOCATOR, PagesDoubted((*held, lost))), PagesReleased) == [PagesReleased((lost,))]


def test_a_step_is_completed_once_and_not_planned_twice() -> None:
    desk = Desk()
    desk.grant(2)
    desk.start()
    plan = desk.plan()
    assert plan is not None
    with pytest.raises(AssertionError, match="a step is running"):
        desk.core.plan()
    desk.complete(plan)
    with pytest.raises(AssertionError, match="not the step"):
        desk.core.complete(plan, [], 0.0)


@pytest.mark.parametrize("message", [Drain(), Stop(), Roster((1, 1), ())])
def test_what_is_the_shells_own_changes_nothing(message: Drain | Stop | Roster) -> None:
    assert Desk().tell(FRONT, message) == []


# ── anything, in any order ────────────────────────────────────────────────────────────────────


class Machine(RuleBasedStateMachine):
    """Prefills that find pages or do not, hand-overs in both directions, choices that share pages,
    cancels, faults, deaths and recalls around running steps.

    The model of who holds what is a naive one: the block tables themselves.
    """

    @initialize(role=st.sampled_from(["prefill", "decode", "both"]), step_tokens=st.integers(1, 12))
    def begin(self, role: str, step_tokens: int) -> None:
        self.desk = Desk(role, step_tokens=step_tokens, answers=False)
        # All prompts here begin alike, so any full page of another worker serves all of them.
        self.cache = self.desk.filled_by_other(0, 4 * PAGE, 1)
        self.role = role
        self.number = 0
        self.term = 10
        self.lengths: dict[int, int] = {}
        self.running: Plan | None = None
        self.offers: dict[tuple[SequenceKey, int], HandOver] = {}
        self.positions: dict[tuple[SequenceKey, int], int] = {}
        self.other_alive = True

    def note(self, sends: list[Send]) -> list[Send]:
        for send in sends:
            match send.message:
                case HandOver() as message:
                    assert send.to == OTHER
                    self.offers[message.spec.key, message.term] = message
                case StepTokens(rows=rows):
                    for row in rows:
                        expected = self.positions.get((row.key, row.term))
                        assert expected in (None, row.position), "a position was left out or repeated"
                        self.positions[row.key, row.term] = row.position + 1
        return sends

    @rule(length=st.integers(1, 14), here=st.booleans())
    def start(self, length: int, here: bool) -> None:
        self.number += 1
        self.lengths[self.number] = length
        decode = ME if here and self.role == "both" else OTHER
        self.note(self.desk.start(self.number, length, decode=decode, limit=length + 4))

    @rule(length=st.integers(1, 14), choices=st.integers(1, 4))
    def receive(self, length: int, choices: int) -> None:
        """A hand-over, and further choices of its request."""
        if self.other_alive:
            self.number += 1
            self.lengths[self.number] = length
            self.note(self.desk.hand_over(self.number, length, limit=length + 4))
            if self.role != "prefill":
                for choice in range(1, choices):
                    self.start_choice(self.number, choice, ())

    @precondition(lambda self: self.number and self.role != "prefill")
    @rule(data=st.data(), choice=st.integers(0, 3), more=st.lists(st.sampled_from([3, 3, 3, 4]), max_size=9))
    def choice_comes_again(self, data: st.DataObject, choice: int, more: list[int]) -> None:
        """With or without tokens of its own, and also while it is still here in an older term."""
        self.start_choice(data.draw(st.integers(1, self.number)), choice, tuple(more))

    def start_choice(self, number: int, choice: int, more: tuple[int, ...]) -> None:
        self.term += 2
        length = self.lengths[number]
        before = {page for sequence in self.desk.core.sequences for page in sequence.pages}
        limit = length + len(more) + 4
        sends = self.desk.start(number, length, choice=choice, more=more, term=self.term, limit=limit)
        self.note(sends)
        for sequence in self.desk.core.sequences:
            if sequence.term >= self.term:
                assert before.issuperset(sequence.pages), "it shares what was here, or nothing"
                assert len(sequence.pages) * PAGE == sequence.computed < len(sequence.log)

    @precondition(lambda self: any(wanted.seeks for wanted in self.desk.fillings.values()))
    @rule(data=st.data(), count=st.integers(0, 4), more=st.booleans())
    def answer_a_search(self, data: st.DataObject, count: int, more: bool) -> None:
        """Also when what it had found before came with the promise of more, or it is doomed."""
        desk = self.desk
        seeking = {place for place, wanted in desk.fillings.items() if wanted.seeks}
        key, term = data.draw(st.sampled_from(sorted(seeking)))
        [sequence] = [s for s in desk.core.sequences if (s.key, s.term) == (key, term)]
        wanted = desk.fillings[key, term]
        most = len(wanted.tokens) // (4 * PAGE)
        have = len(sequence.pages)
        pages = self.cache[have : min(have + count, most)] if sequence.seeks else ()
        assert not sequence.seeks or sequence.computed == have * PAGE
        self.note(desk.give(wanted, pages, more=more))

    @rule()
    def plan(self) -> None:
        if self.running is None:
            self.running = self.desk.plan()
            if self.running is not None:
                assert 0 < self.running.rows <= self.desk.core.limits.step_tokens

    @rule(data=st.data(), count=st.integers(1, 6))
    def steps(self, data: st.DataObject, count: int) -> None:
        """Some steps at once: by single rules few sequences would come far."""
        for _ in range(count):
            if self.running is not None:
                self.complete(data)
            self.plan()

    @precondition(lambda self: self.running is not None)
    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        plan, self.running = self.running, None
        assert plan is not None
        tokens = [
            data.draw(st.sampled_from([3, 3, 3, 3, STOP_TOKEN, -1])) for piece in plan.slices if piece.samples
        ]
        self.note(self.desk.act(self.desk.core.complete(plan, tokens, 0.0)))

    @precondition(lambda self: self.number)
    @rule(data=st.data(), term=st.sampled_from([0, 1, 2, 3, 4, 999]), choice=st.integers(0, 3))
    def cancel(self, data: st.DataObject, term: int, choice: int) -> None:
        number = data.draw(st.integers(1, self.number))
        self.note(self.desk.tell(FRONT, Cancel(SequenceKey(number, choice), term)))

    @precondition(lambda self: self.offers and self.other_alive)
    @rule(data=st.data(), accept=st.booleans())
    def answer(self, data: st.DataObject, accept: bool) -> None:
        key, term = data.draw(st.sampled_from(sorted(self.offers)))
        message = self.offers.pop((key, term))
        if accept:
            sends = self.note(self.desk.accept(message))
            assert all(isinstance(send.message, PagesReleased) for send in sends)
        else:
            self.note(self.desk.tell(OTHER, HandOverRefused(key, term, "x")))

    @rule(fence=st.booleans())
    def other_dies_or_lives(self, fence: bool) -> None:
        if self.other_alive:
            if fence:
                self.note(self.desk.tell(ALLOCATOR, FenceWanted(OTHER)))
            self.note(self.desk.peers([], [OTHER]))
            self.offers.clear()
        else:
            self.note(self.desk.peers([OTHER]))
        self.other_alive = not self.other_alive

    @rule()
    def gateway_restarts(self) -> None:
        self.note(self.desk.peers([FRONT], [FRONT]))

    @rule()
    def recall(self) -> None:
        self.note(self.desk.tell(ALLOCATOR, LeaseRecall()))

    @rule()
    def allocator_restarts(self) -> None:
        mine = set(self.desk.owned)
        self.desk.fillings.clear()
        sends = self.note(self.desk.peers([ALLOCATOR], [ALLOCATOR]))
        [held] = sent(sends, PagesHeld)
        assert isinstance(held, PagesHeld)
        offered = {page for message in self.offers.values() for page in message.pages}
        assert {*held.leased, *held.used} | offered >= mine

    @invariant()
    def it_is_sound(self) -> None:
        if hasattr(self, "desk"):
            desk = self.desk
            desk.core.check()
            used = {page for sequence in desk.core.sequences for page in sequence.pages}
            held = {*used, *desk.core.lease.held()}
            assert held == desk.owned, "a page leaked, or was released too early"

    def teardown(self) -> None:
        """When all is answered and cancelled, every page went back or on, once."""
        if not hasattr(self, "desk"):
            return
        if self.running is not None:
            self.note(self.desk.complete(self.running))
        for number in range(1, self.number + 1):
            for choice in range(4):
                self.note(self.desk.tell(FRONT, Cancel(SequenceKey(number, choice), 999)))
        for key, term in list(self.offers):
            self.desk.tell(OTHER, HandOverRefused(key, term, "x"))
        self.desk.all_is_released()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
