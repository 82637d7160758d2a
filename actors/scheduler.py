"""The scheduler actor: `engine.scheduler` behind an inbox."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from actors.shell import Actor
from engine.fairness import Fairness
from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToScheduler


class SchedulerActor(Actor):
    """Admission and placement."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        topology = self.boot.topology
        table = topology.scheduler
        hosts = {actor.name: actor.host for actor in topology.actors()}
        self.core = Scheduler(self.boot.page_shape.tokens, Fairness(table.weights, table.reserve), hosts)

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        self.send(self.core.peers(up, down, now))

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        self.send(self.core.handle(source, cast("ToScheduler", message), now))

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return self.core.statistics()
