"""The side that connects: one connection for many calls, made when there is something to do.

Only `run` talks; a call waits for its job in the line (`transport.page_jobs`). A cut connection is made
again, with waits that double while it brings nothing, and goes on with the pages that are not settled. A
call that is cancelled leaves nobody who wants its pages: nothing more is written for it, and the connection
goes on for the others.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Generic, Literal

import msgspec
import trio

from transport.errors import ProtocolError, TransferCut, TransportError
from transport.page_jobs import Flight, Item, Job, JobLine
from transport.page_settings import ClientStatistics, TransferSettings
from transport.page_streams import byte_stream
from transport.page_wire import HELLO_LIMIT, Hello, Wire, must_fit, run_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.shapes import PageRef
    from transport.page_hosts import PageParty
    from transport.pages import PagePools

Connect = Callable[[], Awaitable[trio.abc.Stream]]
"""Opens a stream to the peer; raises OSError when it cannot."""


class _Bell:
    """Wakes all who wait now."""

    def __init__(self) -> None:
        self._event = trio.Event()

    async def wait(self) -> None:
        await self._event.wait()

    def ring(self) -> None:
        self._event.set()
        self._event = trio.Event()


class PageClient(ABC, Generic[Item]):
    """What the two clients share."""

    does: Literal["fetch", "send"]
    keeps_settled: bool
    """Whether pages that are settled are good although the peer starts anew."""

    def __init__(
        self,
        connect: Connect,
        me: PageParty,
        pools: PagePools,
        settings: TransferSettings | None = None,
        *,
        peer_host: str | None = None,
    ) -> None:
        """`peer_host`: who must answer at the other end; None for whoever does."""
        self.peer: Hello | None = None
        """What the peer said of itself when it was last connected."""
        self._connect = connect
        self._pools = pools
        self._settings = settings or TransferSettings()
        self._peer_host = peer_host
        self._hello = Hello(
            identity=me.identity,
            host=me.host,
            epoch=me.epoch,
            does=self.does,
            gives=False,
            takes=False,
            page_bytes=pools.page_bytes,
            pools=pools.sizes(),
            session=secrets.randbits(63),
        )
        self._line: JobLine[Item] = JobLine(
            run_pages(pools.page_bytes, self._settings.run_bytes),
            self._settings.window_bytes // pools.page_bytes,
        )
        self._failures = 0  # connections in a row that brought nothing
        self._reason = ""  # of the last of them
        self._connected = False
        self._launching = False
        self._running = False
        self._work = _Bell()  # a job came, or room for one
        self._owed = _Bell()  # something is in flight
        self._statistics = ClientStatistics()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the calls until cancelled; without this task every call raises TransferCut."""
        if self._running:
            raise RuntimeError("this client runs already")
        self._running = True
        task_status.started()
        try:
            while True:
                while not self._line.jobs:
                    await self._work.wait()
                wire = await self._connection()
                if wire is not None:
                    await self._use(wire)
        finally:
            self._running = False
            self._fail_all(TransferCut("the client stopped"))

    def statistics(self) -> ClientStatistics:
        """A copy of the counters."""
        return msgspec.structs.replace(self._statistics)

    def check(self) -> None:
        """Raise AssertionError unless every page of every job is in exactly one place."""
        self._line.check()
        assert self._connected or not self._line.flights

    async def _call(self, items: Sequence[Item], epoch: int | None) -> list[bool]:
        """Have `run` do a job, and wait for it."""
        await trio.lowlevel.checkpoint()
        if not self._running:
            raise TransferCut("the client is not running")
        if not items:
            return []
        job = Job(items, epoch, trio.current_time())
        self._line.enter(job)
        if self._connected and self.peer is not None:
            self._meet(job, self.peer)
        self._work.ring()
        try:
            await job.done.wait()
        except trio.Cancelled:
            self._statistics.cancelled += 1
            raise
        finally:
            self._line.leave(job)
        if job.error is not None:
            raise job.error
        return job.answers

    # ── connecting ──────────────────────────────────────────────────────────────────────────────────

    async def _connection(self) -> Wire | None:
        """Connect and greet until it works; None when nobody waits for it or the peer does not fit."""
        while self._line.jobs:
            if self._failures:
                wait = self._settings.retry_first_s * 2.0 ** min(self._failures - 1, 30)
                await self._sit_out(min(wait, self._settings.retry_most_s))
                if not self._line.jobs:
                    break
            reason = "the peer does not answer"
            with trio.move_on_after(min(self._settings.connect_s, self._patience())):
                try:
                    return await self._greeted()
                except (OSError, TransferCut) as error:
                    reason = str(error)
                except ProtocolError as error:
                    self._failures += 1
                    self._fail_all(error)
                    return None
            self._failed(reason)
        return None

    async def _greeted(self) -> Wire:
        stall_s = self._settings.stall_s
        wire = Wire(byte_stream(await self._connect(), stall_s), self._pools.page_bytes, stall_s)
        try:
            await wire.send_preamble()
            await wire.send(self._hello)
            await wire.receive_preamble()
            peer = await wire.receive(Hello, HELLO_LIMIT)
            must_fit(self._hello, peer)
            if self._peer_host not in (None, peer.host):
                raise ProtocolError(f"{peer.host} answers where {self._peer_host} was expected")
        except BaseException as error:
            self._statistics.protocol_errors += isinstance(error, ProtocolError)
            await wire.aclose()
            raise
        self._statistics.connections += 1
        self._statistics.restarts += self.peer is not None and self.peer.epoch != peer.epoch
        self.peer = peer
        return wire

    async def _sit_out(self, seconds: float) -> None:
        """Wait before the next attempt, giving up on jobs whose time comes meanwhile."""
        until = trio.current_time() + seconds
        while self._line.jobs and (left := until - trio.current_time()) > 0:
            with trio.move_on_after(min(left, self._patience())):
                await self._work.wait()
            self._give_up()

    def _patience(self) -> float:
        """Seconds until the first job is given up."""
        oldest = min(job.since for job in self._line.jobs)
        return max(0.0, oldest + self._settings.give_up_s - trio.current_time())

    def _failed(self, reason: str) -> None:
        self._failures += 1
        self._reason = reason
        self._give_up()

    def _give_up(self) -> None:
        now = trio.current_time()
        for job in [job for job in self._line.jobs if now >= job.since + self._settings.give_up_s]:
            self._statistics.given_up += 1
            self._line.leave(job, TransferCut(f"no page for {self._settings.give_up_s} s: {self._reason}"))

    def _fail_all(self, error: TransportError) -> None:
        for job in [*self._line.jobs]:
            self._line.leave(job, type(error)(str(error)))

    # ── one connection ──────────────────────────────────────────────────────────────────────────────

    async def _use(self, wire: Wire) -> None:
        """Do jobs over a connection until it fails or nobody has used it for a while."""
        assert self.peer is not None
        failures: list[TransportError] = []

        async def launch() -> None:
            try:
                await self._launch_all(wire)
            except TransportError as error:
                failures.append(error)
            # Why it failed may still be on its way to us: what is owed is waited for.
            self._launching = False
            self._owed.ring()

        async def land() -> None:
            try:
                await self._land_all(wire)
            except TransportError as error:
                failures.append(error)
            nursery.cancel_scope.cancel()

        self._connected = self._launching = True
        try:
            for job in [*self._line.jobs]:
                self._meet(job, self.peer)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(launch)
                nursery.start_soon(land)
        finally:
            self._connected = False
            self._line.take_back()
            await wire.aclose()
        for failure in failures:
            if isinstance(failure, ProtocolError):
                self._statistics.protocol_errors += 1
                self._failures += 1
                self._fail_all(failure)
                return
        if failures:
            self._statistics.cuts += 1
            self._failed(str(failures[0]))

    def _meet(self, job: Job[Item], peer: Hello) -> None:
        """Let a job know who answers: pages of another incarnation are gone."""
        if job.epoch is None:
            job.epoch = peer.epoch
        if job.epoch != peer.epoch:
            if not self.keeps_settled:
                job.answers = [False] * len(job.items)
            self._line.leave(job)
            return
        for item in job.items:
            page = self._theirs(item)
            if not 0 <= page.index < peer.pools.get(page.pool, 0):
                self._line.leave(
                    job, IndexError(f"{peer.host} has no {page}, but pools of {peer.pools} pages")
                )
                return

    async def _launch_all(self, wire: Wire) -> None:
        while True:
            flight = self._line.take_off()
            if flight is not None:
                self._owed.ring()
                await self._launch(wire, flight)
                continue
            with trio.move_on_after(self._settings.idle_s) as scope:
                await self._work.wait()
            if scope.cancelled_caught and not self._line.jobs and not self._line.flights:
                return

    async def _land_all(self, wire: Wire) -> None:
        while True:
            # The peer owes nothing while nothing is in flight; a cut meanwhile shows with the next use.
            while not self._line.flights:
                if not self._launching:
                    return
                await self._owed.wait()
            await self._land(wire, self._line.flights[0])

    def _landed(self, answers: Sequence[bool], mismatched: int = 0) -> None:
        """The oldest flight is answered; its connection is a good one."""
        whole = sum(answers)
        if self._line.flights[0].job.live:
            self._statistics.pages += whole
            self._statistics.bytes += whole * self._pools.page_bytes
            self._statistics.absent += len(answers) - whole - mismatched
        self._statistics.mismatched += mismatched
        self._failures = 0
        self._line.land(answers, trio.current_time())
        self._work.ring()

    # ── what the two clients do differently ─────────────────────────────────────────────────────────

    @abstractmethod
    def _theirs(self, item: Item) -> PageRef:
        """The page of an item that is in the peer's pools."""

    @abstractmethod
    async def _launch(self, wire: Wire, flight: Flight[Item]) -> None:
        """Send what begins a flight."""

    @abstractmethod
    async def _land(self, wire: Wire, flight: Flight[Item]) -> None:
        """Receive what ends a flight, and call `_landed`."""
