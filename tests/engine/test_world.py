"""The whole core under arbitrary delivery orders, cancels, kills and restarts."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from world import World, expected

ROLES = {
    "local": {"prefill": "prefill", "decode": "decode"},
    "unified": {"both": "both"},
    "two-decode": {"prefill": "prefill", "decode-1": "decode", "decode-2": "decode"},
}


@pytest.mark.parametrize("topology", ROLES)
def test_requests_end_with_the_expected_tokens(topology: str) -> None:
    world = World(ROLES[topology], pages=40)
    for length in (1, 2, 4, 5, 9, 17):
        assert world.submit(tuple(range(100, 100 + length)), length + 12)
    world.settle()
    assert not world.failures
    assert len(world.logs) == 6


@pytest.mark.parametrize("topology", ROLES)
def test_a_pool_that_is_too_small_for_all_preempts_and_ends(topology: str) -> None:
    world = World(ROLES[topology], pages=8)
    for n in range(8):
        assert world.submit((n, n + 1, n + 2), 26)
    world.settle()
    assert not world.failures
    scheduler = world.alive["scheduler"].core.statistics()
    assert scheduler["preemptions"] > 0


@pytest.mark.parametrize("topology", ROLES)
def test_the_prompt_of_several_choices_is_computed_once(topology: str) -> None:
    """And the tokens of each are those of the choice alone."""
    world = World(ROLES[topology], pages=40)
    prompt = tuple(range(100, 118))
    keys = world.submit(prompt, 30, n=3)
    world.settle()
    for key in keys:
        assert world.logs[key] == expected(prompt, 30, key.choice)
    figures = [world.alive[name].core.statistics() for name in world.roles]
    assert sum(figure["positions_shared"] for figure in figures) == 2 * 16
    generated = sum(len(world.logs[key]) - len(prompt) for key in keys)
    once = len(prompt) - 1 + generated
    forked = sum(figure["pages_forked"] for figure in figures)
    assert forked >= 1, "the begun page of a sibling is copied"
    assert sum(figure["tokens_filled"] for figure in figures) == once + 2 - forked


@pytest.mark.parametrize("victim", ["scheduler", "allocator", "gateway", "prefill", "decode"])
@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_any_actor_may_die_at_any_moment(victim: str, moment: int) -> None:
    """No request is lost and no token changes, not even of the gateway's own when somebody may resume it."""
    world = World(ROLES["local"], pages=40)
    prompts = [(n, n + 1, n + 2, n + 3, n + 4) for n in range(3)]
    keys = [world.submit(prompt, 20, n=n + 1, keepsake=b"kept") for n, prompt in enumerate(prompts)]
    order = random.Random(moment)
    for _ in range(moment * 4):
        choices = world.deliverable()
        if choices and order.random() < 0.7:
            world.deliver(order.choice(choices))
        else:
            name = order.choice(["prefill", "decode"])
            world.end_step(name) or world.begin_step(name)
        world.check()
    world.kill(victim)
    world.check()
    world.settle()
    assert not world.failures
    for prompt, choices in zip(prompts, keys, strict=True):
        for key in choices:
            assert world.logs[key] == expected(prompt, 20, key.choice)


@pytest.mark.parametrize("topology", ROLES)
@pytest.mark.parametrize("kills", [False, True])
def test_a_pool_hardly_larger_than_one_request_never_stands_still(topology: str, kills: bool) -> None:
    """Field report 23: whoever gives way, and for however little, somebody always goes on."""
    for seed in range(40):
        order = random.Random(f"{topology} {kills} {seed}")
        world = World(ROLES[topology], pages=order.choice([6, 7, 8, 9]))
        for _ in range(300):
            chance = order.random()
            dead = sorted(set(world.names) - set(world.alive))
            if chance < 0.05:
                world.submit(
                    tuple(range(order.randint(1, 8))),
                    order.randint(9, 24),
                    n=order.choice([1, 1, 2, 3, 4]),
                    client=order.choice("ab"),
                    priority=order.choice([0, 1]),
                    keepsake=order.choice([b"", b"kept"]),
                )
            elif chance < 0.06 and world.open:
                world.cancel(order.choice(sorted(world.open)))
            elif chance < 0.07 and kills and world.alive:
                world.kill(order.choice(sorted(world.alive)))
            elif chance < 0.10 and dead:
                world.start(order.choice(dead))
            elif chance < 0.6 and (choices := world.deliverable()):
                world.deliver(order.choice(choices))
            else:
                name = order.choice(sorted(world.roles))
                world.end_step(name) or world.begin_step(name)
        world.settle(3000)


@pytest.mark.parametrize("topology", ROLES)
def test_whatever_link_is_slow_nothing_is_lost(topology: str) -> None:
    """What a peer says last may come when everything that it spoke of is over."""
    names = World(ROLES[topology], pages=1).names
    for slow in itertools.permutations(names, 2):
        for moment in range(0, 40, 4):
            world = World(ROLES[topology], pages=40)
            order = random.Random(moment)
            for length in (3, 6, 9):
                world.submit(tuple(range(length)), length + 9)
            for _ in range(moment):
                if choices := world.deliverable():
                    world.deliver(order.choice(choices))
            world.go_on(slow=slow)
            world.settle()
            assert not world.failures


class Chaos(RuleBasedStateMachine):
    """Anything, in any order."""

    @initialize(topology=st.sampled_from(sorted(ROLES)), pages=st.integers(8, 40))
    def begin(self, topology: str, pages: int) -> None:
        self.world = World(ROLES[topology], pages)

    @rule(
        length=st.integers(1, 12),
        more=st.integers(1, 12),
        first=st.integers(0, 99),
        n=st.integers(1, 4),
        client=st.sampled_from("abc"),
        priority=st.integers(0, 1),
        keepsake=st.sampled_from([b"", b"kept"]),
    )
    def submit(
        self, length: int, more: int, first: int, n: int, client: str, priority: int, keepsake: bytes
    ) -> None:
        self.world.submit(
            tuple(range(first, first + length)),
            length + more,
            n=n,
            client=client,
            priority=priority,
            keepsake=keepsake,
        )

    @precondition(lambda self: self.world.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.open))))

    @precondition(lambda self: self.world.deliverable())
    @rule(data=st.data(), count=st.integers(1, 20))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            choices = self.world.deliverable()
            if not choices:
                break
            self.world.deliver(choices[data.draw(st.integers(0, len(choices) - 1))])

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.world.roles)))
        self.world.end_step(name) or self.world.begin_step(name)

    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        alive = sorted(self.world.alive)
        if alive:
            self.world.kill(data.draw(st.sampled_from(alive)))

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        dead = sorted(set(self.world.names) - set(self.world.alive))
        if dead:
            self.world.start(data.draw(st.sampled_from(dead)))

    @invariant()
    def every_core_is_sound(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


TestChaos = Chaos.TestCase
TestChaos.settings = settings(
    max_examples=100,
    stateful_step_count=60,
    deadline=None,
    # A failure prints its whole story anyway; shrinking one takes minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
