"""What is sent on one connection: one message at a time, and short answers behind a bound."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import trio

from engine.stream_protocol import encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from engine.stream_protocol import ToClient

MAX_ANSWERS = 512
"""Enough for an error to every stream of a connection, and for who waits for `READY_ANSWERS`."""
READY_ANSWERS = 64


class Outbox:
    """The sending side. Tasks wait for their turn with `say`; who must not wait posts."""

    def __init__(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        self._send = send
        self._turn = trio.Lock()
        self._answers: deque[ToClient] = deque()
        self._closed = False
        self._taken = trio.Event()
        self.dropped = 0
        """Answers that nobody would have read."""

    def __len__(self) -> int:
        """Answers that wait."""
        return len(self._answers)

    async def say(self, message: ToClient) -> None:
        """Send a message when it is its turn."""
        data = encode(message)
        async with self._turn:
            await self._send(data)

    def post(self, message: ToClient) -> None:
        """Leave a short answer to `send_posted`; it is dropped when MAX_ANSWERS wait."""
        if self._closed or len(self._answers) >= MAX_ANSWERS:
            self.dropped += 1
        else:
            self._answers.append(message)

    async def send_posted(self) -> None:
        """Send what was posted, until nothing is left."""
        while self._answers:
            await self.say(self._answers.popleft())
            self._taken.set()

    async def wait_ready(self) -> None:
        """Wait until few answers wait."""
        while len(self._answers) >= READY_ANSWERS:
            self._taken = trio.Event()
            await self._taken.wait()

    def close(self) -> None:
        """Nobody is there."""
        self._closed = True
        self._answers.clear()
        self._taken.set()
