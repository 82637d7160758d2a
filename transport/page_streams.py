"""Bytes between hosts, straight out of and into the memory of pages.

    SocketBytes    a TCP socket: the kernel reads a page where it lies and writes it where it belongs
    StreamBytes    any trio stream: TLS, or memory in tests; one copy more on each side

What arrives is put away by `receive_into(room)`: the room is asked for when the bytes are there, with no
waiting in between. So a slot that was given up while its page was on the way is never written to, even
though somebody was waiting to do so.
"""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Protocol

import trio

from transport.errors import TransferCut
from transport.pages import CHECKPOINT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUFFERS_A_CALL = 64
"""Of sendmsg(2); the kernel takes 1,024."""

UNSENT_BYTES = 1 << 20
"""A sender is woken when the kernel holds less than this that is not on its way (TCP_NOTSENT_LOWAT)."""


class Stalled(TransferCut):
    """The peer kept us waiting for longer than it may."""


class ByteStream(Protocol):
    """A reliable stream of bytes, both ways; one task at a time sends, one receives."""

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Send all of these, one after the other. Raises TransferCut."""
        ...

    async def receive_into(self, room: Callable[[], memoryview], patience_s: float) -> int:
        """Wait for bytes and put some where `room()` says; returns how many, 0 at the stream's end.

        `room()` is called once the bytes are there and must always give at least one byte of room.
        Raises TransferCut when the stream broke, Stalled when nothing came for `patience_s` seconds.
        """
        ...

    async def aclose(self) -> None:
        """Close at once. Idempotent."""
        ...


class SocketBytes:
    """A TCP connection as a ByteStream."""

    def __init__(self, stream: trio.SocketStream, stall_s: float) -> None:
        """Take a connection over from trio. `stall_s`: how long a peer may keep a sender waiting."""
        with contextlib.suppress(OSError):  # the socket of another family
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        # trio's own receive_into would wait with the room in its hand.
        self._socket = socket.socket(fileno=stream.socket.detach())
        self._socket.setblocking(False)
        self._stall_s = stall_s
        self._since_checkpoint = 0

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        await trio.lowlevel.checkpoint()
        left = deque(memoryview(buffer) for buffer in buffers if len(buffer))
        while left:
            try:
                sent = self._socket.sendmsg([left[index] for index in range(min(len(left), BUFFERS_A_CALL))])
            except BlockingIOError:
                with trio.move_on_after(self._stall_s) as scope:
                    await trio.lowlevel.wait_writable(self._socket)
                if scope.cancelled_caught:
                    raise Stalled(f"the peer took nothing for {self._stall_s} s") from None
                continue
            except OSError as error:
                raise TransferCut(f"the connection broke: {error.strerror}") from None
            while sent:
                first = left.popleft()
                if len(first) > sent:
                    left.appendleft(first[sent:])
                sent -= min(sent, len(first))

    async def receive_into(self, room: Callable[[], memoryview], patience_s: float) -> int:
        if self._since_checkpoint >= CHECKPOINT_BYTES:
            self._since_checkpoint = 0
            await trio.lowlevel.checkpoint()
        else:
            await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                received = self._socket.recv_into(room())
            except BlockingIOError:
                with trio.move_on_after(patience_s) as scope:
                    await trio.lowlevel.wait_readable(self._socket)
                if scope.cancelled_caught:
                    raise Stalled(f"the peer sent nothing for {patience_s} s") from None
            except OSError as error:
                raise TransferCut(f"the connection broke: {error.strerror}") from None
            else:
                self._since_checkpoint += received
                return received

    async def aclose(self) -> None:
        if self._socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self._socket)
            self._socket.close()
        await trio.lowlevel.cancel_shielded_checkpoint()


class StreamBytes:
    """Any trio stream as a ByteStream."""

    def __init__(self, stream: trio.abc.Stream, stall_s: float) -> None:
        """Take a stream over. `stall_s`: how long one page, or one header, may take to go out."""
        self._stream = stream
        self._stall_s = stall_s
        self._read = memoryview(b"")

    async def send(self, buffers: Sequence[bytes | memoryview]) -> None:
        for buffer in buffers:
            try:
                with trio.move_on_after(self._stall_s) as scope:
                    await self._stream.send_all(buffer)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise TransferCut("the stream broke") from None
            if scope.cancelled_caught:
                raise Stalled(f"the peer took nothing for {self._stall_s} s")

    async def receive_into(self, room: Callable[[], memoryview], patience_s: float) -> int:
        if not self._read:
            try:
                with trio.move_on_after(patience_s) as scope:
                    self._read = memoryview(await self._stream.receive_some())
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                raise TransferCut("the stream broke") from None
            if scope.cancelled_caught:
                raise Stalled(f"the peer sent nothing for {patience_s} s")
        else:
            await trio.lowlevel.checkpoint()
        target = room()
        size = min(len(target), len(self._read))
        target[:size] = self._read[:size]
        self._read = self._read[size:]
        return size

    async def aclose(self) -> None:
        await trio.aclose_forcefully(self._stream)


def byte_stream(stream: trio.abc.Stream, stall_s: float) -> ByteStream:
    """The best ByteStream there is over a stream, which belongs to it from now on."""
    if isinstance(stream, trio.SocketStream):
        return SocketBytes(stream, stall_s)
    return StreamBytes(stream, stall_s)
