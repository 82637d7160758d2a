"""One host of a system in memory: its shared memory, its launcher and the actors that run there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from actors.boot import VITALS, Boot, World, segment_sizes
from actors.launcher import Launcher
from actors.run import first_cause, make_actor
from engine.layout import Vitals

if TYPE_CHECKING:
    from actors.shell import Actor as ActorShell
    from engine.ids import Incarnation
    from engine.supervision import Over
    from engine.testing.system import System
    from engine.topology import Actor

KILLED = -9


@dataclass(slots=True)
class Life:
    """One incarnation that runs as a task."""

    actor: ActorShell
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    killed: bool = False


class Machine:
    """One life of a host, from the start of its launcher to its end: the nest of that launcher.

    Shared memory is plain bytearrays, so it survives the actors as the memfds do, and like them it is gone
    with the launcher. A kill cancels the actor's task, cuts its inbox and drops what it still sends; its
    exit is reported when the task is over, as a process's is when it has been reaped.
    """

    def __init__(self, system: System, host: str, epoch: int, first_endpoint: str) -> None:
        self.host = host
        self.source = f"launcher-{host}.{epoch}" if host else "launcher"
        """By what name plans and hooks know the launcher."""
        self.over: Over | None = None
        self.ended = trio.Event()
        self.lost = False
        self.lives: dict[Incarnation, Life] = {}
        self._system = system
        self._scope = trio.CancelScope()
        topology = system.topology
        sizes = segment_sizes(topology, system.shape, system.context_length, host)
        self._segments = {name: memoryview(bytearray(size)) for name, size in sizes.items()}
        self.vitals = Vitals(self._segments[VITALS], len(topology.actors()))
        self.launcher = Launcher(
            topology,
            system.links(self.source),
            self.vitals,
            host=host,
            epoch=epoch,
            first_endpoint=first_endpoint,
        )

    async def run(self) -> None:
        """The launcher, until it has ended or was killed."""
        with self._scope:
            self.over = await self.launcher.run(self)
        self.ended.set()

    def lose(self) -> None:
        """SIGKILL of the launcher: all its actors end with it, and nobody is told."""
        self.lost = True
        self._system.memory.cut(self.launcher.endpoint)
        for incarnation in list(self.lives):
            self.kill(incarnation)
        self._scope.cancel()

    def spawn(self, actor: Actor, incarnation: Incarnation) -> None:
        """Start an incarnation as a task."""
        system = self._system
        boot = Boot(
            name=actor.name,
            kind=actor.kind,
            ordinal=actor.ordinal,
            epoch=incarnation.epoch,
            topology=system.topology,
            run_dir="",
            launcher=self.launcher.me,
            launcher_endpoint=self.launcher.endpoint,
            launcher_pid=0,
            model_folder=str(system.folder),
            page_shape=system.shape,
            context_length=system.context_length,
        )
        world = World(
            boot=boot,
            links=system.links(f"{incarnation.name}.{incarnation.epoch}"),
            segments=self._segments,
            compute=system.compute,
            open_backend=system.open_backend,
            gone=self.gone,
        )
        life = Life(make_actor(world))
        self.lives[incarnation] = life
        system.nursery.start_soon(self._live, incarnation, life)

    async def _live(self, incarnation: Incarnation, life: Life) -> None:
        code = 0
        try:
            with life.scope:
                await life.actor.run()
        except Exception as error:
            self._system.errors.append(first_cause(error))
            code = 70
        del self.lives[incarnation]
        if not self.lost:
            self.launcher.exited(incarnation, KILLED if life.killed else code, "")

    def kill(self, incarnation: Incarnation) -> None:
        """End an incarnation as SIGKILL does."""
        life = self.lives.get(incarnation)
        if life is not None and not life.killed:
            life.killed = True
            self._system.memory.cut(life.actor.post.inbox.endpoint)
            life.scope.cancel()

    def gone(self, ordinal: int, epoch: int) -> bool | None:
        """What the writers' locks say of an incarnation: a task that was killed may write until it ends."""
        if epoch > self.vitals.epoch(ordinal):
            return None
        return not any(
            life.actor.boot.ordinal == ordinal and incarnation.epoch <= epoch
            for incarnation, life in self.lives.items()
        )
