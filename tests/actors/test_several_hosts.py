"""Two hosts in memory, in virtual time: whichever computes, and whatever becomes of it, no token changes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from engine.supervision import Over
from engine.testing import KillAt
from transport.faulty import EdgePlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from trio.testing import MockClock

    from engine.testing import System
    from engine.testing.fixtures import StartSystem

PROMPT = "the relay runs from one host to another"


def steps(system: System) -> dict[str, int]:
    """What each worker has computed."""
    return {name: int(system.actor(name).statistics()["steps"]) for name in system.topology.worker}


async def ask_many(system: System, during: Callable[[], None] | None = None) -> None:
    """Requests at once, more than one worker's; their answers are right whatever happens meanwhile."""
    answers: dict[int, str] = {}

    async def ask(n: int) -> None:
        answers[n], _ = await system.complete(PROMPT[: n + 5], max_tokens=20 + n)

    async with trio.open_nursery() as nursery:
        for n in range(12):
            nursery.start_soon(ask, n)
        if during is not None:
            await trio.sleep(0.3)
            assert len(answers) < 12, "it should happen in the midst of them"
            during()
    assert answers == {n: system.expected(PROMPT[: n + 5], max_tokens=20 + n) for n in range(12)}


async def test_requests_are_computed_on_both_hosts(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-hosts")
    with trio.fail_after(600):
        await ask_many(system)
        await system.settle()
        assert all(count > 5 for count in steps(system).values()), steps(system)
        assert system.actor("allocator-b").statistics()["pages_total"] == 64
        assert (await system.stop()).code == 0
    assert system.over_at("b") == Over(0, None)


async def test_a_host_without_a_free_slot_has_the_other_answer(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    settings = [f"worker.both-{host}.{kind}_slots=1" for host in "ab" for kind in ("prefill", "decode")]
    system = await start_system("two-hosts", settings=[*settings, "scheduler.reserve=0"])
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(system.complete, PROMPT, max_tokens=200))
            nursery.start_soon(partial(system.complete, PROMPT, max_tokens=200))
            await system.until(lambda: min(steps(system).values()) > 20)
        await system.settle()
    assert min(steps(system).values()) >= 200


@pytest.mark.parametrize("seed", [1, 2])
async def test_faulty_links_between_hosts_change_nothing(
    seed: int, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    plan = EdgePlan(drop=0.05, delay=0.1, duplicate=0.05, reorder=0.1, cut=0.002)
    system = await start_system("two-hosts", plan=plan, seed=seed)
    with trio.fail_after(600):
        await ask_many(system)
        await system.settle()


async def test_a_host_that_is_killed_costs_no_client_a_token(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-hosts")
    with trio.fail_after(600):
        await ask_many(system, lambda: system.kill_host("b"))
        gateway = system.gateways()[0]
        await system.until(lambda: "both-b" not in {member.name for member in gateway.members.values()})
        assert gateway.not_ready() is None
        await ask_many(system)
        system.start_host("b")
        await system.wait_ready()
        await ask_many(system)
        await system.settle()
        assert steps(system)["both-b"] > 5
        assert system.actor("both-b").me.epoch == 4097


async def test_a_host_that_is_cut_off_and_joined_again(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """It is given up after the deadline; joined again in time it starts what was declared dead anew."""
    system = await start_system("two-hosts")
    with trio.fail_after(600):
        await ask_many(system, lambda: system.cut_host("b"))
        gateway = system.gateways()[0]
        await system.until(lambda: "both-b" not in {member.name for member in gateway.members.values()})
        system.heal_host("b")
        await system.until(lambda: "both-b" in {member.name for member in gateway.members.values()})
        await ask_many(system)
        await system.settle()
        assert system.actor("both-b").me.epoch == 2
        assert system.over_at("b") is None


async def test_a_host_that_is_cut_off_for_good_ends_itself(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-hosts")
    with trio.fail_after(600):
        await ask_many(system, lambda: system.cut_host("b"))
        await system.until(lambda: system.over_at("b") is not None)
        over = system.over_at("b")
        assert over is not None
        assert over.code == 70
        assert "silent" in (over.message or "")
        await ask_many(system)
        system.heal_host("b")
        system.start_host("b")
        await system.wait_ready()
        await ask_many(system)
        await system.settle()


async def test_a_host_that_leaves_has_its_requests_placed_elsewhere(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-hosts")
    with trio.fail_after(600):
        await ask_many(system, system.launcher_of("b").stop)
        assert system.over_at("b") == Over(0, None)
        assert system.gateways()[0].not_ready() is None
        system.start_host("b")
        await system.wait_ready()
        await ask_many(system)
        await system.settle()


@pytest.mark.parametrize("victim", ["both-b", "allocator-b", "scheduler", "health"])
async def test_killed_at_any_message_no_token_changes(
    victim: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """For every third message of two short requests, one a host: SIGKILL there costs no client anything."""
    k = 0
    while True:
        kill = KillAt(victim, k)
        system = await start_system("two-hosts", on_message=kill)
        answers: set[str] = set()

        async def ask(system: System = system, answers: set[str] = answers) -> None:
            answers.add((await system.complete("relay", max_tokens=4))[0])

        with trio.fail_after(600):
            kill.arm(system)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                nursery.start_soon(ask)
            finished_before_the_kill = not kill.killed
            assert answers == {system.expected("relay", max_tokens=4)}, f"message {k}"
            kill.killed = True
            await system.settle()
            await system.stop()
        if finished_before_the_kill:
            break
        k += 3
    assert k > 10, "a request takes more messages than that"


@pytest.mark.parametrize("k", range(0, 200, 9))
async def test_a_host_killed_at_any_message(
    k: int, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """The whole host, its memory too; the answer comes from the other one."""
    due: list[int] = []

    def on_message(number: int, source: str, destination: str) -> None:
        if due and number >= due[0]:
            due.clear()
            system.kill_host("b")

    system = await start_system("two-hosts", on_message=on_message)
    with trio.fail_after(600):
        due.append(system.messages + k)
        await ask_many(system)
        assert system.is_lost("b")
        system.start_host("b")
        await system.wait_ready()
        await ask_many(system)
        await system.settle()
