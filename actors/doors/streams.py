"""One client's connection of the stream protocol, whatever carries it.

A carrier (a WebSocket, a ZeroMQ socket) hands each message to `receive` and gives `send` to write
with. One task makes requests of what was asked for, in order; one task a stream says what its
session says; one sends the short answers. Nothing is queued without a bound:

    waits                              at most
    ──────────────────────────────────────────────────────────────────────────────────────────
    creates, to be tokenised           MAX_STREAMS, and MAX_WAITING_BYTES of bodies
    text that is not sent yet          one delta a stream; the rest waits in its session
    answers (pong, errors)             MAX_ANSWERS; a carrier that can, waits for `wait_ready`

Every create and every resume gets exactly one terminal message: an `end` with `done`, or an error.
A message about a stream that it cannot have meant (its name is in use, or nobody has it) is answered
by an error without a stream, so that no live stream is taken for dead.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, assert_never

import msgspec
import structlog
import trio

from actors.doors.openai_error import ApiError
from actors.doors.stream import BROKEN, Stream
from actors.doors.stream_messages import as_refused, as_stream_error, begun_by, check_switches, ours, too_many
from actors.doors.stream_outbox import MAX_ANSWERS, Outbox
from actors.sessions import Refused
from engine.stream_protocol import (
    Cancel,
    Create,
    Credit,
    End,
    Failed,
    Opened,
    Ping,
    Pong,
    Resume,
    StreamError,
    decode_to_gateway,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from actors.doors.intake import Asked, Intake
    from actors.sessions import Generation, Session, Sessions
    from engine.stream_protocol import ToClient

log = structlog.get_logger()

MAX_STREAMS = 256
MAX_WAITING_BYTES = 16 * 2**20


class StreamPeer:
    """One connection: streams by the names that the client gave them."""

    def __init__(
        self,
        sessions: Sessions,
        intake: Intake,
        nursery: trio.Nursery,
        send: Callable[[bytes], Awaitable[None]],
        *,
        client: str = "",
    ) -> None:
        """`send` is called by one task at a time; `client`: who asks, for fair shares."""
        self._sessions = sessions
        self._intake = intake
        self._nursery = nursery
        self._client = client
        self._outbox = Outbox(send)
        self._answering = False
        self._streams: dict[str, Stream] = {}
        self._waiting: dict[Stream, Create] = {}
        """To be opened, first come, first served."""
        self._waiting_bytes = 0
        self._opening = False
        self._scopes: set[trio.CancelScope] = set()
        """Of the running tasks."""
        self._ended = trio.Event()
        """Some task has."""
        self._closed = False
        self._finishing = False
        self._deltas = 0
        """Of streams that are over."""

    # ── from the client ───────────────────────────────────────────────────────────────────────

    def receive(self, message: bytes) -> None:
        """Follow one message; never waits. What is wrong with it is answered."""
        if self._closed:
            return
        try:
            said = decode_to_gateway(message)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._misunderstood(message, error)
            return
        match said:
            case Create():
                self._create(said)
            case Resume():
                self._resume(said)
            case Credit():
                if stream := self._known(said.stream):
                    stream.credit(said.upto)
            case Cancel():
                if stream := self._known(said.stream):
                    self._cancel(stream)
            case Ping():
                self._answer(Pong())
            case _:
                assert_never(said)

    def close(self, by: str) -> None:
        """The connection is gone: what can be resumed is kept for a while. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._outbox.close()
        for stream in list(self._streams.values()):
            stream.leave(by)
        for scope in self._scopes:
            scope.cancel()

    async def wait_ready(self) -> None:
        """Wait until the client has read enough of its answers to be listened to again."""
        await self._outbox.wait_ready()

    async def finish(self, seconds: float) -> None:
        """Shut down within so many seconds: accept nothing more, and wait for every stream's end.

        Those that have none when half of the time is over end with an error.
        """
        self._finishing = True
        with trio.move_on_after(seconds / 2):
            await self._wait_quiet()
        refusal = StreamError("The server is shutting down.", 503, "draining")
        for stream in list(self._streams.values()):
            stream.leave("shutdown")
            stream.scope.cancel()
            self._answer(Failed(refusal, stream.name), ending=stream.name)
        with trio.move_on_after(seconds / 2):
            await self._wait_quiet()

    def statistics(self) -> dict[str, int | float]:
        """Streams now, and messages since the beginning."""
        return {
            "streams": len(self._streams),
            "waiting": len(self._waiting),
            "deltas": self._deltas + sum(stream.sent for stream in self._streams.values()),
            "answers": len(self._outbox),
            "answers_dropped": self._outbox.dropped,
        }

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._streams) <= MAX_STREAMS
        assert len(self._outbox) <= MAX_ANSWERS
        assert self._waiting_bytes == sum(len(create.body) for create in self._waiting.values())
        assert all(self._streams.get(stream.name) is stream for stream in self._waiting)
        assert not any(stream.over for stream in self._streams.values())
        assert not (self._closed and (self._streams or len(self._outbox)))

    # ── what it may say ───────────────────────────────────────────────────────────────────────

    def _misunderstood(self, message: bytes, error: Exception) -> None:
        """A message that is none; a stream that it wanted to begin is told so by its name."""
        name = begun_by(message)
        if name is not None and self._in_use(name):
            name = None
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        none = StreamError(f"Not a message: {reason}", code="invalid_message")
        self._answer(Failed(none, name), ending=name)

    def _known(self, name: str) -> Stream | None:
        stream = self._streams.get(name)
        if stream is None:
            self._answer(Failed(StreamError(f"No stream {name!r} is open.", 404, "unknown_stream", "stream")))
        return stream

    def _in_use(self, name: str) -> bool:
        return name in self._streams or self._outbox.ends(name)

    def _begin(self, name: str, window: int | None) -> Stream | None:
        """A new stream, or None when there can be none of this name now."""
        if self._in_use(name):
            refusal = f"The stream {name!r} is open already."
            self._answer(Failed(StreamError(refusal, 409, "stream_in_use", "stream")))
            return None
        if self._finishing:
            refused = Failed(StreamError("The server is shutting down.", 503, "draining"), name)
            self._answer(refused, ending=name)
            return None
        # A stream that has ended frees its name at once; its task is there until the end is sent.
        if len(self._streams) >= MAX_STREAMS or len(self._scopes) >= 2 * MAX_STREAMS:
            refused = Failed(too_many(f"{MAX_STREAMS} streams are open on this connection"), name)
            self._answer(refused, ending=name)
            return None
        stream = self._streams[name] = Stream(name, window, self._forget)
        return stream

    def _create(self, create: Create) -> None:
        stream = self._begin(create.stream, create.window)
        if stream is None:
            return
        if self._waiting and self._waiting_bytes + len(create.body) > MAX_WAITING_BYTES:
            self._answer(stream.failed(too_many("Too much waits to be tokenised")), ending=stream.name)
            return
        self._waiting[stream] = create
        self._waiting_bytes += len(create.body)
        if not self._opening:
            self._opening = True
            self._start(self._open_waiting, trio.CancelScope())

    def _resume(self, resume: Resume) -> None:
        stream = self._begin(resume.stream, resume.window)
        if stream is None:
            return
        try:
            session = self._sessions.resume(resume.request, resume.positions)
        except Refused as refusal:
            self._answer(stream.failed(as_refused(refusal)), ending=stream.name)
        except Exception:
            log.exception("stream_resume_failed", request_id=resume.request.partition(".")[0])
            self._answer(stream.failed(ours()), ending=stream.name)
        else:
            self._run(stream, session, resumed=True)

    def _cancel(self, stream: Stream) -> None:
        stream.cancel()
        if stream.session is None:
            # It was not opened yet, so nobody else can say that it has ended.
            stream.finish()
            stream.scope.cancel()
            self._answer(End(stream.name, "cancelled", 0, 0, done=True), ending=stream.name)

    # ── streams ───────────────────────────────────────────────────────────────────────────────

    async def _open_waiting(self) -> None:
        """Make requests of the waiting creates, one after the other."""
        try:
            while self._waiting:
                stream, create = next(iter(self._waiting.items()))
                failed = None
                with stream.scope:
                    failed = await self._open(stream, create)
                if failed is not None:
                    await self._outbox.say(failed)
        finally:
            self._opening = False

    async def _open(self, stream: Stream, create: Create) -> Failed | None:
        """Make a request of a create, or find the one that its key has made; what was wrong."""
        try:
            if session := self._again(create):
                self._run(stream, session, resumed=True)
                return None
            asked = await self._ask(create)
            if stream.over:
                return None
            # Meanwhile another connection may have said the same.
            session = self._again(create)
            resumed = session is not None
            if session is None:
                session = self._intake.open(_resumable(asked.generation, create))
                if asked.name is not None:
                    log.info("request_named", request_id=session.request_id, name=asked.name)
            self._run(stream, session, resumed=resumed)
        except ApiError as error:
            return stream.failed(as_stream_error(error))
        except Refused as refusal:
            return stream.failed(as_refused(refusal))
        except Exception:
            log.exception("stream_create_failed")
            return stream.failed(ours())
        return None

    def _again(self, create: Create) -> Session | None:
        """The session of the request that this create has already made, from its beginning."""
        request = None if create.key is None else self._sessions.find(create.key)
        return None if request is None else self._sessions.resume(request, None)

    async def _ask(self, create: Create) -> Asked:
        body = bytes(create.body)
        check_switches(body)
        ask = self._intake.chat if create.endpoint == "chat" else self._intake.completion
        return await ask(body, client=self._client)

    def _run(self, stream: Stream, session: Session, *, resumed: bool) -> None:
        """Have a task say what a session says."""
        self._unwait(stream)
        stream.read(session)
        opened = Opened(
            stream=stream.name,
            request=session.resume_id,
            model=self._sessions.model.name,
            prompt_tokens=len(session.generation.prompt),
            choices=session.generation.n,
            resumed=resumed,
            grace_s=self._sessions.resume_grace_s,
        )
        self._start(partial(stream.run, opened, session, self._outbox.say), stream.scope)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.name]
        self._deltas += stream.sent
        self._unwait(stream)

    def _unwait(self, stream: Stream) -> None:
        if waiting := self._waiting.pop(stream, None):
            self._waiting_bytes -= len(waiting.body)

    def _answer(self, message: ToClient, *, ending: str | None = None) -> None:
        """Have a short message sent, without waiting for it; perhaps the last one of the stream `ending`."""
        self._outbox.post(message, ending)
        if not self._answering:
            self._answering = True
            self._start(self._send_answers, trio.CancelScope())

    async def _send_answers(self) -> None:
        try:
            await self._outbox.send_posted()
        finally:
            self._answering = False

    # ── tasks ─────────────────────────────────────────────────────────────────────────────────

    def _start(self, work: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        self._scopes.add(scope)
        self._nursery.start_soon(self._contained, work, scope)

    async def _contained(self, work: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        """Work that cannot fail but for its own connection."""
        try:
            with scope:
                await work()
        except BROKEN:
            self.close("client_disconnect")
        except Exception:
            log.exception("stream_peer_failed")
            self.close("stream_door")
        finally:
            self._scopes.discard(scope)
            self._ended.set()

    async def _wait_quiet(self) -> None:
        while self._scopes:
            self._ended = trio.Event()
            await self._ended.wait()


def _resumable(generation: Generation, create: Create) -> Generation:
    return msgspec.structs.replace(generation, resumable=True, key=create.key or "")
