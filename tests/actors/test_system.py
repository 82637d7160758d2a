"""The whole system in memory, in virtual time: topologies, faulty links, kills at every message."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import trio

from actors.sessions import Delta, DeltaToken, Generation
from engine.sampling import GREEDY, SamplingParams
from engine.testing import KillAt
from engine.testing.models import generate
from transport.faulty import EdgePlan

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.testing import System
    from engine.testing.fixtures import StartSystem

PROMPT = "the relay runs from prefill to decode"
TOPOLOGIES = ["local", "unified", "two-decode"]


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_answers_equal_the_model_alone(
    topology: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system(topology)
    sampling = SamplingParams(temperature=0.9, seed=7)
    with trio.fail_after(600):
        for prompt in ("x", PROMPT):
            text, end = await system.complete(prompt, max_tokens=20)
            assert text == system.expected(prompt, max_tokens=20)
            assert (end.reason, end.prompt_tokens) == ("length", len(prompt))
            text, _ = await system.complete(prompt, max_tokens=20, sampling=sampling)
            assert text == system.expected(prompt, max_tokens=20, sampling=sampling)
        await system.settle()


@pytest.mark.parametrize("topology", TOPOLOGIES)
async def test_many_requests_share_the_batch(
    topology: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system(topology)
    answers: dict[int, str] = {}

    async def ask(n: int) -> None:
        text, _ = await system.complete(PROMPT[: n + 1], max_tokens=5 + n)
        answers[n] = text

    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for n in range(20):
                nursery.start_soon(ask, n)
        assert answers == {n: system.expected(PROMPT[: n + 1], max_tokens=5 + n) for n in range(20)}
        await system.settle()
    steps = [actor.statistics().get("steps", 0) for actor in map(system.actor, system.topology.worker)]
    assert sum(steps) < 20 * 10, "requests were not batched"


async def test_a_small_pool_preempts_and_every_answer_is_right(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local", settings=["kv.pages=12", "kv.page_tokens=8"])
    answers: dict[int, str] = {}

    async def ask(n: int) -> None:
        text, _ = await system.complete(PROMPT[n:], max_tokens=40)
        answers[n] = text

    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for n in range(6):
                nursery.start_soon(ask, n)
        assert answers == {n: system.expected(PROMPT[n:], max_tokens=40) for n in range(6)}
        await system.settle()
    assert system.actor("scheduler").statistics()["preemptions"] > 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("seed", range(2))
async def test_faulty_links_change_nothing(
    topology: str, seed: int, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    plan = EdgePlan(drop=0.1, delay=0.1, duplicate=0.1, reorder=0.1, cut=0.002)
    system = await start_system(topology, plan=plan, seed=seed)
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(_ask_and_compare, system, PROMPT[n:], 10)
        await system.settle()


async def _ask_and_compare(system: System, prompt: str, max_tokens: int) -> None:
    text, end = await system.complete(prompt, max_tokens=max_tokens)
    assert end.reason in ("length", "stop"), end
    assert text == system.expected(prompt, max_tokens=max_tokens)


async def test_cancelled_requests_leave_nothing(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    gateway = system.gateways()[0]
    with trio.fail_after(600):
        for n in range(25):
            session = gateway.open(Generation(system.encode(PROMPT), 30, GREEDY))
            await trio.sleep(n * 0.01)
            session.cancel("test")
            session.cancel("test")
            assert [event async for event in session.events()][-1].reason == "cancelled"
        await system.settle()


async def test_a_stop_string_ends_the_request_everywhere(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-decode")
    with trio.fail_after(600):
        whole = system.expected(PROMPT, max_tokens=30)
        stop = whole[12:14]
        text, end = await system.complete(PROMPT, max_tokens=30, stop=(stop,))
        assert text == whole[: whole.index(stop)]
        assert end.reason == "stop"
        await system.settle()


PENALTIES = SamplingParams(
    temperature=0.9,
    top_k=50,
    min_p=0.001,
    seed=7,
    presence_penalty=0.5,
    frequency_penalty=1.5,
    repetition_penalty=1.3,
    logit_bias=((40, 3.0), (41, -100.0)),
)


@pytest.mark.parametrize("sampling", [PENALTIES, SamplingParams(frequency_penalty=2.0)])
@pytest.mark.parametrize("victim", [None, "decode", "prefill"])
async def test_penalties_are_the_same_fold_wherever_the_log_is(
    victim: str | None, sampling: SamplingParams, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """Also behind a death, when generated tokens are placed again as if they were a prompt."""
    system = await start_system("local")
    expected = system.expected(PROMPT, max_tokens=40, sampling=sampling)
    plain = msgspec.structs.replace(
        sampling, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0
    )
    assert expected != system.expected(PROMPT, max_tokens=40, sampling=plain)
    with trio.fail_after(600):
        session = system.gateways()[0].open(Generation(system.encode(PROMPT), 40, sampling))
        text, count = "", 0
        async for event in session.events():
            if isinstance(event, Delta):
                text += event.text
                count += 1
                if count == 10 and victim is not None:
                    system.kill_actor(victim)
        assert text == expected
        await system.settle()


async def scored(system: System, victim: str | None) -> tuple[str, list[DeltaToken]]:
    """Text and tokens of an answer whose worker is killed in the middle."""
    generation = Generation(system.encode(PROMPT), 30, GREEDY, logprobs=3, token_ids=True)
    session = system.gateways()[0].open(generation)
    text, tokens = "", []
    async for event in session.events():
        if isinstance(event, Delta):
            text += event.text
            tokens += event.tokens
            if len(tokens) == 10 and victim is not None:
                system.kill_actor(victim)
    return text, tokens


async def test_logprobs_come_with_every_token_also_behind_a_death(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        text, tokens = await scored(system, None)
        assert text == system.expected(PROMPT, max_tokens=30)
        assert [told.token for told in tokens] == generate(system.folder, system.encode(PROMPT), 30)
        for told in tokens:
            assert told.logprobs is not None
            assert told.logprobs.top[0] == (told.token, told.logprobs.logprob), "greedy takes the likeliest"
            assert len(told.logprobs.top) == 3
        assert await scored(system, "decode") == (text, tokens)
        await system.settle()


@pytest.mark.parametrize("victim", [None, "decode"])
async def test_what_stops_and_what_does_not(
    victim: str | None, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    tokens = generate(system.folder, system.encode(PROMPT), 30)
    stop = tokens[3]
    with trio.fail_after(600):
        text, end = await system.complete(PROMPT, max_tokens=30, stop_tokens=(stop,))
        first = tokens.index(stop)
        assert text == system.decode(tokens[:first])
        assert (end.reason, end.completion_tokens) == ("stop", first + 1)
        text, _ = await system.complete(PROMPT, max_tokens=30, stop_tokens=(stop,), show_stop=True)
        assert text == system.decode(tokens[: first + 1])
        # Before the least number of tokens a stop token is not even sampled.
        limits = {"max_tokens": 30, "stop_tokens": (stop,), "min_tokens": 12}
        if victim is not None:
            session = system.gateways()[0].open(
                Generation(system.encode(PROMPT), 30, GREEDY, stop_tokens=(stop,), min_tokens=12)
            )
            events = session.events()
            seen = [await anext(events) for _ in range(4)]
            system.kill_actor(victim)
            seen += [event async for event in events]
            text = "".join(event.text for event in seen if isinstance(event, Delta))
        else:
            text, end = await system.complete(PROMPT, **limits)
            assert end.completion_tokens >= 12
        assert text == system.expected(PROMPT, **limits)
        # The model's own end is one more stop token, and can be ignored.
        ending = SamplingParams(logit_bias=((1, 100.0),))
        assert (await system.complete(PROMPT, max_tokens=9, sampling=ending))[1].completion_tokens == 1
        _, end = await system.complete(PROMPT, max_tokens=9, sampling=ending, ignore_eos=True)
        assert (end.reason, end.completion_tokens) == ("length", 9)
        # A stop string counts only in what comes behind them.
        whole = system.expected(PROMPT, max_tokens=30)
        text, _ = await system.complete(PROMPT, max_tokens=30, stop=(whole[2:4],), show_stop=True)
        assert text == whole[: whole.index(whole[2:4]) + 2]
        text, _ = await system.complete(PROMPT, max_tokens=30, stop=(whole[:2],), min_tokens=30)
        assert text == whole
        await system.settle()


@pytest.mark.parametrize("victim", ["scheduler", "allocator", "replicator", "health", "prefill", "decode"])
async def test_killed_at_any_message_no_token_changes(
    victim: str, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """For every message of a short request: SIGKILL of an actor there costs the client nothing."""
    k = 0
    while True:
        kill = KillAt(victim, k)
        system = await start_system("local", on_message=kill)
        with trio.fail_after(600):
            kill.arm(system)
            text, end = await system.complete("relay", max_tokens=4)
            finished_before_the_kill = not kill.killed
            assert (text, end.reason) == (system.expected("relay", max_tokens=4), "length"), f"message {k}"
            kill.killed = True
            await system.settle()
            assert (await system.complete("x", max_tokens=2))[0] == system.expected("x", max_tokens=2)
            await system.stop()
        if finished_before_the_kill:
            break
        k += 1
    assert k > 10, "a request takes more messages than that"


async def test_gateway_killed_at_any_message_leaves_nothing(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """Its clients lose their connections; nobody keeps anything of their requests."""
    k = 0
    over_before_the_kill = False
    while not over_before_the_kill:
        kill = KillAt("front", k)
        system = await start_system("local", on_message=kill)
        with trio.fail_after(600):
            kill.arm(system)
            system.gateways()[0].open(Generation(system.encode("relay"), 4, GREEDY))
            await system.settle()
            over_before_the_kill = not kill.killed
            kill.killed = True
            assert (await system.complete("x", max_tokens=2))[0] == system.expected("x", max_tokens=2)
            await system.stop()
        k += 1
    assert k > 10, "a request takes more messages than that"
