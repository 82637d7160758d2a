"""One stream of the stream protocol: what its session says, as messages, as far as there is credit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING

import structlog
import trio

from actors import sessions as gateway
from actors.doors.stream_messages import delta_message, end_message, ours
from actors.doors.ticket import ticket_of
from engine.stream_protocol import Failed, Opened, StreamError

if TYPE_CHECKING:
    from actors.sessions import Session
    from engine.stream_protocol import ToClient

log = structlog.get_logger()

BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)
"""What a send raises when nobody is there."""


class Stream:
    """From its create or resume to its terminal message."""

    def __init__(self, name: str, window: int | None, forget: Callable[[Stream], None]) -> None:
        """`forget` is called once, when its name is free again: before the terminal message is sent."""
        self.name = name
        self.session: Session | None = None
        self.scope = trio.CancelScope()
        """Of the task that works for it."""
        self.over = False
        """Its terminal message is said or being said."""
        self._reading = False
        """Its session waits for somebody to read on."""
        self.sent = 0
        """Deltas."""
        self._forget = forget
        self._cancelled = False
        self._granted = window
        self._news = trio.Event()

    def credit(self, upto: int) -> None:
        """So many deltas may be sent in all."""
        if self._granted is not None:
            self._granted = max(self._granted, upto)
            self._news.set()

    def cancel(self) -> None:
        """Its client does not want it any more; what follows is the session's End."""
        self._cancelled = True
        self._news.set()
        if self.session is not None:
            self.session.cancel("client_cancel")

    def read(self, session: Session) -> None:
        """From now on it says what this session says; a task runs it."""
        self.session = session
        self.scope = trio.CancelScope()
        self._reading = True

    def leave(self, by: str) -> None:
        """Nobody hears any more what its session says."""
        self.finish()
        if self._reading and self.session is not None:
            self._reading = False
            self.session.leave(by)

    def finish(self) -> None:
        """Free its name: a client may use it again as soon as it has read the terminal message."""
        if not self.over:
            self.over = True
            self._forget(self)

    def failed(self, error: StreamError) -> Failed:
        """The terminal message of a stream that cannot go on."""
        self.finish()
        return Failed(error, self.name)

    async def run(self, opened: Opened, session: Session, say: Callable[[ToClient], Awaitable[None]]) -> None:
        """Say all that its session says. BROKEN when nobody listens."""
        events = session.events()
        choices = session.generation.n
        tells_cache = ticket_of(session.generation).cache
        ends = 0
        try:
            await say(opened)
            async for event in events:
                if isinstance(event, gateway.Delta):
                    await self._say_delta(event, session, say)
                    continue
                ends += 1
                if done := ends == choices:
                    self.finish()
                await say(end_message(self.name, self.sent, event, done=done, tells_cache=tells_cache))
            assert ends == choices, f"{ends} of {choices} choices have ended"
            self._reading = False
        except gateway.Superseded:
            self._reading = False
            error = StreamError("The request was resumed elsewhere.", 409, "superseded")
            await say(self.failed(error))
        except BROKEN:
            raise
        except Exception:
            log.exception("stream_failed", request_id=session.request_id)
            self._reading = False
            session.cancel("stream_door")
            await say(self.failed(ours()))
        finally:
            # Where the events come from a generator, it must not be left to the garbage collector.
            if isinstance(events, AsyncGenerator):
                await events.aclose()
            self.leave("connection_closed")

    async def _wait_news(self, session: Session) -> None:
        """For credit or a cancel; Superseded when somebody resumes the request meanwhile."""
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await session.superseded.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await self._news.wait()
            nursery.cancel_scope.cancel()
        if session.superseded.is_set():
            raise gateway.Superseded

    async def _say_delta(
        self, delta: gateway.Delta, session: Session, say: Callable[[ToClient], Awaitable[None]]
    ) -> None:
        """Say it when there is credit; not at all when nobody wants more."""
        while not self._cancelled and self._granted is not None and self.sent >= self._granted:
            self._news = trio.Event()
            await self._wait_news(session)
        if self._cancelled:
            return
        self.sent += 1
        told = session.generation.token_ids or session.generation.logprobs is not None
        await say(delta_message(self.name, self.sent, delta, told=told))
