"""A thousand streams open on one gateway: every one whole, memory bounded, and nothing left."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import trio
from launches import Launch, wait_until

from engine.testing.models import write_byte_model
from tools import observe

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.system

STREAMS = 1250
"""Some of them have ended before the last ones come."""
OPEN = 1000
TOKENS = 18
MOST_KIB_A_STREAM = 48
MOST_KIB_MORE = 4 * 1024
"""That a second load may leave behind beside the first."""


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launch]:
    """A model of noise, so that the gateway is what limits."""
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_model(folder)
    settings = [f"model.path={folder}", f"gateway.front.max_open={2 * STREAMS}"]
    settings += ["worker.prefill.backend=reference", "worker.decode.backend=reference"]
    with Launch(tmp_path_factory.mktemp("many"), "local", *settings) as launch:
        yield launch.wait_ready()


def body(launch: Launch, number: int) -> dict[str, Any]:
    """Somebody's request: noise of a length of its own, which nothing but its limit ends."""
    return {
        **launch.body("x" * (number % 50)),
        "stream": True,
        "temperature": 1,
        "seed": number,
        "max_tokens": TOKENS + number % 7,
        "ignore_eos": True,
        "return_token_ids": True,
    }


def tokens_of(events: bytes) -> list[int]:
    """The token ids of an event stream that is complete."""
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line]
    assert lines[-1] == b"[DONE]", events[-300:]
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    return [token for choice in choices for token in choice.get("token_ids") or ()]


async def read(launch: Launch, payload: dict[str, Any], started: trio.Event | None = None) -> list[int]:
    """One stream to its end; HTTP/1.0, where a body is all that comes. Reading begins when it may."""
    url = httpx.URL(launch.url)
    content = json.dumps(payload).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream(url.host, url.port or 0) as stream:
        await stream.send_all(head.encode() + content)
        if started is not None:
            await started.wait()
        data = b"".join([piece async for piece in stream])
    status, _, events = data.partition(b"\r\n\r\n")
    assert b" 200 " in status.splitlines()[0], data
    return tokens_of(events)


async def load(launch: Launch, payloads: list[dict[str, Any]]) -> tuple[list[list[int]], int, int]:
    """Everybody's tokens; how many streams were open at once, and the gateway's KiB then, at most."""
    pid = launch.life("front").pid
    found: dict[int, list[int]] = {}
    most = peak = 0
    late = trio.Event()

    async def one(number: int) -> None:
        # Every hundredth client reads nothing until all others have their answer.
        found[number] = await read(launch, payloads[number], late if number % 100 == 0 else None)

    async with trio.open_nursery() as nursery:
        for number in range(len(payloads)):
            nursery.start_soon(one, number)
        while len(found) < len(payloads) - len(payloads) // 100 - 1:
            await trio.sleep(0.2)
            peak = max(peak, usage_of(pid).private_kib)
            is_open = await trio.to_thread.run_sync(launch.statistics)
            most = max(most, int(is_open["front"]["requests"]))
        late.set()
    return [found[number] for number in range(len(payloads))], most, peak


async def test_a_thousand_streams(launch: Launch) -> None:
    assert await read(launch, body(launch, 0)), "it is warm"
    payloads = [body(launch, 0) | {"seed": n, **_changes(n)} for n in range(STREAMS)]
    pid = launch.life("front").pid
    usages = []
    with trio.fail_after(200):
        for turn in range(2):
            launch.wait_quiet()
            usages.append(before := usage_of(pid))
            found, most, peak = await load(launch, payloads[: STREAMS if turn == 0 else STREAMS // 4])
            print(f"{most} open at once, {(peak - before.private_kib) / most:.1f} KiB a stream")
            assert turn or most >= OPEN
            assert [len(tokens) for tokens in found] == [TOKENS + n % 7 for n in range(len(found))]
            assert peak <= before.private_kib + OPEN * MOST_KIB_A_STREAM
            for number in (3, 250 + turn):
                assert await read(launch, payloads[number]) == found[number], "alone it says the same"
    launch.wait_quiet()
    limit = usages[0].descriptors + 1
    wait_until(lambda: usage_of(pid).descriptors <= limit, 5, "all sockets are closed")
    usages.append(usage_of(pid))
    print(usages)
    # What Python keeps for the next time it kept after the first load, too.
    assert usages[2].private_kib <= usages[1].private_kib + MOST_KIB_MORE
    assert launch.life("front").pid == pid


def usage_of(pid: int) -> observe.Usage:
    """What a living process holds."""
    usage = observe.usage(pid)
    assert usage is not None
    return usage


def _changes(number: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "x" * (number % 50)}],
        "max_tokens": TOKENS + number % 7,
    }


def test_bytes_at_random_hold_no_descriptor_of_the_zeromq_door(launch: Launch) -> None:
    """To libzmq they could be a peer of an old ZeroMQ; and it aborts when descriptors run out."""
    pid = launch.life("front").pid
    before = usage_of(pid).descriptors
    garbage = random.Random(1).randbytes(5000)
    for _ in range(200):
        with socket.socket(socket.AF_UNIX) as raw, contextlib.suppress(OSError):
            raw.settimeout(1)
            raw.connect(str(launch.run_dir / "s" / "front.zmq"))
            raw.sendall(garbage)
    wait_until(lambda: usage_of(pid).descriptors <= before + 20, 10, "their descriptors are closed")
