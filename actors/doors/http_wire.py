"""hypercorn's HTTP/1.1 and WebSocket protocols, with the bounds that they lack.

Tried with hypercorn 0.18: it inflates a compressed message before it looks at the size, goes on
buffering a message that it has refused as too large, leaves its application waiting for ever when
frames come before the handshake was answered or a send breaks while messages wait, keeps a connection
whose handshake it has refused, and treats what a peer does wrong as its own crash.
Here nothing is compressed, the first fault ends the connection, and it is a PeerFault.

There is no HTTP/2: without TLS hardly anybody speaks it, and each of its bounds would have to be
found again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio
from hypercorn.protocol.events import Body, Data, Event, Request, StreamClosed
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol, H11WSConnection
from hypercorn.protocol.ws_stream import ASGIWebsocketState, FrameTooLargeError, WSStream
from wsproto.connection import ConnectionState
from wsproto.events import CloseConnection, Message, Ping
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import ProtocolError

if TYPE_CHECKING:
    import h11
    from hypercorn.typing import ASGISendEvent

_BREATH = 256
"""Frames of one read after which others have their turn: there may be ten thousand."""
_REASON_CHARS = 100
"""A close frame has room for 123 bytes of it."""


class PeerFault(Exception):
    """What the other side did breaks the protocol: its connection ends, and nothing else."""


class Http1(H11Protocol):
    """HTTP/1.1 over one connection, which may become a WebSocket."""

    async def _check_protocol(self, event: h11.Request) -> None:
        """An offer to speak HTTP/2 is not taken up."""

    async def _create_stream(self, request: h11.Request) -> None:
        headers = dict(request.headers)
        offered = [token.strip().lower() for token in headers.get(b"connection", b"").split(b",")]
        upgrade = headers.get(b"upgrade", b"").strip().lower()
        if request.method != b"GET" or upgrade != b"websocket" or b"upgrade" not in offered:
            await super()._create_stream(request)
            return
        stream = WebSocketStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        self.stream = stream
        self.connection = H11WSConnection(self.connection)  # type: ignore[arg-type]  # it is h11's still
        try:
            await stream.handle(
                Request(
                    stream_id=STREAM_ID,
                    headers=[
                        (name, value)
                        for name, value in request.headers
                        if name != b"sec-websocket-extensions"
                    ],
                    http_version=request.http_version.decode(),
                    method="GET",
                    raw_path=request.target,
                    state=self.connection_state,
                )
            )
        except UnicodeDecodeError:
            raise PeerFault("a header of the handshake is not ASCII") from None


class WebSocketStream(WSStream):
    """A WebSocket whose faults end it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answered = trio.Event()
        """The application has accepted or refused: frames may have come before."""
        self._giving: trio.CancelScope | None = None
        """Of giving a message to the application."""

    async def app_send(self, message: ASGISendEvent | None) -> None:
        try:
            await super().app_send(message)
        finally:
            self._answered.set()

    async def handle(self, event: Event) -> None:
        if isinstance(event, (Body, Data)) and not (self.closed or self.handshake.accepted):
            await self._answered.wait()
            if not self.handshake.accepted:
                return
        if isinstance(event, StreamClosed) and self.app_put is not None and not self.closed:
            self.closed = True
            # Its application hears of it when it listens again, and may be waiting for the very send that
            # has broken: nobody waits for it here, nor goes on giving it what came before.
            if self._giving is not None:
                self._giving.cancel()
            self.task_group.spawn(self.app_put, {"type": "websocket.disconnect", "code": self._close_code})
            return
        try:
            await super().handle(event)
        except ProtocolError as error:
            raise PeerFault(str(error)) from None
        if isinstance(event, Request) and self.closed:
            raise PeerFault("the handshake is none")

    @property
    def _close_code(self) -> int:
        """What the application is told that the connection ended with."""
        ended = self.state in (ASGIWebsocketState.HTTPCLOSED, ASGIWebsocketState.CLOSED)
        return CloseReason.NORMAL_CLOSURE if ended else CloseReason.ABNORMAL_CLOSURE

    async def _handle_events(self) -> None:
        assert self.app_put is not None, "the handshake was accepted by an application"
        for number, event in enumerate(self.connection.events(), 1):
            if self.closed:
                return
            if number % _BREATH == 0:
                await trio.lowlevel.checkpoint()
            if isinstance(event, Message):
                try:
                    self.buffer.extend(event)
                except FrameTooLargeError:
                    await self._fault(
                        CloseReason.MESSAGE_TOO_BIG, f"a message is larger than {self.buffer.max_length}"
                    )
                if event.message_finished:
                    with trio.CancelScope() as self._giving:
                        await self.app_put(self.buffer.to_message())
                    self.buffer.clear()
            elif isinstance(event, Ping):
                await self._send_wsproto_event(event.response())
            elif isinstance(event, CloseConnection):
                if self.connection.state is ConnectionState.OPEN:
                    # It has not said so: the frames make no sense.
                    await self._fault(event.code, event.reason or "bad frames")
                if self.connection.state is ConnectionState.REMOTE_CLOSING:
                    await self._send_wsproto_event(event.response())
                await self.send(StreamClosed(stream_id=self.stream_id))
                return

    async def _fault(self, code: int, reason: str) -> None:
        await self._send_wsproto_event(CloseConnection(code=code, reason=reason[:_REASON_CHARS]))
        raise PeerFault(reason)
