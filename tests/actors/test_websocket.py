"""The WebSocket door over real sockets: the protocol, browsers, and clients that behave badly."""

from __future__ import annotations

import socket
import struct
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog
import trio
from scripted_sessions import ScriptedSessions, body, served
from websocket_client import WebSocket, websocket

from actors.doors.http_server import ServerLimits
from actors.doors.intake import Intake
from actors.doors.websocket import IDLE_S, WebSocketDoor
from engine.stream_protocol import Delta, End, Failed, Opened, Pong
from engine.transcript import tail_hash

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from scripted_sessions import Door
    from trio.testing import MockClock

CREATE = {"type": "create", "stream": "s", "endpoint": "chat", "body": body()}
TEXT, BINARY, CONTINUED, CLOSE, PING = 1, 2, 0, 8, 9


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, masked: bool = True, flags: int = 0
) -> bytes:
    """One frame, right or wrong; the mask is zero, which is one, too."""
    head = bytes([(0x80 if fin else 0) | flags | opcode])
    size, mask = len(payload), 0x80 if masked else 0
    if size < 126:
        head += bytes([mask | size])
    elif size < 2**16:
        head += bytes([mask | 126]) + struct.pack("!H", size)
    else:
        head += bytes([mask | 127]) + struct.pack("!Q", size)
    return head + (bytes(4) if masked else b"") + payload


async def flood(client: WebSocket, data: bytes) -> int:
    """Send it again and again until the server has had enough; how many bytes that took."""
    sent = 0
    try:
        while True:
            await client.send_raw(data)
            sent += len(data)
    except trio.BrokenResourceError:
        return sent


@asynccontextmanager
async def undisturbed(door: Door) -> AsyncIterator[None]:
    """Another client streams meanwhile; the block's connections leave nothing behind, no traceback either."""
    with structlog.testing.capture_logs() as logs:
        async with websocket(door.port) as other:
            await other.send(**CREATE)
            session = await door.sessions.next()
            assert isinstance(await other.read(), Opened)
            yield
            session.say("still here")
            session.end()
            assert [type(message) for message in await other.read_to_end()] == [Delta, End]
        with trio.fail_after(1.5):
            door.shutdown.set()
            await door.closed.wait()
    assert "http_connections_cut" not in [entry["event"] for entry in logs], "one was kept"
    ours = [entry for entry in logs if entry["log_level"] in ("error", "critical")]
    assert not ours


# ── the protocol ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("opcode", [TEXT, BINARY])
@pytest.mark.parametrize("pieces", [1, 3, 50])
async def test_a_stream_over_a_socket(opcode: int, pieces: int) -> None:
    async with served(ScriptedSessions(("Pa", "ris"))) as door, websocket(door.port) as client:
        assert client.response.status_code == 101
        data = msgspec.json.encode(CREATE)
        cuts = [len(data) * number // pieces for number in range(pieces + 1)]
        for number in range(pieces):
            piece = data[cuts[number] : cuts[number + 1]]
            await client.send_raw(frame(CONTINUED if number else opcode, piece, fin=number == pieces - 1))
            await client.send_raw(frame(PING, b"between"))
        assert await client.read_to_end() == [
            Opened("s", "r0.secret", "Scripted-1M", 3, 1, grace_s=30.0),
            Delta("s", 1, "Pa", number=1),
            Delta("s", 2, "ris", number=2),
            End("s", "stop", 3, 7, done=True, number=2),
        ]


async def test_many_streams_share_a_connection() -> None:
    async with served(ScriptedSessions()) as door, websocket(door.port) as client:
        sessions = []
        for number in range(64):
            await client.send(**(CREATE | {"stream": str(number)}))
            sessions.append(await door.sessions.next())
        for turn in range(20):
            for session in sessions:
                session.say(f"{turn} ")
        for session in sessions:
            session.end()
        texts, ended = dict.fromkeys(map(str, range(64)), ""), 0
        while ended < 64:
            match await client.read():
                case Delta(stream=stream, text=text):
                    texts[stream] += text
                case End(done=True):
                    ended += 1
                case message:
                    assert isinstance(message, Opened)
        assert set(texts.values()) == {"".join(f"{turn} " for turn in range(20))}


async def test_the_key_of_the_handshake_is_who_asks() -> None:
    async with served(ScriptedSessions(("a",))) as door:
        for key in ("Bearer secret", "Bearer other", ""):
            async with websocket(door.port, Authorization=key) as client:
                await client.send(**CREATE)
                await client.read_to_end()
        first, second, none = (session.generation.client for session in door.sessions.opened)
        assert first.startswith("key:")
        assert second.startswith("key:")
        assert first != second
        assert none == ""
        assert "secret" not in first


async def test_coming_back_on_another_connection() -> None:
    async with served(ScriptedSessions()) as door:
        async with websocket(door.port) as client:
            await client.send(**CREATE)
            session = await door.sessions.next()
            session.say("Par")
            assert isinstance(await client.read(), Opened)
            delta = await client.read()
            assert isinstance(delta, Delta)
        await session.gone.wait()
        assert (session.left, session.cancels) == (["client_disconnect"], [])
        async with websocket(door.port) as client:
            position = {"sequence": delta.sequence, "tail": tail_hash(delta.text)}
            await client.send(type="resume", stream="again", request="r0.secret", positions=[position])
            again = await door.sessions.next()
            again.say("is")
            again.end()
            assert [type(message) for message in await client.read_to_end()] == [Opened, Delta, End]
        assert door.sessions.resumed[0][0] == "r0.secret"


# ── handshakes ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("path", "headers", "status", "code"),
    [
        ("/v1/stream", {"Origin": "http://elsewhere.example"}, 403, "origin_refused"),
        ("/v1/stream", {"Origin": "null"}, 403, "origin_refused"),
        ("/v1/stream", {"Origin": "http://127.0.0.1:1"}, 403, "origin_refused"),
        ("/v1/stream", {"Origin": "http://[oops"}, 403, "origin_refused"),
        ("/v1/streams", {}, 404, "unknown_url"),
        ("/", {}, 404, "unknown_url"),
    ],
)
async def test_refused_handshakes(path: str, headers: dict[str, str], status: int, code: str) -> None:
    async with (
        served(ScriptedSessions()) as door,
        undisturbed(door),
        websocket(door.port, path, **headers) as client,
    ):
        assert client.response.status_code == status
        assert msgspec.json.decode(client.response.body)["error"]["code"] == code


async def test_pages_of_our_own_origin_may_connect() -> None:
    sessions = ScriptedSessions()
    async with served(sessions) as door, websocket(door.port, Origin=f"http://{door.url[7:]}") as client:
        assert client.response.status_code == 101


async def test_a_request_that_is_no_handshake() -> None:
    async with served(ScriptedSessions()) as door:
        response = await door.client.get("/v1/stream")
        assert response.status_code == 426
        assert response.headers["upgrade"] == "websocket"


HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
)


@pytest.mark.parametrize(
    "sent",
    [
        HANDSHAKE.replace(b"version: 13", b"version: 12") + b"\r\n",
        HANDSHAKE.replace(b"sec-websocket-key", b"sec-other") + b"\r\n",
        HANDSHAKE + b"sec-websocket-protocol: \xff\xfe\r\n\r\n",
        HANDSHAKE + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=["version", "no key", "not ascii", "flood", "http/2"],
)
async def test_bad_handshakes_end_their_connection(sent: bytes) -> None:
    async with served(ScriptedSessions(), limits=ServerLimits(idle_s=0.5)) as door, undisturbed(door):
        stream = await trio.open_tcp_stream("127.0.0.1", door.port)
        async with stream:
            await stream.send_all(sent)
            data = b""
            try:
                while piece := await stream.receive_some():
                    data += piece
            except trio.BrokenResourceError:
                pass
            assert b" 101 " not in data


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [(b"", b" 101 ", b'{"type":"pong"}'), (b"origin: http://elsewhere\r\n", b" 403 ", b"origin_refused")],
)
async def test_frames_that_come_with_the_handshake(headers: bytes, status: bytes, said: bytes) -> None:
    async with served(ScriptedSessions()) as door, undisturbed(door):
        stream = await trio.open_tcp_stream("127.0.0.1", door.port)
        async with stream:
            await stream.send_all(HANDSHAKE + headers + b"\r\n" + frame(TEXT, b'{"type":"ping"}'))
            data = b""
            while said not in data:
                piece = await stream.receive_some()
                assert piece, data
                data += piece
            assert status in data


async def test_nothing_is_compressed() -> None:
    async with served(ScriptedSessions(("a",))) as door:
        extension = "permessage-deflate; client_max_window_bits"
        async with websocket(door.port, **{"Sec-WebSocket-Extensions": extension}) as client:
            assert client.response.status_code == 101
            assert "sec-websocket-extensions" not in client.response.headers


# ── frames that are none ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (frame(TEXT, b"\xff\xfe"), 1007),
        (frame(TEXT, b"\xe2\x82", fin=False) + frame(CONTINUED, b""), 1007),
        (frame(TEXT, b"{}", masked=False), 1002),
        (frame(3, b"{}"), 1002),
        (frame(TEXT, b"{}", flags=0x40), 1002),
        (frame(CONTINUED, b"{}"), 1002),
        (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"x", fin=False), 1002),
        (frame(CLOSE, b"\x03"), 1002),
        (frame(CLOSE, struct.pack("!H", 999)), 1002),
        (frame(TEXT, b" " * 200_000), 1009),
        (frame(TEXT, b" " * 60_000, fin=False) + frame(CONTINUED, b" " * 200_000), 1009),
    ],
    ids=lambda value: str(value[:6]) if isinstance(value, bytes) else str(value),
)
async def test_what_is_no_frame_ends_its_connection(sent: bytes, code: int) -> None:
    async with served(ScriptedSessions()) as door, undisturbed(door), websocket(door.port) as client:
        await client.send(**CREATE)
        session = await door.sessions.next()
        assert isinstance(await client.read(), Opened)
        await client.send_raw(sent)
        assert await client.read() is None
        assert client.close_code == code
        await session.gone.wait()
        assert session.left == ["client_disconnect"]


async def test_an_endless_message_is_not_kept() -> None:
    async with served(ScriptedSessions()) as door, undisturbed(door), websocket(door.port) as client:
        await client.send_raw(b"\x82\xff" + struct.pack("!Q", 2**40) + bytes(4))
        assert await flood(client, bytes(2**16)) < 2**28


async def test_garbage_in_a_frame_is_answered() -> None:
    async with served(ScriptedSessions()) as door, undisturbed(door), websocket(door.port) as client:
        for garbage in (b"", b"{", b"[]", b"\x00" * 1000, b"[" * 50_000):
            await client.send_raw(frame(TEXT, garbage))
            message = await client.read()
            assert isinstance(message, Failed)
            assert (message.stream, message.error.code) == (None, "invalid_message")


# ── clients who go, or do not read ────────────────────────────────────────────────────────────


def reset(client: WebSocket) -> None:
    client.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.stream.socket.close()


def vanish(client: WebSocket) -> None:
    client.stream.socket.close()


def half_close(client: WebSocket) -> None:
    client.stream.socket.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("leave", [reset, vanish, half_close])
@pytest.mark.parametrize("half_a_frame", [False, True])
async def test_going_without_a_word_leaves_the_request(
    leave: Callable[[WebSocket], None], half_a_frame: bool
) -> None:
    async with served(ScriptedSessions()) as door, undisturbed(door), websocket(door.port) as client:
        await client.send(**CREATE)
        session = await door.sessions.next()
        session.say("first")
        if half_a_frame:
            await client.send_raw(frame(TEXT, b"{" * 100)[:50])
        leave(client)
        await session.gone.wait()
        assert (session.left, session.cancels) == (["client_disconnect"], [])


async def test_a_farewell_is_answered() -> None:
    async with served(ScriptedSessions()) as door, undisturbed(door), websocket(door.port) as client:
        await client.send(**CREATE)
        session = await door.sessions.next()
        client.protocol.send_close(1000, "bye")
        await client.flush()
        while await client.read():
            pass
        assert client.close_code == 1000
        await session.gone.wait()


async def test_who_does_not_read_is_cut_and_its_request_kept() -> None:
    async with (
        served(ScriptedSessions(), limits=ServerLimits(stall_s=0.3)) as door,
        undisturbed(door),
        websocket(door.port) as client,
    ):
        await client.send(**CREATE)
        session = await door.sessions.next()
        for _ in range(200):
            session.say("x" * 100_000)
        await session.gone.wait()
        assert (session.left, session.cancels) == (["client_disconnect"], [])
        assert session.taken < 200


@pytest.mark.parametrize(
    "message", [frame(PING, b"x" * 125), frame(TEXT, b'{"type":"ping"}'), frame(TEXT, b"nothing")]
)
async def test_floods_are_slowed_down_and_cut(message: bytes) -> None:
    with socket.socket() as listener:
        # What a listening socket has, its connections get.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        limits = ServerLimits(stall_s=0.3)
        async with (
            served(ScriptedSessions(), limits=limits, listener=listener) as door,
            undisturbed(door),
            websocket(door.port) as client,
        ):
            client.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await flood(client, message * 500)


async def test_a_flood_whose_answers_are_read_is_answered_in_full() -> None:
    async with (
        served(ScriptedSessions()) as door,
        websocket(door.port) as client,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(client.send_raw, frame(TEXT, b'{"type":"ping"}') * 2000)
        for _ in range(2000):
            assert await client.read() == Pong()


async def test_tiny_frames_leave_others_their_turn() -> None:
    """A read of 64 KiB has ten thousand of them: a third of a second in one go."""
    async with (
        served(ScriptedSessions()) as door,
        websocket(door.port) as client,
        websocket(door.port) as other,
    ):
        await client.send_raw(frame(TEXT, b"", fin=False))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood, client, frame(CONTINUED, b"", fin=False) * 5000)
            took = []
            for _ in range(20):
                before = trio.current_time()
                await other.send(type="ping")
                assert await other.read() == Pong()
                took.append(trio.current_time() - before)
            nursery.cancel_scope.cancel()
        assert sorted(took)[10] < 0.1


# ── shutdown ──────────────────────────────────────────────────────────────────────────────────


async def test_at_shutdown_streams_end_and_the_connection_is_closed() -> None:
    async with served(ScriptedSessions()) as door, websocket(door.port) as client:
        await client.send(**CREATE)
        session = await door.sessions.next()
        assert isinstance(await client.read(), Opened)
        door.shutdown.set()
        session.end("error", "the server shut down before the answer was complete")
        assert [type(message) for message in await client.read_to_end()] == [End]
        assert await client.read() is None
        assert client.close_code == 1012
        await door.closed.wait()


async def test_at_shutdown_streams_that_do_not_end_get_an_error() -> None:
    limits = ServerLimits(grace_s=1.0)
    with structlog.testing.capture_logs() as logs:
        async with served(ScriptedSessions(), limits=limits) as door, websocket(door.port) as client:
            await client.send(**CREATE)
            session = await door.sessions.next()
            assert isinstance(await client.read(), Opened)
            door.shutdown.set()
            failed = await client.read()
            assert isinstance(failed, Failed)
            assert (failed.stream, failed.error.code) == ("s", "draining")
            assert session.left == ["shutdown"]
            assert await client.read() is None
            assert client.close_code == 1012
            await door.closed.wait()
    assert not [entry for entry in logs if entry["event"] == "http_connections_cut"]


@pytest.mark.parametrize("floods", [False, True])
async def test_a_shutdown_waits_for_nobody_who_does_not_answer(floods: bool) -> None:
    with structlog.testing.capture_logs() as logs:
        async with (
            served(ScriptedSessions(), limits=ServerLimits(grace_s=2.0)) as door,
            websocket(door.port) as client,
            trio.open_nursery() as nursery,
        ):
            await client.send(**CREATE)
            await door.sessions.next()
            if floods:
                nursery.start_soon(flood, client, frame(TEXT, b"{}") * 100)
            with trio.fail_after(4.0):
                door.shutdown.set()
                await door.closed.wait()
    assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")]


async def test_nothing_is_left_of_connections_that_came_and_went() -> None:
    async with served(ScriptedSessions()) as door:
        for number in range(20):
            async with websocket(door.port) as client:
                await client.send(**CREATE)
                session = await door.sessions.next()
                (reset, vanish, half_close)[number % 3](client)
                await session.gone.wait()
        with structlog.testing.capture_logs() as logs:
            door.shutdown.set()
            with trio.fail_after(1.0):
                await door.closed.wait()
        assert [entry["event"] for entry in logs] == ["http_door_closed"]


# ── in virtual time ───────────────────────────────────────────────────────────────────────────


async def test_a_connection_on_which_nothing_happens_is_closed(autojump_clock: MockClock) -> None:
    sessions = ScriptedSessions()
    door = WebSocketDoor(sessions, Intake(sessions), shutdown=trio.Event(), grace_s=2.0)
    to_door, from_client = trio.open_memory_channel[dict[str, Any]](10)
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message["type"] == "websocket.close":
            # What the client still says is not answered: nothing may follow a close.
            to_door.send_nowait({"type": "websocket.receive", "text": '{"type":"ping"}'})

    def abort() -> None:
        to_door.send_nowait({"type": "websocket.disconnect", "code": 1006})

    scope = {"path": "/v1/stream", "headers": [], "state": {"abort": abort}}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(door, scope, from_client.receive, send))
        await trio.sleep(IDLE_S - 1)
        to_door.send_nowait({"type": "websocket.receive", "text": msgspec.json.encode(CREATE).decode()})
        session = await sessions.next()
        await trio.sleep(3 * IDLE_S)
        assert [message["type"] for message in sent] == ["websocket.accept", "websocket.send"]
        session.end()
        await trio.sleep(IDLE_S + 2)
        assert sent[-1] == {
            "type": "websocket.close",
            "code": 1001,
            "reason": "nothing was said for a long time",
        }
