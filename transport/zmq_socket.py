"""A ZeroMQ socket native to trio, that one task may send on while another receives.

libzmq shows both directions through one file descriptor, and that descriptor is a wake-up call, not
a state: *any* libzmq call may answer it and so take the wake-up from the task that waited for it.
What keeps the two tasks from sleeping through each other's news:

1. After every libzmq call, whatever it returned, the task parked in the other direction is woken if
   EVENTS permits it to go on (`_wake_other`).
2. A non-blocking call may fail although it could succeed, since libzmq does not look at its own
   mailbox on every call; reading EVENTS makes it look. So a refused call is tried again after that,
   and EVENTS is read once more right before parking.
3. trio allows one waiter a descriptor, so the second direction waits on a duplicate.
4. A parked task is woken by `notify_closing` on its descriptor, which costs nothing while nobody is
   parked; the woken task tries again unless the socket really was closed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar, cast

import trio
import zmq

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

# As plain integers: pyzmq's enumerations are a microsecond a comparison.
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)
_OTHER = {_IN: _OUT, _OUT: _IN}


class ZmqSocket:
    """Owns a zmq socket that is bound, connected and configured by the caller beforehand.

    One task may send and one other receive at the same time. `send` and `send_frames` wait for room,
    which a ROUTER cannot do (it is writable when *any* peer is): there, use the `_nowait` forms and
    treat trio.WouldBlock as a slow peer.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._is_router = self._option(zmq.TYPE) == zmq.ROUTER
        self._fd = self._option(zmq.FD)
        self._fds: dict[int, int] = {}
        self._parked: set[int] = set()
        self._busy: set[int] = set()
        self._closed = False

    def send_nowait(self, message: bytes) -> None:
        """Queue one single-frame message; raises trio.WouldBlock or trio.ClosedResourceError."""
        # Copying is right for messages: at these sizes it is cheaper than reference counting.
        self._attempt(_OUT, lambda: self._socket.send(message, zmq.NOBLOCK))

    def receive_nowait(self) -> bytes:
        """Take one single-frame message; raises trio.WouldBlock or trio.ClosedResourceError."""
        return self._attempt(_IN, lambda: self._socket.recv(zmq.NOBLOCK))

    def send_frames_nowait(self, frames: Sequence[bytes]) -> None:
        """Queue one message of several frames; errors as `send_nowait`, all frames or none."""
        self._attempt(_OUT, lambda: self._socket.send_multipart(frames, zmq.NOBLOCK))

    def receive_frames_nowait(self) -> list[bytes]:
        """Take all frames of one message; errors as `receive_nowait`."""
        return self._attempt(_IN, lambda: self._socket.recv_multipart(zmq.NOBLOCK))

    async def send(self, message: bytes) -> None:
        """Queue one single-frame message, waiting for room."""
        await self._until_done(_OUT, lambda: self.send_nowait(message))

    async def receive(self) -> bytes:
        """Wait for one single-frame message; cancelled, it has taken none."""
        return await self._until_done(_IN, self.receive_nowait)

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        """Queue one message of several frames, waiting for room."""
        await self._until_done(_OUT, lambda: self.send_frames_nowait(frames))

    async def receive_frames(self) -> list[bytes]:
        """Wait for all frames of one message; cancelled, it has taken none."""
        return await self._until_done(_IN, self.receive_frames_nowait)

    def close(self, linger_ms: int = 0) -> None:
        """Drop what is queued, close the socket and wake its tasks with ClosedResourceError. Idempotent.

        `linger_ms`: so long what is queued may still leave, while the context waits for it.
        """
        if self._closed:
            return
        self._closed = True
        for direction in self._parked:
            trio.lowlevel.notify_closing(self._fds[direction])
        for fd in self._fds.values():
            if fd != self._fd:
                os.close(fd)
        self._socket.close(linger=linger_ms)

    def _option(self, option: int) -> int:
        return cast("int", self._socket.getsockopt(option))

    def _attempt(self, direction: int, call: Callable[[], T]) -> T:
        """Perform one libzmq call, and pass on to the other direction what it may have swallowed."""
        if self._closed:
            raise trio.ClosedResourceError
        try:
            try:
                return call()
            except zmq.Again:
                # Reading EVENTS makes libzmq look at its mailbox, which a call does once a
                # millisecond only: what refuses now refuses for good.
                self._wake_other(direction, self._option(zmq.EVENTS))
                return call()
        except zmq.Again:
            raise trio.WouldBlock from None
        finally:
            if _OTHER[direction] in self._parked:
                self._wake_other(direction, self._option(zmq.EVENTS))

    async def _until_done(self, direction: int, attempt: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        if direction in self._busy:
            raise trio.BusyResourceError("another task uses this direction of the socket")
        if self._is_router and direction == _OUT:
            raise TypeError("a ROUTER cannot wait for room at one peer: use the _nowait form")
        self._busy.add(direction)
        try:
            while True:
                try:
                    result = attempt()
                except trio.WouldBlock:
                    await self._wait_for(direction)
                else:
                    # Done is done: a cancellation now must not lose a message, nor hide a send.
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    return result
        finally:
            self._busy.discard(direction)

    async def _wait_for(self, direction: int) -> None:
        """Return when it is worth trying again, at once if EVENTS says so already."""
        events = self._option(zmq.EVENTS)
        self._wake_other(direction, events)
        if events & direction:
            return
        if direction not in self._fds:
            self._fds[direction] = os.dup(self._fd) if self._fds else self._fd
        self._parked.add(direction)
        try:
            await trio.lowlevel.wait_readable(self._fds[direction])
        except trio.ClosedResourceError:
            if self._closed:
                raise
        finally:
            self._parked.discard(direction)

    def _wake_other(self, direction: int, events: int) -> None:
        other = _OTHER[direction]
        if other in self._parked and events & other:
            trio.lowlevel.notify_closing(self._fds[other])
