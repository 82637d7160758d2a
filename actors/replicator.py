"""The replicator actor: copies sealed pages to the standby pool behind everybody's back."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast


from actors.shell import Actor
from engine.replication import ReplicationPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToReplicator


class ReplicatorActor(Actor):
    """Keeps what is sealed safe."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.core = ReplicationPlan(self.page_table(), self.boot.topology.replicator.standby_pages)

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        self.send(self.core.peers(up, down, now))

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        self.send(self.core.handle(source, cast("ToReplicator", message), now))

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return self.core.statistics()
