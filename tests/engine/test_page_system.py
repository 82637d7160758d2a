"""The page system as a whole: workers, allocator and a pool, under everything that can happen to them.

The real cores run in `world.World`, whose naive model of a page is the rows that were last written to it:
whose they are, at which position, of which identity and salt. So it is known at every moment

    what a page holds      every page that is found is compared with the whole log, row by row
    who has it             the block tables and leases of all workers, also of the dead that may still write
    whose it may become    nothing is leased that anybody has, was granted, or could write

and at the end nothing is left: free + cached = total, and every request has the tokens it must have.
"""

from __future__ import annotations

import random
from itertools import product
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import PAGE_TOKENS, World, expected, prompt_of

if TYPE_CHECKING:
    from engine.allocator import Allocator
    from engine.ids import Incarnation

TOPOLOGIES = {
    "local": {"prefill": "prefill", "decode": "decode"},
    "unified": {"both": "both"},
    "two": {"both-1": "both", "both-2": "both"},
    "two-decode": {"prefill": "prefill", "decode-1": "decode", "decode-2": "decode"},
}
SALTS = ["", "", "tenant"]


def new_world(topology: str, pages: int) -> World:
    """Of one worker alone each life has another identity than the last: nothing of it may be found again."""
    alone = len(TOPOLOGIES[topology]) == 1
    return World(
        TOPOLOGIES[topology], pages, lambda worker: f"model {worker.epoch % 2}" if alone else "model"
    )


def allocator_of(world: World) -> Allocator:
    """The living allocator's core."""
    return world.alive["allocator"].core  # type: ignore[return-value]


def check(world: World) -> None:
    """Every core is sound, and whatever can be found holds what its seal says."""
    world.check()
    world.check_found()


# ── who died, and when ────────────────────────────────────────────────────────────────────────

VICTIMS = {
    "local": [
        ("prefill",),
        ("decode",),
        ("allocator",),
        ("prefill", "allocator"),
        ("decode", "allocator"),
        ("prefill", "decode"),
        ("prefill", "decode", "allocator"),
    ],
    "two": [("both-1",), ("both-1", "allocator"), ("both-1", "both-2")],
}
CASES = [(topology, victims) for topology, sets in VICTIMS.items() for victims in sets]


@pytest.mark.parametrize("gone", ["at once", "later"])
@pytest.mark.parametrize(("topology", "victims"), CASES, ids=["+".join(names) for _, names in CASES])
def test_whoever_dies_whenever_its_pages_are_back_within_so_many_deliveries(
    topology: str, victims: tuple[str, ...], gone: str
) -> None:
    """Field reports 3 and 4: after the proof and the fences, not after a time-out; and no token changes.

    Until then what it could write is nobody's. The bound counts deliveries beyond those that were on
    their way: a roster for each, and a fence and its answer for each pair of the living and the dead.
    """
    for moment in range(0, 240, 24):
        order = random.Random(f"{topology} {victims} {moment}")
        world = new_world(topology, 24)
        asked = [(prompt_of(n % 3, 5 + 3 * n), 12 + 3 * n) for n in range(3)]
        keys = [world.submit(prompt, limit, n=2, salt=SALTS[n]) for n, (prompt, limit) in enumerate(asked)]
        world.busy(order, moment)
        for name in victims:
            world.kill(name, ghost=gone == "later")
        for name in victims:
            if name == "allocator":
                world.start(name)
        ghosts = sorted(world.ghosts)
        world.busy(order, 30)
        for ghost in ghosts:
            if order.random() < 0.5:
                world.go_mad(ghost)
        world.busy(order, 30)
        check(world)
        for ghost in ghosts:
            world.prove_gone(ghost)
        backlog = sum(map(len, world.queues.values())) + sum(map(len, world.rosters.values()))
        actors = len(world.names)
        bound = backlog + actors * len(victims) * 4 + actors
        deliveries = 0
        while allocator_of(world).statistics()["fences_waiting"] or allocator_of(world).waits_for_proof:
            choices = world.deliverable()
            assert choices or allocator_of(world).waits_for_proof, "pages wait for nothing"
            if choices:
                world.deliver(order.choice(choices))
            world.tick()
            deliveries += 1
            assert deliveries <= bound
        assert allocator_of(world).census()["quarantined"] == 0
        world.settle()
        check(world)
        assert not world.failures
        for (prompt, limit), choices_of in zip(asked, keys, strict=True):
            for key in choices_of:
                assert world.logs[key] == expected(prompt, limit, key.choice)


@pytest.mark.parametrize("moment", range(0, 120, 8))
def test_a_request_is_cancelled_whenever_and_leaves_nothing(moment: int) -> None:
    """Field reports 1 and 6: also when the other half has not seen it yet, or has it and was not told."""
    for seed, victim in product(range(4), range(3)):
        order = random.Random(f"{moment} {seed} {victim}")
        world = new_world("local", 16)
        keys = [key for n in range(3) for key in world.submit(prompt_of(n, 11), 20)]
        world.busy(order, moment)
        world.cancel(keys[victim])
        world.settle()
        check(world)
        assert not world.failures
        assert allocator_of(world).statistics()["prefixes_filling"] == 0
        assert allocator_of(world).statistics()["pages_pinned"] == 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_burst_of_cancels_leaves_nothing_and_the_next_request_is_served(topology: str) -> None:
    """Field report 10."""
    for seed in range(10):
        order = random.Random(f"{topology} {seed}")
        world = new_world(topology, 10)
        for _ in range(4):
            for n in range(4):
                world.submit(prompt_of(n % 3, 9), 18, n=2)
            world.busy(order, order.randint(0, 80))
            for key in sorted(world.open):
                world.cancel(key)
        [key] = world.submit(prompt_of(1, 9), 14)
        world.settle()
        assert world.logs[key] == expected(prompt_of(1, 9), 14)
        check(world)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_half_of_a_request_that_is_left_is_told_at_once(victim: str) -> None:
    """Field report 7: neither half works on for a request whose other half is dead."""
    for moment in range(0, 160, 10):
        order = random.Random(f"{victim} {moment}")
        world = new_world("local", 16)
        world.submit(prompt_of(0, 14), 20)
        world.busy(order, moment)
        world.kill(victim)
        while choices := world.deliverable():
            world.deliver(choices[0])
        other = "decode" if victim == "prefill" else "prefill"
        states = [sequence.state.value for sequence in world.alive[other].core.sequences]
        assert states in ([], ["decode"] if other == "decode" else ["prefill"])
        world.settle()
        check(world)
        assert not world.failures


def test_a_pool_that_is_full_of_cached_pages_is_as_good_as_an_empty_one() -> None:
    """Field report 9: to make room needs no room, also for what fills the whole pool."""
    for seed in range(5):
        order = random.Random(seed)
        world = new_world("local", 12)
        for n in range(6):
            world.submit(tuple(1000 * n + position for position in range(20)), 24)
            world.busy(order, 60)
            world.settle()
        census = allocator_of(world).census()
        assert census["cached"] >= 8
        [key] = world.submit(prompt_of(0, 40), 46)
        world.settle()
        assert world.logs[key] == expected(prompt_of(0, 40), 46)


@pytest.mark.parametrize("topology", ["two", "local"])
def test_the_first_answer_and_every_later_one_are_the_same(topology: str) -> None:
    """Field report 16: whether the prefix came from the cache or not. Field report 14: 150 times over."""
    world = new_world(topology, 9)
    prompt = prompt_of(0, 3 * PAGE_TOKENS)
    for turn in range(150):
        [key] = world.submit(prompt, 16)
        if turn % 3 == 0:
            world.submit(prompt_of(1 + turn % 2, 9), 16, salt=SALTS[turn % 3])
        world.settle()
        assert world.logs[key] == expected(prompt, 16)
    core = allocator_of(world)
    assert core.statistics()["pages_hit"] > 100
    assert core.statistics()["pages_evicted"] > 20


def test_pages_are_found_by_the_same_identity_and_salt_only() -> None:
    """Field report 13: a page of the same tokens that depends on something else is another page."""
    world = new_world("unified", 30)
    prompt = prompt_of(0, 3 * PAGE_TOKENS + 1)

    def hits(salt: str) -> int:
        before = allocator_of(world).statistics()["pages_hit"]
        [key] = world.submit(prompt, 16, salt=salt)
        world.settle()
        assert world.logs[key] == expected(prompt, 16)
        return int(allocator_of(world).statistics()["pages_hit"] - before)

    assert [hits(salt) for salt in ("", "tenant", "", "tenant")] == [0, 0, 3, 3]
    world.kill("both")
    world.settle()
    assert [hits(salt) for salt in ("", "tenant", "")] == [0, 0, 3], "the next life has another identity"
    world.kill("both")
    world.settle()
    assert [hits(salt) for salt in ("", "tenant")] == [3, 3], "and the next but one the first one's again"
    check(world)


# ── anything, in any order ────────────────────────────────────────────────────────────────────


def live(world: World, order: random.Random, count: int) -> None:
    """So many times whatever may happen: mostly work, and now and then a death, alone or with others."""
    for _ in range(count):
        chance = order.random()
        workers = sorted(set(world.roles) & set(world.alive))
        if chance < 0.06:
            length, salt, kept = order.randint(1, 14), order.choice(SALTS), order.choice([b"", b"kept"])
            prompt = prompt_of(order.randint(0, 2), length)
            n = order.choice([1, 1, 2, 3])
            world.submit(prompt, length + order.randint(1, 8), n=n, salt=salt, keepsake=kept)
        elif chance < 0.07 and world.open:
            world.cancel(order.choice(sorted(world.open)))
        elif chance < 0.085:
            others = ("allocator", "gateway", "scheduler")
            victims = {order.choice([*workers, *workers, *others, "allocator"])}
            if order.random() < 0.3:
                victims |= {"allocator", order.choice(workers or others)}
            for name in sorted(victims & set(world.alive)):
                world.kill(name, ghost=order.random() < 0.7)
        elif chance < 0.105 and world.ghosts:
            ghost = order.choice(sorted(world.ghosts))
            if order.random() < 0.5:
                world.go_mad(ghost)
            else:
                world.prove_gone(ghost)
        else:
            world.busy(order, 3, restarts=0.02)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_whatever_happens_no_page_is_lost_and_none_is_wrong(topology: str) -> None:
    """Thousands of steps; every so often all is started again, and then nothing may be left."""
    for seed in range(8):
        order = random.Random(f"{topology} {seed}")
        world = new_world(topology, order.randint(9, 22))
        for _ in range(3):
            for _ in range(30):
                live(world, order, 4)
                check(world)
            world.settle()
            check(world)


class Machine(RuleBasedStateMachine):
    """Requests that share, fork and end; workers and allocators that die, alone and together; ghosts."""

    @initialize(
        topology=st.sampled_from(sorted(TOPOLOGIES)), pages=st.integers(9, 22), seed=st.integers(0, 2**32)
    )
    def begin(self, topology: str, pages: int, seed: int) -> None:
        self.world = new_world(topology, pages)
        live(self.world, random.Random(seed), 60)

    @rule(
        family=st.integers(0, 2),
        length=st.integers(1, 14),
        more=st.integers(1, 8),
        n=st.sampled_from([1, 1, 2, 3]),
        salt=st.sampled_from(SALTS),
        keepsake=st.sampled_from([b"", b"kept"]),
    )
    def submit(self, family: int, length: int, more: int, n: int, salt: str, keepsake: bytes) -> None:
        self.world.submit(prompt_of(family, length), length + more, n=n, salt=salt, keepsake=keepsake)
        self.world.submit(prompt_of(0, length + 2), length + 2 + more, salt=salt, keepsake=keepsake)

    @precondition(lambda self: self.world.open)
    @rule(data=st.data(), seed=st.integers(0, 2**32))
    def cancel(self, data: st.DataObject, seed: int) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.open))))
        self.world.busy(random.Random(seed), 20, restarts=0.05)

    @rule(seed=st.integers(0, 2**32), count=st.integers(10, 150))
    def go_on(self, seed: int, count: int) -> None:
        self.world.busy(random.Random(seed), count, restarts=0.05)

    @rule(
        data=st.data(),
        who=st.sampled_from(
            ["worker", "worker", "allocator", "worker, allocator", "workers", "gateway", "scheduler", "all"]
        ),
        ghost=st.sampled_from([True, True, False]),
        seed=st.integers(0, 2**32),
        count=st.integers(0, 150),
    )
    def die(self, data: st.DataObject, who: str, ghost: bool, seed: int, count: int) -> None:
        """Alone or together; and what the others do then."""
        world = self.world
        victims = {name for name in ("allocator", "gateway", "scheduler") if name in who or who == "all"}
        workers = sorted(set(world.roles) & set(world.alive))
        if who.startswith("worker,") or who == "worker":
            victims |= {data.draw(st.sampled_from(workers))} if workers else set()
        elif who in ("workers", "all"):
            victims |= set(workers)
        for name in sorted(victims & set(world.alive)):
            world.kill(name, ghost=ghost)
        world.busy(random.Random(seed), count, restarts=0.1)

    @precondition(lambda self: self.world.ghosts)
    @rule(data=st.data(), how=st.sampled_from(["mad", "mad", "gone"]), seed=st.integers(0, 2**32))
    def ghost(self, data: st.DataObject, how: str, seed: int) -> None:
        ghost: Incarnation = data.draw(st.sampled_from(sorted(self.world.ghosts)))
        if how == "mad":
            self.world.go_mad(ghost)
        else:
            self.world.prove_gone(ghost)
        self.world.busy(random.Random(seed), 60, restarts=0.1)

    @invariant()
    def all_is_sound(self) -> None:
        if hasattr(self, "world"):
            check(self.world)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            check(self.world)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    deadline=None,
    # A failure prints its whole story anyway; shrinking one takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
