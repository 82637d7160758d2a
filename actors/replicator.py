"""The replicator actor: it alone copies pages, to the standby pool, the file below memory and other hosts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import trio

from actors.boot import POOL, POOL_NUMBER, STANDBY
from actors.file_tier import FileTier
from actors.other_hosts import OtherHosts, party_of
from actors.shell import Actor
from engine.core import Send
from engine.errors import StartError
from engine.ids import Incarnation, is_first_life
from engine.messages import (
    Drain,
    FetchEnded,
    FetchWanted,
    PagesHeld,
    PageSite,
    PagesSealed,
    ReadGranted,
    Roster,
    SpillEnded,
    SpillWanted,
    Stop,
)
from engine.replication import ReplicationPlan
from engine.shapes import PageRef
from engine.topology import of_host
from transport.page_format import PageFormat
from transport.pages import PageCopy, PagePool, SharedMemoryPages

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.messages import Member, Message
    from transport.pages import PageTransport

log = structlog.get_logger()

STANDBY_NUMBER = 1

Job = tuple[Incarnation, SpillWanted | FetchWanted]
"""What an allocator has asked for."""


class ReplicatorActor(Actor):
    """Keeps what is sealed safe, and brings what is not in memory."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.table = self.page_table()
        self.core = ReplicationPlan(self.table, self.boot.topology.replicator.standby_pages)
        self.pool = PagePool(POOL_NUMBER, world.segments[POOL], self.boot.page_shape.page_bytes)
        self.allocator = of_host("allocator", self.host)
        self.file: FileTier | None = None
        self.others: OtherHosts | None = None
        self._news = trio.Event()
        self._jobs, self._todo = trio.open_memory_channel[Job](math.inf)
        self._fetching: dict[int, FetchWanted] = {}
        """What was wanted and has not ended, by its ticket, for whichever allocator."""

    async def prepare(self) -> None:
        path, topology, shape = self.boot.file_tier, self.boot.topology, self.boot.page_shape
        # The keys say what else the bits depend on: pages of other kernels are never asked for.
        identity = f"{Path(self.boot.model_folder).name}:{shape.dtype}"
        if self.host and self.world.network:
            table = topology.host[self.host]
            me = party_of(self.host, self.boot.run_dir, identity)
            self.others = OtherHosts(
                me, table.address, table.pages_port, self.table, self.pool, self.allocator, self.send
            )
        if path is None:
            return
        form = PageFormat(shape.page_bytes, shape.tokens, identity)
        names = {actor.ordinal: actor.name for actor in topology.actors()}
        budget = topology.allocator.file_bytes
        try:
            self.file = await FileTier.open(
                Path(path), form, budget, self.table, self.pool, names, self.allocator
            )
        except StartError as error:
            if is_first_life(self.me.epoch):
                raise
            # Of a system that runs the file is only a cache: it goes on without.
            log.error("file_tier_lost", why=str(error))

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._replicate)
            if self.others is not None:
                await nursery.start(self.others.serve)
                self._tell_site(self.members.values())
            async for job in self._todo:
                nursery.start_soon(self._do, *job)

    async def _do(self, asker: Incarnation, job: SpillWanted | FetchWanted) -> None:
        """Whatever is asked for is answered, since pages wait for it."""
        if isinstance(job, SpillWanted):
            nothing = Send(self.allocator, SpillEnded(job.pages))
            self.send(await self.file.spill(job) if self.file else [nothing])
            return
        if job.source.kind == "file" and self.file is not None:
            sends = await self.file.fetch(job)
        elif job.source.kind == "host" and self.others is not None:
            sends = await self.others.fetch(job)
        else:
            sends = [Send(self.allocator, FetchEnded(job.ticket, 0, 0.0))]
        del self._fetching[job.ticket]
        # To another allocator that ticket says nothing: it hears what is still on its way.
        self.send(sends if asker in self.members else [*sends, self._held()])

    def _held(self) -> Send:
        """All pages that are being fetched; what else is leased to this replicator nobody writes any more."""
        targets = (page.target for fetch in self._fetching.values() for page in fetch.pages)
        return Send(self.allocator, PagesHeld(tuple(targets), (), 0))

    async def _replicate(self) -> None:
        if STANDBY not in self.world.segments:
            return
        page_bytes = self.boot.page_shape.page_bytes
        transport: PageTransport = SharedMemoryPages(
            self.pool,
            PagePool(STANDBY_NUMBER, self.world.segments[STANDBY], page_bytes),
            self.table.is_current,
        )
        while True:
            copy = self.core.next_copy()
            if copy is None:
                await self._news.wait()
                self._news = trio.Event()
                continue
            target = PageRef(STANDBY_NUMBER, copy.slot, 0)
            [whole] = await transport.copy([PageCopy(copy.page, target)])
            self.core.done(copy, whole)

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        self.send(self.core.peers(up, down, now))
        if any(member.name == self.allocator for member in up):
            self.send([self._held()])
            if self.file is not None:
                self.send([Send(self.allocator, self.file.all_keys())])
        self._tell_site(up)

    def _tell_site(self, members: Iterable[Member]) -> None:
        """Other hosts hear where pages of this one are given."""
        if self.others is not None and self.others.site is not None:
            others = [member for member in members if member.kind == "replicator"]
            self.send([Send(member.incarnation, self.others.site) for member in others])

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        match message:
            case SpillWanted() | FetchWanted():
                if isinstance(message, FetchWanted):
                    self._fetching[message.ticket] = message
                self._jobs.send_nowait((source, message))
            case ReadGranted() if self.others is not None:
                self.others.answered(message)
            case PageSite() if self.others is not None:
                self.others.told(message)
            case PagesSealed() | Roster() | Drain() | Stop():
                self.send(self.core.handle(source, message, now))
                self._news.set()

    async def wind_down(self) -> None:
        """Pages that are on their way are seen through; a slot half written holds nothing."""
        self._jobs.close()

    def check(self) -> None:
        self.core.check()
        for part in (self.file, self.others):
            if part is not None:
                part.check()

    def statistics(self) -> Statistics:
        parts = [part.statistics() for part in (self.file, self.others) if part is not None]
        return {**self.core.statistics(), **{name: value for part in parts for name, value in part.items()}}
