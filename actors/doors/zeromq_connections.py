"""How many connections the ZeroMQ door may have.

libzmq accepts without end, and ends the whole process when no descriptor is left for a socket of its
own. So connections are counted by what it tells of them, and one too many is shut down, which libzmq
takes for a client that went away.

It tells of everybody whom it accepts, but not of a connection that another one with the same routing
id took over: before somebody is sent away, those thought to be open are looked at, now and then.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import structlog
import trio
import zmq
from zmq.utils.monitor import parse_monitor_message

from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from collections.abc import Iterable

log = structlog.get_logger()

LOOK_S = 1.0
"""Between two looks at all of them: a look takes milliseconds."""


class ZeroMQConnections:
    """The connections of a socket that listens at these descriptors."""

    def __init__(self, bound: zmq.Socket[bytes], listeners: Iterable[int], most: int) -> None:
        self._names = {_name_of(descriptor) for descriptor in listeners}
        self._most = most
        self._open: set[int] = set()
        self._looked = -LOOK_S
        self._told = ZmqSocket(bound.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED))
        self.refused = 0

    async def watch(self) -> None:
        """Count those who come and go, and send away whoever is one too many; for ever."""
        while True:
            event = parse_monitor_message(await self._told.receive_frames())
            descriptor = int(event["value"])
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._accepted(descriptor)
            else:
                self._open.discard(descriptor)

    def close(self) -> None:
        """Hear nothing more; the connections are the socket's."""
        self._told.close()

    def _accepted(self, descriptor: int) -> None:
        now = trio.current_time()
        if len(self._open) >= self._most and now - self._looked >= LOOK_S:
            self._looked = now
            self._open = {one for one in self._open if self._connection(one, end=False)}
            if len(self._open) >= self._most:
                log.warning("zeromq_connection_refused", open=len(self._open), refused=self.refused)
        if len(self._open) < self._most:
            self._open.add(descriptor)
        else:
            self.refused += 1
            self._connection(descriptor, end=True)

    def _connection(self, descriptor: int, *, end: bool) -> bool:
        """Whether this is a connection to the door, and not what else has its number by now; `end` it."""
        try:
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()
                ours = connection.getsockname() in self._names
                if ours and end:
                    connection.shutdown(socket.SHUT_RDWR)
                return ours
        except OSError:
            return False


def _name_of(descriptor: int) -> object:
    with socket.socket(fileno=os.dup(descriptor)) as listener:
        return listener.getsockname()
