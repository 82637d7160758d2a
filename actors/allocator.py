"""The allocator actor: `engine.allocator` over the page table in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from actors.shell import Actor
from engine.allocator import Allocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message, ToAllocator


class AllocatorActor(Actor):
    """Leases, releases, reclamation."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        ordinals = {actor.name: actor.ordinal for actor in self.boot.topology.actors()}
        self.core = Allocator(self.page_table(), ordinals)

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        self.send(self.core.peers(up, down, now))

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        self.send(self.core.handle(source, cast("ToAllocator", message), now))

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return self.core.statistics()
