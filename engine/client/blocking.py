"""The client for programs without an event loop: a thread of its own runs the async one."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, TypeVar

import trio

from engine.client.client import Client
from engine.client.discovery import find_endpoint
from engine.client.errors import ClientClosed
from engine.client.events import Piece

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Self, Unpack

    from engine.client.events import Event, Finish
    from engine.client.patience import Patience
    from engine.client.request import ChatParameters, CompletionParameters
    from engine.client.stream import Stream

T = TypeVar("T")


class BlockingClient:
    """As `Client`, for any number of threads. A context manager, or to be closed.

    with BlockingClient() as client:
        for event in client.chat("Tell me a story."):
            ...
    """

    def __init__(self, endpoint: str | None = None, *, patience: Patience | None = None) -> None:
        """As `Client`; raises what entering its block would."""
        self.endpoint = find_endpoint() if endpoint is None else endpoint
        started: SimpleQueue[_Loop | BaseException] = SimpleQueue()
        self._thread = threading.Thread(
            target=_run, args=(self.endpoint, patience, started), name="estafet-client", daemon=True
        )
        self._thread.start()
        begun = started.get()
        if isinstance(begun, BaseException):
            self._thread.join()
            raise begun
        self._loop = begun

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], **parameters: Unpack[ChatParameters]
    ) -> BlockingStream:
        """As `Client.chat`, with the same parameters."""
        return self._ask(lambda: self._loop.client.chat(messages, **parameters))

    def complete(
        self, prompt: str | Sequence[int], **parameters: Unpack[CompletionParameters]
    ) -> BlockingStream:
        """As `Client.complete`, with the same parameters."""
        return self._ask(lambda: self._loop.client.complete(prompt, **parameters))

    def statistics(self) -> dict[str, int | float]:
        """Requests now, and what happened since the beginning."""
        return self._loop.call(self._loop.client.statistics)

    def close(self) -> None:
        """Cancel what is open and end the thread. Idempotent, and right from any thread."""
        self._loop.stop()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, ask: Callable[[], Stream]) -> BlockingStream:
        return BlockingStream(self._loop, self._loop.call(ask))


class BlockingStream:
    """As `Stream`: an iterator of pieces and finishes, for one thread at a time."""

    def __init__(self, loop: _Loop, stream: Stream) -> None:
        self._loop = loop
        self._stream = stream
        self._events: deque[Event] = deque()

    @property
    def request_id(self) -> str | None:
        """The gateway's name of the request; None before it was accepted."""
        return self._stream.request_id

    @property
    def model(self) -> str | None:
        """The model that answers; None before the request was accepted."""
        return self._stream.model

    @property
    def finishes(self) -> dict[int, Finish]:
        """How choices ended, of those whose end has come."""
        return self._stream.finishes

    def accepted(self) -> str:
        """Wait until the request was accepted: its id."""
        return self._loop.wait(self._stream.accepted)

    def text(self) -> str:
        """The rest of the text, of the first choice."""
        return self.texts()[0]

    def texts(self) -> list[str]:
        """The rest of the text of every choice."""
        parts: dict[int, list[str]] = {0: []}
        with self:
            for event in self:
                if isinstance(event, Piece):
                    parts.setdefault(event.choice, []).append(event.text)
                else:
                    parts.setdefault(event.choice, [])
        return ["".join(parts[choice]) for choice in sorted(parts)]

    def cancel(self) -> None:
        """Give the request up: what has come can still be read, then the reason "cancelled"."""
        self._loop.call(self._stream.cancel)

    def close(self) -> None:
        """Leave it: cancelled unless it is complete. Idempotent."""
        self._events.clear()
        self._loop.soon(self._stream.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while not self._events:
            # Waiting takes nothing: a Ctrl-C in the middle of it loses nothing.
            self._loop.wait(self._stream.wait)
            events = self._loop.call(self._stream.take)
            if not events:
                raise StopIteration
            self._events += events
        return self._events.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # `for … break` leaves a stream that nobody can read on.
        self._loop.soon(self._stream.close)


class _Loop:
    """The trio run of the client's thread, as other threads call it."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()

    def call(self, function: Callable[[], T]) -> T:
        """The outcome of a call in the client's thread."""
        try:
            return trio.from_thread.run_sync(function, trio_token=self._token)
        except trio.RunFinishedError:
            raise ClientClosed("the client was closed") from None

    def wait(self, function: Callable[[], Awaitable[T]]) -> T:
        """The same of something that takes time; interrupted, it goes on there and nobody hears of it."""
        try:
            return trio.from_thread.run(function, trio_token=self._token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise ClientClosed("the client was closed") from None

    def soon(self, function: Callable[[], None]) -> None:
        """Call it when there is time; nothing when the client was closed."""
        with suppress(trio.RunFinishedError):
            self._token.run_sync_soon(function)

    def stop(self) -> None:
        """End the run, soon."""
        self.soon(self._stop.set)

    async def wait_stop(self) -> None:
        """Until `stop`."""
        await self._stop.wait()


def _run(endpoint: str, patience: Patience | None, started: SimpleQueue[_Loop | BaseException]) -> None:
    """The thread: one client from its beginning to its end."""

    async def live() -> None:
        async with Client(endpoint, patience=patience) as client:
            loop = _Loop(client)
            started.put(loop)
            await loop.wait_stop()

    try:
        trio.run(live)
    except BaseException as error:
        # Before the start it is the maker's; afterwards everybody who calls is told that it is over.
        started.put(error)
