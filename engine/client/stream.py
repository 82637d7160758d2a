"""One answer, as its reader sees it: an async iterator of pieces and finishes."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from engine.client.events import Finish, Piece

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from engine.client.events import Event
    from engine.client.exchange import Exchange


class Stream:
    """Read by one task, cancelled by any; leaving it early cancels the request.

        async with client.chat("Hello!") as stream:
            async for event in stream:
                ...

    The block may be left out when all is read (`await client.chat("Hello!").text()`); a stream that
    nobody holds any more is cancelled too.
    """

    def __init__(self, exchange: Exchange, flush: Callable[[], None]) -> None:
        """`flush` sends what the exchange has said."""
        self._exchange = exchange
        self._flush = flush
        self._token = trio.lowlevel.current_trio_token()
        self._finishes: dict[int, Finish] = {}
        # The exchange must not hold the stream, which could else never be let go.
        self._news = news = _News()
        exchange.news = news.set
        self._reading = False

    @property
    def request_id(self) -> str | None:
        """The gateway's name of the request, as in its logs; None before it was accepted."""
        name = self._exchange.request_id
        return None if name is None else name.partition(".")[0]

    @property
    def model(self) -> str | None:
        """The model that answers; None before the request was accepted."""
        return self._exchange.model

    @property
    def finishes(self) -> dict[int, Finish]:
        """How choices ended, of those whose end was read."""
        return dict(self._finishes)

    async def accepted(self) -> str:
        """Wait until the request was accepted: its id. Raises as reading does."""
        while self._exchange.request_id is None:
            if self._exchange.error is not None:
                raise self._exchange.error
            if self._exchange.is_complete:
                break
            await self._news.wait()
        await trio.lowlevel.checkpoint()
        return self.request_id or ""

    async def text(self) -> str:
        """The rest of the text, of the first choice."""
        return (await self.texts())[0]

    async def texts(self) -> list[str]:
        """The rest of the text of every choice."""
        parts: list[list[str]] = [[] for _ in range(max(1, self._exchange.choices))]
        async with self:
            async for event in self:
                parts += [[] for _ in range(self._exchange.choices - len(parts))]
                if isinstance(event, Piece):
                    parts[event.choice].append(event.text)
        return ["".join(pieces) for pieces in parts]

    def cancel(self) -> None:
        """Give the request up: what has come can still be read, then the reason "cancelled"."""
        self._exchange.cancel(trio.current_time())
        self._flush()

    def close(self) -> None:
        """Leave it: cancelled unless it is complete, and nothing more comes. Idempotent."""
        _abandon(self._exchange, self._flush)

    async def wait(self) -> None:
        """Wait until `take` has something, or nothing will ever come."""
        while not self._exchange.has_news:
            await self._news.wait()

    def take(self) -> list[Event]:
        """All events that have come; raises what ended the stream early when there are none."""
        events: list[Event] = []
        while (event := self._exchange.take(trio.current_time(), quietly=bool(events))) is not None:
            events.append(event)
            if isinstance(event, Finish):
                self._finishes[event.choice] = event
        self._flush()
        return events

    # ── the iterator ──────────────────────────────────────────────────────────────────────────

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._reading:
            raise trio.BusyResourceError("another task reads this stream")
        self._reading = True
        try:
            if self._exchange.has_news:
                await trio.lowlevel.checkpoint()
            await self.wait()
        finally:
            self._reading = False
        event = self._exchange.take(trio.current_time())
        if event is None:
            raise StopAsyncIteration
        if isinstance(event, Finish):
            self._finishes[event.choice] = event
        self._flush()
        return event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # `async for … break` leaves a stream that nobody can read on; any thread may collect it.
        if not self._exchange.is_complete:
            with suppress(trio.RunFinishedError):
                self._token.run_sync_soon(_abandon, self._exchange, self._flush)


def _abandon(exchange: Exchange, flush: Callable[[], None]) -> None:
    if not exchange.is_complete:
        exchange.abandon(trio.current_time())
        flush()


class _News:
    """An event that can be waited for again and again."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        if self._event.is_set():
            self._event = trio.Event()
        await self._event.wait()
