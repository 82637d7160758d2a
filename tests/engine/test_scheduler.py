"""The scheduler: turns, slots and pages respected, and nothing in it that cannot be told again."""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_desk import (
    ALLOCATOR,
    BACK,
    FRONT,
    PAGE_TOKENS,
    B,
    D,
    Desk,
    E,
    P,
    choices_placed,
    gateway,
    key_of,
    placed,
    places,
    preempted,
    waiting,
)

from engine.core import Send
from engine.fairness import Fairness
from engine.ids import Incarnation, SequenceKey
from engine.messages import (
    Drain,
    NobodyGivesWay,
    Place,
    PoolExhausted,
    PoolFact,
    Preempt,
    RequestEnded,
    RequestFact,
    Roster,
    Stop,
    WorkerFact,
)
from engine.scheduler import Scheduler

# ── placement ─────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_the_gateway_does_not_know_is_not_proposed_to_it() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1), (E, 0, 1))
    fact = msgspec.structs.replace(waiting(1), excluding=(D,))
    assert [place.decode for place in places(desk.tell(FRONT, fact))] == [E]
    assert places(desk.tell(FRONT, msgspec.structs.replace(waiting(2), excluding=(P,)))) == []


def test_a_request_is_placed_in_its_term_by_a_word_to_its_gateway() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1))
    assert desk.tell(BACK, waiting(1, owner=BACK, term=6)) == [Send(BACK, Place(key_of(1, BACK), 6, P, D))]


def test_nothing_is_placed_before_slots_and_pool_are_known() -> None:
    desk = Desk(free=None)
    assert desk.submit(1) == []
    assert desk.tell(P, WorkerFact(1, 0)) == []
    assert desk.tell(D, WorkerFact(0, 1)) == []
    assert placed(desk.pool(10)) == [1]


def test_first_come_first_served_by_arrival_not_by_word() -> None:
    desk = Desk()
    assert desk.submit(3, 1, 2) == []
    assert placed(desk.tell(B, WorkerFact(8, 8))) == [1, 2, 3]


def test_a_long_prompt_at_the_head_is_not_starved_by_short_ones_behind_it() -> None:
    desk = Desk((B, 8, 8), free=20)
    assert desk.submit(1, length=40) == [1]
    assert desk.submit(2, length=40) == [], "ten pages are promised"
    assert desk.submit(3, 4, 5) == [], "they would fit, but are behind"
    assert placed(desk.end(1)) == [2, 3, 4, 5]


def test_a_slot_is_taken_from_placement_until_the_gateway_says_otherwise() -> None:
    desk = Desk((P, 1, 0), (D, 0, 2))
    assert desk.submit(1, 2) == [1], "one prefill slot"
    assert placed(desk.decoding(1)) == [2]
    assert placed(desk.decoding(2)) == []
    assert desk.submit(3) == [], "two decode slots"
    assert placed(desk.end(1)) == [3]


def test_the_worker_that_prefills_decodes_too_where_it_can() -> None:
    desk = Desk((B, 2, 1), (D, 0, 4))
    sends = [send for count in (1, 2) for send in desk.tell(FRONT, waiting(count))]
    assert [(place.prefill, place.decode) for place in places(sends)] == [(B, B), (B, D)]
    desk = Desk((B, 2, 3), (D, 0, 3))
    desk.decoding(1, B)
    assert [place.decode for place in places(desk.tell(FRONT, waiting(2)))] == [B], "also when it has more"


def test_the_least_loaded_workers_are_chosen() -> None:
    desk = Desk((P, 8, 0), (D, 0, 8), (E, 0, 8))
    sends = [send for count in range(4) for send in desk.tell(FRONT, waiting(count))]
    assert [place.decode for place in places(sends)] == [D, E, D, E]


def test_pages_are_counted_beside_what_is_promised() -> None:
    desk = Desk((B, 8, 8), free=5)
    assert desk.submit(1, length=8) == [1]
    assert desk.submit(2, length=8) == [2], "2 + 2 promised + 1 of growth = 5"
    assert desk.submit(3, length=4) == []
    assert placed(desk.pool(7)) == [3]


def test_a_request_that_is_alone_always_goes() -> None:
    desk = Desk((B, 8, 8), free=0)
    assert desk.submit(1, length=4000) == [1]
    assert desk.submit(2) == []
    assert placed(desk.end(1)) == [2]


# ── what is said again ────────────────────────────────────────────────────────────────────────


def test_facts_said_again_change_nothing() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1))
    assert desk.submit(1) == [1]
    before = desk.core.statistics()
    assert desk.submit(1) == [], "an echo of the term in which it waited"
    assert desk.tell(P, WorkerFact(1, 0)) == []
    assert desk.pool(1000) == []
    assert desk.core.statistics() == before
    desk.decoding(1)
    before = desk.core.statistics()
    assert desk.decoding(1) == []
    assert desk.core.statistics() == before
    assert desk.end(1) == desk.end(1) == []
    assert desk.core.statistics()["requests"] == 0


def test_an_older_term_does_not_replace_a_newer_one() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1))
    desk.decoding(1)
    assert desk.submit(1) == []
    assert desk.core.statistics()["requests_decoding"] == 1


def test_what_was_taken_back_is_placed_again() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1))
    assert desk.submit(1) == [1]
    [place] = places(desk.tell(FRONT, waiting(1, term=3)))
    assert place.term == 3


def test_a_new_scheduler_is_told_what_runs_before_it_gives_slots_away() -> None:
    """Rebuilt from facts in any order, it never fills a slot twice."""
    desk = Desk(free=None)
    desk.decoding(1)
    desk.submit(3)
    desk.tell(FRONT, RequestFact(key_of(2), 1, "prefilling", 2.0, 4, 100, P, D))
    desk.pool(1000)
    assert desk.tell(P, WorkerFact(2, 0)) == []
    assert desk.tell(D, WorkerFact(0, 2)) == [], "both decode slots are taken already"
    assert placed(desk.end(1)) == [3]


# ── deaths ────────────────────────────────────────────────────────────────────────────────────


def test_a_dead_gateway_takes_its_requests_and_their_slots_with_it() -> None:
    desk = Desk((B, 1, 1))
    desk.submit(1, 2)
    desk.tell(BACK, waiting(3, owner=BACK))
    assert placed(desk.core.peers((), [FRONT], 0.0)) == [3]
    desk.core.check()
    assert desk.core.statistics()["requests"] == 1


def test_a_late_word_of_a_dead_gateway_takes_no_slot() -> None:
    desk = Desk((B, 1, 1))
    desk.core.peers((), [FRONT], 0.0)
    assert desk.tell(FRONT, waiting(1)) == []
    again = Incarnation("front", 2)
    desk.core.peers([gateway(again)], (), 0.0)
    assert desk.tell(FRONT, waiting(1)) == []
    assert placed(desk.tell(again, waiting(2, owner=again))) == [2]


def test_nothing_is_placed_on_a_dead_worker() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1))
    desk.core.peers((), [D], 0.0)
    assert desk.submit(1) == []
    assert placed(desk.tell(Incarnation("d", 2), WorkerFact(0, 1))) == [1]


def test_requests_on_a_dead_worker_hold_their_other_slot_until_they_are_taken_back() -> None:
    desk = Desk((P, 1, 0), (D, 0, 1), (E, 0, 1))
    assert desk.submit(1, 2) == [1]
    assert desk.core.peers((), [D], 0.0) == []
    assert [place.decode for place in places(desk.tell(FRONT, waiting(1, term=3)))] == [E]


# ── siblings ──────────────────────────────────────────────────────────────────────────────────


def test_the_first_choice_is_prefilled_and_the_others_join_it_where_it_decodes() -> None:
    desk = Desk((P, 4, 0), (D, 0, 8), (E, 0, 8))
    assert desk.ask(1, choices=4) == [(1, 0)]
    sends = desk.tell(FRONT, msgspec.structs.replace(desk.told[key_of(1)], term=2, stage="decoding"))
    where = desk.told[key_of(1)].decode
    assert [(p.key.choice, p.prefill, p.decode) for p in places(sends)] == [
        (n, where, where) for n in (1, 2, 3)
    ]
    assert desk.core.statistics()["placements_beside"] == 3


def test_joining_a_sibling_takes_no_prefill_slot_but_a_decode_slot() -> None:
    desk = Desk((P, 2, 0), (D, 0, 3))
    assert desk.ask(1, choices=2) == [(1, 0)]
    assert desk.ask(2) == [(2, 0)]
    assert desk.accepted(1) == [(1, 1)], "the third decode slot"
    assert desk.ask(3) == []
    assert [place.decode for place in places(desk.end(2))] == [D]
    assert desk.told[key_of(3)].stage == "prefilling", "of the two prefill slots none was taken"


def test_who_waits_for_a_sibling_holds_nobody_back() -> None:
    desk = Desk((P, 1, 0), (D, 0, 8))
    desk.ask(1)
    assert desk.ask(2, choices=3) == desk.ask(3) == []
    assert desk.accepted(1) == [(2, 0)], "the lowest choice"
    assert desk.accepted(2) == [(2, 1), (2, 2), (3, 0)]
    desk = Desk((P, 4, 0), (D, 0, 8))
    assert desk.ask(1, choices=3) == [(1, 0)]
    assert desk.ask(2) == [(2, 0)], "the same client's next, past two that wait for their sibling"


def test_when_the_sibling_ends_the_next_choice_is_placed_as_usual() -> None:
    desk = Desk((P, 4, 0), (D, 0, 8))
    assert desk.ask(1, choices=3) == [(1, 0)]
    assert choices_placed(desk.end(1)) == [(1, 1)]
    assert desk.core.statistics()["placements_beside"] == 0


def test_when_the_sibling_is_lost_it_joins_those_that_joined_it() -> None:
    desk = Desk((P, 4, 0), (D, 0, 8))
    assert desk.ask(1, choices=3) == [(1, 0)]
    assert desk.taken_back(1) == [(1, 0)]
    assert desk.accepted(1) == [(1, 1), (1, 2)]
    assert desk.taken_back(1) == [], "two are about to decode"
    assert desk.accepted(1, 2) == [(1, 0)]
    assert desk.core.statistics()["placements_beside"] == 3


def test_a_sibling_without_room_beside_it_is_no_reason_to_wait() -> None:
    desk = Desk((P, 4, 0), (D, 0, 1), (E, 0, 4))
    desk.tell(FRONT, RequestFact(key_of(1), 2, "decoding", 1.0, 9, 100, P, D))
    fact = RequestFact(key_of(1, choice=1), 0, "waiting", 1.0, 9, 100)
    assert [(p.prefill, p.decode) for p in places(desk.tell(FRONT, fact))] == [(P, E)]


def test_of_several_siblings_the_least_loaded_place_is_joined() -> None:
    desk = Desk((P, 4, 0), (D, 0, 4), (E, 0, 4))
    for choice, decode in enumerate((D, D, E)):
        desk.tell(FRONT, RequestFact(key_of(1, choice=choice), 2, "decoding", 1.0, 9, 100, P, decode))
    fact = RequestFact(key_of(1, choice=3), 0, "waiting", 1.0, 9, 100)
    assert [(p.prefill, p.decode) for p in places(desk.tell(FRONT, fact))] == [(E, E)]


def test_joining_takes_but_the_pages_that_the_siblings_do_not_share() -> None:
    desk = Desk((P, 4, 0), (D, 0, 8), free=20)
    desk.ask(1, length=40, choices=3)
    desk.pool(3)
    assert desk.accepted(1) == [(1, 1)], "one page, and one of growth for each"
    assert choices_placed(desk.pool(5)) == [(1, 2)]


def test_of_siblings_so_many_give_way_that_pages_become_free() -> None:
    """Those that read each other's pages may have none of their own."""
    desk = Desk((P, 9, 0), (D, 0, 9))
    desk.decoding(1)
    desk.ask(2, choices=3)
    desk.accepted(2)
    desk.accepted(2, 1)
    desk.accepted(2, 2)
    keys = [send.message.key for send in desk.tell(ALLOCATOR, PoolExhausted(D))]  # type: ignore[union-attr]
    assert [key.choice for key in keys] == [2, 1, 0]
    assert {key.request for key in keys} == {key_of(2).request}


# ── who says it ───────────────────────────────────────────────────────────────────────────────


def test_a_request_belongs_to_the_gateway_that_says_it_whoever_named_it() -> None:
    desk = Desk((B, 4, 4))
    desk.submit(1, 2)
    again = Incarnation("front", 2)
    assert desk.core.peers([gateway(again)], [FRONT], 0.0) == []
    assert desk.core.statistics()["requests"] == 0
    [send] = desk.tell(again, waiting(1, term=3))
    assert send == Send(again, Place(key_of(1), 3, B, B)), "a name of its former life"
    desk.tell(again, RequestFact(key_of(1), 5, "decoding", 1.0, 9, 100, B, B))
    desk.tell(again, RequestFact(key_of(3, again), 2, "decoding", 3.0, 9, 100, B, B))
    assert [send.to for send in desk.tell(ALLOCATOR, PoolExhausted(B))] == [again]
    assert desk.tell(BACK, RequestEnded(key_of(1), 5)) == []
    assert desk.core.statistics()["requests"] == 2, "another gateway's word ends nothing"
    desk.core.peers((), [again], 0.0)
    desk.core.check()
    assert desk.core.statistics()["requests"] == 0


# ── preemption ────────────────────────────────────────────────────────────────────────────────


def exhausted(desk: Desk) -> list[int]:
    return preempted(desk.tell(ALLOCATOR, PoolExhausted(D)))


def test_who_is_alone_gives_way_to_nobody_and_the_allocator_hears_of_it() -> None:
    """Then only what clients have pinned can be let go of."""
    desk = Desk((P, 8, 0), (D, 0, 8))
    desk.decoding(1)
    assert desk.tell(ALLOCATOR, PoolExhausted(D)) == [Send(ALLOCATOR, NobodyGivesWay())]


def test_the_newest_gives_way() -> None:
    desk = Desk((P, 8, 0), (D, 0, 8))
    for count in (2, 3, 1):
        desk.decoding(count)
    [send] = desk.tell(ALLOCATOR, PoolExhausted(D))
    assert send == Send(FRONT, Preempt(key_of(3), 2))


def test_whoever_is_still_in_prefill_may_have_no_page_so_the_next_gives_way_too() -> None:
    desk = Desk((P, 8, 0), (D, 0, 8))
    desk.decoding(1)
    desk.decoding(2)
    desk.submit(3, 4)
    assert exhausted(desk) == [4, 3, 2]


def test_the_oldest_never_gives_way() -> None:
    desk = Desk((P, 8, 0), (D, 0, 8))
    assert exhausted(desk) == []
    desk.submit(1)
    assert exhausted(desk) == []
    desk = Desk((P, 8, 0), (D, 0, 8))
    desk.submit(1, 2, 3)
    assert exhausted(desk) == [3, 2]


def test_a_waiting_request_does_not_give_way() -> None:
    desk = Desk((P, 8, 0), (D, 0, 8), free=0)
    desk.decoding(1)
    desk.decoding(2)
    assert desk.submit(3) == []
    assert exhausted(desk) == [2]


def test_exhaustion_that_nobody_was_known_for_is_remembered() -> None:
    """A new scheduler may hear of it before the gateways have restated their requests."""
    desk = Desk((P, 8, 0), (D, 0, 8), free=0)
    assert exhausted(desk) == []
    assert preempted(desk.decoding(1)) == []
    assert preempted(desk.decoding(2)) == [2]
    assert preempted(desk.decoding(3)) == [], "once"


def test_pages_that_became_free_end_the_exhaustion() -> None:
    desk = Desk((P, 8, 0), (D, 0, 8), free=0)
    assert exhausted(desk) == []
    desk.pool(3)
    desk.decoding(1)
    assert preempted(desk.decoding(2)) == []


@pytest.mark.parametrize("message", [Drain(), Stop(), Roster((1, 1), ())])
def test_what_is_the_shells_own_changes_nothing(message: Drain | Stop | Roster) -> None:
    assert Desk((B, 1, 1)).tell(FRONT, message) == []


# ── against a naive model ─────────────────────────────────────────────────────────────────────


@dataclass
class Choice:
    """What its gateway knows of a choice, and what the scheduler should."""

    key: SequenceKey
    gateway: str
    client: str
    priority: int
    arrival: float
    length: int
    limit: int
    term: int = 0
    stage: str = "waiting"
    prefill: Incarnation | None = None
    decode: Incarnation | None = None
    charged: bool = False
    beside: bool = False
    pages: int = 0

    @property
    def ticket(self) -> tuple[int, float, SequenceKey]:
        return (self.priority, self.arrival, self.key)

    @property
    def fact(self) -> RequestFact:
        return RequestFact(
            self.key,
            self.term,
            self.stage,  # type: ignore[arg-type]
            self.arrival,
            self.length,
            self.limit,
            self.prefill,
            self.decode,
            client=self.client,
            priority=self.priority,
        )


@dataclass
class Tags:
    """A client's tags, as the paper has them."""

    start: float = 0.0
    finish: float = 0.0
    bypassed: int = 0
    backlogged: bool = False


class Naive:
    """The rules of turns and room over plain lists: everything is computed anew each time."""

    def __init__(self, fairness: Fairness) -> None:
        self.weights, self.reserve, self.bypasses = fairness.weights, fairness.reserve, fairness.bypasses
        self.workers: dict[Incarnation, tuple[int, int]] = {}
        self.choices: dict[SequenceKey, Choice] = {}
        self.free: int | None = None
        self.forget_the_past()

    def forget_the_past(self) -> None:
        self.tags = {client: Tags() for client in CLIENTS}
        self.now = 0.0
        for choice in self.choices.values():
            choice.charged = choice.beside = False

    def weight(self, client: str) -> float:
        return self.weights.get(client, 1.0)

    def family(self, choice: Choice) -> list[Choice]:
        return [other for other in self.choices.values() if other.key.request == choice.key.request]

    def may_be_placed(self, choice: Choice) -> bool:
        """Whether no sibling's prompt is worth waiting for."""
        stages = [other.stage for other in self.family(choice)]
        first = min(other.key for other in self.family(choice) if other.stage == "waiting")
        return "decoding" in stages or ("prefilling" not in stages and choice.key == first)

    def line(self, client: str) -> list[Choice]:
        waiting = [c for c in self.choices.values() if c.client == client and c.stage == "waiting"]
        return sorted((c for c in waiting if self.may_be_placed(c)), key=lambda c: c.ticket)

    def holding(self, client: str = "any") -> list[Choice]:
        active = [c for c in self.choices.values() if c.stage != "waiting"]
        return [c for c in active if client in ("any", c.client)]

    def told(self, choice: Choice) -> None:
        """The scheduler was told of it."""
        if choice.stage != "waiting":
            choice.pages = self.pages(choice, choice.beside)
        else:
            choice.beside = False
        self.settle()

    def settle(self) -> None:
        for client, tags in self.tags.items():
            backlogged = bool(self.line(client))
            if backlogged and not tags.backlogged:
                tags.start, tags.bypassed = max(self.now, tags.finish), 0
            tags.backlogged = backlogged
        if not self.holding() and not any(tags.backlogged for tags in self.tags.values()):
            self.tags = {client: Tags() for client in CLIENTS}
            self.now = 0.0

    def pages(self, choice: Choice, beside: bool) -> int:
        shared = (min(other.length for other in self.family(choice)) - 1) // PAGE_TOKENS if beside else 0
        return max(1, -(-choice.length // PAGE_TOKENS) - shared)

    def free_slots(self, worker: Incarnation) -> tuple[int, int]:
        active = self.holding()
        prefills = [c for c in active if c.stage == "prefilling" and c.prefill == worker and not c.beside]
        decodes = [c for c in active if c.decode == worker]
        return self.workers[worker][0] - len(prefills), self.workers[worker][1] - len(decodes)

    def room(self, client: str, kind: int) -> int:
        """Slots that the client may take, of the prefill kind (0) or the decode kind (1)."""
        free = sum(max(0, self.free_slots(worker)[kind]) for worker in self.workers)
        slots = sum(self.workers[worker][kind] for worker in self.workers)
        kept = max(1, int(slots * self.reserve)) if slots > 1 and self.reserve else 0
        return free - (kept if self.holding(client) else 0)

    def beside(self, choice: Choice) -> set[Incarnation]:
        decodes = {c.decode for c in self.family(choice) if c.stage == "decoding"}
        return {worker for worker in self.workers if worker in decodes and self.free_slots(worker)[1] > 0}

    def next(self) -> tuple[Choice | None, list[Tags]]:
        """Who is to be placed now, and whom that passes."""
        if self.free is None:
            return None, []
        backlogged = [client for client, tags in self.tags.items() if tags.backlogged]
        passed: list[Tags] = []
        for client in sorted(backlogged, key=lambda c: (self.tags[c].start, self.line(c)[0].arrival, c)):
            choice, tags = self.line(client)[0], self.tags[client]
            beside = bool(self.beside(choice))
            if self.room(client, 1) <= 0 or (not beside and self.room(client, 0) <= 0):
                continue
            promised = sum(c.pages for c in self.holding() if c.stage == "prefilling")
            fits = self.pages(choice, beside) + promised + len(self.holding()) <= self.free
            if not fits and self.holding():
                if tags.bypassed >= self.bypasses:
                    break
                passed.append(tags)
                continue
            return choice, passed
        return None, []

    def place(self, choice: Choice, prefill: Incarnation, decode: Incarnation) -> None:
        """Check where a choice was placed, and place it."""
        beside = self.beside(choice)
        if beside:
            assert prefill == decode
            assert decode in beside
        else:
            assert self.free_slots(prefill)[0] > 0
            assert self.free_slots(decode)[1] > 0
        cost = 1 if choice.charged else choice.limit - (choice.length - 1) * bool(beside)
        present = {c.client for c in self.holding()} | {c for c, t in self.tags.items() if t.backlogged}
        tags = self.tags[choice.client]
        tags.finish = tags.start + cost / self.weight(choice.client)
        self.now = max(self.now, tags.start + cost / (2 * sum(map(self.weight, present))))
        tags.start, tags.bypassed = tags.finish, 0
        choice.term += 1
        choice.stage, choice.prefill, choice.decode = "prefilling", prefill, decode
        choice.charged, choice.beside = True, bool(beside)
        self.told(choice)


CLIENTS = ["", "alice", "bob"]
LENGTHS = [1, 4, 5, 8, 16, 33, 60]
WHICH = st.integers(0, 1000)


class Machine(RuleBasedStateMachine):
    """Gateways obey every placement at once; workers and gateways die; facts are said again."""

    # The weights are powers of two, so that sums come out the same in any order.
    @initialize(
        weight=st.sampled_from([0.25, 1.0, 4.0]),
        reserve=st.sampled_from([0.0, 0.125, 0.5]),
        slots=st.integers(1, 4),
    )
    def begin(self, weight: float, reserve: float, slots: int) -> None:
        self.fairness = Fairness({"alice": weight}, reserve, bypasses=2)
        self.core = Scheduler(PAGE_TOKENS, self.fairness)
        self.model = Naive(self.fairness)
        self.gateways = {"front": FRONT, "back": BACK}
        self.epochs = {"front": 1, "back": 1, **dict.fromkeys("pdb", 0)}
        self.count = 0
        self.act(self.core.peers([gateway(FRONT), gateway(BACK)], (), 0.0))
        for name in "pdb":
            self.worker_lives_or_dies(name, slots)
        self.pool(40)

    @property
    def choices(self) -> dict[SequenceKey, Choice]:
        return self.model.choices

    def tell(self, source: Incarnation, message: object) -> None:
        self.act(self.core.handle(source, message, 0.0))  # type: ignore[arg-type]

    def state(self, choice: Choice) -> None:
        """Its gateway says how a choice is."""
        self.choices[choice.key] = choice
        self.model.told(choice)
        self.tell(self.gateways[choice.gateway], choice.fact)

    def act(self, sends: list[Send]) -> None:
        victims = [send.message.key for send in sends if isinstance(send.message, Preempt)]
        for send in sends:
            message = send.message
            if isinstance(message, NobodyGivesWay):
                assert (send.to, victims) == (ALLOCATOR, [])
                continue
            assert isinstance(message, Place | Preempt)
            choice = self.choices[message.key]
            assert send.to == self.gateways[choice.gateway], "not to the one who said it"
            assert message.term == choice.term
            if isinstance(message, Preempt):
                self.gives_way(choice, victims)
                continue
            expected, passed = self.model.next()
            assert expected is choice, "not its turn"
            for tags in passed:
                tags.bypassed += 1
            self.model.place(choice, message.prefill, message.decode)
        expected, _ = self.model.next()
        assert expected is None, "somebody could be placed and was not"

    def gives_way(self, choice: Choice, victims: list[SequenceKey]) -> None:
        assert choice.stage != "waiting"
        mine = self.model.holding(choice.client)
        assert all(c.key in victims for c in mine if c.ticket > choice.ticket), "priority inversion"
        firsts = [min(self.model.holding(client), key=lambda c: c.ticket, default=None) for client in CLIENTS]
        safe = min((c for c in firsts if c is not None), key=lambda c: c.ticket[1:])
        assert choice is not safe, "nobody would be left"

    @rule(
        name=st.sampled_from(["front", "back"]),
        client=st.sampled_from(CLIENTS),
        priority=st.integers(0, 2),
        length=st.sampled_from(LENGTHS),
        more=st.integers(1, 60),
        choices=st.sampled_from([1, 1, 2, 3]),
    )
    def submit(self, name: str, client: str, priority: int, length: int, more: int, choices: int) -> None:
        self.count += 1
        for choice in range(choices):
            key = key_of(self.count, self.gateways[name], choice)
            self.state(Choice(key, name, client, priority, float(self.count), length, length + more))

    @precondition(lambda self: self.choices)
    @rule(which=WHICH, what=st.sampled_from(["again", "accept", "accept", "lose", "end", "echo"]))
    def move(self, which: int, what: str) -> None:
        choice = self.choices[sorted(self.choices)[which % len(self.choices)]]
        if what == "end":
            self.end(choice)
        elif what == "echo" and choice.term:
            # A fact that was under way when the choice was placed.
            stale = RequestFact(choice.key, choice.term - 1, "waiting", choice.arrival, 4, 100)
            self.tell(self.gateways[choice.gateway], stale)
        elif what == "accept" and choice.stage == "prefilling":
            choice.term, choice.stage = choice.term + 1, "decoding"
            self.state(choice)
        elif what == "lose" and choice.stage != "waiting":
            choice.length = min(choice.limit, choice.length + 5 * (choice.stage == "decoding"))
            self.lose(choice)
        else:
            self.state(choice)

    def end(self, choice: Choice) -> None:
        del self.choices[choice.key]
        self.model.settle()
        self.tell(self.gateways[choice.gateway], RequestEnded(choice.key, choice.term))

    def lose(self, choice: Choice) -> None:
        choice.term, choice.stage = choice.term + 2, "waiting"
        choice.prefill = choice.decode = None
        self.state(choice)

    @precondition(lambda self: self.choices)
    @rule(count=st.integers(1, 4))
    def time_passes(self, count: int) -> None:
        """Prompts get done, and what was longest decoding ends."""
        for choice in sorted(self.model.holding(), key=lambda c: c.ticket)[:count]:
            if choice.stage == "prefilling":
                choice.term, choice.stage = choice.term + 1, "decoding"
                self.state(choice)
            else:
                self.end(choice)

    @rule(name=st.sampled_from("pdb"), slots=st.integers(1, 4))
    def worker_lives_or_dies(self, name: str, slots: int) -> None:
        old = Incarnation(name, self.epochs[name])
        if self.model.workers.pop(old, None) is not None:
            self.act(self.core.peers((), [old], 0.0))
            for choice in list(self.choices.values()):
                if old in (choice.prefill, choice.decode) and choice.stage != "waiting":
                    self.lose(choice)
            return
        self.epochs[name] += 1
        new = Incarnation(name, self.epochs[name])
        prefill, decode = (slots if name in "pb" else 0), (slots if name in "db" else 0)
        self.model.workers[new] = prefill, decode
        self.tell(new, WorkerFact(prefill, decode))

    @precondition(lambda self: self.model.workers)
    @rule(which=WHICH)
    def worker_says_it_again(self, which: int) -> None:
        worker = sorted(self.model.workers)[which % len(self.model.workers)]
        self.tell(worker, WorkerFact(*self.model.workers[worker]))

    @rule(name=st.sampled_from(["front", "back"]), seed=WHICH)
    def gateway_restarts(self, name: str, seed: int) -> None:
        """What the dead one said is forgotten; its successor takes some of it over."""
        old = self.gateways[name]
        self.epochs[name] += 1
        self.gateways[name] = Incarnation(name, self.epochs[name])
        its = [choice for choice in self.choices.values() if choice.gateway == name]
        for choice in its:
            del self.choices[choice.key]
        self.model.settle()
        self.act(self.core.peers([gateway(self.gateways[name])], [old], 0.0))
        order = random.Random(seed)
        for choice in its:
            if order.random() < 0.5:
                choice.charged = choice.beside = False
                self.lose(choice)

    @rule(free=st.integers(0, 40))
    def pool(self, free: int) -> None:
        self.model.free = free
        self.tell(ALLOCATOR, PoolFact(40, free))

    @rule()
    def exhaust(self) -> None:
        self.tell(ALLOCATOR, PoolExhausted(D))

    @rule(seed=WHICH)
    def scheduler_restarts(self, seed: int) -> None:
        """Everybody says everything again, in any order, and starts equal."""
        self.core = Scheduler(PAGE_TOKENS, self.fairness)
        free, self.model.free = self.model.free, None
        self.model.forget_the_past()
        known, self.model.choices = self.choices, {}
        self.act(self.core.peers([gateway(g) for g in self.gateways.values()], (), 0.0))
        words: list[Choice | Incarnation] = [*self.model.workers, *known.values()]
        # Who waits is not placed before those that run are known: the pool comes last.
        random.Random(seed).shuffle(words)
        for word in words:
            if isinstance(word, Choice):
                self.state(word)
            else:
                self.tell(word, WorkerFact(*self.model.workers[word]))
        if free is not None:
            self.pool(free)

    @invariant()
    def it_knows_what_the_gateways_know(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        figures = self.core.statistics()
        stages = [choice.stage for choice in self.choices.values()]
        for stage in ("waiting", "prefilling", "decoding"):
            assert figures[f"requests_{stage}"] == stages.count(stage), stage
        assert figures["clients_waiting"] == sum(tags.backlogged for tags in self.model.tags.values())

    def teardown(self) -> None:
        """With workers, pages, and requests that end, everybody gets a turn."""
        if not hasattr(self, "core"):
            return
        for name in "pd":
            if Incarnation(name, self.epochs[name]) not in self.model.workers:
                self.worker_lives_or_dies(name, 1)
        self.pool(40)
        for _ in range(len(self.choices)):
            running = self.model.holding()
            assert running, "nobody runs, and somebody waits"
            self.end(running[0])
        assert self.core.statistics()["requests"] == self.core.statistics()["clients"] == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


def test_long_days_against_the_model() -> None:
    """As above, under load: what takes long to come about (bypasses, siblings that meet) is common here."""
    placements, beside, bypasses, preemptions = 0, 0, 0, 0
    for seed in range(60):
        order = random.Random(seed)
        machine = Machine()
        machine.begin(order.choice([0.25, 1.0, 4.0]), order.choice([0.0, 0.125, 0.5]), order.randint(1, 4))
        for _ in range(120):
            chance, which = order.random(), order.randrange(1000)
            name = order.choice(["front", "back"])
            if len(machine.choices) < 12 and chance < 0.5:
                client, choices = order.choice(CLIENTS), order.choice([1, 1, 2, 3])
                length, more = order.choice(LENGTHS), order.randint(1, 60)
                machine.submit(name, client, order.randint(0, 2), length, more, choices)
            elif chance < 0.75:
                machine.time_passes(order.randint(1, 3))
            elif chance < 0.85 and machine.choices:
                machine.move(which, order.choice(["again", "accept", "lose", "end", "echo"]))
            elif chance < 0.93:
                machine.pool(order.choice([5, 10, 20, 40]))
            elif chance < 0.95:
                machine.exhaust()
            elif chance < 0.97:
                machine.worker_lives_or_dies(order.choice("pdb"), order.randint(1, 4))
            elif chance < 0.98:
                machine.gateway_restarts(name, which)
            elif chance < 0.985:
                machine.scheduler_restarts(which)
            machine.it_knows_what_the_gateways_know()
        placements += machine.core.placements
        beside += machine.core.placements_beside
        bypasses += machine.core.bypasses
        preemptions += machine.core.preemptions
        machine.teardown()
    assert min(placements, beside, bypasses, preemptions) > 50
