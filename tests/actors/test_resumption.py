"""Requests that outlive their readers and their gateway: whoever comes back reads on, to the byte."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, cast

import pytest
import trio

from actors.doors.openai_request import MAX_SALT, MAX_STOP_CHARS, MAX_STOP_TOKENS
from actors.sessions import (
    Delta,
    Diverged,
    End,
    Generation,
    NotKept,
    QueueFull,
    Refused,
    Superseded,
)
from engine.sampling import GREEDY, SamplingParams
from engine.testing import KillAt
from engine.testing.models import generate
from engine.transcript import Position, tail_hash

if TYPE_CHECKING:
    from trio.testing import MockClock

    from actors.gateway import GatewayActor
    from actors.sessions import Session
    from engine.testing import System
    from engine.testing.fixtures import StartSystem

PROMPT = "the relay runs from prefill to decode"
SAMPLED = SamplingParams(temperature=1.2, seed=11)
GRACE_S = 30.0


class Client:
    """Reads a request over any number of sessions, and knows only what a client knows."""

    def __init__(self, system: System, generation: Generation) -> None:
        self.system = system
        self.generation = generation
        self.texts = [""] * generation.n
        self.tokens: list[list[int]] = [[] for _ in range(generation.n)]
        self.sequences = [0] * generation.n
        self.ends: dict[int, End] = {}
        self.gateway = system.gateways()[0]
        self.session: Session = self.gateway.open(generation)
        self.resume_id = self.session.resume_id
        self.resumed = 0

    def positions(self) -> list[Position]:
        return [
            Position(sequence, tail_hash(text))
            for sequence, text in zip(self.sequences, self.texts, strict=True)
        ]

    def take(self, event: Delta | End) -> None:
        if isinstance(event, End):
            assert event.choice not in self.ends or self.resumed
            self.ends[event.choice] = event
            return
        assert event.sequence > self.sequences[event.choice], "nothing new"
        whole = self.texts[event.choice] + event.text
        assert event.tail == (tail_hash(whole) if self.generation.resumable else "")
        assert event.choice not in self.ends or self.resumed, "text behind the end"
        self.texts[event.choice] += event.text
        self.tokens[event.choice] += [told.token for told in event.tokens]
        self.sequences[event.choice] = event.sequence

    def resume(self) -> None:
        self.gateway = self.system.gateways()[0]
        self.session = self.gateway.resume(self.resume_id, self.positions())
        self.resumed += 1

    async def read(self, deltas: int = 10**9) -> bool:
        """Read so many deltas; True when the request is over, False also when the gateway died."""
        events = self.session.events()
        while deltas > 0:
            with trio.move_on_after(1) as patience:
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return True
                self.take(event)
                deltas -= isinstance(event, Delta)
            if patience.cancelled_caught and self.gateway not in self.system.gateways():
                return False
        return False

    async def read_all(self) -> None:
        """To the end, whatever dies."""
        while not await self.read():
            await self.system.until(lambda: bool(self.system.gateways()))
            self.resume()

    def check(self) -> None:
        """Every choice is what the model says when it runs alone."""
        for choice in range(self.generation.n):
            assert self.texts[choice] == alone(self.system, self.generation, choice), f"choice {choice}"
            assert self.ends[choice].reason in ("stop", "length")
            if self.generation.token_ids:
                assert self.ends[choice].completion_tokens == len(self.tokens[choice])


def alone(system: System, generation: Generation, choice: int) -> str:
    params = cast("SamplingParams", generation.sampling)
    sampling = SamplingParams(temperature=params.temperature, seed=params.seed, choice=choice)
    tokens = generate(system.folder, generation.prompt, generation.max_tokens, sampling)
    text = system.decode(tokens)
    for stop in generation.stop:
        text = text.split(stop)[0]
    return text


def asked(system: System, prompt: str = PROMPT, max_tokens: int = 20, **more: object) -> Generation:
    settings: dict[str, object] = {"resumable": True, "token_ids": True, **more}
    sampling = settings.pop("sampling", SAMPLED)
    return Generation(system.encode(prompt), max_tokens, sampling, **settings)  # type: ignore[arg-type]


def front(system: System) -> GatewayActor:
    return system.gateways()[0]


@pytest.mark.parametrize("n", [1, 3])
async def test_a_reader_comes_back_at_every_place(
    n: int, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        for after in range(1, 12):
            client = Client(system, asked(system, max_tokens=10, n=n))
            if not await client.read(after):
                client.session.leave("test")
                await trio.sleep(random.Random(after).uniform(0, 2))
                client.resume()
                await client.read_all()
            client.check()
        await trio.sleep(GRACE_S + 1)
        await system.settle()
        assert front(system).statistics()["requests_kept"] == 0


async def test_choices_differ_and_are_those_of_their_index(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        client = Client(system, asked(system, n=4, resumable=False))
        await client.read_all()
        client.check()
        assert len(set(client.texts)) == 4
        await system.settle()


async def test_whoever_resumes_takes_the_stream_over(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        client = Client(system, asked(system))
        await client.read(3)
        old = client.session
        assert not old.superseded.is_set()
        client.resume()
        assert old.superseded.is_set()
        assert not client.session.superseded.is_set()
        with pytest.raises(Superseded):
            await anext(old.events())
        old.leave("test")
        old.cancel("test")
        client.session.leave("test")
        with pytest.raises(Superseded):
            await anext(client.session.events())
        client.resume()
        await client.read_all()
        client.check()


async def test_a_stop_string_is_held_back_at_every_place(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """Text that may become a stop string is not shown; its place is no other after a resume."""
    system = await start_system("local")
    whole = alone(system, asked(system, max_tokens=30), 0)
    with trio.fail_after(600):
        for stop in (whole[8:11], whole[-2:] + "§", whole[5:7]):
            for after in range(1, 30, 2):
                client = Client(system, asked(system, max_tokens=30, stop=(stop,)))
                if not await client.read(after):
                    client.resume()
                    await client.read_all()
                client.check()


async def test_an_unread_end_can_be_read_again_and_nothing_twice(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        client = Client(system, asked(system, max_tokens=5))
        await client.read_all()
        client.check()
        assert front(system).statistics()["log_slots_kept"] == 0
        for _ in range(2):
            client.ends.clear()
            client.resume()
            await client.read_all()
            client.check()
        again = front(system).resume(client.resume_id, None)
        events = [event async for event in again.events()]
        assert "".join(e.text for e in events if isinstance(e, Delta)) == client.texts[0]
        await trio.sleep(GRACE_S + 1)
        with pytest.raises(NotKept):
            client.resume()


async def test_a_client_with_other_text_is_refused(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        # Without tokens, every delta has text.
        client = Client(system, asked(system, max_tokens=12, token_ids=False))
        await client.read(4)
        right = client.positions()[0]
        gateway = front(system)
        for wrong in (
            [Position(right.sequence, tail_hash("something else"))],
            [Position(right.sequence - 1, right.tail)],
            [Position(10**6, right.tail)],
            [Position(0, right.tail)],
            [],
            [right, right],
        ):
            with pytest.raises(Diverged):
                gateway.resume(client.resume_id, wrong)
        request_id = client.session.request_id
        for name in (
            "",
            "req-1",
            request_id,
            f"{request_id}.0123456789abcdef",
            client.resume_id + "0",
            f"{request_id}.é",
        ):
            with pytest.raises(NotKept):
                gateway.resume(name, [right])
        # It costs the one who reads nothing.
        await client.read_all()
        client.check()


async def test_a_request_without_a_reader_ends_with_its_grace(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local", settings=["gateway.front.resume_grace_s=1"])
    with trio.fail_after(600):
        client = Client(system, asked(system, max_tokens=200))
        await client.read(2)
        client.session.leave("test")
        assert front(system).statistics()["requests"] == 1
        await trio.sleep(1.2)
        assert front(system).statistics()["requests"] == 0
        with pytest.raises(NotKept):
            client.resume()
        await system.settle()


async def test_a_plain_request_ends_with_its_reader(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        client = Client(system, asked(system, max_tokens=200, resumable=False))
        await client.read(2)
        with pytest.raises(NotKept):
            client.resume()
        client.session.leave("test")
        with pytest.raises(NotKept):
            client.resume()
        await system.settle()


async def test_a_client_keeps_only_so_many(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local", settings=["gateway.front.resume_most=2"])
    with trio.fail_after(600):
        others = Client(system, asked(system, max_tokens=200, client="user:quiet"))
        others.session.leave("test")
        clients = [Client(system, asked(system, max_tokens=200, client="user:a")) for _ in range(3)]
        for client in clients:
            client.session.leave("test")
        with pytest.raises(NotKept):
            clients[0].resume()
        for client in (*clients[1:], others):
            client.resume()
            client.session.cancel("test")
        await system.settle()


async def test_keys_find_requests_and_cancelled_ones_are_gone(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    gateway = front(system)
    with trio.fail_after(600):
        client = Client(system, asked(system, key="0123456789abcdef"))
        assert gateway.find("0123456789abcdef") == client.resume_id
        with pytest.raises(Refused):
            gateway.open(asked(system, key="0123456789abcdef"))
        client.session.cancel("test")
        assert [e.reason async for e in client.session.events() if isinstance(e, End)] == ["cancelled"]
        assert gateway.find("0123456789abcdef") is None
        await system.settle()


async def test_choices_are_admitted_together_or_not_at_all(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local", settings=["gateway.front.max_open=5", "scheduler.reserve=0"])
    gateway = front(system)
    with trio.fail_after(600):
        first = Client(system, asked(system, n=3))
        with pytest.raises(QueueFull):
            gateway.open(asked(system, n=3))
        gateway.open(asked(system, n=2)).cancel("test")
        await first.read_all()
        first.check()
        await system.settle()


async def test_the_last_places_are_for_clients_that_have_none(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local", settings=["gateway.front.max_open=8"])
    gateway = front(system)
    with trio.fail_after(600):
        flood = [Client(system, asked(system, max_tokens=100, client="user:flood")) for _ in range(7)]
        for client in flood:
            client.session.leave("test")
        with pytest.raises(QueueFull):
            gateway.open(asked(system, client="user:flood"))
        quiet = Client(system, asked(system, client="user:quiet"))
        with pytest.raises(QueueFull):
            gateway.open(asked(system, client="user:third"))
        await quiet.read_all()
        quiet.check()
        for client in flood:
            client.resume()
            client.session.cancel("test")
        await trio.sleep(GRACE_S + 1)
        await system.settle()


async def test_the_largest_record_fits(start_system: StartSystem, autojump_clock: MockClock) -> None:
    """All that a request may say at its longest: it outlives its gateway, too."""
    system = await start_system("local")
    stops = tuple(letter * MAX_STOP_CHARS for letter in "\U0001f600\U0001f601\U0001f602\U0001f603")
    biases = tuple((token, -1e-9 / 3) for token in range(system.config.vocab_size))
    generation = asked(
        system,
        max_tokens=4,
        sampling=SamplingParams(temperature=1.2, seed=2**64 - 1, logit_bias=biases),
        stop=stops,
        stop_tokens=tuple(range(MAX_STOP_TOKENS)),
        client="key:0123456789abcdef/user:" + "\U0001f600" * 64,
        cache_salt="\U0001f600" * MAX_SALT,
        key="k" * 64,
        ticket=b"t" * 400,
        min_tokens=1,
        priority=-100,
    )
    with trio.fail_after(600):
        client = Client(system, generation)
        system.kill_actor("front")
        await system.wait_ready()
        assert front(system).find("k" * 64) == client.resume_id
        resumed = front(system).resume(client.resume_id, None)
        assert resumed.generation == generation
        resumed.cancel("test")
        await system.settle()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_gateway_killed_at_any_message_breaks_no_stream(
    n: int, start_system: StartSystem, autojump_clock: MockClock
) -> None:
    """For every message of a request: its client reads on at the next incarnation, every byte."""
    k = resumed = 0
    over_before_the_kill = False
    while not over_before_the_kill:
        kill = KillAt("front", k)
        system = await start_system("local", on_message=kill, settings=["gateway.front.resume_grace_s=4"])
        with trio.fail_after(600):
            kill.arm(system)
            client = Client(system, asked(system, "relay", 4, n=n))
            await client.read_all()
            over_before_the_kill = not kill.killed
            kill.killed = True
            await system.wait_ready()
            client.check()
            resumed += client.resumed
            await trio.sleep(5)
            await system.settle()
            await system.stop()
        k += 1
    assert resumed > 10, "a request takes more messages than that"


async def test_many_readers_and_a_gateway_that_dies_again_and_again(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("two-decode")
    draw = random.Random(4)
    clients = [
        Client(
            system,
            asked(
                system,
                PROMPT[i:],
                draw.randint(5, 60),
                n=draw.choice((1, 1, 2)),
                sampling=draw.choice((SAMPLED, GREEDY)),
            ),
        )
        for i in range(12)
    ]
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for client in clients:
                nursery.start_soon(client.read_all)
            for victim in ("front", "decode-1", "front", "scheduler", "front"):
                await trio.sleep(draw.uniform(0.05, 0.3))
                system.kill_actor(victim)
                await system.wait_ready()
        for client in clients:
            client.check()
        assert sum(client.resumed for client in clients) > 0
        await trio.sleep(GRACE_S + 1)
        await system.settle()
