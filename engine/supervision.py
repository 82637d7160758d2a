"""The launcher's mind: start, restart with back-off, drain, stop, give up. No process is touched here.

    starting ── all ready ─▶ running ── signal ─▶ draining ── gateways drained, or time ─▶ stopping ─▶ over
        └── a stated failure, too many failures, or too slow ─▶ stopping with an exit code ─▶ over

The launcher spawns, kills and reports; only the health monitor declares an incarnation dead. What
it says about its processes is level-triggered: the whole list, whenever something changed and to
every new health monitor.

Of several hosts each has a launcher (`engine.hosts`). Those of the others start nothing before the first
host has answered, report to its launcher instead of the health monitor, and drain and stop when it says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, assert_never

from engine.core import Send, Statistics
from engine.errors import StartError
from engine.hosts import LEAVE_S, Announce, Membership, OtherHosts
from engine.ids import Incarnation
from engine.lifecycle import PROCESS, ProcessEvent, ProcessState, advance
from engine.messages import (
    Drain,
    Drained,
    Hello,
    HostFacts,
    HostOrder,
    Join,
    Kill,
    ProcessFact,
    ProcessFacts,
    Ready,
    Roster,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.hosts import Want
    from engine.messages import ToLauncher
    from engine.topology import Actor, LaunchTable

__all__ = [
    "Announce",
    "Child",
    "Command",
    "KillProcess",
    "Over",
    "Phase",
    "Spawn",
    "Supervisor",
    "describe_exit",
    "raise_if_failed",
]

STABLE_S = 30.0
"""A life of so long forgives the failures before it."""

STOP_S = 2.0
"""Of the drain time, what is kept for stopping; then whoever is left is killed."""

WAIT_S = 1.0
"""How long another host is waited for until the person at the terminal hears of it."""


class Spawn(NamedTuple):
    """Start a new incarnation of an actor."""

    actor: Actor
    incarnation: Incarnation


class KillProcess(NamedTuple):
    """End a process with SIGKILL, stopped or not."""

    incarnation: Incarnation
    reason: str


class Over(NamedTuple):
    """Everything has ended: exit with this code, and say why if there is something to say."""

    code: int
    message: str | None


Command = Send | Spawn | KillProcess | Over | Announce


class Phase(Enum):
    """Where the launch is."""

    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    OVER = "over"


@dataclass(slots=True)
class Child:
    """One actor under supervision and its newest incarnation."""

    actor: Actor
    epoch: int = 0
    state: ProcessState = ProcessState.EXITED
    endpoint: str = ""
    born: float = 0.0
    failures: int = 0
    killed: bool = False
    """It was told to be killed for not getting ready."""
    spawn_at: float | None = 0.0
    drained: bool = False

    @property
    def incarnation(self) -> Incarnation:
        """Name and epoch of the newest life."""
        return Incarnation(self.actor.name, self.epoch)

    @property
    def running(self) -> bool:
        """A process exists."""
        return self.state is not ProcessState.EXITED


class Supervisor:
    """All actors of one host."""

    def __init__(
        self,
        actors: Sequence[Actor],
        launch: LaunchTable,
        next_epoch: Callable[[int], int],
        now: float,
        *,
        others: OtherHosts | None = None,
        membership: Membership | None = None,
        heartbeat: Callable[[int], int] = lambda ordinal: 0,
    ) -> None:
        """`next_epoch(ordinal)` counts a start in shared memory, so that no epoch is used twice.

        `others`: the other hosts, of the first one's launcher. `membership`: of every other host's;
        nothing is started there before the first host has answered. `heartbeat(ordinal)`: what the heart
        of an actor counts, which is told to the first host.
        """
        self.phase = Phase.STARTING
        self.others = others or OtherHosts()
        self.membership = membership
        self._launch = launch
        self._next_epoch = next_epoch
        self._count = heartbeat
        spawn_at = now if membership is None else None
        self._children = {actor.name: Child(actor, spawn_at=spawn_at) for actor in actors}
        self._roster: Roster | None = None
        self._join_at: float | None = None if membership is None else now
        self._complain_at: float | None = None if membership is None else now + WAIT_S
        self._said_ready = self._said_waiting = False
        self._drains_for_first = False
        self._start_by = now + launch.start_s
        self._leave_by: float | None = None
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._outcome = Over(0, None)
        self._heartbeat = 0
        self._still_s = 0.0
        self.restarts = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def handle(self, source: Incarnation, message: ToLauncher, now: float) -> list[Command]:
        """Take one message."""
        match message:
            case Join():
                return self._joined(source, message)
            case HostFacts():
                return self._told(source, message, now)
            case HostOrder():
                return self._ordered(source, message, now)
        child = self._children.get(source.name)
        if child is None or child.epoch != source.epoch:
            if self.membership is None or source != self.membership.first:
                return []
            # What the health monitor says comes by the first host's launcher.
            return self._declared(message) if isinstance(message, Roster | Kill) else []
        match message:
            case Hello():
                if child.state is not ProcessState.STARTING:
                    return []
                child.state = advance(PROCESS, child.state, ProcessEvent.HELLO)
                child.endpoint = message.endpoint
                greeting: list[Command] = []
                if self.phase in (Phase.DRAINING, Phase.STOPPING):
                    greeting.append(Send(source, Drain() if self.phase is Phase.DRAINING else Stop()))
                if self._roster is not None:
                    greeting.append(Send(source, self._roster))
                return [*greeting, *self._report()]
            case Ready():
                if child.state is not ProcessState.UP:
                    return []
                child.state = advance(PROCESS, child.state, ProcessEvent.READY)
                commands = self._report()
                if self.phase is Phase.RUNNING:
                    commands.append(Announce("back", f"{source} is ready"))
                if self.phase is Phase.STARTING and all(
                    other.state is ProcessState.READY for other in self._children.values()
                ):
                    self.phase = Phase.RUNNING
                    commands += self._ready()
                return commands
            case Drained():
                child.drained = True
                report = self._report() if self.membership is not None else []
                return [*report, *self._stop_when_drained(now)]
            case Roster() | Kill():
                return self._declared(message)
            case _:
                assert_never(message)

    def _declared(self, message: Roster | Kill) -> list[Command]:
        """Pass on what the health monitor says."""
        if isinstance(message, Kill):
            target = self._children.get(message.target.name)
            if target is None:
                return [*self.others.route(message)]
            if target.incarnation != message.target or not target.running:
                return []
            return [KillProcess(message.target, message.reason)]
        if self._roster is not None and message.version <= self._roster.version:
            return []
        self._roster = message
        here = [child.incarnation for child in self._children.values() if child.running and child.endpoint]
        return [*(Send(child, message) for child in here), *self.others.send(message)]

    # ── other hosts ───────────────────────────────────────────────────────────────────────────

    @property
    def _want(self) -> Want:
        """What all hosts are to do."""
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            return "run"
        return "drain" if self.phase is Phase.DRAINING else "stop"

    def _joined(self, source: Incarnation, message: Join) -> list[Command]:
        commands: list[Command] = [*self.others.join(source, message, self._want)]
        host = self.others.find(source)
        if host is None or not commands:
            return commands
        roster = [] if self._roster is None else [Send(source, self._roster)]
        return [*commands, *roster, *self._report()]

    def _told(self, source: Incarnation, message: HostFacts, now: float) -> list[Command]:
        host = self.others.find(source)
        if host is None:
            return []
        commands: list[Command] = [*self.others.told(host, message, self._want)]
        commands += self._report()
        if self.phase is Phase.RUNNING:
            commands += self._ready()
        return [*commands, *self._stop_when_drained(now), *self._over_when_all_exited(now)]

    def _ordered(self, source: Incarnation, message: HostOrder, now: float) -> list[Command]:
        """The first host says what to do."""
        membership = self.membership
        if membership is None or source != membership.first or self.phase is Phase.OVER:
            return []
        if message.refused:
            return self._give_up(2, f"the first host at {membership.where} refused: {message.refused}", now)
        if membership.heard(message.life):
            self._complain_at = None
            self._start_by = now + self._launch.start_s
            for child in self._children.values():
                child.spawn_at = now
        match message.want:
            case "run":
                return []
            case "drain":
                if self.phase not in (Phase.STARTING, Phase.RUNNING):
                    return []
                self._drains_for_first = True
                return self._drain(now, "the first host drains")
            case "stop":
                if self.phase is Phase.STOPPING:
                    return []
                return [Announce("stop", "the first host stops"), *self._stop(now)]
            case "leave":
                if self._leave_by is None:
                    return []
                self._leave_by = None
                self.phase = Phase.OVER
                return [self._outcome]
            case _:
                assert_never(message.want)

    def turn(self, turn_s: float, now: float) -> list[Command]:
        """What is due once a turn between several hosts, `turn_s` after the last one."""
        membership = self.membership
        if membership is None:
            lost: list[Command] = [*self.others.turn(turn_s)]
            if not lost:
                return []
            return [*lost, *self._stop_when_drained(now), *self._over_when_all_exited(now)]
        membership.turn(turn_s)
        if membership.silent and self.phase in (Phase.STARTING, Phase.RUNNING, Phase.DRAINING):
            said = f"the first host at {membership.where} is silent for {membership.silent_s:.1f} s"
            return self._give_up(70, f"{said}; everything here was stopped", now)
        return self._report()

    def _ready(self) -> list[Command]:
        """Say once that all actors of all hosts are ready, or that others are waited for."""
        if self._said_ready:
            return []
        if self.others.ready:
            self._said_ready = True
            return [Announce("ready", "all actors are ready")]
        if not self._said_waiting and (missing := self.others.missing):
            self._said_waiting = True
            waiting = "; ".join(f"host {name}: start it there with --host {name}" for name in missing)
            return [Announce("waiting", f"all actors here are ready; waiting for {waiting}")]
        return []

    def exited(self, incarnation: Incarnation, code: int, said: str, now: float) -> list[Command]:
        """A process was reaped. `code` is negative for a signal; `said` its last line, if any."""
        child = self._children[incarnation.name]
        if child.epoch != incarnation.epoch or not child.running:
            return []
        was_ready = child.state is ProcessState.READY
        child.state = advance(PROCESS, child.state, ProcessEvent.EXIT)
        child.endpoint = ""
        child.drained = False
        commands = self._report()
        if self.phase is Phase.STOPPING:
            return [*commands, *self._over_when_all_exited(now)]
        if self.phase is Phase.DRAINING:
            # Nobody new is let in, so what a dead actor served is not coming back.
            return [*commands, *self._stop_when_drained(now)]
        if now - child.born > STABLE_S:
            child.failures = 0
        child.failures += 1
        died = f"{incarnation} {describe_exit(code)}" + (f": {said}" if said else "")
        stated = code in (2, 3) and not was_ready
        if stated or child.failures >= self._launch.restart_attempts:
            reason = said if stated and said else f"{died}; it failed {child.failures} times in a row"
            return [*commands, *self._give_up(3 if not was_ready else 70, reason, now)]
        pause = min(self._launch.restart_first_s * 2 ** (child.failures - 1), self._launch.restart_most_s)
        child.spawn_at = now + pause
        self.restarts += 1
        return [*commands, Announce("restart", f"{died}; starting it again in {pause:.1f} s")]

    def signalled(self, now: float) -> list[Command]:
        """Somebody asked to stop; the second time, at once."""
        if self.phase is Phase.RUNNING:
            return self._drain(now, "once more to stop at once")
        if self.phase in (Phase.STARTING, Phase.DRAINING):
            return self._stop(now)
        return []

    def _drain(self, now: float, why: str) -> list[Command]:
        """Open requests may end; gateways let nobody new in."""
        self.phase = Phase.DRAINING
        self._kill_at = now + self._launch.drain_s
        self._stop_at = now + max(0.0, self._launch.drain_s - STOP_S)
        drains: list[Command] = [
            Announce("drain", f"draining for up to {self._launch.drain_s:g} s; {why}"),
            *self.others.order(self._want),
        ]
        drains += [Send(child.incarnation, Drain()) for child in self._children.values() if child.endpoint]
        return [*drains, *self._stop_when_drained(now)]

    def tick(self, now: float) -> list[Command]:
        """Whatever is due by now."""
        commands: list[Command] = []
        membership = self.membership
        if membership is not None and self._join_at is not None:
            self._join_at = None
            commands.append(membership.join())
        if membership is not None and self._complain_at is not None and self._complain_at <= now:
            self._complain_at = None
            commands.append(Announce("waiting", f"waiting for the first host at {membership.where}"))
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            commands += [
                self._spawn(child, now)
                for child in self._children.values()
                if child.spawn_at is not None and child.spawn_at <= now
            ]
        if self.phase is Phase.STARTING and now >= self._start_by:
            late = [c.actor.name for c in self._children.values() if c.state is not ProcessState.READY]
            limit = f"launch.start_s = {self._launch.start_s:g} s"
            said = f"not ready after {limit}: {', '.join(late)}"
            if membership is not None and not membership.life:
                said = f"the first host did not answer at {membership.where} within {limit}"
            commands += self._give_up(3, said, now)
        if self.phase is Phase.RUNNING:
            # Nobody else can see one that hangs before it has said where it can be reached.
            for child in self._children.values():
                due = self._ready_by(child)
                if due is not None and due <= now:
                    child.killed = True
                    reason = f"it was not ready after launch.start_s = {self._launch.start_s:g} s"
                    commands.append(KillProcess(child.incarnation, reason))
        if self.phase is Phase.DRAINING and self._stop_at is not None and now >= self._stop_at:
            commands += self._stop(now)
        if self.phase is Phase.STOPPING and self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            commands += [
                KillProcess(child.incarnation, "it did not stop in time")
                for child in self._children.values()
                if child.running
            ]
        if self._leave_by is not None and now >= self._leave_by:
            commands += self._over_without_others()
        return commands

    def watch(self, heartbeat: int, turn_s: float, deadline_s: float) -> list[Command]:
        """Look at the heart of the health monitor, `turn_s` after the last look.

        It watches everybody else; that it stands still itself, nobody but its launcher can see.
        """
        health = self._health()
        if health is None or not health.endpoint or heartbeat != self._heartbeat:
            self._heartbeat, self._still_s = heartbeat, 0.0
            return []
        self._still_s += turn_s
        if self._still_s <= deadline_s:
            return []
        reason = f"its heart stood still for {self._still_s:.1f} s"
        self._still_s = 0.0
        return [KillProcess(health.incarnation, reason)]

    def deadline(self) -> float | None:
        """When `tick` next has something to do."""
        times = [child.spawn_at for child in self._children.values()]
        if self.phase not in (Phase.STARTING, Phase.RUNNING):
            times = []
        if self.phase is Phase.RUNNING:
            times += map(self._ready_by, self._children.values())
        times += [self._stop_at if self.phase is Phase.DRAINING else None]
        times += [self._kill_at if self.phase is Phase.STOPPING else None]
        times += [self._start_by if self.phase is Phase.STARTING else None]
        times += [self._join_at, self._complain_at, self._leave_by]
        return min((time for time in times if time is not None), default=None)

    def _ready_by(self, child: Child) -> float | None:
        waits = child.running and child.state is not ProcessState.READY and not child.killed
        return child.born + self._launch.start_s if waits else None

    # ── decisions ─────────────────────────────────────────────────────────────────────────────

    def _spawn(self, child: Child, now: float) -> Spawn:
        child.epoch = self._next_epoch(child.actor.ordinal)
        child.state = ProcessState.STARTING
        child.born = now
        child.killed = False
        child.spawn_at = None
        child.endpoint = ""
        return Spawn(child.actor, child.incarnation)

    def _health(self) -> Child | None:
        return next((child for child in self._children.values() if child.actor.kind == "health"), None)

    def _facts(self) -> tuple[ProcessFact, ...]:
        return tuple(
            ProcessFact(
                child.actor.name,
                child.actor.kind,
                child.actor.ordinal,
                child.epoch,
                child.endpoint,
                child.state is ProcessState.READY,
                not child.running,
                None if self.membership is None else self._count(child.actor.ordinal),
            )
            for child in self._children.values()
            if child.epoch
        )

    def _report(self, over: bool = False) -> list[Command]:
        """All that is known, to the health monitor or to the first host.

        In one message: who is not in it is dead.
        """
        membership = self.membership
        if membership is not None:
            if not membership.life:
                return []
            return [Send(membership.first, HostFacts(self._facts(), self._drained, over))]
        health = self._health()
        if health is None or not health.endpoint:
            return []
        return [Send(health.incarnation, ProcessFacts((*self._facts(), *self.others.processes())))]

    @property
    def _drained(self) -> bool:
        gateways = [c for c in self._children.values() if c.actor.kind == "gateway"]
        return all(c.drained or not c.running for c in gateways)

    def _stop_when_drained(self, now: float) -> list[Command]:
        if self.phase is not Phase.DRAINING or not (self._drained and self.others.drained):
            return []
        # Another host that the first one drains waits for the word to stop: who drains there may need us.
        return [] if self._drains_for_first else self._stop(now)

    def _give_up(self, code: int, reason: str, now: float) -> list[Command]:
        self._outcome = Over(code, reason)
        return self._stop(now)

    def _stop(self, now: float) -> list[Command]:
        self.phase = Phase.STOPPING
        self._kill_at = now + STOP_S if self._kill_at is None else min(self._kill_at, now + STOP_S)
        stops: list[Command] = [*self.others.order(self._want)]
        for child in self._children.values():
            child.spawn_at = None
            if child.running and child.endpoint:
                stops.append(Send(child.incarnation, Stop()))
            elif child.running:
                # It has not said hello yet: there is nothing in it to be ended cleanly.
                stops.append(KillProcess(child.incarnation, "stopped while it started"))
        return [*stops, *self._over_when_all_exited(now)]

    def _over_when_all_exited(self, now: float) -> list[Command]:
        if self.phase is not Phase.STOPPING or any(child.running for child in self._children.values()):
            return []
        membership = self.membership
        tells = membership is not None and membership.life > 0 and not membership.silent
        if not tells and not self.others.present:
            self.phase, self._leave_by = Phase.OVER, None
            return [self._outcome]
        # The last word of others is waited for, or that ours was heard; a host that is killed there has
        # as long as we had.
        if self._leave_by is None:
            self._leave_by = now + (LEAVE_S if tells else STOP_S + LEAVE_S)
            return self._report(over=True) if tells else []
        return []

    def _over_without_others(self) -> list[Command]:
        self.phase, self._leave_by = Phase.OVER, None
        late = self.others.present
        lines = [Announce("lost", f"host {name} did not say that it has stopped") for name in late]
        return [*lines, self._outcome]

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    @property
    def children(self) -> dict[str, Child]:
        """Copies of what is known of each actor."""
        return {name: replace(child) for name, child in self._children.items()}

    def check(self) -> None:
        for child in self._children.values():
            assert child.running or not child.endpoint
            assert child.spawn_at is None or not child.running

    def statistics(self) -> Statistics:
        return {
            "actors": len(self._children),
            "ready": sum(child.state is ProcessState.READY for child in self._children.values()),
            "restarts": self.restarts,
        }


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    return f"was ended by signal {-code}" if code < 0 else f"exited with {code}"


def raise_if_failed(over: Over) -> None:
    """Turn a failed launch into the error that a person sees."""
    if over.code:
        error = StartError(over.message or "the system could not go on")
        error.exit_code = over.code
        raise error
