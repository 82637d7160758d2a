"""Many clients, half of whom go away at random moments: nothing of them stays behind."""

from __future__ import annotations

import random
import socket
from typing import TYPE_CHECKING

import httpx
import pytest
import trio
from launches import CAPITAL, Launch, wait_until

from tools import observe

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.system, pytest.mark.model]

REQUESTS = 200
AT_ONCE = 48
PATIENCE_S = 1.0
"""A client that goes away does so within this time."""
GROWTH_KIB = {"prefill": 32 * 1024, "decode": 32 * 1024}
"""Private memory that a worker may gain over the whole load after it has warmed up: its largest step
may be yet to come. Other actors get OTHERS_KIB."""
OTHERS_KIB = 4 * 1024
WORDS = ["keeper", "storm", "over", "the", "grey", "sea", "and", "lamp", "once", "more"]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """A pool that is too small for all who come at once, so that some have to give way."""
    with Launch(tmp_path_factory.mktemp("load"), "local", "kv.pages=64") as launch:
        yield launch.wait_ready()


def usages(launch: Launch) -> dict[str, observe.Usage]:
    """What every actor holds now."""
    found = {name: observe.usage(lives[-1].pid) for name, lives in observe.lives(launch.run_dir).items()}
    return {name: usage for name, usage in found.items() if usage is not None}


async def load(launch: Launch, requests: int, seed: int) -> tuple[int, int]:
    """So many clients; (answered, gone away). Every other one goes away, some of them too late."""
    model = launch.body("")["model"]
    draw = random.Random(seed)
    answered = left = 0
    room = trio.CapacityLimiter(AT_ONCE)

    async def client(http: httpx.AsyncClient, body: dict[str, object], patience_s: float) -> None:
        nonlocal answered, left
        async with room:
            with trio.move_on_after(patience_s) as patience:
                if body["stream"]:
                    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
                        lines = [line async for line in response.aiter_lines() if line]
                        assert lines[-1] == "data: [DONE]", lines
                else:
                    response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                answered += 1
            left += patience.cancelled_caught

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=launch.url, timeout=60, limits=limits, trust_env=False) as http,
        trio.open_nursery() as nursery,
    ):
        for number in range(requests):
            words = draw.choices(WORDS, k=draw.choice((2, 5, 20)))
            body = {
                "model": model,
                "messages": [{"role": "user", "content": " ".join(words)}],
                "max_tokens": draw.randint(1, 60),
                "temperature": draw.choice((0, 1)),
                "seed": number,
                "stream": draw.random() < 0.5,
            }
            patience_s = draw.uniform(0, PATIENCE_S) if number % 2 else float("inf")
            nursery.start_soon(client, http, body, patience_s)
    return answered, left


async def test_nothing_stays_of_those_who_left(launch: Launch) -> None:
    with trio.fail_after(120):
        await load(launch, 50, seed=1)
        launch.wait_quiet()
        before = usages(launch)
        slots = launch.statistics()["front"]["log_slots_free"]
        answered, left = await load(launch, REQUESTS, seed=2)
    launch.wait_quiet()
    figures = launch.statistics()
    print(f"{answered} answered, {left} gone away; {figures['scheduler']}; {figures['front']}")
    assert answered >= REQUESTS // 2
    assert left >= REQUESTS // 5
    assert figures["front"]["log_slots_free"] == slots
    assert launch.is_ready()
    assert {name: actor["epoch"] for name, actor in figures.items()} == dict.fromkeys(figures, 1)
    assert "Paris" in launch.ask(max_tokens=10)

    most = before["front"].descriptors
    wait_until(lambda: usages(launch)["front"].descriptors <= most, 3, "all sockets are closed")
    after = usages(launch)
    for name, usage in after.items():
        print(f"{name}: {before[name]} → {usage}")
        assert usage.descriptors <= before[name].descriptors, name
        assert usage.private_kib <= before[name].private_kib + GROWTH_KIB.get(name, OTHERS_KIB), name


def test_a_client_that_leaves_in_mid_stream_frees_its_pages(launch: Launch) -> None:
    with launch.stream(CAPITAL, max_tokens=900, ignore_eos=True) as stream:
        stream.read(3)
        wait_until(launch.held, 2, "its pages are in use")
    launch.wait_quiet(1.5)


def test_connections_that_clients_close_between_requests_are_let_go(launch: Launch) -> None:
    before = usages(launch)["front"].descriptors
    address = (launch.client.base_url.host, launch.client.base_url.port)
    assert address[1] is not None
    idle = [socket.create_connection(address) for _ in range(50)]
    wait_until(lambda: usages(launch)["front"].descriptors >= before + 50, 3, "all are accepted")
    for connection in idle:
        connection.close()
    wait_until(lambda: usages(launch)["front"].descriptors <= before + 1, 3, "all are closed")
