"""The allocator actor: `engine.allocator` over the page table in shared memory."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

import structlog
import trio

from actors.shell import Actor
from engine.allocator import WRITERS, Allocator
from engine.eviction import LRU, CostAware
from engine.ids import Incarnation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.layout import Owner
    from engine.messages import Member, Message, ToAllocator

log = structlog.get_logger()

PROOF_S = 0.001
"""How often the locks of a dead worker are tried until they tell that its threads are gone."""
PROOF_SLOW_S = 0.05
"""The same after a second: then it is the kernel that takes its time."""


class AllocatorActor(Actor):
    """Leases, shared prefixes, releases, reclamation."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        topology = self.boot.topology
        self._names = {actor.ordinal: actor.name for actor in topology.actors()}
        self._here = {actor.ordinal for actor in topology.actors(self.host)}
        ordinals = {name: ordinal for ordinal, name in self._names.items()}
        policy = CostAware(topology.kv.pages) if topology.allocator.eviction == "cost" else LRU()
        several = len(topology.hosts()) > 1
        self.core = Allocator(self.page_table(), ordinals, policy, self._gone, tells=several)
        self._due = math.inf
        self._earlier = trio.Event()

    def _gone(self, owner: Owner) -> bool:
        """Whether no thread of a dead incarnation can write any more: by its locks, or as reaped."""
        proof = self.world.gone(owner.ordinal, owner.epoch)
        if proof is not None:
            return proof
        return Incarnation(self._names[owner.ordinal], owner.epoch) not in self.dying

    async def serve(self) -> None:
        bereaved_at = trio.current_time()
        while True:
            now = trio.current_time()
            if self.core.waits_for_proof:
                self._due = now + (PROOF_S if now - bereaved_at < 1 else PROOF_SLOW_S)
            else:
                bereaved_at = now
                deadline = self.core.deadline()
                self._due = math.inf if deadline is None else deadline
            with trio.move_on_at(self._due):
                await self._earlier.wait()
            self._earlier = trio.Event()
            self.send(self.core.tick(trio.current_time()))

    def _look_sooner(self) -> None:
        """Something may be due before what `serve` waits for."""
        deadline = self.core.deadline()
        if self.core.waits_for_proof or (deadline is not None and deadline < self._due):
            self._earlier.set()

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        # Workers and replicators of other hosts have nothing of this pool.
        own = [member for member in up if member.kind not in WRITERS or member.ordinal in self._here]
        self.send(self.core.peers(own, down, now))
        if self.core.waits_for_proof:
            log.info("pages_quarantined", pages=self.core.census()["quarantined"])
        self._look_sooner()

    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        self.send(self.core.handle(source, cast("ToAllocator", message), now))
        self._look_sooner()

    def check(self) -> None:
        self.core.check()

    def statistics(self) -> Statistics:
        return self.core.statistics()
