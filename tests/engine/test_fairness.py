"""Fairness: shares by weight, priorities within a client only, newcomers at once, nobody starved."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_desk import ALLOCATOR, FRONT, B, D, Desk, P, key_of, placed, preempted
from world import World

from engine.fairness import Claim, Fairness, FairQueue, Ticket, give_way
from engine.ids import SequenceKey
from engine.messages import PoolExhausted, RequestEnded, WorkerFact

if TYPE_CHECKING:
    from collections.abc import Iterable


def ticket(count: int, priority: int = 0) -> Ticket:
    return Ticket(priority, float(count), SequenceKey(count, 0))


class Line:
    """A queue whose clients' requests all cost the same, or what is said."""

    def __init__(self, **weights: float) -> None:
        self.queue = FairQueue(Fairness(weights))
        self.count = 0
        self.served: list[int] = []

    def ask(self, *names: str, priority: int = 0) -> None:
        for name in names:
            self.count += 1
            self.queue.wait(name, ticket(self.count, priority))
            self.queue.check()

    def serve(self, cost: float = 100.0) -> str:
        """Whose request is placed; it ends at once."""
        client = self.queue.at(0)
        assert client is not None
        self.served.append(int(client.waiting[0].arrival))
        self.queue.hold(client.name)
        self.queue.place(client, cost)
        self.queue.check()
        self.queue.release(client.name)
        self.queue.check()
        return client.name

    def serves(self, count: int, cost: float = 100.0) -> list[str]:
        return [self.serve(cost) for _ in range(count)]


# ── turns ─────────────────────────────────────────────────────────────────────────────────────


def test_clients_take_turns_whatever_they_queue() -> None:
    line = Line()
    line.ask(*["a"] * 5, *["b"] * 2, "c")
    assert line.serves(8) == ["a", "b", "c", "a", "b", "a", "a", "a"]
    assert line.queue.at(0) is None


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=2),
    st.randoms(use_true_random=False),
)
def test_shares_converge_to_weights(weights: dict[str, float], order: random.Random) -> None:
    """Of any two that always wait, neither is ahead by more than one request of each (Goyal et al., 1)."""
    line = Line(**weights)
    served: Counter[str] = Counter()
    for name in weights:
        line.ask(name, name)
    for _ in range(100):
        cost = order.randint(1, 300)
        name = line.serve(cost)
        served[name] += cost
        line.ask(name)
        shares = {name: served[name] / weight for name, weight in weights.items()}
        for one, two in [(a, b) for a in weights for b in weights]:
            assert abs(shares[one] - shares[two]) <= 300 / weights[one] + 300 / weights[two]


def test_a_large_request_costs_its_client_more_turns_than_a_small_one() -> None:
    line = Line()
    line.ask(*["a"] * 2, *["b"] * 9)
    assert line.serve(400) == "a"
    assert line.serves(5) == ["b", "b", "b", "b", "a"]


@settings(deadline=None, max_examples=50)
@given(st.randoms(use_true_random=False))
def test_shares_are_of_what_was_used(order: random.Random) -> None:
    """Whatever was expected of a client, it pays for what was generated, sooner or later."""
    line = Line()
    used: Counter[str] = Counter()
    line.ask("a", "b", "a", "b")
    for _ in range(200):
        client = line.queue.at(0)
        assert client is not None
        name, expected = client.name, round(client.expected)
        generated = order.randint(1, 100) if name == "a" else order.randint(1, 10)
        line.queue.hold(name)
        line.queue.place(client, expected)
        line.queue.settle(name, expected, generated)
        line.queue.check()
        line.queue.release(name)
        used[name] += generated
        line.ask(name)
        assert abs(used["a"] - used["b"]) <= 256 + 2 * 100


def test_what_is_not_used_is_no_credit_for_who_was_away() -> None:
    line = Line()
    line.ask("a", *["b"] * 30)
    client = line.queue.at(0)
    assert client is not None
    assert client.name == "a"
    line.queue.hold("a")
    line.queue.place(client, 1000)
    line.serves(20)
    line.queue.settle("a", 1000, 1)
    line.ask(*["a"] * 30, *["b"] * 30)
    line.queue.check()
    assert 16 <= line.serves(40).count("a") <= 22, "turns from now on, none for the past"


@pytest.mark.parametrize(
    ("client", "weight"),
    [("", 0.5), ("user:a", 2), ("key:1/user:a", 2), ("key:2/user:a", 8), ("key:3/user:b", 4), ("key:3", 4),
     ("key:4/user:b", 1), ("user:b", 1)],
)  # fmt: skip
def test_who_has_key_and_user_is_listed_by_either(client: str, weight: float) -> None:
    fairness = Fairness({"": 0.5, "user:a": 2.0, "key:2/user:a": 8.0, "key:3": 4.0})
    assert fairness.weight(client) == weight


def test_a_client_without_a_limit_pays_for_what_it_generates() -> None:
    desk = Desk((B, 1, 1))
    for count in range(1, 100, 2):
        desk.ask(count, "whole", limit=8000)
        desk.ask(count + 1, "little", limit=24)
    turns = []
    active = [1]
    while active:
        [count] = active
        turns.append("whole" if count % 2 else "little")
        active = placed(desk.tell(FRONT, RequestEnded(key_of(count), 9, 24)))
    assert len(turns) == 100
    assert abs(turns[:60].count("whole") - 30) <= 12, "both generate 20 tokens a request"


def test_priorities_order_the_requests_of_one_client_only() -> None:
    line = Line()
    line.ask("a", "a")
    line.ask("b", "b", "b", priority=-5)
    line.ask("a", priority=-1)
    assert line.serves(6) == ["b", "a", "a", "b", "a", "b"]
    assert line.served == [3, 6, 1, 4, 2, 5]


def test_who_comes_back_has_no_credit_for_having_been_away() -> None:
    line = Line()
    line.ask("b", *["a"] * 50)
    assert line.serves(40).count("b") == 1
    line.ask(*["b"] * 5)
    assert line.serves(6).count("b") in (3, 4), "b is served as much as a from now on, and no more"


def test_who_comes_back_owes_its_last_request_at_most() -> None:
    line = Line()
    line.ask(*["a"] * 30)
    assert line.serves(21) == ["a"] * 21
    line.ask("b")
    assert line.serve() == "b", "nor is a newcomer behind a flood that had the system to itself"
    line.ask("c", "b")
    assert line.serve(1000.0) == "c"
    line.ask("c")
    assert line.serves(11).index("c") in range(5, 11), "ten requests of the others for a large one"


def test_when_nobody_is_there_everybody_is_equal_again() -> None:
    line = Line()
    line.ask("a")
    line.serve(10_000.0)
    assert line.queue.clients == line.queue.now == 0
    line.ask("a", "b")
    assert line.serves(2) == ["a", "b"]


def test_a_stream_of_names_never_heard_of_holds_nobody_back_for_ever() -> None:
    line = Line()
    line.ask("a", "a", "n0", "n1")
    assert line.serve() == "a"
    for count in range(2, 30):
        line.ask(f"n{count}")
        if line.serve() == "a":
            break
    else:
        raise AssertionError("virtual time stands still")
    line = Line()
    for count in range(1000):
        line.ask(f"n{count}", f"m{count}")
        line.serve()
        line.serve()
    assert line.queue.clients == 0


def test_names_are_not_remembered_for_ever() -> None:
    line = Line(low=0.01)
    line.ask("low", *["always"] * 2)
    known = set()
    for count in range(500):
        line.ask("always", f"n{count}")
        line.serves(2)
        known.add(len(line.queue._clients))
    assert max(known) < 20


def test_a_request_that_is_withdrawn_loses_no_turn_of_the_others() -> None:
    line = Line()
    line.ask("a", "b", "a")
    line.queue.withdraw("a", ticket(1))
    line.queue.check()
    assert line.serves(2) == ["b", "a"]


@pytest.mark.parametrize(
    ("slots", "share", "kept"),
    [(0, 0.125, 0), (1, 0.125, 0), (1, 0.5, 0), (2, 0.125, 1), (8, 0.125, 1), (32, 0.125, 4), (32, 0.0, 0)],
)
def test_some_slots_are_reserved_but_never_the_only_one(slots: int, share: float, kept: int) -> None:
    assert Fairness(reserve=share).reserved(slots) == kept


# ── the reserve ───────────────────────────────────────────────────────────────────────────────


def flood(desk: Desk, count: int, client: str = "flood") -> int:
    """So many requests of one client; how many are placed."""
    return sum(len(desk.ask(1000 + n, client)) for n in range(count))


def test_a_flood_of_200_never_makes_a_quiet_client_wait_for_a_slot() -> None:
    desk = Desk((P, 8, 0), (D, 0, 32), reserve=0.125)
    assert flood(desk, 200) == 7, "one prefill slot is kept"
    order, quiet, most = random.Random(5), 0, 0
    for _ in range(300):
        if order.random() < 0.2:
            quiet += 1
            assert desk.ask(quiet, "quiet") == [(quiet, 0)], "it waits for no placement at all"
            desk.accepted(quiet)
            desk.end(quiet)
            continue
        fact = order.choice([f for f in desk.told.values() if f.client == "flood" and f.stage != "waiting"])
        number = fact.key.request & 0xFFFF
        if fact.stage == "prefilling":
            desk.accepted(number)
        elif order.random() < 0.3:
            del desk.told[fact.key]
            desk.end(number)
            desk.ask(number + 200, "flood")
        most = max(most, sum(f.client == "flood" and f.stage != "waiting" for f in desk.told.values()))
    assert quiet > 30
    assert most == 28, "what is not reserved is used, and no more"


def test_a_client_alone_takes_all_but_the_reserve_and_a_single_slot_is_not_reserved() -> None:
    assert flood(Desk((P, 8, 0), (D, 0, 8), reserve=0.125), 20) == 7
    assert flood(Desk((P, 8, 0), (D, 0, 2), reserve=0.125), 20) == 1
    assert flood(Desk((B, 1, 1), reserve=0.125), 20) == 1


def test_one_slot_goes_round() -> None:
    desk = Desk((B, 1, 1), reserve=0.125)
    assert flood(desk, 5) == 1
    desk.ask(1, "quiet")
    assert placed(desk.end(1000)) == [1]
    assert placed(desk.end(1)) == [1001]


def test_two_floods_share_the_slots_by_weight() -> None:
    """Eight decode slots under two endless clients: what each was given goes as four to one."""
    desk = Desk((P, 8, 0), (D, 0, 8), reserve=0.125, weights={"user:alice": 4.0})
    order, count, given = random.Random(7), 0, Counter[str]()
    for _ in range(600):
        for client in ("user:alice", "bob"):
            while sum(f.client == client and f.stage == "waiting" for f in desk.told.values()) < 2:
                count += 1
                desk.ask(count, client, limit=order.randint(20, 100))
        for fact in list(desk.told.values()):
            if fact.stage == "prefilling":
                desk.accepted(fact.key.request & 0xFFFF)
        active = [fact for fact in desk.told.values() if fact.stage == "decoding"]
        ended = order.choice(active)
        given[ended.client] += ended.limit
        del desk.told[ended.key]
        desk.end(ended.key.request & 0xFFFF)
    assert given["user:alice"] / given["bob"] == pytest.approx(4.0, rel=0.1)


# ── starvation, both ways ─────────────────────────────────────────────────────────────────────


def test_who_does_not_fit_does_not_hold_back_others_that_do() -> None:
    desk = Desk((B, 8, 8), free=20)
    assert desk.ask(1, "a", length=40) == [(1, 0)]
    assert desk.ask(2, "a", length=60) == desk.ask(3, "b", length=60) == []
    assert desk.ask(4, "c", length=4) == [(4, 0)]
    assert desk.ask(5, "b", length=4) == [], "within a client nothing is passed"


def test_a_large_request_is_passed_by_small_ones_of_others_so_often_and_no_more() -> None:
    """Small ones end and come for ever, and always fit; the large one needs most of the pool."""
    desk = Desk((B, 64, 64), free=20)
    desk.ask(1, "s1", limit=10)
    assert desk.ask(2, "large", length=76) == []
    passed, running = 0, [1]
    for count in range(3, 50):
        if desk.ask(count, f"s{count}", limit=10):
            running.append(count)
            passed += 1
        elif running:
            desk.end(running.pop(0))
        if len(running) > 2:
            desk.end(running.pop(0))
    assert desk.told[key_of(2)].stage == "prefilling", "the large one is starved"
    assert passed >= Fairness().bypasses
    assert desk.core.bypasses == Fairness().bypasses


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10_000))
def test_everybody_is_placed_whatever_the_others_ask(seed: int) -> None:
    """No request waits longer than for a bounded number of placements of others."""
    order = random.Random(seed)
    desk = Desk((B, 4, 4), free=20, reserve=0.125)
    since: dict[int, int] = {}
    longest = 0
    for count in range(1, 120):
        length = order.choice([4, 4, 8, 60])
        desk.ask(count, order.choice("abc"), length=length, limit=order.randint(length, 100))
        since[count] = desk.core.placements
        while sum(fact.stage == "waiting" for fact in desk.told.values()) > 6:
            active = [fact.key for fact in desk.told.values() if fact.stage != "waiting"]
            assert active, "nobody runs, and somebody waits"
            key = order.choice(active)
            del desk.told[key]
            desk.end(key.request & 0xFFFF)
        for fact in desk.told.values():
            if fact.stage != "waiting" and (count := fact.key.request & 0xFFFF) in since:
                longest = max(longest, desk.core.placements - since.pop(count))
    waiting = [since[count] for count in since]
    assert max([longest, *(desk.core.placements - past for past in waiting)]) < 40


# ── what a message costs ──────────────────────────────────────────────────────────────────────


def test_a_message_looks_at_few_clients_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    look = FairQueue.at

    def counted(queue: FairQueue, turn: int) -> object:
        nonlocal looks
        looks += 1
        return look(queue, turn)

    monkeypatch.setattr(FairQueue, "at", counted)
    desk = Desk((B, 8, 8), free=1000, reserve=0.125)
    for count in range(300):
        desk.ask(count, f"{count}", length=400, limit=500)
    assert desk.core.statistics()["clients_waiting"] == 292
    looks = 0
    assert desk.ask(5000, "late", length=400, limit=500) == []
    assert looks == 0, "all slots are taken"
    assert len(desk.tell(B, WorkerFact(99, 99))) == 1, "8 x 100 pages are promised"
    assert looks <= 2 + Fairness().look_past
    looks = 0
    assert desk.pool(990) == []
    assert looks == 1 + Fairness().look_past, "nobody fits"
    looks = 0
    assert desk.pool(900) == []
    assert looks == 0, "not even the smallest would fit"


# ── who gives way ─────────────────────────────────────────────────────────────────────────────


def claims(*held: tuple[str, int, int, int]) -> list[Claim]:
    """(client, priority, arrival, pages) each."""
    return [Claim(ticket(arrival, priority), client, pages) for client, priority, arrival, pages in held]


def leaving(held: Iterable[Claim], **weights: float) -> list[int]:
    return [int(claim.ticket.arrival) for claim in give_way(held, Fairness(weights))]


def test_of_one_client_the_newest_of_the_lowest_priority_gives_way_first() -> None:
    assert leaving(claims(("", 0, 1, 2), ("", 0, 3, 2), ("", 0, 2, 2))) == [3, 2]
    assert leaving(claims(("", 7, 1, 2), ("", 0, 2, 2), ("", 0, 3, 2), ("", 7, 4, 2))) == [4, 1, 3]


def test_who_holds_the_most_for_its_weight_gives_way_first() -> None:
    held = claims(("a", 0, 1, 4), ("b", 0, 2, 3), ("b", 0, 3, 3), ("c", 0, 4, 5))
    assert leaving(held) == [3, 4, 2]
    assert leaving(held, b=3.0) == [4, 3, 2]
    assert leaving(claims(("a", 0, 1, 1), ("b", 9, 2, 9))) == [2]


def test_a_quiet_client_does_not_give_way_to_a_flood() -> None:
    desk = Desk((B, 64, 64))
    for count in range(10):
        desk.ask(count, "flood", length=40)
        desk.accepted(count)
    desk.ask(20, "quiet", length=40)
    desk.accepted(20)
    assert preempted(desk.tell(ALLOCATOR, PoolExhausted(B))) == [9]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12
    ),
    st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 2.0])),
)
def test_nobody_gives_way_to_one_of_its_own_that_goes_after_it(
    held: list[tuple[str, int, int]], weights: dict[str, float]
) -> None:
    all_claims = claims(*((client, priority, n, pages) for n, (client, priority, pages) in enumerate(held)))
    given_up = list(give_way(all_claims, Fairness(weights)))
    [safe] = set(all_claims) - set(given_up)
    assert len(given_up) == len(all_claims) - 1
    for n, claim in enumerate(given_up):
        left = {*given_up[n + 1 :], safe}
        assert not any(other.client == claim.client and other.ticket > claim.ticket for other in left)
    firsts = [min(c for c in all_claims if c.client == name) for name in {c.client for c in all_claims}]
    assert safe == min(firsts, key=lambda claim: claim.ticket.arrival)
    if given_up:
        pages = Counter[str]()
        for claim in all_claims:
            pages[claim.client] += claim.pages
        most = max(pages[c.client] / weights.get(c.client, 1.0) for c in given_up)
        first = given_up[0].client
        assert pages[first] / weights.get(first, 1.0) == most


@pytest.mark.parametrize("roles", [{"prefill": "prefill", "decode": "decode"}, {"both": "both"}])
@pytest.mark.parametrize("kills", [False, True])
def test_a_small_pool_never_stands_still_whatever_gives_way(roles: dict[str, str], kills: bool) -> None:
    preemptions = 0
    for seed in range(20):
        order = random.Random(f"{sorted(roles)} {kills} {seed}")
        world = World(roles, pages=order.choice([6, 7, 8, 9]))
        for _ in range(300):
            chance = order.random()
            dead = sorted(set(world.names) - set(world.alive))
            if chance < 0.08:
                world.submit(
                    tuple(range(order.randint(1, 8))),
                    order.randint(9, 24),
                    n=order.choice([1, 1, 2, 3]),
                    client=order.choice("abc"),
                    priority=order.randint(0, 2),
                )
            elif chance < 0.09 and world.open:
                world.cancel(order.choice(sorted(world.open)))
            elif chance < 0.095 and kills and world.alive:
                world.kill(order.choice(sorted(world.alive)))
            elif chance < 0.12 and dead:
                world.start(order.choice(dead))
            elif chance < 0.6 and (choices := world.deliverable()):
                world.deliver(order.choice(choices))
            else:
                name = order.choice(sorted(world.roles))
                world.end_step(name) or world.begin_step(name)
        if "scheduler" in world.alive:
            preemptions += int(world.alive["scheduler"].core.statistics()["preemptions"])
        world.settle(3000)
    assert preemptions > 0
