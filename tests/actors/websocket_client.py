"""A WebSocket client on trio that can also misbehave: the sans-I/O core of `websockets` over a socket."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import trio
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.uri import parse_uri

from engine.stream_protocol import End, Failed, decode_to_client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.stream_protocol import ToClient


class WebSocket:
    """One connection, after its handshake."""

    def __init__(self, stream: trio.SocketStream, protocol: ClientProtocol, response: Response) -> None:
        self.stream = stream
        self.protocol = protocol
        self.response = response
        self._frames: list[Frame] = []

    @property
    def close_code(self) -> int | None:
        """What the server closed with."""
        return None if self.protocol.close_rcvd is None else self.protocol.close_rcvd.code

    async def send_raw(self, data: bytes) -> None:
        await self.stream.send_all(data)

    async def send(self, **message: Any) -> None:
        """Send a message of the stream protocol in a text frame."""
        self.protocol.send_text(msgspec.json.encode(message))
        await self.flush()

    async def flush(self) -> None:
        for data in self.protocol.data_to_send():
            if data:
                await self.stream.send_all(data)

    async def frame(self) -> Frame | None:
        """The next data frame or pong; None at the end of the connection."""
        while True:
            while self._frames:
                frame = self._frames.pop(0)
                if frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.PONG):
                    return frame
            try:
                data = await self.stream.receive_some()
            except trio.BrokenResourceError:
                return None
            if not data:
                return None
            self.protocol.receive_data(data)
            self._frames += [event for event in self.protocol.events_received() if isinstance(event, Frame)]
            await self.flush()

    async def read(self) -> ToClient | None:
        """The next message; None at the end of the connection."""
        while (frame := await self.frame()) is not None and frame.opcode is Opcode.PONG:
            pass
        return None if frame is None else decode_to_client(frame.data)

    async def read_to_end(self) -> list[ToClient]:
        """All messages up to the terminal one of a stream, or up to the end of the connection."""
        messages: list[ToClient] = []
        while (message := await self.read()) is not None:
            messages.append(message)
            if isinstance(message, Failed) or (isinstance(message, End) and message.done):
                break
        return messages


@asynccontextmanager
async def websocket(port: int, path: str = "/v1/stream", **headers: str) -> AsyncIterator[WebSocket]:
    """Connect; `response` has a status other than 101 where the server refused."""
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    async with stream:
        protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{path}"))
        request = protocol.connect()
        for name, value in headers.items():
            request.headers[name] = value
        protocol.send_request(request)
        connection = WebSocket(stream, protocol, None)  # type: ignore[arg-type]
        await connection.flush()
        while connection.response is None:
            protocol.receive_data(await stream.receive_some())
            for event in protocol.events_received():
                if isinstance(event, Response):
                    connection.response = event
        yield connection
