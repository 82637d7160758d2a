"""The health monitor actor: `engine.health` over the heartbeats in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import structlog
import trio

from actors.shell import Actor
from engine.health import HealthMonitor
from engine.messages import Kill, Roster

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.boot import World
    from engine.core import Send, Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToHealth

log = structlog.get_logger()


class HealthActor(Actor):
    """Declares who is alive, and has the silent killed."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        table = self.boot.topology.health
        self._here = {actor.ordinal for actor in self.boot.topology.actors(self.host)}
        self.core = HealthMonitor(self.me, deadline_s=table.deadline_s, tick_s=table.tick_s)

    async def serve(self) -> None:
        while True:
            await trio.sleep(self.boot.topology.health.tick_s)
            hearts = {
                member.incarnation: self.vitals.heartbeat(member.ordinal)
                for member in self.core.alive
                if member.ordinal in self._here and member.incarnation != self.me
            }
            self._act(self.core.tick(hearts, trio.current_time()))

    def _act(self, sends: Iterable[Send]) -> None:
        for send in sends:
            match send.message:
                case Kill(target=target, reason=reason):
                    log.warning("worker_suspected", peer=str(target), reason=reason)
                case Roster(version=version, members=members):
                    alive = [str(m.incarnation) for m in members]
                    log.info("roster_declared", version=version[1], alive=alive)
            self.send([send])

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        self._act(self.core.peers(up, down, now))

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        self._act(self.core.handle(source, cast("ToHealth", message), now))

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return self.core.statistics()
