"""One connection to a gateway: a ZeroMQ DEALER from its making to its first loss.

libzmq would connect again by itself and go on with what is queued; what of that the next gateway
still understands nobody knows. So a connection that was lost is closed, with its queue, and the next
one is a new socket with a new name: nothing of one can be taken for the other's, at either end.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

RECONNECT_FIRST_MS = 20
RECONNECT_MAX_MS = 500
MOST_TAKEN = 64
"""Messages that are taken at once, before others have their turn."""
_UP = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_DOWN = int(zmq.EVENT_DISCONNECTED)


class Connection:
    """Connects until it is up; ends at its first loss. A context manager that closes it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        """Raises zmq.ZMQError for an endpoint that is none."""
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.ROUTING_ID, secrets.token_bytes(16))
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
            if endpoint.startswith("tcp://["):
                socket.setsockopt(zmq.IPV6, 1)
            monitor = socket.get_monitor_socket(_UP | _DOWN)
        except BaseException:
            socket.close(linger=0)
            raise
        self._zmq = socket
        self._socket = ZmqSocket(socket)
        self._monitor = ZmqSocket(monitor)
        try:
            socket.connect(endpoint)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drop what is queued. Idempotent."""
        if not self._zmq.closed:
            # libzmq's end first: its thread waits for ever to tell of an event that nobody can hear any
            # more, and everybody else for the lock that it holds meanwhile.
            self._zmq.disable_monitor()
            self._monitor.close()
            self._socket.close()

    async def wait_up(self) -> None:
        """Until a gateway has answered."""
        await self._wait_for(_UP)

    async def wait_down(self) -> None:
        """Until the connection is lost."""
        await self._wait_for(_DOWN)

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting for room."""
        await self._socket.send(message)

    async def receive(self) -> list[bytes]:
        """What has come, at least one message."""
        messages = [await self._socket.receive()]
        try:
            while len(messages) < MOST_TAKEN:
                messages.append(self._socket.receive_nowait())
        except trio.WouldBlock:
            pass
        return messages

    async def _wait_for(self, wanted: int) -> None:
        while parse_monitor_message(await self._monitor.receive_frames())["event"] != wanted:
            pass
