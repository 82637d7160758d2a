"""The async client: any number of requests over one connection, for as long as its block lasts."""

from __future__ import annotations

import secrets
from functools import partial
from typing import TYPE_CHECKING

import trio
import zmq

from engine.client import request
from engine.client.connection import Connection
from engine.client.core import ClientCore
from engine.client.discovery import find_endpoint
from engine.client.errors import ClientClosed, NoEndpoint
from engine.client.stream import Stream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import Any, Self, Unpack

    from engine.client.patience import Patience
    from engine.client.request import ChatParameters, CompletionParameters, Request

TICK_S = 0.25
"""Between two looks at the clock while something is asked."""
CLOSE_S = 1.0
"""How long the client waits at its end for what it cancels."""
FLAPPING_S = 1.0
"""A connection that lasted shorter is followed by a pause before the next."""
PAUSE_S = (0.0, 0.05, 0.1, 0.2, 0.5)
SEED_BITS = 63


class Client:
    """A client of one gateway, for any number of tasks of one trio run.

        async with Client() as client:
            print(await client.chat("What is the capital of France?", temperature=0).text())

    Requests survive lost connections and restarted gateways by themselves. All errors are `ClientError`s.
    """

    def __init__(self, endpoint: str | None = None, *, patience: Patience | None = None) -> None:
        """`endpoint`: as a launch tells it (`ipc://…`, `tcp://HOST:PORT`).

        None takes the environment's ESTAFET_ENDPOINT, else the one launch of this user that runs;
        NoEndpoint says what to do when there is none, or more than one.
        """
        self.endpoint = find_endpoint() if endpoint is None else endpoint
        self._core = ClientCore(patience)
        self._outgoing: list[bytes] = []
        self._written = trio.Event()
        self._work = trio.Event()
        """Something is asked."""
        self._dead = trio.Event()
        self._heard = trio.Event()
        """The gateway has said something, or is gone."""
        self._is_open = False
        self._manager: AbstractAsyncContextManager[trio.Nursery] | None = None
        self._nursery: trio.Nursery | None = None

    # ── what it can be asked ──────────────────────────────────────────────────────────────────

    def chat(
        self, messages: str | Sequence[Mapping[str, Any]], **parameters: Unpack[ChatParameters]
    ) -> Stream:
        """Ask for the next message of a conversation; a mere string is what the user says.

        The request is on its way when this returns. The parameters are those of /v1/chat/completions,
        and `deadline_s` and `window`.
        """
        return self._ask(partial(request.chat, messages, parameters))

    def complete(self, prompt: str | Sequence[int], **parameters: Unpack[CompletionParameters]) -> Stream:
        """Ask for what follows a prompt, a text or token ids; all else as `chat` has it."""
        return self._ask(partial(request.completion, prompt, parameters))

    def statistics(self) -> dict[str, int | float]:
        """Requests now, and what happened since the beginning."""
        return self._core.statistics()

    # ── its block ─────────────────────────────────────────────────────────────────────────────

    async def __aenter__(self) -> Self:
        if self._manager is not None:
            raise RuntimeError("a client has one block")
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            connection = Connection(context, self.endpoint)
        except zmq.ZMQError as error:
            context.term()
            said = f"{self.endpoint!r} is no endpoint: {error}; expected ipc://PATH or tcp://HOST:PORT"
            raise NoEndpoint(said) from None
        self._manager = trio.open_nursery()
        self._nursery = await self._manager.__aenter__()
        self._is_open = True
        self._nursery.start_soon(self._keep_connected, context, connection)
        self._nursery.start_soon(self._keep_time)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._manager is not None
        assert self._nursery is not None
        self._is_open = False
        self._core.close(trio.current_time())
        self._flush()
        with trio.move_on_after(CLOSE_S, shield=True):
            while not self._core.is_idle and self._core.is_connected:
                self._heard = trio.Event()
                await self._heard.wait()
        self._nursery.cancel_scope.cancel()
        # Not told of the block's own exception, the nursery leaves it as it is: no group around it.
        await self._manager.__aexit__(None, None, None)

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _ask(self, make: Callable[..., Request]) -> Stream:
        if not self._is_open:
            raise ClientClosed("ask inside of the client's `async with` block")
        now = trio.current_time()
        asked = make(key=secrets.token_urlsafe(24), seed=secrets.randbits(SEED_BITS), now=now)
        exchange = self._core.open(asked, now)
        self._work.set()
        self._flush()
        return Stream(exchange, self._flush)

    def _flush(self) -> None:
        """Have the sender send what the core has said."""
        if outgoing := self._core.take_outgoing():
            self._outgoing += outgoing
            self._written.set()

    async def _keep_connected(self, context: zmq.Context[zmq.Socket[bytes]], connection: Connection) -> None:
        flaps = 0
        try:
            while True:
                with connection:
                    await connection.wait_up()
                    began = trio.current_time()
                    await self._live(connection)
                flaps = 0 if trio.current_time() - began > FLAPPING_S else min(flaps + 1, len(PAUSE_S) - 1)
                await trio.sleep(PAUSE_S[flaps])
                connection = Connection(context, self.endpoint)
        finally:
            # All sockets are closed and linger for nothing: this waits for libzmq's thread only.
            context.term()

    async def _live(self, connection: Connection) -> None:
        """From the connection's coming up to its loss."""
        self._dead = trio.Event()
        self._core.connected(trio.current_time())
        self._flush()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._send, connection)
            nursery.start_soon(self._receive, connection)
            nursery.start_soon(self._end_when_dead, nursery.cancel_scope)
            await connection.wait_down()
            nursery.cancel_scope.cancel()
        self._core.disconnected(trio.current_time())
        self._outgoing.clear()
        self._heard.set()

    async def _end_when_dead(self, scope: trio.CancelScope) -> None:
        await self._dead.wait()
        scope.cancel()

    async def _send(self, connection: Connection) -> None:
        while True:
            while self._outgoing:
                outgoing, self._outgoing = self._outgoing, []
                for message in outgoing:
                    await connection.send(message)
            self._written = trio.Event()
            await self._written.wait()

    async def _receive(self, connection: Connection) -> None:
        while True:
            messages = await connection.receive()
            now = trio.current_time()
            for message in messages:
                self._core.receive(message, now)
            self._flush()
            self._heard.set()

    async def _keep_time(self) -> None:
        while True:
            if self._core.is_idle:
                self._work = trio.Event()
                await self._work.wait()
            now = trio.current_time()
            self._core.turn(now)
            self._flush()
            if self._core.is_dead(now):
                self._dead.set()
            with trio.move_on_at(min(self._core.next_turn(), now + TICK_S)):
                self._work = trio.Event()
                await self._work.wait()
