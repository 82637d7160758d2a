"""The ZeroMQ door over real sockets: whatever a client does costs that client."""

from __future__ import annotations

import json
import os
import socket
from contextlib import ExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import trio
import zmq
from scripted_sessions import MODEL, ScriptedSessions, body

from actors.doors.zeromq import ENVELOPE_BYTES, FAR_TOO_LARGE, DoorLimits, serve_zeromq
from engine.client import CacheUse, Client, ConnectionLost, Finish, GenerationFailed, Patience, Piece, Refused
from engine.messages import Cached
from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MAX_BODY_BYTES = 100_000
MOST_BYTES = MAX_BODY_BYTES + ENVELOPE_BYTES


class Doors:
    """The door on the launcher's two sockets, as often as it is opened."""

    def __init__(
        self, sessions: ScriptedSessions, folder: Path, nursery: trio.Nursery, stack: ExitStack
    ) -> None:
        self.sessions = sessions
        self._nursery = nursery
        self.path = folder / "front.zmq"
        self._unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        self._unix.bind(str(self.path))
        self._tcp = stack.enter_context(socket.socket())
        self._tcp.bind(("127.0.0.1", 0))
        for listener in (self._unix, self._tcp):
            listener.listen()
            listener.setblocking(False)
        self.ipc = f"ipc://{self.path}"
        self.tcp = f"tcp://127.0.0.1:{self._tcp.getsockname()[1]}"
        self.shutdown = trio.Event()
        self.closed = trio.Event()

    def open(self, limits: DoorLimits | None = None) -> None:
        self.shutdown, self.closed = trio.Event(), trio.Event()
        # A gateway inherits descriptors of its own, which the launcher keeps: so does this one.
        listeners = {self.ipc: os.dup(self._unix.fileno()), self.tcp: os.dup(self._tcp.fileno())}
        shutdown, closed = self.shutdown, self.closed

        async def serve() -> None:
            await serve_zeromq(
                self.sessions,
                listeners=listeners,
                shutdown=shutdown,
                max_body_bytes=MAX_BODY_BYTES,
                limits=limits or DoorLimits(grace_s=0.5),
            )
            closed.set()

        self._nursery.start_soon(serve)

    async def close(self) -> None:
        self.shutdown.set()
        await self.closed.wait()


@asynccontextmanager
async def served(
    sessions: ScriptedSessions, folder: Path, limits: DoorLimits | None = None
) -> AsyncIterator[Doors]:
    """An open door; everything must be over within the test's twenty seconds."""
    with trio.fail_after(20), ExitStack() as stack:
        async with trio.open_nursery() as nursery:
            doors = Doors(sessions, folder, nursery, stack)
            doors.open(limits)
            yield doors
            await doors.close()
            assert doors.path.exists(), "the socket's file is the launcher's"


class Dealer:
    """A client that says just what the test wants."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, **options: int) -> None:
        raw = context.socket(zmq.DEALER)
        raw.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            raw.setsockopt(getattr(zmq, name), value)
        raw.connect(endpoint)
        self.socket = ZmqSocket(raw)

    async def say(self, **message: Any) -> None:
        await self.socket.send(json.dumps(message).encode())

    async def create(self, stream: str = "s", **more: Any) -> None:
        await self.say(type="create", stream=stream, endpoint="chat", body=body(), **more)

    async def hear(self) -> dict[str, Any]:
        return dict(json.loads(await self.socket.receive()))

    async def answers(self, question: str) -> bool:
        """The door still answers."""
        await self.create(question)
        while (heard := await self.hear())["type"] != "end":
            assert heard.get("stream") in (question, None)
        return True


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("by", ["ipc", "tcp"])
async def test_a_stream_from_create_to_end(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, by: str
) -> None:
    sessions = ScriptedSessions(("Hel", "lo"))
    async with served(sessions, tmp_path) as doors:
        dealer = Dealer(context, getattr(doors, by))
        await dealer.say(type="ping")
        assert await dealer.hear() == {"type": "pong"}
        await dealer.create()
        heard = [await dealer.hear() for _ in range(4)]
        assert [message["type"] for message in heard] == ["opened", "delta", "delta", "end"]
        assert [message.get("text") for message in heard] == [None, "Hel", "lo", None]
        dealer.socket.close()


async def test_a_client_need_not_know_the_model(tmp_path: Path) -> None:
    async with served(ScriptedSessions(("hi",)), tmp_path) as doors, Client(doors.ipc) as client:
        assert await client.chat("hello").text() == "hi"
        stream = client.complete("hello", model=MODEL.name)
        assert await stream.text() == "hi"
        assert stream.model == MODEL.name
        with pytest.raises(Refused) as refused:
            await client.chat("hello", model="another").text()
        assert (refused.value.status, refused.value.param) == (404, "model")
        with pytest.raises(Refused, match="messages"):
            await client.chat([]).text()


async def test_many_streams_on_one_socket_from_many_tasks(tmp_path: Path) -> None:
    async with served(ScriptedSessions(("a", "b", "c")), tmp_path) as doors, Client(doors.ipc) as client:
        texts: list[str] = []

        async def ask() -> None:
            texts.append(await client.chat("hello").text())

        async with trio.open_nursery() as nursery:
            for _ in range(100):
                nursery.start_soon(ask)
        assert texts == ["abc"] * 100
        assert client.statistics()["connections"] == 1


async def test_choices_and_their_ends(tmp_path: Path) -> None:
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors, Client(doors.ipc) as client:
        async with client.chat("hello", n=2) as stream:
            session = await sessions.next()
            session.say("one", choice=1)
            session.say("null")
            session.end("length", choice=1)
            session.end("stop")
            events = [event async for event in stream]
        prompt = len(session.generation.prompt)
        assert events == [
            Piece("one", 1),
            Piece("null"),
            Finish("length", prompt, 7, 1),
            Finish("stop", prompt, 7),
        ]


async def test_a_finish_says_what_of_the_prompt_was_found(tmp_path: Path) -> None:
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors, Client(doors.ipc) as client:
        for asked, use in [(None, None), ({"cache": True}, CacheUse(2, 0, 1, 0, 3))]:
            async with client.chat("hello", cache_salt="tenant", x_estafet=asked) as stream:
                session = await sessions.next()
                assert session.generation.cache_salt == "tenant"
                session.end(cached=Cached(memory=2, host=1))
                assert [event async for event in stream] == [Finish("stop", 6, 7, 0, 3, use)]


@pytest.mark.parametrize("how", ["block", "break", "scope", "cancel"])
async def test_who_leaves_early_cancels(tmp_path: Path, how: str) -> None:
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors, Client(doors.ipc) as client:
        stream = client.chat("hello")
        session = await sessions.next()
        session.say("x")
        if how == "block":
            async with stream:
                pass
        elif how == "break":
            async for _ in stream:
                break
            del stream
        elif how == "scope":
            with trio.CancelScope() as scope:
                async with stream:
                    async for _ in stream:
                        scope.cancel()
        else:
            assert await stream.accepted() == "r0"
            stream.cancel()
            events = [event async for event in stream]
            assert isinstance(events[-1], Finish)
            assert events[-1].reason == "cancelled"
        await session.cancelled.wait()
        assert session.cancels == ["client_cancel"]


async def test_a_reader_that_stops_costs_its_own_window(tmp_path: Path) -> None:
    """What it does not take is not fetched from its session, and the next stream is not held up."""
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors, Client(doors.ipc) as client:
        slow = client.chat("hello", window=8)
        session = await sessions.next()
        session.say(*["x"] * 1000)
        session.end()
        other = client.chat("hello", window=8)
        second = await sessions.next()
        second.say(*["y"] * 1000)
        second.end()
        assert await other.text() == "y" * 1000
        assert session.taken <= 8 + 1
        assert await slow.text() == "x" * 1000


async def test_a_client_that_reads_nothing_holds_up_nobody(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors, Client(doors.ipc) as client:
        deaf = Dealer(context, doors.ipc, RCVHWM=1)
        await deaf.create()
        session = await sessions.next()
        pieces = [f"{number} ".rjust(500) for number in range(3000)]
        session.say(*pieces)
        session.end()
        for _ in range(3):
            stream = client.chat("hello")
            other = await sessions.next()
            other.say("at once")
            other.end()
            assert await stream.text() == "at once"
        assert session.taken < 3000, "nothing waited: the test shows nothing"
        text = ""
        while (heard := await deaf.hear())["type"] != "end":
            text += heard.get("text", "")
        assert text == "".join(pieces)
        deaf.socket.close()


async def test_silence_ends_a_client_and_pings_keep_it(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    sessions = ScriptedSessions()
    limits = DoorLimits(peer_silence_s=0.4, sweep_s=0.05)
    async with served(sessions, tmp_path, limits) as doors:
        silent, alive = Dealer(context, doors.ipc), Dealer(context, doors.ipc)
        await silent.create("silent")
        left = await sessions.next()
        await alive.create("alive")
        kept = await sessions.next()
        assert (await alive.hear())["type"] == "opened"
        with trio.move_on_after(5):
            while not left.gone.is_set():
                await alive.say(type="ping")
                assert await alive.hear() == {"type": "pong"}
        assert left.left == ["client_silence"]
        assert not kept.left
        silent.socket.close()
        alive.socket.close()


async def test_a_client_that_was_idle_is_served_again(tmp_path: Path) -> None:
    limits = DoorLimits(peer_silence_s=0.1, sweep_s=0.02)
    async with served(ScriptedSessions(("hi",)), tmp_path, limits) as doors, Client(doors.ipc) as client:
        for _ in range(2):
            assert await client.chat("hello").text() == "hi"
            await trio.sleep(0.3)  # longer than the door has patience
        assert client.statistics()["connections"] == 1


async def test_who_vanishes_is_noticed_at_the_next_word(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors:
        dealer = Dealer(context, doors.tcp)
        await dealer.create()
        session = await sessions.next()
        assert (await dealer.hear())["type"] == "opened"
        dealer.socket.close()
        while not session.gone.is_set():
            session.say("anybody?")
            await trio.lowlevel.checkpoint()
        assert session.left == ["client_disconnect"]


GARBAGE = [b"", b"\0", b"{", b"[]", b"null", b'{"type":"create"}', b"\xff" * 1000, b"[" * 50_000]


async def test_garbage_is_answered_and_nobody_hurt(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    async with served(ScriptedSessions(("hi",)), tmp_path) as doors:
        dealer = Dealer(context, doors.ipc)
        for garbage in GARBAGE:
            await dealer.socket.send(garbage)
            heard = await dealer.hear()
            assert (heard["type"], heard["error"]["code"]) == ("error", "invalid_message"), garbage[:20]
        await dealer.socket.send_frames([b"", b"{}"])
        assert "2 frames" in (await dealer.hear())["error"]["message"]
        assert await dealer.answers("still")
        dealer.socket.close()


async def test_what_is_no_zeromq_is_no_client(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    async with served(ScriptedSessions(("hi",)), tmp_path) as doors:
        port = int(doors.tcp.rpartition(":")[2])
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            dealer = Dealer(context, doors.tcp)
            assert await dealer.answers("still")
            dealer.socket.close()


async def test_a_message_that_is_too_large_is_refused_by_its_name(tmp_path: Path) -> None:
    async with served(ScriptedSessions(("hi",)), tmp_path) as doors, Client(doors.ipc) as client:
        other = client.chat("hello")
        with pytest.raises(Refused, match=f"larger than {MOST_BYTES} bytes") as refused:
            await client.chat("x" * MOST_BYTES).text()
        assert (refused.value.status, refused.value.code) == (413, "request_too_large")
        assert await other.text() == "hi"
        assert client.statistics()["connections"] == 1


async def test_a_message_that_is_far_too_large_costs_its_connection(tmp_path: Path) -> None:
    size = FAR_TOO_LARGE * MOST_BYTES
    async with (
        served(ScriptedSessions(("hi",)), tmp_path) as doors,
        Client(doors.ipc) as other,
        Client(doors.ipc, patience=Patience(lost_s=0.5)) as client,
    ):
        with pytest.raises(ConnectionLost, match="no gateway took the request of"):
            await client.chat("x" * size).text()
        assert client.statistics()["connections"] > 1
        assert await other.chat("hello").text() == "hi"
        assert other.statistics()["connections"] == 1


async def test_one_client_too_many_is_told_so(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    limits = DoorLimits(peers=2, peer_silence_s=60)
    async with served(ScriptedSessions(("hi",)), tmp_path, limits) as doors:
        dealers = [Dealer(context, doors.ipc) for _ in range(3)]
        for dealer in dealers[:2]:
            assert await dealer.answers("one")
        await dealers[2].say(type="ping")
        heard = await dealers[2].hear()
        assert (heard["error"]["code"], heard.get("stream")) == ("too_many_clients", None)
        async with Client(doors.ipc) as client:
            with pytest.raises(Refused, match="2 clients are connected") as refused:
                await client.chat("hello").text()
        assert (refused.value.status, refused.value.retry_after_s) == (429, 1.0)
        for dealer in dealers:
            dealer.socket.close()


async def test_the_door_closes_with_a_word_to_every_stream(tmp_path: Path) -> None:
    sessions = ScriptedSessions()
    async with served(sessions, tmp_path) as doors, Client(doors.ipc) as client:
        ends, open_still = client.chat("hello"), client.chat("hello")
        first, second = await sessions.next(), await sessions.next()
        second.say("half")
        assert await anext(open_still) == Piece("half")
        doors.shutdown.set()
        first.say("whole")
        first.end()
        assert await ends.text() == "whole"
        with pytest.raises(GenerationFailed, match="shutting down"):
            await open_still.text()
        await doors.closed.wait()


@pytest.mark.parametrize("by", ["ipc", "tcp"])
async def test_a_stream_goes_on_behind_another_door(tmp_path: Path, by: str) -> None:
    """The door dies without a word; the next one, on the same sockets, is asked for what follows."""
    sessions = ScriptedSessions()
    async with (
        served(sessions, tmp_path, DoorLimits(grace_s=0)) as doors,
        Client(getattr(doors, by)) as client,
    ):
        stream = client.chat("hello")
        first = await sessions.next()
        first.say("Once ", "upon ")
        assert [await anext(stream), await anext(stream)] == [Piece("Once "), Piece("upon ")]
        # What the door says at its end is no concern of this test: a killed one says nothing.
        first.crash(trio.ClosedResourceError())
        await first.gone.wait()
        await doors.close()
        doors.open()
        second = await sessions.next()
        ((request, positions),) = sessions.resumed
        assert (request, positions and positions[0].sequence) == ("r0.secret", 2)
        second.say("a time")
        second.end()
        assert await stream.text() == "a time"
        assert client.statistics()["connections"] == 2


async def test_one_connection_too_many_is_shut_down(
    tmp_path: Path, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    """Idle connections took all descriptors of the process, and libzmq then aborts it."""
    limits = DoorLimits(connections=4, grace_s=0.1)
    async with served(ScriptedSessions(("hi",)), tmp_path, limits) as doors:
        first = Dealer(context, doors.tcp)
        assert await first.answers("before")
        port = int(doors.tcp.rpartition(":")[2])
        idle = [await trio.open_tcp_stream("127.0.0.1", port) for _ in range(3)]
        for connection in idle:
            assert await connection.receive_some(64), "libzmq's greeting"
        for _ in range(20):
            refused = await trio.open_tcp_stream("127.0.0.1", port)
            while await refused.receive_some(64):
                pass
            await refused.aclose()
        late = Dealer(context, doors.ipc, RECONNECT_IVL=20)
        await late.create("late")
        with trio.move_on_after(0.3) as waited:
            await late.hear()
        assert waited.cancelled_caught, "one too many was let in"
        assert await first.answers("meanwhile")
        for connection in idle:
            await connection.aclose()
        answered = False
        while not answered:  # what was said into a connection that is shut down is lost, or not all
            await late.create("late")
            with trio.move_on_after(0.2):
                while not answered:
                    heard = await late.hear()
                    assert heard.get("stream") in ("late", None)
                    answered = heard["type"] == "end"
        first.socket.close()
        late.socket.close()
