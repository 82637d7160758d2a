"""The ZeroMQ door: the stream protocol over one ROUTER socket, for `engine.client` and its like.

A message of two frames, the client's routing id and one JSON object, either way. A routing id is a
connection: a client that connects again takes another, and resumes.

    what a client may do                        what it costs
    ─────────────────────────────────────────────────────────────────────────────────────────────
    read nothing                                its high-water mark; its own sends wait, nobody else's
    say nothing for `peer_silence_s`            its place; what can be resumed is kept for its grace
    vanish                                      the same, at the next message to it
    send what is no message, or too large       an answer
    send what is far too large                  its connection (libzmq closes it, so nobody can answer)
    be one too many                             an answer, or without a word its connection
    connect and say nothing                     its connection, after `peer_silence_s` without a handshake

ROUTER does not tell of clients that go, hence the silence: a client with open streams pings.
"""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio
import zmq

from actors.doors.intake import Intake
from actors.doors.stream_messages import begun_by
from actors.doors.streams import StreamPeer
from actors.doors.zeromq_connections import ZeroMQConnections
from engine.stream_protocol import Failed, StreamError, encode
from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.sessions import Sessions

log = structlog.get_logger()

ENVELOPE_BYTES = 64 * 2**10
"""What a message may have beside its body."""
MOST_TAKEN = 64
"""Messages that are taken at once, before others have their turn."""
SEND_HIGH_WATER_MARK = 1000
"""Messages that wait for one client inside libzmq."""
RECEIVE_HIGH_WATER_MARK = 16
"""Messages of one client that wait for us inside libzmq: each may be FAR_TOO_LARGE, nearly."""
FAR_TOO_LARGE = 4
"""Times the largest message; what is less is read, and told that it is too large."""
ROOM_FIRST_S, ROOM_MOST_S = 0.005, 0.5
"""Pauses between two looks whether a client has room again: libzmq does not tell of one client."""
RETRY_AFTER_S = 1.0
"""When a client may knock again that was one too many."""
LINGER_MS = 200
"""What last words may take to leave, when the door closes."""


class DoorLimits(msgspec.Struct, frozen=True):
    """How much patience the door has, and how many clients."""

    peers: int = 1024
    connections: int = 1152
    """Of those too who have said nothing yet; beyond them connections are shut down."""
    peer_silence_s: float = 10.0
    sweep_s: float = 1.0
    grace_s: float = 0.8
    """What open streams have from the shutdown to the door's end."""


async def serve_zeromq(
    sessions: Sessions,
    *,
    listeners: Mapping[str, int],
    shutdown: trio.Event,
    max_body_bytes: int,
    limits: DoorLimits | None = None,
) -> None:
    """Serve the door until `shutdown` is set.

    `listeners`: endpoints (`tcp://…`, `ipc://…`) and the descriptors that listen there already, which
    become the door's.
    """
    limits = limits or DoorLimits()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router = context.socket(zmq.ROUTER)
    try:
        # Before binding: what is bound later has the options of that moment.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        # Bytes at random are a peer of ZeroMQ 2 with a message to libzmq, which then never lets go of them.
        # With a domain, and nobody who asks about it, it takes peers of ZeroMQ 3 and later only.
        router.setsockopt(zmq.ZAP_DOMAIN, b"estafet")
        router.setsockopt(zmq.MAXMSGSIZE, FAR_TOO_LARGE * (max_body_bytes + ENVELOPE_BYTES))
        router.setsockopt(zmq.SNDHWM, SEND_HIGH_WATER_MARK)
        router.setsockopt(zmq.RCVHWM, RECEIVE_HIGH_WATER_MARK)
        router.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * limits.peer_silence_s))
        connections = ZeroMQConnections(router, listeners.values(), limits.connections)
        for endpoint, descriptor in listeners.items():
            router.setsockopt(zmq.IPV6, int("[" in endpoint))
            router.setsockopt(zmq.USE_FD, descriptor)
            router.bind(endpoint)
        socket = ZmqSocket(router)
        log.info("zeromq_door_opened", endpoints=list(listeners))
        try:
            async with trio.open_nursery() as nursery:
                most_bytes = max_body_bytes + ENVELOPE_BYTES
                door = ZeroMQDoor(sessions, socket, nursery, most_bytes, limits)
                nursery.start_soon(connections.watch)
                nursery.start_soon(door.receive)
                nursery.start_soon(door.sweep)
                await shutdown.wait()
                await door.finish()
                nursery.cancel_scope.cancel()
        finally:
            connections.close()
            socket.close(linger_ms=LINGER_MS)
    finally:
        router.close(linger=LINGER_MS)
        with trio.CancelScope(shield=True):
            # Not longer than the last words take.
            await trio.to_thread.run_sync(context.term)
    log.info("zeromq_door_closed")


class _Peer:
    """One client's connection."""

    def __init__(self, now: float) -> None:
        self.heard = now
        self.streams: StreamPeer


class ZeroMQDoor:
    """Everybody who is connected."""

    def __init__(
        self,
        sessions: Sessions,
        socket: ZmqSocket,
        nursery: trio.Nursery,
        most_bytes: int,
        limits: DoorLimits,
    ) -> None:
        """`most_bytes`: of a message."""
        self._sessions = sessions
        self._intake = Intake(sessions)
        self._socket = socket
        self._nursery = nursery
        self._most_bytes = most_bytes
        self._limits = limits
        self._peers: dict[bytes, _Peer] = {}
        self._finishing = False
        self.refused = 0
        """Messages of clients that were one too many."""

    async def receive(self) -> None:
        """Hand every message to its client's streams, for ever."""
        while True:
            self._take(await self._socket.receive_frames())
            try:
                for _ in range(MOST_TAKEN):
                    self._take(self._socket.receive_frames_nowait())
            except trio.WouldBlock:
                pass

    async def sweep(self) -> None:
        """Let go of clients that say nothing, for ever."""
        while True:
            await trio.sleep(self._limits.sweep_s)
            overdue = trio.current_time() - self._limits.peer_silence_s
            for name, peer in list(self._peers.items()):
                if peer.heard < overdue:
                    self._drop(name, "client_silence")

    async def finish(self) -> None:
        """Accept nobody more, and let the streams of all others end."""
        self._finishing = True
        async with trio.open_nursery() as nursery:
            for peer in self._peers.values():
                nursery.start_soon(peer.streams.finish, self._limits.grace_s)

    def statistics(self) -> dict[str, int | float]:
        """Clients now, and what was refused since the beginning."""
        return {"peers": len(self._peers), "refused": self.refused}

    def check(self) -> None:
        """Assert what always holds."""
        assert len(self._peers) <= self._limits.peers
        for peer in self._peers.values():
            peer.streams.check()

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _take(self, frames: list[bytes]) -> None:
        name, *rest = frames
        peer = self._peers.get(name)
        if peer is None:
            if self._finishing:
                return
            if len(self._peers) >= self._limits.peers:
                self.refused += 1
                said = f"{self._limits.peers} clients are connected; try again later."
                error = StreamError(said, 429, "too_many_clients", retry_after_s=RETRY_AFTER_S)
                self._refuse(name, error, begun_by(rest[0]) if rest else None)
                return
            peer = self._peers[name] = _Peer(trio.current_time())
            send = partial(self._send, name)
            peer.streams = StreamPeer(self._sessions, self._intake, self._nursery, send)
        peer.heard = trio.current_time()
        if len(rest) == 1 and len(rest[0]) <= self._most_bytes:
            peer.streams.receive(rest[0])
        elif len(rest) == 1:
            said = f"The message is larger than {self._most_bytes} bytes."
            self._refuse(name, StreamError(said, 413, "request_too_large"), begun_by(rest[0]))
        else:
            said = f"Not a message: {len(rest)} frames instead of one."
            self._refuse(name, StreamError(said, code="invalid_message"))

    async def _send(self, name: bytes, message: bytes) -> None:
        """Wait for room at one client; BrokenResourceError when it is gone."""
        pause = ROOM_FIRST_S
        while True:
            try:
                self._socket.send_frames_nowait((name, message))
            except trio.WouldBlock:
                await trio.sleep(pause)
                pause = min(2 * pause, ROOM_MOST_S)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._drop(name, "client_disconnect")
                raise trio.BrokenResourceError from None
            else:
                return

    def _refuse(self, name: bytes, error: StreamError, stream: str | None = None) -> None:
        """A word to a client, if it has room for one."""
        try:
            self._socket.send_frames_nowait((name, encode(Failed(error, stream))))
        except trio.WouldBlock:
            pass
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise

    def _drop(self, name: bytes, by: str) -> None:
        """A client is gone: its place is free."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            if streams := peer.streams.statistics()["streams"]:
                log.info("zeromq_client_lost", by=by, streams=streams)
            peer.streams.close(by)
