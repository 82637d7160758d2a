"""The scheduler: oldest first, slots and pages respected, and nothing in it that cannot be told again."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import Send
from engine.fairness import Fairness
from engine.ids import Incarnation, SequenceKey, owner_of, pack_request
from engine.messages import (
    Drain,
    Member,
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

PAGE_TOKENS = 4
FRONT, BACK = Incarnation("front", 1), Incarnation("back", 1)
ORDINALS = {"front": 4, "back": 5}
P, D, E, B = (Incarnation(name, 1) for name in ("p", "d", "e", "b"))
ALLOCATOR = Incarnation("allocator", 1)


def gateway(incarnation: Incarnation) -> Member:
    return Member(incarnation.name, "gateway", ORDINALS[incarnation.name], incarnation.epoch, "", True)


def key_of(count: int, owner: Incarnation = FRONT) -> SequenceKey:
    return SequenceKey(pack_request(ORDINALS[owner.name], owner.epoch, count), 0)


def waiting(count: int, length: int = 4, owner: Incarnation = FRONT, term: int = 0) -> RequestFact:
    """A request that came in as the `count`th."""
    return RequestFact(key_of(count, owner), term, "waiting", float(count), length, 100)


class Desk:
    """A scheduler with gateways, workers with slots, and a pool; nothing is reserved."""

    def __init__(self, *workers: tuple[Incarnation, int, int], free: int | None = 1000) -> None:
        self.core = Scheduler(PAGE_TOKENS, Fairness(reserve=0.0))
        assert self.core.peers([gateway(FRONT), gateway(BACK)], (), 0.0) == []
        for worker, prefill, decode in workers:
            self.tell(worker, WorkerFact(prefill, decode))
        if free is not None:
            self.pool(free)

    def tell(self, source: Incarnation, message: object) -> list[Send]:
        sends = self.core.handle(source, message, 0.0)  # type: ignore[arg-type]
        self.core.check()
        return sends

    def pool(self, free: int) -> list[Send]:
        return self.tell(ALLOCATOR, PoolFact(1000, free))

    def submit(self, *counts: int, length: int = 4) -> list[int]:
        return placed([send for count in counts for send in self.tell(FRONT, waiting(count, length))])

    def decoding(self, count: int, decode: Incarnation = D, length: int = 5) -> list[Send]:
        fact = RequestFact(key_of(count), 2, "decoding", float(count), length, 100, P, decode)
        return self.tell(FRONT, fact)

    def end(self, count: int) -> list[Send]:
        return self.tell(FRONT, RequestEnded(key_of(count), 9))


def places(sends: list[Send]) -> list[Place]:
    return [send.message for send in sends if isinstance(send.message, Place)]


def placed(sends: list[Send]) -> list[int]:
    """Which requests were placed, by their count."""
    return [place.key.request & 0xFFFF for place in places(sends)]


def preempted(sends: list[Send]) -> list[int]:
    return [send.message.key.request & 0xFFFF for send in sends if isinstance(send.message, Preempt)]


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


# ── preemption ────────────────────────────────────────────────────────────────────────────────


def exhausted(desk: Desk) -> list[int]:
    return preempted(desk.tell(ALLOCATOR, PoolExhausted(D)))


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
class Request:
    """What its gateway knows of a request."""

    key: SequenceKey
    arrival: float
    length: int
    term: int = 0
    stage: str = "waiting"
    prefill: Incarnation | None = None
    decode: Incarnation | None = None

    @property
    def fact(self) -> RequestFact:
        return RequestFact(
            self.key,
            self.term,
            self.stage,  # type: ignore[arg-type]
            self.arrival,
            self.length,
            100,
            self.prefill,
            self.decode,
        )


@dataclass
class Slots:
    prefill: int
    decode: int
    requests: set[SequenceKey] = field(default_factory=set)


class Machine(RuleBasedStateMachine):
    """Gateways obey every placement at once; workers and gateways die; facts are said again."""

    @initialize()
    def begin(self) -> None:
        self.core = Scheduler(PAGE_TOKENS)
        self.requests: dict[SequenceKey, Request] = {}
        self.workers: dict[Incarnation, Slots] = {}
        self.gateways = {"front": FRONT, "back": BACK}
        self.epochs = {"front": 1, "back": 1, **dict.fromkeys("pdb", 0)}
        self.free: int | None = None
        self.count = 0
        self.act(self.core.peers([gateway(FRONT), gateway(BACK)], (), 0.0))

    def tell(self, source: Incarnation, message: object) -> None:
        self.act(self.core.handle(source, message, 0.0))  # type: ignore[arg-type]

    def act(self, sends: list[Send]) -> None:
        for send in sends:
            message = send.message
            assert isinstance(message, Place | Preempt)
            request = self.requests[message.key]
            assert send.to == self.gateways["front" if owner_of(message.key.request)[0] == 4 else "back"]
            if isinstance(message, Preempt):
                active = [r for r in self.requests.values() if r.stage != "waiting"]
                assert request.key != min(active, key=lambda r: (r.arrival, r.key)).key, "the oldest"
                continue
            assert message.term == request.term
            assert request.stage == "waiting"
            older = [
                r for r in self.requests.values() if r.stage == "waiting" and r.arrival < request.arrival
            ]
            assert not older, "not the oldest"
            active = [r for r in self.requests.values() if r.stage != "waiting"]
            if active:
                assert self.free is not None
                promised = sum(-(-r.length // PAGE_TOKENS) for r in active if r.stage == "prefilling")
                assert promised + -(-request.length // PAGE_TOKENS) + len(active) <= self.free
            request.term += 1
            request.stage, request.prefill, request.decode = "prefilling", message.prefill, message.decode
            self.never_more_than_slots()

    def never_more_than_slots(self) -> None:
        for worker, slots in self.workers.items():
            placed_here = [r for r in self.requests.values() if r.stage != "waiting"]
            prefills = [r for r in placed_here if r.stage == "prefilling" and r.prefill == worker]
            assert len(prefills) <= slots.prefill
            assert len([r for r in placed_here if r.decode == worker]) <= slots.decode

    def source(self, request: Request) -> Incarnation:
        return self.gateways["front" if owner_of(request.key.request)[0] == 4 else "back"]

    @rule(name=st.sampled_from(["front", "back"]), length=st.integers(1, 30))
    def submit(self, name: str, length: int) -> None:
        self.count += 1
        key = key_of(self.count, self.gateways[name])
        self.requests[key] = Request(key, float(self.count), length)
        self.tell(self.gateways[name], self.requests[key].fact)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), what=st.sampled_from(["again", "accept", "accept", "lose", "end", "echo"]))
    def move(self, data: st.DataObject, what: str) -> None:
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        if what == "accept" and request.stage == "prefilling":
            request.term, request.stage = request.term + 1, "decoding"
        elif what == "lose" and request.stage != "waiting":
            request.term, request.stage = request.term + 2, "waiting"
            request.prefill = request.decode = None
        elif what == "end":
            del self.requests[request.key]
            self.tell(self.source(request), RequestEnded(request.key, request.term))
            return
        elif what == "echo":
            # A fact that was under way when the request was placed.
            if request.term:
                stale = RequestFact(request.key, request.term - 1, "waiting", request.arrival, 4, 100)
                self.tell(self.source(request), stale)
            return
        self.tell(self.source(request), request.fact)

    @rule(name=st.sampled_from("pdb"), slots=st.integers(1, 3))
    def worker_lives_or_dies(self, name: str, slots: int) -> None:
        old = Incarnation(name, self.epochs[name])
        if self.workers.pop(old, None) is not None:
            self.act(self.core.peers((), [old], 0.0))
            for request in list(self.requests.values()):
                if old in (request.prefill, request.decode) and request.stage != "waiting":
                    request.term, request.stage = request.term + 2, "waiting"
                    request.prefill = request.decode = None
                    self.tell(self.source(request), request.fact)
            return
        self.epochs[name] += 1
        new = Incarnation(name, self.epochs[name])
        prefill, decode = (slots if name in "pb" else 0), (slots if name in "db" else 0)
        self.workers[new] = Slots(prefill, decode)
        self.tell(new, WorkerFact(prefill, decode))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_says_it_again(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.workers)))
        self.tell(worker, WorkerFact(self.workers[worker].prefill, self.workers[worker].decode))

    @rule(name=st.sampled_from(["front", "back"]))
    def gateway_restarts(self, name: str) -> None:
        old = self.gateways[name]
        self.epochs[name] += 1
        self.gateways[name] = Incarnation(name, self.epochs[name])
        owner = (ORDINALS[name], old.epoch)
        self.requests = {k: r for k, r in self.requests.items() if owner_of(k.request) != owner}
        self.act(self.core.peers([gateway(self.gateways[name])], [old], 0.0))

    @rule(free=st.integers(0, 20))
    def pool(self, free: int) -> None:
        self.free = free
        self.tell(ALLOCATOR, PoolFact(20, free))

    @rule()
    def exhaust(self) -> None:
        self.tell(ALLOCATOR, PoolExhausted(D))

    @rule(data=st.data())
    def scheduler_restarts(self, data: st.DataObject) -> None:
        """Everybody says everything again, in any order."""
        self.core = Scheduler(PAGE_TOKENS)
        self.act(self.core.peers([gateway(g) for g in self.gateways.values()], (), 0.0))
        facts: list[tuple[Incarnation, object]] = [
            (worker, WorkerFact(slots.prefill, slots.decode)) for worker, slots in self.workers.items()
        ]
        # Who waits is not placed before those that run are known: the pool comes last.
        facts += [(self.source(request), request.fact) for request in self.requests.values()]
        for source, message in data.draw(st.permutations(facts)):
            self.tell(source, message)
        if self.free is not None:
            self.tell(ALLOCATOR, PoolFact(20, self.free))

    @invariant()
    def it_knows_what_the_gateways_know(self) -> None:
        if not hasattr(self, "core"):
            return
        self.core.check()
        figures = self.core.statistics()
        stages = [request.stage for request in self.requests.values()]
        for stage in ("waiting", "prefilling", "decoding"):
            assert figures[f"requests_{stage}"] == stages.count(stage), stage
        self.never_more_than_slots()

    def teardown(self) -> None:
        """With workers, pages, and requests that end, everybody gets a turn."""
        if not hasattr(self, "core"):
            return
        for name in "pd":
            if Incarnation(name, self.epochs[name]) not in self.workers:
                self.worker_lives_or_dies(name, 1)
        self.pool(20)
        for _ in range(len(self.requests)):
            running = [request for request in self.requests.values() if request.stage != "waiting"]
            assert running, "nobody runs, and somebody waits"
            del self.requests[running[0].key]
            self.tell(self.source(running[0]), RequestEnded(running[0].key, running[0].term))
        assert self.core.statistics()["requests"] == 0


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)
