"""The replicator actor: copies sealed pages to the standby pool behind everybody's back."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import trio

from actors.boot import POOL, POOL_NUMBER, STANDBY
from actors.shell import Actor
from engine.replication import ReplicationPlan
from engine.shapes import PageRef
from transport.pages import PageCopy, PagePool, SharedMemoryPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToReplicator
    from transport.pages import PageTransport

STANDBY_NUMBER = 1


class ReplicatorActor(Actor):
    """Keeps what is sealed safe."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.core = ReplicationPlan(self.page_table(), self.boot.topology.replicator.standby_pages)
        self._news = trio.Event()

    async def serve(self) -> None:
        if STANDBY not in self.world.segments:
            return
        page_bytes = self.boot.page_shape.page_bytes
        transport: PageTransport = SharedMemoryPages(
            PagePool(POOL_NUMBER, self.world.segments[POOL], page_bytes),
            PagePool(STANDBY_NUMBER, self.world.segments[STANDBY], page_bytes),
            self.core.table.is_current,
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

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        self.send(self.core.handle(source, cast("ToReplicator", message), now))
        self._news.set()

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return self.core.statistics()
