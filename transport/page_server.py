"""The side that is connected to: gives pages that are asked for, and takes pages that are handed over.

One task a connection, one run at a time, in order: what a peer is owed beyond that waits on its side of the
wire, and a peer that does not read stops its own task only. Whoever connects is bounded in number and in
time before it has said who it is, and does not get further unless it fits.

A client has one connection at a time: when it connects again (its session, in the Hello, says so), the task
of the old one is ended first. So bytes that were on their way through a connection that one side has given
up never reach a slot that has meanwhile been filled, published and read.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import msgspec
import trio

from transport.checksum import page_checksum
from transport.errors import ProtocolError, TransferCut, TransportError
from transport.page_runs import Sink, checksums, give_run, take_run
from transport.page_settings import ServerSettings, ServerStatistics
from transport.page_streams import byte_stream
from transport.page_wire import (
    HELLO_LIMIT,
    KEY_BYTES,
    Ask,
    Give,
    Hello,
    Receipt,
    Refused,
    Run,
    RunPage,
    Wire,
    must_fit,
    run_pages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.shapes import PageRef
    from transport.page_hosts import PageGiver, PageParty, PageTaker
    from transport.page_wire import GivenPage, PageName
    from transport.pages import PagePools

REMEMBERED_PAGES = 4096
"""Of each session: pages taken whose receipt may have been lost, so that they may come once more."""


class _Session:
    """One client, through all its connections."""

    def __init__(self) -> None:
        self.scope: trio.CancelScope | None = None
        self.closed = trio.Event()
        self.taken: OrderedDict[PageRef, int] = OrderedDict()

    def remember(self, target: PageRef, checksum: int) -> None:
        """Note a page that is stored, before its receipt goes out."""
        self.taken[target] = checksum
        self.taken.move_to_end(target)
        while len(self.taken) > REMEMBERED_PAGES:
            self.taken.popitem(last=False)


class PageServer:
    """Gives pages, takes pages, or both; `handle` is the handler of a trio listener."""

    def __init__(
        self,
        me: PageParty,
        pools: PagePools,
        settings: ServerSettings | None = None,
        *,
        giver: PageGiver | None = None,
        taker: PageTaker | None = None,
        on_error: Callable[[str, TransportError], None] = lambda _peer, _error: None,
    ) -> None:
        """`on_error(peer, error)`: told of every connection that ended badly, for the log."""
        self._pools = pools
        self._settings = settings or ServerSettings()
        self._giver = giver
        self._taker = taker
        self._on_error = on_error
        self._hello = Hello(
            identity=me.identity,
            host=me.host,
            epoch=me.epoch,
            does="serve",
            gives=giver is not None,
            takes=taker is not None,
            page_bytes=pools.page_bytes,
            pools=pools.sizes(),
        )
        self._sessions: OrderedDict[int, _Session] = OrderedDict()
        self._statistics = ServerStatistics()

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection until it ends; errors of the peer are counted, told and survived."""
        peer = "a peer that did not greet"
        wire = Wire(
            byte_stream(stream, self._settings.stall_s), self._pools.page_bytes, self._settings.stall_s
        )
        try:
            hello = await self._greeted(wire)
            if hello is not None:
                peer = hello.host
                await self._in_session(hello, wire)
        except TransferCut as error:
            self._statistics.cuts += 1
            self._on_error(peer, error)
        except ProtocolError as error:
            self._statistics.protocol_errors += 1
            self._on_error(peer, error)
            await self._refuse(wire, str(error), temporary=False)
        finally:
            await wire.aclose()

    def statistics(self) -> ServerStatistics:
        """A copy of the counters."""
        return msgspec.structs.replace(self._statistics)

    def check(self) -> None:
        """Raise AssertionError when a bound does not hold."""
        connected = sum(session.scope is not None for session in self._sessions.values())
        assert connected == self._statistics.open <= self._settings.connections
        assert 0 <= self._statistics.greeting <= self._settings.greetings
        assert len(self._sessions) <= 2 * self._settings.connections
        assert all(len(session.taken) <= REMEMBERED_PAGES for session in self._sessions.values())

    # ── who comes ───────────────────────────────────────────────────────────────────────────────────

    async def _greeted(self, wire: Wire) -> Hello | None:
        """Hear who connects; None when there is no room for one more."""
        if self._statistics.greeting >= self._settings.greetings:
            self._statistics.refused += 1
            return None
        self._statistics.connections += 1
        self._statistics.greeting += 1
        try:
            with trio.move_on_after(self._settings.stall_s):
                await wire.send_preamble()
                await wire.receive_preamble()
                hello = await wire.receive(Hello, HELLO_LIMIT)
                try:
                    must_fit(self._hello, hello)
                except ProtocolError:
                    # The other side finds out by itself, in its own words.
                    await wire.send(self._hello)
                    raise
                return hello
        finally:
            self._statistics.greeting -= 1
        raise TransferCut(f"no greeting for {self._settings.stall_s} s")

    async def _in_session(self, hello: Hello, wire: Wire) -> None:
        session = self._sessions.setdefault(hello.session, _Session())
        self._sessions.move_to_end(hello.session)
        while session.scope is not None:
            self._statistics.superseded += 1
            session.scope.cancel()
            await session.closed.wait()
        if self._statistics.open >= self._settings.connections:
            self._statistics.refused += 1
            if not session.taken:
                self._sessions.pop(hello.session, None)
            self._forget_sessions()
            await self._refuse(wire, f"{self._hello.host} has no room for more clients", temporary=True)
            return
        session.closed = trio.Event()
        self._statistics.open += 1
        self._sessions[hello.session] = session
        try:
            with trio.CancelScope() as session.scope:
                self._forget_sessions()
                await wire.send(self._hello)
                if hello.does == "fetch":
                    await self._give(wire)
                else:
                    await self._take(wire, session)
        finally:
            self._statistics.open -= 1
            session.scope = None
            session.closed.set()

    def _forget_sessions(self) -> None:
        """Forget those not connected, the longest unused first, beyond as many as may be connected."""
        for number in [number for number, session in self._sessions.items() if session.scope is None]:
            if len(self._sessions) <= self._settings.connections:
                break
            del self._sessions[number]

    async def _refuse(self, wire: Wire, reason: str, *, temporary: bool) -> None:
        """Say why, if the peer takes it at once."""
        with trio.move_on_after(self._settings.stall_s):
            try:
                await wire.send(Refused(reason[:1000], temporary))
            except TransferCut:
                return

    # ── what is done for it ─────────────────────────────────────────────────────────────────────────

    async def _give(self, wire: Wire) -> None:
        assert self._giver is not None
        while (ask := await wire.receive_if_any(Ask, self._settings.idle_s)) is not None:
            self._must_be_ours([name.page for name in ask.names])
            if any(len(name.key) != KEY_BYTES for name in ask.names):
                raise ProtocolError(f"a chain key has {KEY_BYTES} bytes")
            read, there = await self._pinned(self._giver, ask.names)
            pages = [ask.names[position].page for position in there]
            try:
                sums = await checksums(pages, self._pools, self._giver.checksum_of)
                run = Run(
                    ask.number,
                    [
                        RunPage(position, ask.names[position].key, checksum)
                        for position, checksum in zip(there, sums, strict=True)
                    ],
                )
                whole = sum(await give_run(wire, run, pages, self._pools, self._giver.still_valid))
            finally:
                if read is not None:
                    self._giver.unpin(read)
            self._statistics.given += whole
            self._statistics.absent += len(ask.names) - whole

    async def _pinned(self, giver: PageGiver, names: Sequence[PageName]) -> tuple[int | None, list[int]]:
        """What is to be given back, and positions of the pages that are there."""
        with trio.move_on_after(self._settings.pin_s):
            read, there = await giver.pin(names)
            return read, [position for position, found in enumerate(there) if found]
        self._statistics.pins_late += 1
        return None, []

    async def _take(self, wire: Wire, session: _Session) -> None:
        assert self._taker is not None
        while (give := await wire.receive_if_any(Give, self._settings.idle_s)) is not None:
            targets = [page.target for page in give.pages]
            self._must_be_ours(targets)
            if len(set(targets)) != len(targets):
                raise ProtocolError(f"run {give.number} names a target twice")
            again = [self._is_stored(session, page) for page in give.pages]
            sinks = [
                Sink(self._pools.slot(page.target), page.checksum, self._wanted(page.target, repeated))
                for page, repeated in zip(give.pages, again, strict=True)
            ]
            taken = await take_run(wire, give.number, sinks)
            for page, repeated, whole in zip(give.pages, again, taken.whole, strict=True):
                self._statistics.repeated += repeated
                self._statistics.taken += whole
                self._statistics.absent += not whole and not repeated
                if whole:
                    session.remember(page.target, page.checksum)
                    self._taker.stored(page.target)
            self._statistics.absent -= taken.mismatched
            self._statistics.mismatched += taken.mismatched
            stored = [whole or repeated for whole, repeated in zip(taken.whole, again, strict=True)]
            await wire.send(Receipt(give.number, stored))

    def _is_stored(self, session: _Session, page: GivenPage) -> bool:
        """Whether this page came before, its receipt was lost, and it is still what its slot holds."""
        known = session.taken.get(page.target) == page.checksum
        return known and page_checksum(self._pools.slot(page.target)) == page.checksum

    def _wanted(self, target: PageRef, repeated: bool) -> Callable[[], bool]:
        taker = self._taker
        assert taker is not None
        return (lambda: False) if repeated else (lambda: taker.accepts(target))

    def _must_be_ours(self, pages: Sequence[PageRef]) -> None:
        most = run_pages(self._pools.page_bytes)
        if not 1 <= len(pages) <= most:
            raise ProtocolError(f"{len(pages)} pages in one run, where 1 to {most} are allowed")
        for page in pages:
            try:
                self._pools.slot(page)
            except IndexError as error:
                raise ProtocolError(str(error)) from None
