"""The launcher in its shell: `engine.supervision` over something that starts and ends actors.

In a real launch the nest is `actors.processes.Processes`; in a test it is tasks in memory.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol, assert_never, cast

import structlog
import trio

from actors.boot import FIRST_LAUNCHER_EPOCH
from actors.post import PostOffice
from engine.core import Send
from engine.hosts import Membership, OtherHosts
from engine.ids import Incarnation
from engine.supervision import Announce, KillProcess, Over, Spawn, Supervisor
from engine.topology import of_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.layout import Vitals
    from engine.messages import ToLauncher
    from engine.supervision import Command
    from engine.topology import Actor, Topology
    from transport.link import LinkFactory

log = structlog.get_logger()


class Nest(Protocol):
    """Where actors are born and die."""

    def spawn(self, actor: Actor, incarnation: Incarnation) -> None:
        """Start an incarnation; its end is reported to `Launcher.exited`."""
        ...

    def kill(self, incarnation: Incarnation) -> None:
        """End an incarnation at once; a no-op when it has ended."""
        ...


class Launcher:
    """Supervises the actors of one host until it is told to stop, or gives up."""

    def __init__(
        self,
        topology: Topology,
        links: LinkFactory,
        vitals: Vitals,
        announce: Callable[[Announce], None] = lambda announcement: None,
        *,
        host: str = "",
        epoch: int = FIRST_LAUNCHER_EPOCH,
        first_endpoint: str = "",
    ) -> None:
        """Of a host that is not the first, `epoch` is later than that of any launcher of it before, and
        `first_endpoint` is where the first host's launcher is.
        """
        first, *others = topology.hosts()
        self.me = Incarnation(of_host("launcher", host), epoch)
        self.post = PostOffice(self.me, "launcher", links, introduces=self._expects)
        deadline_s, agreement = topology.health.deadline_s, topology.agreement()
        self._membership: Membership | None = None
        if host != first:
            head = Incarnation(of_host("launcher", first), FIRST_LAUNCHER_EPOCH)
            self._membership = Membership(
                host, head, first_endpoint, self.post.inbox.endpoint, agreement, deadline_s
            )
            self.post.connect(head, first_endpoint)
        self.core = Supervisor(
            topology.actors(host),
            topology.launch,
            self._next_epoch,
            trio.current_time(),
            others=OtherHosts(others if host == first else (), agreement, deadline_s),
            membership=self._membership,
            heartbeat=vitals.heartbeat,
        )
        self._vitals = vitals
        self._topology = topology
        self._announce = announce
        self._nest: Nest | None = None
        self._over: Over | None = None
        self._changed = trio.Event()

    def _next_epoch(self, ordinal: int) -> int:
        after = 0 if self._membership is None else self._membership.epochs_after
        return self._vitals.next_epoch(ordinal, after)

    @property
    def endpoint(self) -> str:
        """Where actors say hello."""
        return self.post.inbox.endpoint

    def stop(self) -> None:
        """Drain and stop; called again, stop at once."""
        self._do(self.core.signalled(trio.current_time()))

    def exited(self, incarnation: Incarnation, code: int, said: str) -> None:
        """The nest reaped an incarnation."""
        tell = log.warning if code else log.info
        tell("process_exited", process=str(incarnation), code=code, **({"said": said} if said else {}))
        self.post.disconnect(incarnation.name)
        self._do(self.core.exited(incarnation, code, said, trio.current_time()))

    async def run(self, nest: Nest) -> Over:
        """Start everything and supervise it; returns when everything has ended."""
        self._nest = nest
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.post.keep_promises)
                nursery.start_soon(self._receive)
                nursery.start_soon(self._take_turns)
                while self._over is None:
                    self._do(self.core.tick(trio.current_time()))
                    if self._over is None:
                        due = self.core.deadline()
                        self._changed = trio.Event()
                        with trio.move_on_at(math.inf if due is None else due):
                            await self._changed.wait()
                nursery.cancel_scope.cancel()
        finally:
            self.post.close()
        assert self._over is not None
        return self._over

    async def _receive(self) -> None:
        while True:
            source, message = await self.post.receive()
            self._do(self.core.handle(source, cast("ToLauncher", message), trio.current_time()))

    async def _take_turns(self) -> None:
        """Watch the health monitor, and speak with other hosts."""
        table = self._topology.health
        health = next((a.ordinal for a in self._topology.actors() if a.kind == "health"), 0)
        while True:
            before = trio.current_time()
            await trio.sleep(table.tick_s)
            now = trio.current_time()
            # As the health monitor does: when the whole machine stood still, that is nobody's silence.
            turn_s = min(now - before, 2 * table.tick_s)
            self._do(self.core.watch(self._vitals.heartbeat(health), turn_s, table.deadline_s))
            self._do(self.core.turn(turn_s, now))

    def _expects(self, incarnation: Incarnation) -> bool:
        child = self.core.children.get(incarnation.name)
        if child is None:
            return self.core.others.expects(incarnation)
        return child.incarnation == incarnation and child.running

    def _do(self, commands: Iterable[Command]) -> None:
        assert self._nest is not None
        for command in commands:
            match command:
                case Send():
                    self.post.post([command])
                case Spawn(actor=actor, incarnation=incarnation):
                    log.info("process_spawned", process=str(incarnation))
                    self._nest.spawn(actor, incarnation)
                case KillProcess(incarnation=incarnation, reason=reason):
                    log.warning("process_killed", process=str(incarnation), reason=reason)
                    self._nest.kill(incarnation)
                case Announce():
                    log.info("launch_announced", what=command.what, text=command.message)
                    self._announce(command)
                case Over():
                    self._over = command
                case _:
                    assert_never(command)
        self._changed.set()
