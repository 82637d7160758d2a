"""From the events of one session to one HTTP response: whole, or streamed as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import trio

from actors.doors.openai_error import server_error
from actors.sessions import Delta, End, Superseded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from actors.doors.answers import Answer
    from actors.doors.event_id import EventId
    from actors.sessions import Session

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

log = structlog.get_logger()

_encode = msgspec.json.Encoder().encode
_DRAIN_BYTES = 64 * 2**20
RETRY_MS = 500
"""When the client of a resumable stream may come back: a gateway has started again by then."""
_DRAIN_S = 2.0
"""How much of a refused body is still read, so that the client reads the refusal and not a reset."""
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Client:
    """The other side of one request: its body, where the response goes, and whether anybody is there."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive = receive
        self.send = send
        self.gone = False
        self._body_ended = False
        self._answered = False

    async def receive_body(self) -> bytes:
        """The next piece of the body; empty when it has ended or the client has gone."""
        while not (self._body_ended or self.gone):
            message = await self._receive()
            self.gone = message["type"] == "http.disconnect"
            self._body_ended = not message.get("more_body", False)
            if body := message.get("body"):
                return bytes(body)
        return b""

    async def send_json(
        self, status: int, value: object, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send a whole response with a JSON body."""
        await self.send_whole(status, _encode(value), "application/json", headers)

    async def send_whole(
        self, status: int, body: bytes, content_type: str, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> None:
        """Send a whole response."""
        self._answered = True
        fixed = ((b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body)))
        await self.send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
        await self.send({"type": "http.response.body", "body": body, "more_body": True})
        await self._drain()
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def send_body(self, data: bytes, *, more: bool) -> None:
        """Send a piece of a response that has been started."""
        self._answered = not more
        await self.send({"type": "http.response.body", "body": data, "more_body": more})

    async def _drain(self) -> None:
        """Read the rest of the body within bounds: closing on unread data would reset the connection."""
        size = 0
        with trio.move_on_after(_DRAIN_S):
            while size < _DRAIN_BYTES and (data := await self.receive_body()):
                size += len(data)

    async def wait_gone(self) -> None:
        """Wait for the client to go away, or for its response to have been sent."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def watch(self, session: Session) -> None:
        """Wait for the client to go away and give its session up at once."""
        await self.wait_gone()
        if self._answered:
            return  # The server says so, too, when the response has been sent.
        self.gone = True
        log.info("http_client_disconnected", request_id=session.request_id)
        session.leave("client_disconnect")


class Reply:
    """The response to one request that generates.

    Nothing is sent before the first event, so that a request which fails before its first token gets a
    real status; but a stream that can be resumed says its id at once. Its choices succeed together: when
    one fails, the others are given up. When the client is gone the events are still read to their End,
    or until somebody resumes them.
    """

    def __init__(
        self,
        session: Session,
        client: Client,
        answer: Answer,
        name: str,
        place: EventId | None = None,
        *,
        goes_on: bool = False,
    ) -> None:
        """`name`: what the client knows the request by; `place`: where a stream that can be resumed is.

        `goes_on`: it was begun on another connection.
        """
        self._session = session
        self._client = client
        self._answer = answer
        self._place = place
        self._goes_on = goes_on
        self._headers = ((b"x-request-id", name.encode()),)
        self._streaming = False
        self._failed = False

    async def run(self, *, stream: bool) -> None:
        """Answer to the end; no session is left open whatever happens."""
        events = self._session.events()
        try:
            if stream:
                await self._stream(events)
            else:
                await self._whole(events)
        except trio.Cancelled:
            self._session.cancel("shutdown")
            raise
        except Superseded:
            # By whoever resumed it, or it waits for somebody who does.
            await self._fail(409, "The stream is read on another connection.", "superseded")
        except Exception:
            log.exception("http_reply_failed", request_id=self._session.request_id)
            self._session.cancel("http_door")
            await self._fail(500, "The request failed inside the server.")
        finally:
            # Where the events come from a generator, it must not be left to the garbage collector.
            if isinstance(events, AsyncGenerator):
                await events.aclose()

    async def _whole(self, events: AsyncIterator[Delta | End]) -> None:
        deltas: list[Delta] = []
        ends: list[End] = []
        async for event in events:
            if isinstance(event, Delta):
                deltas.append(event)
            elif await self._succeeded(event):
                ends.append(event)
                if len(ends) == self._session.generation.n:
                    await self._client.send_json(200, self._answer.whole(deltas, ends), self._headers)

    async def _stream(self, events: AsyncIterator[Delta | End]) -> None:
        answer, place = self._answer, self._place
        head = b"" if self._goes_on else answer.head()
        if place is not None:
            # At once: whoever is cut off before the first token can come back, too.
            await self._send_events(b"retry: %d\n%b\n" % (RETRY_MS, place.line()) + head)
            head = b""
        told = frozenset(place.ended) if place is not None else frozenset()
        ends: list[End] = []
        async for event in events:
            if isinstance(event, Delta):
                if not (self._client.gone or self._failed):
                    await self._send_events(head + self._at(event) + answer.delta(event))
                    head = b""
            elif await self._succeeded(event):
                ends.append(event)
                data = head + (b"" if event.choice in told else self._at(event) + answer.end(event))
                head = b""
                if len(ends) < self._session.generation.n:
                    await self._send_events(data)
                else:
                    await self._send_events(data + answer.tail(ends) + b"data: [DONE]\n\n", more=False)

    def _at(self, event: Delta | End) -> bytes:
        """The line that says where the stream is with this event."""
        if self._place is None:
            return b""
        self._place.took(event)
        return self._place.line()

    async def _send_events(self, data: bytes, *, more: bool = True) -> None:
        if not self._streaming:
            self._streaming = True
            await self._client.send(
                {"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *self._headers]}
            )
        await self._client.send_body(data, more=more)

    async def _succeeded(self, end: End) -> bool:
        """Whether the End brings an answer to somebody; if it does not, the client has been told."""
        if end.reason in ("stop", "length"):
            return not (self._client.gone or self._failed)
        if not self._failed:
            self._failed = True
            if self._session.generation.n > 1:
                self._session.cancel("failed_choice")
            if end.reason == "error":
                await self._fail(500, end.error or "The request failed.")
            else:
                await self._fail(503, "The request was cancelled by the server.")
        return False

    async def _fail(self, status: int, message: str, code: str | None = None) -> None:
        if self._client.gone:
            return
        log.warning("http_reply_broken", request_id=self._session.request_id, reason=message)
        if self._streaming:
            await self._send_events(b"data: %b\n\n" % _encode(server_error(message, code)), more=False)
        else:
            await self._client.send_json(status, server_error(message, code), self._headers)
