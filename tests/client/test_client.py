"""The trio shell around the client's core, and the blocking one around that, on real sockets."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import zmq

from engine.client import (
    BlockingClient,
    Client,
    ClientClosed,
    ConnectionLost,
    DeadlineExceeded,
    Finish,
    NoEndpoint,
    Patience,
    Piece,
)
from engine.stream_protocol import (
    Cancel,
    Create,
    Delta,
    End,
    Opened,
    Ping,
    Pong,
    decode_to_gateway,
    encode,
)
from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from engine.stream_protocol import ToClient


class Gateway:
    """Answers every request with the same words, or hears only."""

    def __init__(self, socket: ZmqSocket, words: tuple[str, ...], *, ends: bool, is_deaf: bool) -> None:
        self._socket = socket
        self._words = words
        self._ends = ends
        self.is_deaf = is_deaf
        self.heard: list[object] = []
        self.cancelled = trio.Event()
        self._news = trio.Event()

    async def hear_creates(self, count: int) -> None:
        """Wait until so many have come."""
        while sum(isinstance(message, Create) for message in self.heard) < count:
            self._news = trio.Event()
            await self._news.wait()

    async def run(self) -> None:
        while True:
            name, data = await self._socket.receive_frames()
            message = decode_to_gateway(data)
            self.heard.append(message)
            self._news.set()
            if self.is_deaf:
                continue
            for answer in self._answers(message):
                self._socket.send_frames_nowait([name, encode(answer)])

    def _answers(self, message: object) -> list[ToClient]:
        match message:
            case Create(stream=stream):
                number = len(self._words)
                told = [Delta(stream, n, word, number=n) for n, word in enumerate(self._words, 1)]
                end = [End(stream, "stop", 1, number, done=True, number=number)] if self._ends else []
                return [Opened(stream, "r1", "m", 1, 1), *told, *end]
            case Cancel(stream=stream):
                self.cancelled.set()
                return [End(stream, "cancelled", 1, 0, done=True)]
            case Ping():
                return [Pong()]
            case _:
                return []


@asynccontextmanager
async def gateway(
    folder: Path, *words: str, ends: bool = True, is_deaf: bool = False
) -> AsyncIterator[tuple[Gateway, str]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    raw = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{folder}/door"
    raw.bind(endpoint)
    socket = ZmqSocket(raw)
    serving = Gateway(socket, words, ends=ends, is_deaf=is_deaf)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serving.run)
            yield serving, endpoint
            nursery.cancel_scope.cancel()
    socket.close()
    context.term()


async def fail_inside(endpoint: str) -> None:
    async with Client(endpoint) as client:
        client.chat("hello")
        raise KeyError


async def test_an_exception_of_the_block_comes_out_as_it_is(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (_, endpoint):
        with pytest.raises(KeyError):
            await fail_inside(endpoint)


async def test_a_deadline_is_kept_to_and_cancels(tmp_path: Path) -> None:
    async with gateway(tmp_path, "Once", ends=False) as (serving, endpoint), Client(endpoint) as client:
        stream = client.chat("hello", deadline_s=0.2)
        began = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await stream.text()
        assert 0.15 < trio.current_time() - began < 2
        await serving.cancelled.wait()


async def test_a_gateway_that_is_never_there(tmp_path: Path) -> None:
    with trio.fail_after(10):
        async with Client(f"ipc://{tmp_path}/nobody", patience=Patience(lost_s=0.3)) as client:
            with pytest.raises(ConnectionLost):
                await client.chat("hello").text()


async def test_a_gateway_that_says_nothing_is_connected_to_again(tmp_path: Path) -> None:
    """It holds the connection and answers nothing, as a frozen one: another is tried."""
    patience = Patience(ping_s=0.05, silence_s=0.2, answer_s=0.5)
    async with (
        gateway(tmp_path, "hi", is_deaf=True) as (serving, endpoint),
        Client(endpoint, patience=patience) as client,
    ):
        stream = client.chat("hello")
        await serving.hear_creates(3)
        serving.is_deaf = False
        assert await stream.text() == "hi"
        assert client.statistics()["connections"] >= 3


async def test_a_stream_has_one_reader(tmp_path: Path) -> None:
    async with gateway(tmp_path, ends=False) as (_, endpoint), Client(endpoint) as client:
        stream = client.chat("hello")
        with pytest.RaisesGroup(trio.BusyResourceError):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(stream.text)
                nursery.start_soon(stream.text)


async def test_outside_of_its_block_nothing_can_be_asked(tmp_path: Path) -> None:
    async with gateway(tmp_path, ends=False) as (_, endpoint):
        client = Client(endpoint)
        with pytest.raises(ClientClosed):
            client.chat("hello")
        async with client:
            stream = client.chat("hello")
            await stream.accepted()
        with pytest.raises(ClientClosed):
            await stream.text()
        with pytest.raises(ClientClosed):
            client.chat("hello")
        with pytest.raises(RuntimeError, match="one block"):
            async with client:
                pass


@pytest.mark.parametrize("window", [0, -1, 1 << 21, "x"])
async def test_a_window_is_a_number_of_pieces(tmp_path: Path, window: int) -> None:
    async with Client(f"ipc://{tmp_path}/nobody") as client:
        with pytest.raises(ValueError, match="window"):
            client.chat("hello", window=window)


async def test_parameters_go_as_they_are_given(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (serving, endpoint), Client(endpoint) as client:
        await client.chat("hello", max_tokens=3, stop=["x"], top_p=None, seed=7).text()
        await client.complete([1, 2], n=2, seed=8).accepted()
        bodies = [msgspec.json.decode(each.body) for each in serving.heard if isinstance(each, Create)]
    messages = [{"role": "user", "content": "hello"}]
    assert bodies == [
        {"messages": messages, "max_tokens": 3, "stop": ["x"], "seed": 7},
        {"prompt": [1, 2], "n": 2, "seed": 8},
    ]


# ── blocking ──────────────────────────────────────────────────────────────────────────────────


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "estafet-client"]


async def test_blocking_streams_from_several_threads(tmp_path: Path) -> None:
    async with gateway(tmp_path, "Hel", "lo") as (_, endpoint):

        def work() -> None:
            with BlockingClient(endpoint) as client:
                texts: list[str] = []
                asking = [
                    threading.Thread(target=lambda: texts.append(client.chat("hello").text()))
                    for _ in range(8)
                ]
                for thread in asking:
                    thread.start()
                for thread in asking:
                    thread.join()
                assert texts == ["Hello"] * 8
                stream = client.complete("hello")
                assert list(stream) == [Piece("Hel"), Piece("lo"), Finish("stop", 1, 2)]
                assert stream.accepted() == "r1"
                assert (stream.request_id, stream.model) == ("r1", "m")
                assert client.statistics()["connections"] == 1
            assert not threads()
            with pytest.raises(ClientClosed):
                client.chat("hello")
            client.close()

        await trio.to_thread.run_sync(work)


@pytest.mark.parametrize("how", ["block", "break", "cancel", "close the client"])
async def test_blocking_who_leaves_early_cancels(tmp_path: Path, how: str) -> None:
    async with gateway(tmp_path, "Once", ends=False) as (serving, endpoint):

        def work() -> None:
            with BlockingClient(endpoint) as client:
                stream = client.chat("hello")
                if how == "block":
                    with stream:
                        assert next(stream) == Piece("Once")
                elif how == "break":
                    for _ in stream:
                        break
                    del stream
                elif how == "cancel":
                    assert next(stream) == Piece("Once")
                    stream.cancel()
                    assert list(stream) == [Finish("cancelled", 1, 0)]
                else:
                    assert next(stream) == Piece("Once")
            if how == "close the client":
                with pytest.raises(ClientClosed):
                    next(stream)

        await trio.to_thread.run_sync(work)
        await serving.cancelled.wait()


def test_blocking_says_at_once_what_is_wrong() -> None:
    with pytest.raises(NoEndpoint, match="expected ipc://PATH"):
        BlockingClient("nonsense")
    assert not threads()


INTERRUPTED = """
import sys, threading
from engine.client import BlockingClient
try:
    with BlockingClient(sys.argv[1]) as client:
        stream = client.chat("hello")
        print(next(stream).text, flush=True)
        next(stream)
except KeyboardInterrupt:
    print("interrupted", [thread.name for thread in threading.enumerate()])
"""


async def test_blocking_ctrl_c_ends_it_and_cancels(tmp_path: Path) -> None:
    async with gateway(tmp_path, "Once", ends=False) as (serving, endpoint):
        process = await trio.lowlevel.open_process(
            [sys.executable, "-c", INTERRUPTED, endpoint], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        async with process.stdout:
            first = b""
            while not first.endswith(b"\n"):
                first += await process.stdout.receive_some()
            assert first == b"Once\n"
            process.send_signal(2)
            rest = b"".join([part async for part in process.stdout])
            assert rest == b"interrupted ['MainThread']\n"
        assert await process.wait() == 0
        await serving.cancelled.wait()


def test_it_is_light() -> None:
    """It starts fast, for it loads neither the tensor library nor what serves."""
    code = "import engine.client, sys; print(*sys.modules)"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    print(f"imported in {time.monotonic() - began:.2f} s")
    loaded = set(done.stdout.split())
    assert {"trio", "zmq", "msgspec"} <= loaded
    assert not loaded & {"torch", "numpy", "hypercorn", "httpx", "tokenizers", "jinja2", "structlog"}
