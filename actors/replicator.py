"""The replicator actor: it alone copies pages. To the standby pool behind everybody's back, to the file
below memory and back."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, cast

import structlog
import trio

from actors.boot import POOL, POOL_NUMBER, STANDBY
from actors.file_tier import FileTier
from actors.shell import Actor
from engine.core import Send
from engine.messages import FetchEnded, FetchWanted, SpillEnded, SpillWanted
from engine.replication import ReplicationPlan
from engine.shapes import PageRef
from transport.page_format import PageFormat
from transport.pages import PageCopy, PagePool, SharedMemoryPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToReplicator
    from transport.pages import PageTransport

log = structlog.get_logger()

STANDBY_NUMBER = 1


class ReplicatorActor(Actor):
    """Keeps what is sealed safe, and brings what is not in memory."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.table = self.page_table()
        self.core = ReplicationPlan(self.table, self.boot.topology.replicator.standby_pages)
        self.pool = PagePool(POOL_NUMBER, world.segments[POOL], self.boot.page_shape.page_bytes)
        self.file: FileTier | None = None
        self._news = trio.Event()
        self._jobs, self._todo = trio.open_memory_channel[SpillWanted | FetchWanted](math.inf)

    async def prepare(self) -> None:
        path, topology = self.boot.file_tier, self.boot.topology
        if path is None:
            return
        shape = self.boot.page_shape
        # The keys say what else the bits depend on: pages of other kernels are never asked for.
        identity = f"{Path(self.boot.model_folder).name}:{shape.dtype}"
        form = PageFormat(shape.page_bytes, shape.tokens, identity)
        names = {actor.ordinal: actor.name for actor in topology.actors()}
        budget = topology.allocator.file_bytes
        self.file = await FileTier.open(Path(path), form, budget, self.table, self.pool, names)

    async def serve(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._replicate)
            async for job in self._todo:
                nursery.start_soon(self._do, job)

    async def _do(self, job: SpillWanted | FetchWanted) -> None:
        """Whatever is asked for is answered, since pages wait for it."""
        if isinstance(job, SpillWanted):
            self.send(await self.file.spill(job) if self.file else [_not_spilled(job)])
        elif job.source.kind == "file" and self.file is not None:
            self.send(await self.file.fetch(job))
        else:
            self.send([Send("allocator", FetchEnded(job.ticket, 0, 0.0))])

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
        if self.file is not None and any(member.kind == "allocator" for member in up):
            self.send([Send("allocator", self.file.all_keys())])

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        if isinstance(message, SpillWanted | FetchWanted):
            self._jobs.send_nowait(message)
            return
        self.send(self.core.handle(source, cast("ToReplicator", message), now))
        self._news.set()

    async def wind_down(self) -> None:
        """Pages that are on their way are seen through; a slot half written holds nothing."""
        self._jobs.close()

    def check(self) -> None:
        self.core.check()
        if self.file is not None:
            self.file.check()

    def statistics(self) -> Statistics:
        return {**self.core.statistics(), **(self.file.statistics() if self.file else {})}


def _not_spilled(job: SpillWanted) -> Send:
    return Send("allocator", SpillEnded(job.pages))
