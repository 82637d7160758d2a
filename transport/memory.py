"""The link inside one process: what actors talk over in tests, in real or in virtual time.

Messages are bytes, as on any link, so that whatever passes here passes between processes too.

    MemoryOutbox ──▶ _Pipe (at most `high_water_mark` messages) ──▶ MemoryInbox

A pipe lives as long as anything can still come out of it: it outlives its closed outbox while the
inbox drains it (those messages had left), and it outlives a lost inbox while its outbox is open.
"""

from __future__ import annotations

from collections import deque

import trio

SCHEME = "memory:"


class _Pipe:
    """The messages on their way from one outbox to the inbox at `endpoint`."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.messages: deque[bytes] = deque()
        self.writer_closed = False
        self.room = trio.lowlevel.ParkingLot()


class MemoryNetwork:
    """A LinkFactory whose endpoints exist only here; one network connects any number of actors."""

    def __init__(self, *, high_water_mark: int = 1000) -> None:
        """`high_water_mark`: messages that one outbox may have under way before senders wait."""
        self.high_water_mark = high_water_mark
        self._inboxes: dict[str, MemoryInbox] = {}
        self._pipes: dict[str, list[_Pipe]] = {}
        self._lost = 0

    def bind(self, name: str) -> MemoryInbox:
        """Open the inbox `memory:NAME`; raises ValueError when that name is bound already."""
        endpoint = SCHEME + name
        if endpoint in self._inboxes:
            raise ValueError(f"{endpoint} is bound already")
        inbox = self._inboxes[endpoint] = MemoryInbox(self, endpoint)
        return inbox

    def connect(self, endpoint: str) -> MemoryOutbox:
        """Open an outbox to `memory:NAME`, bound or not yet."""
        if not endpoint.startswith(SCHEME):
            raise ValueError(f"{endpoint!r} is not an endpoint of a memory network")
        pipe = _Pipe(endpoint)
        self._pipes.setdefault(endpoint, []).append(pipe)
        return MemoryOutbox(self, pipe)

    def cut(self, endpoint: str) -> None:
        """Lose an inbox as if its process had been killed: nobody is told.

        What is under way is lost. Senders go on until the high-water mark, as with any dead peer.
        A task that still receives there waits until it is cancelled or the inbox is closed: the
        dead learn nothing.
        """
        self._inboxes.pop(endpoint, None)
        for pipe in self._pipes.get(endpoint, []):
            self._lost += len(pipe.messages)
            pipe.messages.clear()
            pipe.room.unpark_all()
        self._forget_drained(endpoint)

    def check(self) -> None:
        """Assert that bounds hold and that nothing is kept for ends which are gone."""
        for endpoint, pipes in self._pipes.items():
            assert pipes, f"an empty list is kept for {endpoint}"
            for pipe in pipes:
                assert len(pipe.messages) <= self.high_water_mark
                assert not pipe.writer_closed or (pipe.messages and endpoint in self._inboxes)

    def statistics(self) -> dict[str, int]:
        """Counts of open inboxes, pipes, messages under way, and messages lost with their inbox."""
        pipes = [pipe for pipes in self._pipes.values() for pipe in pipes]
        return {
            "inboxes": len(self._inboxes),
            "pipes": len(pipes),
            "queued": sum(len(pipe.messages) for pipe in pipes),
            "lost": self._lost,
        }

    def _next_message(self, inbox: MemoryInbox) -> bytes | None:
        """Take one message for a bound inbox, from its pipes in turn so that none starves."""
        if self._inboxes.get(inbox.endpoint) is not inbox:
            return None
        pipes = self._pipes.get(inbox.endpoint, [])
        for at, pipe in enumerate(pipes):
            if pipe.messages:
                message = pipe.messages.popleft()
                pipe.room.unpark()
                pipes.append(pipes.pop(at))
                if pipe.writer_closed and not pipe.messages:
                    self._forget_drained(inbox.endpoint)
                return message
        return None

    def _wake(self, endpoint: str) -> None:
        if inbox := self._inboxes.get(endpoint):
            inbox._arrival.unpark()

    def _close_writer(self, pipe: _Pipe) -> None:
        pipe.writer_closed = True
        pipe.room.unpark_all()
        self._forget_drained(pipe.endpoint)

    def _forget_drained(self, endpoint: str) -> None:
        bound = endpoint in self._inboxes
        pipes = [
            pipe
            for pipe in self._pipes.pop(endpoint, [])
            if not pipe.writer_closed or (pipe.messages and bound)
        ]
        if pipes:
            self._pipes[endpoint] = pipes


class MemoryInbox:
    """The receiving end; see `transport.link.Inbox`."""

    def __init__(self, network: MemoryNetwork, endpoint: str) -> None:
        self._network = network
        self._endpoint = endpoint
        self._arrival = trio.lowlevel.ParkingLot()
        self._closed = False

    @property
    def endpoint(self) -> str:
        """`memory:NAME`."""
        return self._endpoint

    def receive_nowait(self) -> bytes:
        """The next message; raises trio.WouldBlock or trio.ClosedResourceError."""
        if self._closed:
            raise trio.ClosedResourceError
        message = self._network._next_message(self)
        if message is None:
            raise trio.WouldBlock
        return message

    async def receive(self) -> bytes:
        """Wait for the next message; raises trio.ClosedResourceError once closed."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._arrival:
            raise trio.BusyResourceError("another task is receiving from this inbox")
        while True:
            try:
                message = self.receive_nowait()
            except trio.WouldBlock:
                await self._arrival.park()
            else:
                # The message is out of the queue: a cancellation now must not lose it.
                await trio.lowlevel.cancel_shielded_checkpoint()
                return message

    def close(self) -> None:
        """Unbind, losing what was not received, and wake the receiver. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._network._inboxes.get(self._endpoint) is self:
            self._network.cut(self._endpoint)
        self._arrival.unpark_all()


class MemoryOutbox:
    """The sending end; see `transport.link.Outbox`."""

    def __init__(self, network: MemoryNetwork, pipe: _Pipe) -> None:
        self._network = network
        self._pipe = pipe

    def send_nowait(self, message: bytes) -> None:
        """Queue a message; raises trio.WouldBlock or trio.ClosedResourceError."""
        if self._pipe.writer_closed:
            raise trio.ClosedResourceError
        if len(self._pipe.messages) >= self._network.high_water_mark:
            raise trio.WouldBlock
        # Copied, so that a caller's reused buffer cannot change what was sent.
        self._pipe.messages.append(bytes(message))
        self._network._wake(self._pipe.endpoint)

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting for room; raises trio.ClosedResourceError once closed."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._pipe.room:
            raise trio.BusyResourceError("another task is sending to this outbox")
        while True:
            try:
                self.send_nowait(message)
            except trio.WouldBlock:
                await self._pipe.room.park()
            else:
                await trio.lowlevel.cancel_shielded_checkpoint()
                return

    def close(self) -> None:
        """Disconnect and wake the sender; what a bound inbox has not read yet, it still may. Idempotent."""
        if not self._pipe.writer_closed:
            self._network._close_writer(self._pipe)
