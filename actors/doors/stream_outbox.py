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
        self._answers: deque[tuple[ToClient, str | None]] = deque()
        self._ending: set[str] = set()
        self._closed = False
        self._taken = trio.Event()
        self.dropped = 0
        """Answers that nobody would have read."""

    def __len__(self) -> int:
        """Answers that wait."""
        return len(self._answers)

    def ends(self, name: str) -> bool:
        """Whether the terminal message of a stream of this name waits.

        Another one of the name must not begin before: what it says could come first.
        """
        return name in self._ending

    async def say(self, message: ToClient) -> None:
        """Send a message when it is its turn."""
        data = encode(message)
        async with self._turn:
            await self._send(data)

    def post(self, message: ToClient, ending: str | None = None) -> None:
        """Leave a short answer to `send_posted`; it is dropped when MAX_ANSWERS wait.

        `ending`: it is the terminal message of the stream of this name.
        """
        if self._closed or len(self._answers) >= MAX_ANSWERS:
            self.dropped += 1
            return
        self._answers.append((message, ending))
        if ending is not None:
            self._ending.add(ending)

    async def send_posted(self) -> None:
        """Send what was posted, until nothing is left."""
        while self._answers:
            async with self._turn:
                if self._closed:
                    return
                message, ending = self._answers.popleft()
                if ending is not None:
                    # What comes now waits for its turn behind this.
                    self._ending.discard(ending)
                await self._send(encode(message))
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
        self._ending.clear()
        self._taken.set()
