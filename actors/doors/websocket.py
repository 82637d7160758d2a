"""The WebSocket door `/v1/stream`: the stream protocol, one JSON message a WebSocket message.

Text and binary messages are read alike; ours are text. The connection carries up to MAX_STREAMS
requests. When it ends, by whoever, its requests are left: they can be resumed for a while. A
browser's page of another site is refused (Origin): what listens on a person's own machine must not
answer whatever page is open there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec
import structlog
import trio

from actors.doors.intake import client_of_key
from actors.doors.openai_error import ApiError
from actors.doors.streams import StreamPeer

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from actors.doors.http_reply import Receive, Send
    from actors.doors.intake import Intake
    from actors.sessions import Sessions

log = structlog.get_logger()

PATH = "/v1/stream"
IDLE_S = 600.0
"""A connection without a stream and without a message for so long is closed."""
_GOING_AWAY, _SERVICE_RESTART = 1001, 1012
_CLOSING_S = 0.5
"""How long a client may take to answer a close."""


class WebSocketDoor:
    """Serves the WebSocket scopes of an ASGI application."""

    def __init__(
        self,
        sessions: Sessions,
        intake: Intake,
        *,
        shutdown: trio.Event,
        grace_s: float,
        idle_s: float = IDLE_S,
    ) -> None:
        """After `shutdown`, streams that do not end by themselves in a quarter of `grace_s` get an error."""
        self._sessions = sessions
        self._intake = intake
        self._shutdown = shutdown
        self._grace_s = grace_s
        self._idle_s = idle_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve one connection until it is gone."""
        try:
            _check(scope)
        except ApiError as refusal:
            log.info("websocket_refused", status=refusal.status, reason=str(refusal))
            await _refuse(refusal, send)
            return
        socket = _Socket(receive, send, scope["state"]["abort"])
        client = client_of_key(dict(scope["headers"]).get(b"authorization"))
        await send({"type": "websocket.accept"})
        try:
            async with trio.open_nursery() as nursery:
                peer = StreamPeer(self._sessions, self._intake, nursery, socket.say, client=client)
                nursery.start_soon(self._wind_down, socket, peer)
                try:
                    await self._listen(socket, peer, nursery)
                finally:
                    peer.close("shutdown" if self._shutdown.is_set() else "client_disconnect")
                    nursery.cancel_scope.cancel()
        except Exception:
            log.exception("websocket_failed")
            socket.abort()
            while not socket.gone:
                await socket.hear()

    async def _listen(self, socket: _Socket, peer: StreamPeer, nursery: trio.Nursery) -> None:
        """Follow what the client says until it is gone.

        Until hypercorn has said so, somebody must take its messages, or it never closes the connection.
        """
        while not socket.gone:
            data = None
            with trio.move_on_after(self._idle_s) as patience:
                data = await socket.hear()
            if data is not None:
                peer.receive(data)
                await peer.wait_ready()
            elif patience.cancelled_caught and not peer.statistics()["streams"]:
                nursery.start_soon(socket.close, _GOING_AWAY, "nothing was said for a long time")

    async def _wind_down(self, socket: _Socket, peer: StreamPeer) -> None:
        await self._shutdown.wait()
        await peer.finish(self._grace_s / 2)
        await socket.close(_SERVICE_RESTART, "the server is shutting down")


class _Socket:
    """One accepted WebSocket."""

    def __init__(self, receive: Receive, send: Send, abort: Callable[[], None]) -> None:
        self._receive = receive
        self._send = send
        self.abort = abort
        self._closing = False
        self.gone = False

    async def hear(self) -> bytes | None:
        """The next message; None when there will be none."""
        message = await self._receive()
        if message["type"] == "websocket.disconnect":
            self.gone = True
            return None
        if message["type"] == "websocket.connect":
            return await self.hear()
        data: bytes | None = message.get("bytes")
        return message["text"].encode() if data is None else data

    async def say(self, message: bytes) -> None:
        """Send a message; nothing after a close."""
        if not self._closing:
            await self._send({"type": "websocket.send", "text": message.decode()})

    async def close(self, code: int, reason: str) -> None:
        """Say so, and end the connection when the client does not."""
        if self._closing:
            return
        self._closing = True
        with trio.move_on_after(_CLOSING_S):
            await self._send({"type": "websocket.close", "code": code, "reason": reason})
            await trio.sleep_forever()
        self.abort()


def _check(scope: MutableMapping[str, Any]) -> None:
    """Refuse a handshake with an ApiError."""
    if scope["path"] != PATH:
        raise ApiError(404, f"There is no WebSocket at {scope['path'][:200]}.", code="unknown_url")
    headers = dict(scope["headers"])
    origin: bytes | None = headers.get(b"origin")
    if origin is not None and _host_of(origin) != headers.get(b"host", b"").lower():
        raise ApiError(403, "Pages of other sites may not connect.", code="origin_refused")


def _host_of(origin: bytes) -> bytes | None:
    try:
        return urlsplit(origin.lower()).netloc
    except ValueError:
        return None


async def _refuse(refusal: ApiError, send: Send) -> None:
    body = msgspec.json.encode(refusal.body)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "websocket.http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
