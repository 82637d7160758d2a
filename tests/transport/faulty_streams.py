"""A trio stream that goes wrong at one byte: cut, damaged, or silent from there on; or that trickles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import trio
import trio.testing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Fault = Literal["cut", "damage", "silence"]
Way = Literal["to server", "to client"]


class FaultyStream(trio.abc.Stream):
    """One end of a memory stream; faults strike what is sent through it."""

    def __init__(
        self, inner: trio.abc.Stream, fault: Fault | None = None, at: int = 0, piece: int = 1 << 20
    ) -> None:
        """`at`: the byte, counted from 0, that is not delivered any more or has a bit turned.

        `piece`: bytes that are received at once, at most.
        """
        self._inner = inner
        self._fault = fault
        self._at = at
        self._piece = piece
        self.sent = 0

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        data = bytearray(data)
        here = self._at - self.sent
        struck = self._fault is not None and here < len(data)
        self.sent += len(data)
        if not struck:
            await self._inner.send_all(data)
        elif self._fault == "damage":
            if here >= 0:
                data[here] ^= 1 << (self._at % 8)
            await self._inner.send_all(data)
        else:
            if here > 0:
                await self._inner.send_all(data[:here])
            if self._fault == "cut":
                await self._inner.aclose()
                raise trio.BrokenResourceError("cut")
            await trio.lowlevel.checkpoint()

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._inner.receive_some(min(self._piece, max_bytes or self._piece))

    async def aclose(self) -> None:
        await self._inner.aclose()


class FaultyPath:
    """The way from a client to a server: connection k suffers fault k of `faults`, later ones none."""

    def __init__(
        self,
        handle: Callable[[trio.abc.Stream], Awaitable[None]],
        nursery: trio.Nursery,
        faults: Sequence[tuple[Way, Fault, int]],
        piece: int = 1 << 20,
    ) -> None:
        self.handle = handle
        self.connections = 0
        self._nursery = nursery
        self._faults = faults
        self._piece = piece
        self._ends: tuple[FaultyStream, FaultyStream] | None = None

    async def connect(self) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        here, there = trio.testing.memory_stream_pair()
        way, fault, at = None, None, 0
        if self.connections < len(self._faults):
            way, fault, at = self._faults[self.connections]
        self.connections += 1
        client = FaultyStream(here, fault if way == "to server" else None, at, self._piece)
        server = FaultyStream(there, fault if way == "to client" else None, at, self._piece)
        self._ends = client, server
        self._nursery.start_soon(self.handle, server)
        return client

    def bytes_sent(self) -> dict[Way, int]:
        """Bytes that the last connection carried each way."""
        assert self._ends is not None
        return {"to server": self._ends[0].sent, "to client": self._ends[1].sent}
