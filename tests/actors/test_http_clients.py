"""The HTTP door and clients that behave badly: gone, half gone, slow, stuck, or sending anything at all."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_sessions import MODEL, ScriptedSessions, body, served

from actors.doors.http_server import ServerLimits

if TYPE_CHECKING:
    from collections.abc import Callable

STREAM = json.dumps(body(stream=True)).encode()
WHOLE = json.dumps(body()).encode()


def reset(stream: trio.SocketStream) -> None:
    """Close so that the other side gets RST and not FIN."""
    stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stream.socket.close()


def close(stream: trio.SocketStream) -> None:
    stream.socket.close()


def half_close(stream: trio.SocketStream) -> None:
    stream.socket.shutdown(socket.SHUT_WR)


async def read_until(stream: trio.SocketStream, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        piece = await stream.receive_some()
        assert piece, data
        data += piece
    return data


LEAVE = pytest.mark.parametrize("leave", [close, half_close, reset])


@LEAVE
@pytest.mark.parametrize("payload", [STREAM, WHOLE], ids=["stream", "whole"])
async def test_leaving_before_the_first_token_cancels(
    leave: Callable[[trio.SocketStream], None], payload: bytes
) -> None:
    async with served(ScriptedSessions()) as door:
        stream = await door.raw(payload)
        session = await door.sessions.next()
        leave(stream)
        await session.cancelled.wait()
        assert session.cancels == ["client_disconnect"]
        await stream.aclose()


@LEAVE
async def test_leaving_in_mid_stream_cancels_and_disturbs_nobody(
    leave: Callable[[trio.SocketStream], None],
) -> None:
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:

        async def other() -> None:
            response = await door.chat(stream=True)
            assert response.text.endswith("data: [DONE]\n\n")

        nursery.start_soon(other)
        staying = await door.sessions.next()
        stream = await door.raw(STREAM)
        leaving = await door.sessions.next()
        staying.say("a")
        leaving.say("first")
        await read_until(stream, b'"first"')
        leave(stream)
        await leaving.cancelled.wait()
        assert leaving.cancels == ["client_disconnect"]
        staying.say("b")
        staying.end()
        await stream.aclose()
    assert staying.cancels == []


async def test_leaving_in_the_middle_of_the_body_opens_nothing() -> None:
    async with served(ScriptedSessions()) as door:
        stream = await trio.open_tcp_stream("127.0.0.1", door.port)
        await stream.send_all(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b"content-length: 1000\r\n\r\n{"
        )
        await stream.aclose()
        assert (await door.client.get("/health/live")).status_code == 200
    assert door.sessions.opened == []


async def test_a_client_that_does_not_read_holds_back_only_itself() -> None:
    limits = ServerLimits(grace_s=0.2)
    async with served(ScriptedSessions(), limits=limits) as door, trio.open_nursery() as nursery:
        stream = await door.raw(STREAM)
        stuck = await door.sessions.next()
        stuck.say(*["x" * 10_000] * 5_000)
        finished = []

        async def other() -> None:
            finished.append(await door.chat(stream=True))

        for _ in range(20):
            nursery.start_soon(other)
            quick = await door.sessions.next()
            quick.say("a")
            quick.end()
        while len(finished) < 20:
            await trio.lowlevel.checkpoint()
        # The rest waits in the session, which is a view of the token log, not in a growing buffer.
        assert stuck.taken < 2_000
        door.shutdown.set()
        await door.closed.wait()
        assert stuck.cancels[0] in ("client_disconnect", "shutdown")
        await stream.aclose()


async def test_a_client_that_does_not_read_for_too_long_is_cut_off() -> None:
    async with served(ScriptedSessions(), limits=ServerLimits(stall_s=0.1)) as door:
        stream = await door.raw(STREAM)
        session = await door.sessions.next()
        session.say(*["x" * 10_000] * 5_000)
        await session.cancelled.wait()
        assert session.cancels == ["client_disconnect"]
        await stream.aclose()


async def test_shutdown_lets_responses_end_within_the_grace() -> None:
    async with served(ScriptedSessions()) as door, trio.open_nursery() as nursery:

        async def ask() -> None:
            assert (await door.chat(stream=True)).text.endswith("data: [DONE]\n\n")

        nursery.start_soon(ask)
        session = await door.sessions.next()
        session.say("a")
        door.shutdown.set()
        session.say("b")
        session.end()
        await door.closed.wait()
    assert session.cancels == []


async def test_shutdown_is_bounded_when_a_session_does_not_end() -> None:
    async with served(ScriptedSessions(), limits=ServerLimits(grace_s=0.1)) as door:
        streams = [await door.raw(payload) for payload in (STREAM, WHOLE)]
        sessions = [await door.sessions.next() for _ in streams]
        door.shutdown.set()
        await door.closed.wait()
        for session in sessions:
            assert session.cancels
        for stream in streams:
            await stream.aclose()


async def test_the_port_outlives_the_server() -> None:
    """What the launcher does when a gateway restarts: the same listener, served by the next one."""
    async with served(ScriptedSessions(("one",))) as door:
        assert (await door.chat()).status_code == 200
        door.shutdown.set()
        await door.closed.wait()
        assert door.listener.fileno() >= 0
        stream = await door.raw(WHOLE)  # accepted by the kernel, answered by the next server
        async with served(ScriptedSessions(("two",)), listener=door.listener):
            assert b'"content":"two"' in await read_until(stream, b"usage")
        await stream.aclose()


async def test_broken_http_is_answered_and_survived() -> None:
    async with served(ScriptedSessions(("x",))) as door:
        for sent in (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 100,
            b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n",
        ):
            stream = await trio.open_tcp_stream("127.0.0.1", door.port)
            await stream.send_all(sent)
            half_close(stream)
            try:
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass  # closed on unread data
            await stream.aclose()
        assert (await door.chat()).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"G",
        b"GET /v1/models HTTP/1.1\r\nhost: x\r\n",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 1",
    ],
)
async def test_a_connection_that_never_becomes_a_request_is_closed(sent: bytes) -> None:
    async with served(ScriptedSessions(("x",)), limits=ServerLimits(idle_s=0.4)) as door:
        stream = await trio.open_tcp_stream("127.0.0.1", door.port)
        await stream.send_all(sent)
        async with stream, trio.open_nursery() as nursery:

            async def trickle() -> None:
                """One more byte now and then does not prolong it."""
                for _ in range(100):
                    await trio.sleep(0.05)  # what this client does, not what the test waits for
                    try:
                        await stream.send_all(b"x")
                    except trio.BrokenResourceError:
                        return

            if sent:
                nursery.start_soon(trickle)
            try:
                while await stream.receive_some():
                    pass
            except trio.BrokenResourceError:
                pass  # closed on unread data
            nursery.cancel_scope.cancel()
        assert (await door.chat()).status_code == 200


async def test_a_body_that_does_not_arrive_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.doors.http._BODY_S", 0.2)
    async with served(ScriptedSessions(("x",))) as door:
        stream = await trio.open_tcp_stream("127.0.0.1", door.port)
        await stream.send_all(
            b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'content-length: 50\r\n\r\n{"prompt":'
        )
        assert b" 408 " in await read_until(stream, b"did not arrive")
        await stream.aclose()
        assert door.sessions.opened == []


async def test_floods_are_refused() -> None:
    """What is too much is known before it is looked at: by its number, or by its length."""
    async with served(ScriptedSessions(("x",)), max_body_bytes=4 * 2**20) as door:
        began = time.process_time()
        for change, param in [
            ({"stop": ["x"] * 10_000}, "stop"),
            ({"stop": [f"{n}" for n in range(10_000)]}, "stop"),
            ({"stop_token_ids": [1] * 10_000}, "stop_token_ids"),
            ({"logit_bias": {str(n): 1 for n in range(10_000)}}, "logit_bias"),
            ({"x" * 100_000: 1}, "x" * 200),
            ({"messages": [{"role": "user", "content": "x" * 2_000_000}]}, "messages"),
            ({"model": "x" * 1_000_000}, "model"),
            ({"tools": [{}] * 100_000}, "tools"),
        ]:
            response = await door.chat(**change)
            assert response.status_code in (400, 404), param
            assert response.json()["error"]["param"] == param
            assert len(response.content) < 2_000
        flood = b"".join(b"x-%d: y\r\n" % number for number in range(20_000))
        for head in (flood, b"cookie: " + b"y" * 1_000_000 + b"\r\n", b"x: y\r\n" * 100_000):
            stream = await trio.open_tcp_stream("127.0.0.1", door.port)
            try:
                await stream.send_all(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + head + b"\r\n")
                assert b" 200 " not in await stream.receive_some()
            except trio.BrokenResourceError:
                pass  # closed on unread data
            await stream.aclose()
        assert time.process_time() - began < 5
        assert (await door.chat()).status_code == 200
        assert len(door.sessions.opened) == 1


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant", "x"]), "content": VALUES}),
    max_size=3,
)
BODIES = st.fixed_dictionaries(
    {"model": st.just(MODEL.name) | VALUES},
    optional={
        "messages": MESSAGES | VALUES,
        "max_tokens": st.integers(0, 2000) | VALUES,
        "temperature": st.floats(0, 2) | VALUES,
        "top_p": st.floats(0, 1) | VALUES,
        "seed": st.integers(-(2**64), 2**64) | VALUES,
        "stop": st.text() | st.lists(st.text(), max_size=5) | VALUES,
        "stream": st.booleans() | VALUES,
        "stream_options": st.just({"include_usage": True}) | VALUES,
        "n": st.integers(0, 17) | VALUES,
        "best_of": st.integers(0, 3) | VALUES,
        "priority": st.integers(-101, 101) | VALUES,
        "logprobs": st.booleans() | st.integers(-1, 6) | VALUES,
        "echo": st.booleans() | VALUES,
        "continue_final_message": st.booleans() | VALUES,
        "add_generation_prompt": st.booleans() | VALUES,
        "prompt": st.text() | st.lists(st.integers(0, 300), max_size=3) | VALUES,
        "tokens": st.lists(st.integers(0, 255), max_size=3) | VALUES,
        "logit_bias": st.dictionaries(st.integers(-1, 300).map(str), st.integers(-100, 101)) | VALUES,
        "stop_token_ids": st.lists(st.integers(0, 300), max_size=3) | VALUES,
        "repetition_penalty": st.floats(0, 3) | VALUES,
        "min_tokens": st.integers(-1, 2000) | VALUES,
        "chat_template_kwargs": st.dictionaries(st.sampled_from(["now", "a", ""]), VALUES) | VALUES,
        "metadata": VALUES,
        "tools": VALUES,
        "user": VALUES,
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    bodies=st.lists(BODIES | VALUES, min_size=1, max_size=10),
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
)
def test_any_json_is_answered_and_never_with_500(bodies: list[object], path: str) -> None:
    async def post() -> None:
        async with served(ScriptedSessions(("x",))) as door:
            for value in bodies:
                content = json.dumps(value).encode()
                headers = {"content-type": "application/json"}
                response = await door.client.post(path, content=content, headers=headers)
                assert response.status_code in (200, 400, 404)
                assert response.status_code == 200 or response.json()["error"]["message"]
            assert all(session.cancels == [] for session in door.sessions.opened)

    trio.run(post)
