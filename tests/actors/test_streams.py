"""A connection of the stream protocol without a socket: what is answered, in which order."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import structlog
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_sessions import ScriptedSession, ScriptedSessions, body
from trio.testing import MockClock, wait_all_tasks_blocked

from actors.doors.intake import THREAD_CHARS, Intake
from actors.doors.stream_outbox import MAX_ANSWERS, READY_ANSWERS
from actors.doors.streams import MAX_STREAMS, MAX_WAITING_BYTES, StreamPeer
from actors.sessions import DeltaToken, Diverged, Draining, NotKept, QueueFull, Superseded
from engine.messages import Cached
from engine.sampling import TokenLogprobs
from engine.stream_protocol import CacheUse, Delta, End, Failed, Opened, Pong, ToClient, decode_to_client
from engine.transcript import Position

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from actors.doors.intake import Asked

KEY = "0123456789abcdef"
CUT = [Position(1, "0" * 16)]


class Wire:
    """A connection and its client, who reads unless told to stop."""

    def __init__(
        self, sessions: ScriptedSessions, nursery: trio.Nursery, intake: Intake | None = None
    ) -> None:
        self.sessions = sessions
        self.got: list[ToClient] = []
        self.broken = False
        self.reads = trio.Event()
        self.reads.set()
        self.sending = 0
        self.on_sent: Callable[[], None] = lambda: None
        self.peer = StreamPeer(sessions, intake or Intake(sessions), nursery, self._send, client="key:me")

    async def _send(self, data: bytes) -> None:
        assert self.sending == 0, "one at a time"
        self.sending += 1
        try:
            await trio.lowlevel.checkpoint()
            await self.reads.wait()
            if self.broken:
                raise trio.BrokenResourceError
            self.got.append(decode_to_client(data))
        finally:
            self.sending -= 1
        self.peer.check()
        self.on_sent()

    def read(self, reads: bool) -> None:
        """Whether the client reads from now on."""
        if reads:
            self.reads.set()
        elif self.reads.is_set():
            self.reads = trio.Event()

    def say(self, **message: Any) -> None:
        self.say_raw(msgspec.json.encode(message))

    def say_raw(self, message: bytes) -> None:
        self.peer.receive(message)
        self.peer.check()

    def create(self, name: str = "s", /, **said: Any) -> None:
        """Ask for a chat; what is not of the envelope is of the body."""
        envelope = {field: said.pop(field) for field in ("key", "window") if field in said}
        self.say(type="create", stream=name, endpoint="chat", body=body(**said), **envelope)

    def resume(self, request: str, stream: str = "s", positions: list[Position] = CUT, **said: Any) -> None:
        self.say(type="resume", stream=stream, request=request, positions=positions, **said)

    def of(self, stream: str | None = "s") -> list[ToClient]:
        """What was said of a stream."""
        return [message for message in self.got if getattr(message, "stream", None) == stream]

    def texts(self, stream: str = "s") -> list[str]:
        return [message.text for message in self.of(stream) if isinstance(message, Delta)]

    async def opened(self, name: str = "s", /, **said: Any) -> ScriptedSession:
        """Create a stream; its session, to be played by the test."""
        self.create(name, **said)
        session = await self.sessions.next()
        await wait_all_tasks_blocked()
        return session


@asynccontextmanager
async def connected(sessions: ScriptedSessions | None = None) -> AsyncIterator[Wire]:
    """A connection; at the end every task of it must be over or end by its close."""
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            wire = Wire(sessions or ScriptedSessions(), nursery)
            yield wire
            wire.peer.close("test_over")
            wire.peer.check()


async def idle(wire: Wire) -> list[ToClient]:
    """What was said when nothing moves any more."""
    await wait_all_tasks_blocked()
    return wire.got


def errors(messages: list[ToClient]) -> list[tuple[str | None, int, str | None]]:
    return [(m.stream, m.error.status, m.error.code) for m in messages if isinstance(m, Failed)]


# ── the life of a stream ──────────────────────────────────────────────────────────────────────


async def test_a_stream_from_create_to_its_end() -> None:
    async with connected(ScriptedSessions(("Pa", "ris"))) as wire:
        wire.create()
        assert await idle(wire) == [
            Opened("s", "r0.secret", "Scripted-1M", 3, 1, grace_s=30.0),
            Delta("s", 1, "Pa", number=1),
            Delta("s", 2, "ris", number=2),
            End("s", "stop", 3, 7, done=True, number=2),
        ]
        generation = wire.sessions.opened[0].generation
        assert (generation.resumable, generation.key, generation.client) == (True, "", "key:me")
        assert wire.sessions.opened[0].left == []
        assert wire.peer.statistics()["deltas"] == 2


async def test_a_completion_is_asked_for_in_the_same_way() -> None:
    async with connected(ScriptedSessions(("x",))) as wire:
        wire.say(
            type="create",
            stream="s",
            endpoint="completion",
            body={"model": "Scripted-1M", "prompt": "ab", "stream": True, "stream_options": None},
        )
        assert [type(message) for message in await idle(wire)] == [Opened, Delta, End]
        assert wire.sessions.opened[0].generation.prompt == (2, *b"ab")


async def test_every_choice_has_its_end_and_the_last_one_is_done() -> None:
    async with connected() as wire:
        session = await wire.opened(n=2)
        session.say("a", choice=1)
        session.end(choice=1)
        session.say("b", choice=0)
        session.end("length", choice=0)
        assert (await idle(wire))[1:] == [
            Delta("s", 1, "a", 1, number=1),
            End("s", "stop", 3, 7, 1, number=1),
            Delta("s", 1, "b", 0, number=2),
            End("s", "length", 3, 7, 0, done=True, number=2),
        ]


async def test_tokens_are_told_to_who_asked_for_them() -> None:
    async with connected() as wire:
        session = await wire.opened(logprobs=True, top_logprobs=1)
        session.tell("A", DeltaToken(65, TokenLogprobs(-0.5, ((65, -0.5),))), DeltaToken(66, None))
        session.end()
        delta = (await idle(wire))[1]
        assert isinstance(delta, Delta)
        assert msgspec.to_builtins(delta.tokens) == [
            {"token": 65, "logprob": -0.5, "top": [(65, -0.5)]},
            {"token": 66},
        ]


async def test_a_name_is_free_as_soon_as_its_end_is_read() -> None:
    async with connected(ScriptedSessions(("a",))) as wire:
        wire.create()

        def say_again() -> None:
            if isinstance(wire.got[-1], End) and len(wire.sessions.opened) < 3:
                wire.create()

        wire.on_sent = say_again
        assert [type(message) for message in await idle(wire)] == [Opened, Delta, End] * 3


async def test_an_error_in_a_session_is_its_own_streams_only() -> None:
    async with connected() as wire:
        bad, good = await wire.opened("bad"), await wire.opened("good")
        bad.say("a")
        bad.crash()
        good.say("b")
        await idle(wire)
        good.end()
        await idle(wire)
        assert errors(wire.of("bad")) == [("bad", 500, "server_error")]
        assert bad.cancels == ["stream_door"]
        assert [type(message) for message in wire.of("good")] == [Opened, Delta, End]


async def test_a_session_that_fails_says_so_in_its_end() -> None:
    async with connected() as wire:
        session = await wire.opened()
        session.end("error", "the worker is lost")
        assert (await idle(wire))[-1] == End("s", "error", 3, 7, error="the worker is lost", done=True)


# ── what is refused ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("said", "status", "param", "code"),
    [
        ({"temperature": 3}, 400, "temperature", None),
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"wishes": 1}, 400, "wishes", "unknown_parameter"),
        ({"max_tokens": 10_000}, 400, "max_tokens", "context_length_exceeded"),
        ({"stream": False}, 400, "stream", None),
        ({"messages": []}, 400, "messages", None),
    ],
)
async def test_wrong_bodies_are_refused_as_http_refuses_them(
    said: dict[str, Any], status: int, param: str, code: str | None
) -> None:
    async with connected(ScriptedSessions(("a",))) as wire:
        wire.create("bad", **said)
        wire.create("good")
        await idle(wire)
        (failed,) = wire.of("bad")
        assert isinstance(failed, Failed)
        assert (failed.error.status, failed.error.param, failed.error.code) == (status, param, code)
        assert [type(message) for message in wire.of("good")] == [Opened, Delta, End]


async def test_echo_is_refused() -> None:
    async with connected() as wire:
        asked = {"model": "Scripted-1M", "prompt": "ab", "echo": True}
        wire.say(type="create", stream="s", endpoint="completion", body=asked)
        assert errors(await idle(wire)) == [("s", 400, None)]


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [(QueueFull(), 429, "queue_full"), (Draining(), 503, "draining"), (RuntimeError(), 500, "server_error")],
)
async def test_refusals_of_the_gateway_have_a_status(refusal: Exception, status: int, code: str) -> None:
    async with connected() as wire:
        wire.sessions.refusal = refusal
        wire.create()
        await idle(wire)
        assert errors(wire.got) == [("s", status, code)]
        (failed,) = wire.got
        assert isinstance(failed, Failed)
        assert failed.error.retry_after_s == (1 if status == 429 else None)


@pytest.mark.parametrize(
    ("message", "stream"),
    [
        (b"", None),
        (b"\xff\xfe", None),
        (b"{" * 100_000, None),
        (b"[" * 100_000, None),
        (b'"create"', None),
        (b"{}", None),
        (b'{"type":"opened"}', None),
        (b'{"type":"create"}', None),
        (b'{"type":"create","stream":"t","endpoint":"poem","body":{}}', "t"),
        (b'{"type":"create","stream":"s","endpoint":"poem","body":{}}', None),
        (b'{"type":"create","stream":"","endpoint":"chat","body":{}}', None),
        (b'{"type":"create","stream":"t","endpoint":"chat","body":{},"key":"short"}', "t"),
        (b'{"type":"create","stream":"t","endpoint":"chat","body":{},"window":0}', "t"),
        (b'{"type":"create","stream":"t","endpoint":"chat","body":{},"more":1}', "t"),
        (b'{"type":"resume","stream":"t","request":"r","positions":[{"sequence":-1,"tail":""}]}', "t"),
        (b'{"type":"credit","stream":"s","upto":0}', None),
        (b'{"type":"cancel","stream":7}', None),
        (b'{"type":"cancel","stream":"' + b"s" * 65 + b'"}', None),
    ],
)
async def test_what_is_no_message_is_answered_and_disturbs_nobody(message: bytes, stream: str | None) -> None:
    async with connected() as wire:
        session = await wire.opened()
        wire.say_raw(message)
        session.say("a")
        session.end()
        await idle(wire)
        assert errors(wire.got) == [(stream, 400, "invalid_message")]
        assert [type(message) for message in wire.of("s")] == [Opened, Delta, End]


async def test_a_body_that_is_no_json_ends_its_own_stream() -> None:
    async with connected() as wire:
        for number, nothing in enumerate((b"7", b'"x"', b"[]", b"null")):
            wire.say_raw(b'{"type":"create","stream":"%d","endpoint":"chat","body":%b}' % (number, nothing))
        assert errors(await idle(wire)) == [(str(number), 400, None) for number in range(4)]


async def test_a_name_in_use_is_refused_without_ending_its_stream() -> None:
    async with connected() as wire:
        session = await wire.opened()
        wire.create()
        wire.resume("r0.secret")
        session.say("a")
        session.end()
        await idle(wire)
        assert errors(wire.got) == [(None, 409, "stream_in_use")] * 2
        assert [type(message) for message in wire.of("s")] == [Opened, Delta, End]
        assert len(wire.sessions.opened) == 1


async def test_unknown_streams_are_answered_and_harmless() -> None:
    async with connected(ScriptedSessions(("a",))) as wire:
        wire.create()
        await idle(wire)
        wire.say(type="cancel", stream="s")
        wire.say(type="credit", stream="s", upto=3)
        await idle(wire)
        assert errors(wire.got) == [(None, 404, "unknown_stream")] * 2


async def test_a_name_is_not_used_again_before_its_error_is_sent() -> None:
    async with connected() as wire:
        wire.read(False)
        for _ in range(2):
            wire.resume("r9")
            wire.create()
        assert await idle(wire) == []
        wire.read(True)
        await idle(wire)
        assert errors(wire.got) == [("s", 404, "not_kept"), *[(None, 409, "stream_in_use")] * 3]
        await wire.opened()
        assert isinstance(wire.got[-1], Opened)


async def test_a_ping_is_answered() -> None:
    async with connected() as wire:
        wire.say(type="ping")
        assert await idle(wire) == [Pong()]


async def test_a_connection_has_so_many_streams_and_no_more() -> None:
    async with connected() as wire:
        for number in range(MAX_STREAMS + 1):
            wire.create(str(number))
        await idle(wire)
        assert errors(wire.got) == [(str(MAX_STREAMS), 429, "too_many_streams")]
        (await wire.sessions.next()).end()
        await idle(wire)
        wire.create("again")
        await idle(wire)
        assert [type(message) for message in wire.of("again")] == [Opened]


async def test_ends_that_nobody_reads_have_a_bound() -> None:
    async with connected() as wire:
        for number in range(MAX_STREAMS):
            wire.create(f"first {number}")
        await idle(wire)
        wire.read(False)
        for number in range(MAX_STREAMS):
            wire.say(type="cancel", stream=f"first {number}")
        await idle(wire)
        assert wire.peer.statistics()["streams"] == 0, "their ends are on the way, their names free"
        for number in range(MAX_STREAMS):
            wire.create(f"second {number}")
        await idle(wire)
        assert MAX_STREAMS < len(wire.sessions.opened) < 2 * MAX_STREAMS + 1
        wire.create("third")
        wire.read(True)
        await idle(wire)
        assert ("third", 429, "too_many_streams") in errors(wire.got)
        assert len([m for m in wire.got if isinstance(m, End)]) == MAX_STREAMS


async def test_bodies_that_wait_have_a_bound() -> None:
    async with connected() as wire:
        wire.create("big", messages=[{"role": "user", "content": "x" * MAX_WAITING_BYTES}])
        wire.create("small")
        assert wire.peer.statistics()["waiting"] == 1
        await idle(wire)
        assert ("small", 429, "too_many_streams") in errors(wire.got)
        # Cancelled, it makes room at once, though a thread still works on it.
        wire.say(type="cancel", stream="big")
        wire.create("small")
        await wire.sessions.next()
        assert [session.generation.prompt for session in wire.sessions.opened] == [(1, *b"hi")]


# ── order and cancelling ──────────────────────────────────────────────────────────────────────


async def test_requests_are_opened_in_the_order_in_which_they_came() -> None:
    async with connected() as wire:
        wire.create("slow", messages=[{"role": "user", "content": "x" * (THREAD_CHARS + 1)}], max_tokens=1)
        for number in range(20):
            wire.create(str(number), max_tokens=number + 1)
        sessions = [await wire.sessions.next() for _ in range(20)]
        assert [session.generation.max_tokens for session in sessions] == list(range(1, 21))
        await idle(wire)
        assert errors(wire.got) == [("slow", 400, "context_length_exceeded")]


async def test_cancelling_ends_a_stream_at_once() -> None:
    async with connected() as wire:
        session = await wire.opened(n=2)
        session.say("a")
        wire.say(type="cancel", stream="s")
        assert session.cancels == ["client_cancel"]
        await idle(wire)
        assert [(m.reason, m.done) for m in wire.got if isinstance(m, End)] == [
            ("cancelled", False),
            ("cancelled", True),
        ]


async def test_cancelling_before_the_request_was_opened() -> None:
    async with connected() as wire:
        wire.create("first")
        wire.create("second")
        wire.say(type="cancel", stream="second")
        wire.say(type="cancel", stream="first")
        wire.create("third")
        await wire.sessions.next()
        await idle(wire)
        assert wire.of("first") == [End("first", "cancelled", 0, 0, done=True)]
        assert wire.of("second") == [End("second", "cancelled", 0, 0, done=True)]
        assert [type(message) for message in wire.of("third")] == [Opened]
        assert len(wire.sessions.opened) == 1


class HeldIntake(Intake):
    """Tokenises when the test lets it."""

    def __init__(self, sessions: ScriptedSessions) -> None:
        super().__init__(sessions)
        self.goes_on = trio.Event()

    async def chat(self, body: bytes, **said: Any) -> Asked:
        asked = await super().chat(body, **said)
        await self.goes_on.wait()
        return asked


@pytest.mark.parametrize("tokenised", [False, True], ids=["while", "just after"])
async def test_cancelling_while_it_is_tokenised(tokenised: bool) -> None:
    sessions = ScriptedSessions()
    intake = HeldIntake(sessions)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            wire = Wire(sessions, nursery, intake)
            wire.create("first")
            wire.create("second")
            await idle(wire)
            if tokenised:
                intake.goes_on.set()
            wire.say(type="cancel", stream="first")
            await idle(wire)
            assert wire.of("first") == [End("first", "cancelled", 0, 0, done=True)]
            intake.goes_on.set()
            await idle(wire)
            assert len(sessions.opened) == 1
            assert [type(message) for message in wire.of("second")] == [Opened]
            wire.peer.close("test_over")


async def test_cancelling_lets_the_next_one_go_on() -> None:
    sessions = ScriptedSessions()
    intake = HeldIntake(sessions)
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            wire = Wire(sessions, nursery, intake)
            wire.create("first")
            await idle(wire)
            held, intake.goes_on = intake.goes_on, trio.Event()
            intake.goes_on.set()
            wire.create("second")
            wire.say(type="cancel", stream="first")
            await idle(wire)
            assert not held.is_set()
            assert [type(message) for message in wire.of("second")] == [Opened]
            wire.peer.close("test_over")


# ── credit and slow readers ───────────────────────────────────────────────────────────────────


async def test_no_more_deltas_than_there_is_credit_for() -> None:
    async with connected() as wire:
        session = await wire.opened(window=2)
        session.say(*"abcdefg")
        await idle(wire)
        assert wire.texts() == ["a", "b"]
        assert session.taken <= 3, "the rest waits in the session"
        for upto in (1, 2, 4, 4, 3):
            wire.say(type="credit", stream="s", upto=upto)
        await idle(wire)
        assert wire.texts() == ["a", "b", "c", "d"]
        wire.say(type="credit", stream="s", upto=100)
        session.end()
        await idle(wire)
        assert wire.texts() == list("abcdefg")
        assert isinstance(wire.got[-1], End)


async def test_an_end_needs_no_credit() -> None:
    async with connected() as wire:
        session = await wire.opened(window=1)
        session.say("a")
        session.end()
        assert [type(message) for message in await idle(wire)] == [Opened, Delta, End]


async def test_cancelling_needs_no_credit() -> None:
    async with connected() as wire:
        session = await wire.opened(window=1)
        session.say(*"abc")
        await idle(wire)
        wire.say(type="cancel", stream="s")
        await idle(wire)
        assert wire.texts() == ["a"]
        assert wire.got[-1] == End("s", "cancelled", 3, 7, done=True, number=1)


async def test_being_superseded_needs_no_credit() -> None:
    async with connected() as wire:
        session = await wire.opened(window=1)
        session.say(*"abc")
        await idle(wire)
        session.superseded.set()
        await idle(wire)
        assert wire.texts() == ["a"]
        assert isinstance(wire.got[-1], Failed)
        assert wire.got[-1].error.code == "superseded"
        assert not session.cancels
        assert wire.peer.statistics()["streams"] == 0


async def test_one_stream_without_credit_holds_up_no_other() -> None:
    async with connected() as wire:
        held, free = await wire.opened("held", window=1), await wire.opened("free")
        held.say(*"abc")
        free.say(*"xyz")
        await idle(wire)
        assert (wire.texts("held"), wire.texts("free")) == (["a"], ["x", "y", "z"])


async def test_who_does_not_read_makes_nothing_grow_but_its_sessions() -> None:
    async with connected() as wire:
        wire.read(False)
        sessions = [await wire.opened(str(number)) for number in range(3)]
        for session in sessions:
            session.say(*["x"] * 1000)
        for _ in range(10_000):
            wire.say(type="ping")
            wire.say_raw(b"nothing")
        await idle(wire)
        assert all(session.taken <= 1 for session in sessions)
        figures = wire.peer.statistics()
        assert figures["answers"] <= MAX_ANSWERS
        assert figures["answers_dropped"] > 10_000
        for session in sessions:
            session.end()
        wire.read(True)
        await idle(wire)
        assert [len(wire.texts(str(number))) for number in range(3)] == [1000] * 3


async def test_a_carrier_can_wait_until_answers_are_read() -> None:
    async with connected() as wire:
        wire.read(False)
        ready = trio.Event()

        async def flood() -> None:
            for _ in range(1000):
                await wire.peer.wait_ready()
                wire.say(type="ping")
            ready.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            await wait_all_tasks_blocked()
            assert 0 < wire.peer.statistics()["answers"] <= READY_ANSWERS
            wire.read(True)
            await ready.wait()
        await idle(wire)
        assert len(wire.got) == 1000
        assert wire.peer.statistics()["answers_dropped"] == 0


async def test_the_first_choice_tells_what_of_the_prompt_was_found() -> None:
    found = Cached(memory=1, file=1)
    for asked, told in [({}, None), ({"x_estafet": {"cache": True}}, CacheUse(1, 0, 0, 1, 1))]:
        async with connected() as wire:
            session = await wire.opened(n=2, cache_salt="tenant", **asked)
            assert session.generation.cache_salt == "tenant"
            session.end(choice=1)
            session.end(cached=found)
            await idle(wire)
            assert wire.got[-2:] == [
                End("s", "stop", 3, 7, 1),
                End("s", "stop", 3, 7, done=True, cached_tokens=2, cache=told),
            ]


# ── coming back ───────────────────────────────────────────────────────────────────────────────


async def test_another_connection_goes_on() -> None:
    sessions = ScriptedSessions()
    async with connected(sessions) as first:
        session = await first.opened()
        session.say("a")
        await idle(first)
        first.peer.close("client_disconnect")
        assert session.left == ["client_disconnect"]
        async with connected(sessions) as second:
            second.resume("r0.secret", "mine", window=5)
            again = await sessions.next()
            again.say("b")
            again.end()
            await idle(second)
            assert sessions.resumed == [("r0.secret", CUT)]
            assert second.got == [
                Opened("mine", "r0.secret", "Scripted-1M", 3, 1, resumed=True, grace_s=30.0),
                Delta("mine", 2, "b", number=1),
                End("mine", "stop", 3, 7, done=True, number=1),
            ]


async def test_a_stream_that_was_resumed_elsewhere_ends_here() -> None:
    async with connected() as wire:
        session = await wire.opened()
        session.crash(Superseded())
        await idle(wire)
        assert errors(wire.got) == [("s", 409, "superseded")]
        wire.peer.close("client_disconnect")
        assert session.left == [], "it is read by somebody else"
        assert session.cancels == []


@pytest.mark.parametrize(
    ("refusal", "status", "code"),
    [
        (NotKept(), 404, "not_kept"),
        (Diverged(), 409, "diverged"),
        (Draining(), 503, "draining"),
        (RuntimeError(), 500, "server_error"),
    ],
)
async def test_what_cannot_be_resumed_is_refused(refusal: Exception, status: int, code: str) -> None:
    async with connected() as wire:
        wire.sessions.refusal = refusal
        wire.resume("r0.secret")
        assert errors(await idle(wire)) == [("s", status, code)]


async def test_saying_create_again_with_its_key_makes_no_second_request() -> None:
    sessions = ScriptedSessions()
    async with connected(sessions) as first, connected(sessions) as second:
        await first.opened(key=KEY)
        second.create(key=KEY)
        again = await sessions.next()
        again.say("from the beginning")
        await idle(second)
        assert len(sessions.opened) == 1
        assert sessions.resumed == [("r0.secret", None)]
        opened = second.got[0]
        assert isinstance(opened, Opened)
        assert (opened.request, opened.resumed) == ("r0.secret", True)
        assert second.texts() == ["from the beginning"]


async def test_the_same_key_said_twice_at_the_same_time_makes_one_request() -> None:
    sessions = ScriptedSessions()
    content = "x" * (THREAD_CHARS + 1)
    sessions.model = msgspec.structs.replace(sessions.model, context_length=10**6)
    async with connected(sessions) as first, connected(sessions) as second:
        # Both look for it before either has tokenised its messages.
        for wire in (first, second):
            wire.create(key=KEY, messages=[{"role": "user", "content": content}])
        await sessions.next()
        await sessions.next()
        assert len(sessions.opened) == 1
        assert sessions.resumed == [("r0.secret", None)]


# ── the end of a connection ───────────────────────────────────────────────────────────────────


async def test_a_lost_connection_leaves_its_requests_once() -> None:
    async with connected() as wire:
        sessions = [await wire.opened(name) for name in ("a", "b")]
        wire.create("waiting", messages=[{"role": "user", "content": "x" * 2_000_000}])
        await idle(wire)
        wire.peer.close("client_disconnect")
        wire.peer.close("again")
        wire.say(type="ping")
        await idle(wire)
        assert [session.left for session in sessions] == [["client_disconnect"]] * 2
        assert [session.cancels for session in sessions] == [[], []]
        assert len(wire.sessions.opened) == 2


async def test_a_request_whose_last_word_was_not_sent_is_left_too() -> None:
    async with connected() as wire:
        session = await wire.opened()
        wire.read(False)
        session.end()
        await idle(wire)
        wire.peer.close("client_disconnect")
        await idle(wire)
        assert len(session.left) == 1


async def test_a_send_that_breaks_ends_the_connection() -> None:
    async with connected() as wire:
        talking, silent = await wire.opened("talking"), await wire.opened("silent")
        wire.broken = True
        talking.say("a")
        await idle(wire)
        assert len(talking.left) == len(silent.left) == 1
        assert wire.peer.statistics()["streams"] == 0


async def test_cancellation_from_outside_leaves_the_requests() -> None:
    sessions = ScriptedSessions()
    async with trio.open_nursery() as nursery:
        wire = Wire(sessions, nursery)
        session = await wire.opened()
        nursery.cancel_scope.cancel()
    assert len(session.left) == 1


async def test_a_shutdown_waits_for_the_ends(autojump_clock: MockClock) -> None:
    async with connected() as wire, trio.open_nursery() as nursery:
        session = await wire.opened()
        nursery.start_soon(wire.peer.finish, 2.0)
        await idle(wire)
        wire.create("late")
        wire.resume("r0.secret", "later")
        session.end("error", "the server shut down")
        await idle(wire)
        assert errors(wire.got) == [("late", 503, "draining"), ("later", 503, "draining")]
        assert isinstance(wire.of("s")[-1], End)
        assert trio.current_time() == pytest.approx(0, abs=0.1)


async def test_a_shutdown_tells_streams_that_do_not_end(autojump_clock: MockClock) -> None:
    async with connected() as wire:
        session, held = await wire.opened(), await wire.opened("held", window=1)
        held.say(*"abc")
        began = trio.current_time()
        await wire.peer.finish(2.0)
        assert trio.current_time() - began == pytest.approx(1.0, abs=0.1)
        assert errors(wire.got) == [("s", 503, "draining"), ("held", 503, "draining")]
        assert (session.left, held.left) == (["shutdown"], ["shutdown"])


async def test_a_shutdown_is_bounded_when_nobody_reads(autojump_clock: MockClock) -> None:
    async with connected() as wire:
        await wire.opened()
        wire.read(False)
        wire.say(type="ping")
        began = trio.current_time()
        await wire.peer.finish(2.0)
        assert trio.current_time() - began == pytest.approx(2.0, abs=0.1)


# ── anything at all ───────────────────────────────────────────────────────────────────────────

NAMES = st.sampled_from(["a", "b", "c"])
WINDOWS = st.one_of(st.none(), st.integers(1, 3))
_BODIES = st.sampled_from([body(), body(n=2), body(n=3, max_tokens=1), body(temperature=9), {}, 7])
Step = tuple[str, Any]


def said(kind: str, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Step]:
    message = st.fixed_dictionaries({"type": st.just(kind), **fields})
    return st.tuples(st.just("say"), message)


STEPS = st.one_of(
    said(
        "create",
        stream=NAMES,
        endpoint=st.just("chat"),
        body=_BODIES,
        key=st.sampled_from([None, KEY]),
        window=WINDOWS,
    ),
    said(
        "resume",
        stream=NAMES,
        request=st.sampled_from(["r0.secret", "r1.secret", "r9"]),
        positions=st.just([{"sequence": 1, "tail": "0" * 16}]),
        window=WINDOWS,
    ),
    said("credit", stream=NAMES, upto=st.integers(0, 9)),
    said("cancel", stream=NAMES),
    said("ping"),
    st.tuples(st.just("raw"), st.binary(max_size=20)),
    st.tuples(st.just("text"), st.integers(0, 5)),
    st.tuples(st.just("end"), st.integers(0, 5)),
    st.tuples(st.just("crash"), st.integers(0, 5)),
    st.tuples(st.just("supersede"), st.integers(0, 5)),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("read"), st.booleans()),
    st.tuples(st.just("wait"), st.none()),
)


async def play(steps: list[Step]) -> None:
    sessions = ScriptedSessions()
    refusal = QueueFull()
    begun = 0
    readers: list[ScriptedSession] = []
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            wire = Wire(sessions, nursery)

            async def gather() -> None:
                while True:
                    readers.append(await sessions.next())

            async with trio.open_nursery() as gathering:
                gathering.start_soon(gather)
                for kind, what in steps:
                    reader = readers[what % len(readers)] if isinstance(what, int) and readers else None
                    match kind:
                        case "say":
                            begun += what["type"] in ("create", "resume")
                            wire.say(**what)
                        case "raw":
                            wire.say_raw(what)
                        case "text" if reader:
                            reader.say("x", choice=0)
                        case "end" if reader:
                            for choice in range(reader.generation.n):
                                reader.end(choice=choice)
                        case "crash" if reader:
                            reader.crash()
                        case "supersede" if reader:
                            reader.crash(Superseded())
                        case "refuse":
                            sessions.refusal = refusal if what else None
                        case "read":
                            wire.read(what)
                        case _:
                            await wait_all_tasks_blocked()
                # At last everybody reads, everything has credit and ends.
                wire.read(True)
                for name in ("a", "b", "c"):
                    wire.say(type="credit", stream=name, upto=1000)
                await wait_all_tasks_blocked()
                for reader in readers:
                    for choice in range(reader.generation.n):
                        reader.end(choice=choice)
                await wait_all_tasks_blocked()
                gathering.cancel_scope.cancel()
            assert wire.peer.statistics()["streams"] == 0
            assert_told(wire.got, begun)
            wire.peer.close("test_over")
            wire.peer.check()


async def lose(steps: list[Step]) -> None:
    """Play with sessions that never end, and lose the connection."""
    sessions = ScriptedSessions()
    async with trio.open_nursery() as nursery:
        wire = Wire(sessions, nursery)
        for kind, what in steps:
            match kind:
                case "say":
                    wire.say(**what)
                case "raw":
                    wire.say_raw(what)
                case "read":
                    wire.read(what)
                case "wait":
                    await wait_all_tasks_blocked()
                case _:
                    pass
        wire.peer.close("client_disconnect")
        wire.peer.check()
        with trio.fail_after(5):
            await wait_all_tasks_blocked()
        assert not nursery.child_tasks
    for session in sessions.readers:
        assert len(session.left) <= 1
        assert session.left or session.cancels


def assert_told(got: list[ToClient], begun: int) -> None:
    """Every stream is opened at most once, is numbered without a gap, and ends once; nothing follows."""
    live: dict[str, int] = {}
    terminal = 0
    for message in got:
        match message:
            case Opened(stream=name):
                assert name not in live, "it is over before it begins again"
                live[name] = 0
            case Delta(stream=name, number=number):
                live[name] += 1
                assert number == live[name]
            case End(stream=name, done=True):
                live.pop(name, None)
                terminal += 1
            case Failed(stream=str(name)):
                live.pop(name, None)
                terminal += 1
            case Failed(error=error):
                terminal += error.code == "stream_in_use"
            case _:
                pass
    assert not live
    assert terminal == begun


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_every_create_and_resume_is_told_its_end_once(steps: list[Step]) -> None:
    with structlog.testing.capture_logs() as logs:
        trio.run(play, steps)
    assert {entry["event"] for entry in logs} <= {"stream_failed", "request_named"}


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_a_lost_connection_leaves_every_request_once_whatever_was_said(steps: list[Step]) -> None:
    trio.run(lose, steps)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=100),
            st.recursive(
                st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
                lambda inner: st.dictionaries(
                    st.sampled_from(["type", "stream", "body", "endpoint", "upto"]), inner, max_size=5
                ),
                max_leaves=10,
            ).map(msgspec.json.encode),
        ),
        max_size=20,
    )
)
def test_no_bytes_raise(messages: list[bytes]) -> None:
    async def main() -> None:
        async with connected() as wire:
            for message in messages:
                wire.say_raw(message)
            await wait_all_tasks_blocked()
            assert len(wire.got) == len(messages)

    trio.run(main)
