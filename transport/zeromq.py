"""The link between processes and hosts: ZeroMQ PUSH → PULL, over ipc on a host and tcp between hosts.

One `ZeroMQNetwork` an actor: it owns the context (there is no global one), and closing it closes
what is still open and returns when libzmq has let go of every descriptor.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal, cast

import zmq

from engine.errors import StartError
from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from pathlib import Path

SOCKET_FOLDER = "s"
IPC_PATH_LIMIT = 107
"""Bytes that `sockaddr_un` leaves for a path, its terminating zero taken off."""

HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 3000
"""A tcp connection that is silent for so long is made anew: TCP itself waits for minutes."""

# A peer that is restarted elsewhere is given up by its users, so attempts may be quick at first (a
# peer that is only slow to start) and must become cheap.
RECONNECT_FIRST_MS = 10
RECONNECT_MAX_MS = 500


class ZeroMQNetwork:
    """A LinkFactory over real sockets."""

    def __init__(
        self,
        run_dir: Path,
        *,
        kind: Literal["ipc", "tcp"] = "ipc",
        host: str = "127.0.0.1",
        port: int = 0,
        high_water_mark: int = 1000,
    ) -> None:
        """Nothing is opened before the first bind or connect, and no trio run is needed.

        `run_dir`: the private folder of this launch; ipc sockets lie in its folder `s`.
        `kind`: how inboxes are bound; outboxes connect to either. `host`: IP address that tcp inboxes
        bind to. `port`: that of the only inbox, 0 for free ones. `high_water_mark`: messages queued at
        each end of a connection.
        """
        self._folder = run_dir / SOCKET_FOLDER
        self._kind = kind
        self._address = f"tcp://{f'[{host}]' if ':' in host else host}:{port or '*'}"
        self._high_water_mark = high_water_mark
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._open: set[ZeroMQInbox | ZeroMQOutbox] = set()

    def bind(self, name: str) -> ZeroMQInbox:
        """Open the inbox `name`; raises StartError when its address cannot be had."""
        path = None
        if self._kind == "ipc":
            path = self._socket_path(name)
            address = f"ipc://{path}"
        else:
            address = self._address
        socket = self._socket(zmq.PULL, address)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise StartError(f"cannot open the inbox {name!r} at {address}: {error}") from None
        endpoint = cast("bytes", socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        inbox = ZeroMQInbox(self, socket, endpoint, path)
        self._open.add(inbox)
        return inbox

    def connect(self, endpoint: str) -> ZeroMQOutbox:
        """Open an outbox to an inbox, which need not exist yet; raises StartError on a malformed one."""
        socket = self._socket(zmq.PUSH, endpoint)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise StartError(f"cannot connect to {endpoint!r}: {error}") from None
        outbox = ZeroMQOutbox(self, socket)
        self._open.add(outbox)
        return outbox

    def close(self) -> None:
        """Close every end that is still open, and the context. Idempotent."""
        for end in list(self._open):
            end.close()
        # Every socket is closed and lingers for nothing, so this waits for libzmq's thread only.
        self._context.term()

    def _socket_path(self, name: str) -> Path:
        if not name or "/" in name or "\0" in name:
            raise StartError(f"{name!r} cannot be the name of an inbox: it becomes a file name")
        path = self._folder / name
        length = len(os.fsencode(path))
        if length > IPC_PATH_LIMIT:
            raise StartError(
                f"socket path {path} has {length} bytes, the system allows {IPC_PATH_LIMIT}: "
                "choose a shorter run directory"
            )
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _socket(self, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        if address.startswith("tcp://"):
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            socket.setsockopt(zmq.CONNECT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, self._high_water_mark)
        socket.setsockopt(zmq.RCVHWM, self._high_water_mark)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        return socket


class ZeroMQInbox:
    """The receiving end; see `transport.link.Inbox`."""

    def __init__(
        self, network: ZeroMQNetwork, socket: zmq.Socket[bytes], endpoint: str, path: Path | None
    ) -> None:
        self._network = network
        self._socket = ZmqSocket(socket)
        self._endpoint = endpoint
        self._path = path

    @property
    def endpoint(self) -> str:
        """`ipc://PATH` or `tcp://HOST:PORT`."""
        return self._endpoint

    def receive_nowait(self) -> bytes:
        """The next message; raises trio.WouldBlock or trio.ClosedResourceError."""
        return self._socket.receive_nowait()

    async def receive(self) -> bytes:
        """Wait for the next message; raises trio.ClosedResourceError once closed."""
        return await self._socket.receive()

    def close(self) -> None:
        """Unbind, wake the receiver and remove the socket file. Idempotent."""
        if self not in self._network._open:
            return
        self._network._open.discard(self)
        self._socket.close()
        if self._path is not None:
            # libzmq removes it too, but later, in its own thread.
            self._path.unlink(missing_ok=True)


class ZeroMQOutbox:
    """The sending end; see `transport.link.Outbox`."""

    def __init__(self, network: ZeroMQNetwork, socket: zmq.Socket[bytes]) -> None:
        self._network = network
        self._socket = ZmqSocket(socket)

    def send_nowait(self, message: bytes) -> None:
        """Queue a message; raises trio.WouldBlock or trio.ClosedResourceError."""
        self._socket.send_nowait(message)

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting for room; raises trio.ClosedResourceError once closed."""
        await self._socket.send(message)

    def close(self) -> None:
        """Drop what is still queued, disconnect and wake the sender. Idempotent."""
        self._network._open.discard(self)
        self._socket.close()
