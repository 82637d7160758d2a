"""The shell around a pure core: receive → decide (engine) → act, a heartbeat, a clean end.

    async with a nursery:   post office timers · heartbeat · inbox loop · the actor's own `serve`

An actor is a subclass of `Actor`: it prepares what it needs, then serves. Nothing in here differs
between a process of its own and a test in memory; the `World` does.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import structlog
import trio

from actors.boot import PAGE_TABLE, VITALS
from actors.post import PostOffice
from engine.core import Send
from engine.layout import PageTable, Vitals
from engine.messages import Drain, Hello, Ready, Roster, Stop, Suspicion

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from actors.boot import World
    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.messages import Member, Message

log = structlog.get_logger()

WIND_DOWN_S = 1.0
BEAT_S = 0.05
BEATS_A_LOOK = 5
"""Every so many beats statistics are published, and invariants checked when nothing moved."""


class Actor(ABC):
    """One incarnation of an actor in its shell."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.boot = world.boot
        self.me = world.boot.incarnation
        self.host = world.boot.host
        self.vitals = Vitals(world.segments[VITALS], len(world.boot.topology.actors()))
        self.post = PostOffice(self.me, world.boot.kind, world.links)
        self.members: dict[Incarnation, Member] = {}
        self.draining = trio.Event()
        self.stopping = trio.Event()
        self._roster: Roster | None = None
        self.serving = False

    def page_table(self) -> PageTable:
        """The shared page metadata."""
        topology, shape = self.boot.topology, self.boot.page_shape
        segment = self.world.segments[PAGE_TABLE]
        return PageTable(segment, topology.kv.pages, shape.tokens, len(topology.actors()))

    # ── what an actor is ──────────────────────────────────────────────────────────────────────

    async def prepare(self) -> None:
        """Get ready to serve; may take its time."""

    async def serve(self) -> None:
        """Work of the actor beside its messages; may return."""

    async def wind_down(self) -> None:
        """Say goodbye to clients when told to stop; cut off after WIND_DOWN_S."""

    @abstractmethod
    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> None:
        """Members that became ready, and incarnations that died."""

    @abstractmethod
    def handle(self, source: Incarnation, message: Message, now: float) -> None:
        """Take one message that is not the shell's own."""

    @abstractmethod
    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""

    @abstractmethod
    def statistics(self) -> Statistics:
        """Figures for people, metrics and tests."""

    # ── the shell ─────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Live until told to stop."""
        with structlog.contextvars.bound_contextvars(actor=self.me.name, epoch=self.me.epoch):
            await self._run()

    async def _run(self) -> None:
        self.post.connect(self.boot.launcher, self.boot.launcher_endpoint)
        hello = Hello(self.boot.kind, self.boot.ordinal, os.getpid(), self.post.inbox.endpoint)
        self.post.post([Send(self.boot.launcher, hello)])
        log.info("actor_started", pid=os.getpid())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._beat)
                nursery.start_soon(self.post.keep_promises)
                nursery.start_soon(self._receive)
                nursery.start_soon(self._live)
                await self.stopping.wait()
                if self.serving:
                    with trio.move_on_after(WIND_DOWN_S):
                        await self.wind_down()
                nursery.cancel_scope.cancel()
        finally:
            self.post.close()
        log.info("actor_stopped")

    async def _live(self) -> None:
        await self.prepare()
        self.serving = True
        log.info("actor_ready")
        self.post.post([Send(self.boot.launcher, Ready())])
        self._meet_members()
        await self.serve()

    async def _receive(self) -> None:
        while True:
            source, message = await self.post.receive()
            match message:
                case Roster():
                    self._take_roster(message)
                case Drain():
                    self.draining.set()
                case Stop():
                    self.stopping.set()
                case _:
                    self.handle(source, message, trio.current_time())

    async def _beat(self) -> None:
        """Show that the event loop turns, and what is in it."""
        looked: Statistics | None = None
        shown: Statistics | None = None
        checked = False
        beats = 0
        while True:
            self.vitals.beat(self.boot.ordinal)
            beats += 1
            if beats % BEATS_A_LOOK == 0 and self.serving:
                statistics = self.statistics()
                figures = {"epoch": self.me.epoch, **statistics, **self.post.statistics()}
                if figures != shown:
                    self.vitals.publish(self.boot.ordinal, figures)
                    shown = figures
                if statistics != looked:
                    looked, checked = statistics, False
                elif not checked:
                    self.check()
                    checked = True
                for stuck in self.post.stuck:
                    log.warning("peer_suspected", peer=str(stuck))
                    self.post.post([Send("health", Suspicion(stuck, "it does not take its messages"))])
                self.post.stuck.clear()
            await trio.sleep(BEAT_S)

    # ── the roster ────────────────────────────────────────────────────────────────────────────

    @property
    def dying(self) -> tuple[Incarnation, ...]:
        """Who was declared dead without its process being known to be gone."""
        return () if self._roster is None else self._roster.dying

    def _take_roster(self, roster: Roster) -> None:
        if self._roster is not None and roster.version <= self._roster.version:
            return
        self._roster = roster
        if self.serving:
            self._meet_members()

    def _meet_members(self) -> None:
        """Bring the connections and the core up to date with the roster; cores see ready members only."""
        if self._roster is None:
            return
        listed = {m.incarnation: m for m in self._roster.members if m.ready and m.incarnation != self.me}
        down = [incarnation for incarnation in self.members if incarnation not in listed]
        up = [member for incarnation, member in listed.items() if incarnation not in self.members]
        for incarnation in down:
            log.info("peer_died", peer=str(incarnation))
            self.post.disconnect(incarnation.name)
        self.members = listed
        # Connecting delivers what the new peer said before we knew it, but only to the inbox loop,
        # which runs after the core has been told who is there.
        for member in up:
            self.post.connect(member.incarnation, member.endpoint)
        if up or down:
            self.peers(up, down, trio.current_time())

    def send(self, sends: Iterable[Send]) -> None:
        """Post what a core decided."""
        self.post.post(sends)
