"""One request of a gateway with all its choices, and whoever reads it now."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Self

import trio

from actors.sessions import Diverged, Superseded
from engine.ids import request_name

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from actors.choice import Choice
    from actors.gateway import GatewayActor
    from actors.sessions import Delta, End, Generation
    from engine.transcript import Position


class OpenRequest:
    """Its choices, and its one reader.

    A reader who resumes takes the place of the one before: the text that the old one has not taken is
    folded again for the new one, so nothing is kept twice.
    """

    def __init__(self, number: int, generation: Generation) -> None:
        self.number = number
        self.generation = generation
        self.choices: list[Choice] = []
        self.reader: Reader | None = None
        self.delivered = False
        """Its reader came back for more after the last end: it has everything."""
        self.expires = float("inf")
        """When it is given up unless somebody comes for it."""
        self._news = trio.Event()

    @property
    def name(self) -> str:
        """How logs and clients name it."""
        return request_name(self.number)

    @property
    def resume_id(self) -> str:
        """Its name and a secret that is made of its key; logs have the name alone."""
        return f"{self.name}.{blake2b(self.generation.key.encode(), digest_size=8).hexdigest()}"

    @property
    def ended(self) -> bool:
        """All choices are complete."""
        return all(choice.end is not None for choice in self.choices)

    def wake(self) -> None:
        """There is something to read."""
        self._news.set()

    async def wait_news(self) -> None:
        """Until there is."""
        self._news = trio.Event()
        await self._news.wait()

    def forget_reader(self) -> None:
        """Whoever reads it does so no more, and is told."""
        if self.reader is not None:
            self.reader.superseded.set()
            self.reader = None
            self._news.set()

    def read_by(self, reader: Reader, positions: Sequence[Position] | None) -> None:
        """From now on this one reads, from these positions on; Diverged when there is no going on."""
        if positions is not None and len(positions) != len(self.choices):
            raise Diverged(f"{len(positions)} positions for {len(self.choices)} choices")
        places: Sequence[Position | None] = positions or [None] * len(self.choices)
        rewinds = [choice.rewind(place) for choice, place in zip(self.choices, places, strict=True)]
        for take in rewinds:
            take()
        self.forget_reader()
        self.reader = reader
        self.delivered = False
        self.expires = float("inf")


class Reader:
    """Implements `actors.sessions.Session`."""

    def __init__(self, gateway: GatewayActor, request: OpenRequest) -> None:
        self.request = request
        self.superseded = trio.Event()
        """Somebody else reads from now on, or may."""
        self._gateway = gateway
        self._ends = 0

    @property
    def request_id(self) -> str:
        """How logs and clients name the request."""
        return self.request.name

    @property
    def resume_id(self) -> str:
        """What it takes to resume it."""
        return self.request.resume_id

    @property
    def generation(self) -> Generation:
        """What was asked for."""
        return self.request.generation

    def events(self) -> AsyncIterator[Delta | End]:
        """Deltas as they are committed, then exactly one End a choice. May be left at any point."""
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta | End:
        request = self.request
        while True:
            if request.reader is not self:
                raise Superseded
            for choice in request.choices:
                event = choice.read()
                if event is not None:
                    self._ends += event is choice.end
                    return event
            if self._ends == len(request.choices):
                self._gateway.delivered(request)
                raise StopAsyncIteration
            await request.wait_news()

    def cancel(self, by: str) -> None:
        """Give the request up everywhere at once."""
        if self.request.reader is self:
            self._gateway.cancel(self.request, by)

    def leave(self, by: str) -> None:
        """The client is gone: it may come back for what can be resumed."""
        if self.request.reader is self:
            self._gateway.leave(self.request, by)
