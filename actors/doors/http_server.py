"""HTTP connections on trio: hypercorn's protocol code behind an accept loop with bounds.

hypercorn's own `serve` shields every send from cancellation and bounds none, so one client that
stops reading keeps it from ever shutting down (tests/actors/test_http_clients.py has that client).
Here each connection is wrapped: a send that makes no progress for `stall_s` breaks the connection,
closing breaks pending sends at once, and an exception in one connection stays in it.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from functools import partial
from os import dup
from typing import TYPE_CHECKING

import structlog
import trio
from hypercorn.app_wrappers import ASGIWrapper
from hypercorn.config import Config
from hypercorn.events import Closed, RawData
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from actors.doors.http_wire import Http1, PeerFault

if TYPE_CHECKING:
    from hypercorn.typing import ASGIFramework

log = structlog.get_logger()

BACKLOG = 512
_KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A client whose host vanished without a word is noticed after a minute, also while nothing is sent."""
_DRAIN_S = 2.0
_DRAIN_BYTES = 16 * 2**20
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER value that makes close() drop unsent data and reset the connection."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How long the server waits for clients, in seconds, and for how many."""

    grace_s: float = 5.0
    """After shutdown: for responses in progress to end before their connections are reset."""
    stall_s: float = 60.0
    """For a client that does not read what was sent to it."""
    idle_s: float = 60.0
    """For the next request on a connection that is kept alive."""
    connections: int = 4096
    """Beyond so many nobody is let in."""


class Connection:
    """One accepted socket, in the shape that hypercorn expects of a trio stream."""

    def __init__(self, stream: trio.SocketStream, stall_s: float) -> None:
        self._stream = stream
        self._stall_s = stall_s
        self.socket = stream.socket
        for option in _KEEPALIVE:
            self.socket.setsockopt(*option)

    async def receive_some(self, max_bytes: int) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes) -> None:
        with trio.move_on_after(self._stall_s) as scope:
            await self._stream.send_all(data)
        if scope.cancelled_caught:
            log.warning("http_client_stalled", seconds=self._stall_s)
            self.abort()
            raise trio.BrokenResourceError("the client does not read")

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()

    def abort(self) -> None:
        """Reset the connection now; a pending send or receive ends with ClosedResourceError."""
        if self.socket.fileno() >= 0:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.socket.close()


class _Server(TCPServer):
    """hypercorn's protocol over one connection, without its wait for those who have gone.

    Its own waits for `idle_s` on a connection that the client has closed between two requests, and
    holds the descriptor for so long: clients who come and go would use all descriptors up.
    """

    _gone = False

    async def run(self) -> None:
        try:
            client = parse_socket_addr(self.stream.socket.family, self.stream.socket.getpeername())
            server = parse_socket_addr(self.stream.socket.family, self.stream.socket.getsockname())
            async with TaskGroup() as tasks:
                self._task_group = tasks
                self.protocol = Http1(  # type: ignore[assignment]  # its wrapper would speak HTTP/2, too
                    self.app,
                    self.config,
                    self.context,
                    tasks,
                    ConnectionState(self.state),
                    False,
                    client,
                    server,
                    self.protocol_send,
                )
                await self.idle_task.restart(tasks, self._idle_timeout)
                await self._read_data()
        except OSError:
            pass
        finally:
            await self._close()

    async def _read_data(self) -> None:
        try:
            while data := await self.stream.receive_some(MAX_RECV):
                await self.protocol.handle(RawData(bytes(data)))
            await self.protocol.handle(RawData(b""))
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        except PeerFault as fault:
            log.info("http_peer_at_fault", reason=str(fault))
            await self.protocol.handle(Closed())
            await self._drain()
        await self.protocol.handle(Closed())
        self._gone = True
        await self.idle_task.stop()

    async def _drain(self) -> None:
        """Read on for a moment, so that the peer reads what is wrong and not a reset."""
        size = 0
        with trio.move_on_after(_DRAIN_S):
            try:
                await self.stream.send_eof()
                while size < _DRAIN_BYTES and (data := await self.stream.receive_some(MAX_RECV)):
                    size += len(data)
            except (trio.ClosedResourceError, trio.BrokenResourceError, trio.BusyResourceError):
                pass

    async def _idle_timeout(self) -> None:
        # A response that was being sent while the client went away gets here after the end.
        if not self._gone:
            await super()._idle_timeout()


class _Connections:
    """The open connections, and the wait until there are none."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Connection] = set()
        self._changed = trio.Event()

    @property
    def full(self) -> bool:
        """There are as many as may be."""
        return len(self._open) >= self.most

    def add(self, connection: Connection) -> None:
        self._open.add(connection)

    def discard(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._changed.set()

    async def wait_none(self) -> None:
        while self._open:
            self._changed = trio.Event()
            await self._changed.wait()

    def abort(self) -> int:
        for connection in self._open:
            connection.abort()
        return len(self._open)


async def serve_app(
    app: ASGIFramework,
    *,
    listener_fd: int,
    shutdown: trio.Event,
    limits: ServerLimits,
    max_message_bytes: int,
) -> None:
    """Serve an ASGI application on a bound socket until `shutdown` is set, then for `grace_s` at most.

    `max_message_bytes`: of one message on a WebSocket. What a client sends in one request is the
    application's to bound. The scope's `state` has `abort`, which resets the connection.

    The descriptor stays the caller's: a later server can take the port over without a gap.
    """
    config = Config()
    config.accesslog = None
    config.errorlog = None
    config.include_server_header = False
    config.keep_alive_timeout = limits.idle_s
    config.websocket_max_message_size = max_message_bytes
    context = WorkerContext(None)
    connections = _Connections(limits.connections)
    wrapped = ASGIWrapper(app)

    async def handle(stream: trio.SocketStream) -> None:
        connection = Connection(stream, limits.stall_s)
        if connections.full:
            # A descriptor that a client takes is one that the actor's own links may need: libzmq aborts.
            log.warning("http_connection_refused", open=connections.most)
            connection.abort()
            return
        connections.add(connection)
        try:
            # It is written for trio's SSLStream and takes any stream of that shape.
            state = ConnectionState({"abort": connection.abort})
            await _Server(wrapped, config, context, state, connection)  # type: ignore[arg-type]
        except Exception:
            log.exception("http_connection_failed")
        finally:
            connections.discard(connection)
            connection.abort()

    listening = socket.socket(fileno=dup(listener_fd))
    listening.setblocking(False)
    listening.listen(BACKLOG)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(listening))
    async with trio.open_nursery() as handlers:
        try:
            async with trio.open_nursery() as accepting:
                accepting.start_soon(
                    partial(trio.serve_listeners, handle, [listener], handler_nursery=handlers)
                )
                await shutdown.wait()
                accepting.cancel_scope.cancel()
            await context.terminated.set()
            with trio.move_on_after(limits.grace_s):
                await connections.wait_none()
        finally:
            # hypercorn shields its sends: only closing the socket ends them.
            if cut := connections.abort():
                log.warning("http_connections_cut", count=cut)
            handlers.cancel_scope.cancel()
