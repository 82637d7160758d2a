"""The launcher's mind: start, restart with back-off, drain, stop, give up. No process is touched here.

    starting ── all ready ─▶ running ── signal ─▶ draining ── gateways drained, or time ─▶ stopping ─▶ over
        └── a stated failure, too many failures, or too slow ─▶ stopping with an exit code ─▶ over

The launcher spawns, kills and reports; only the health monitor declares an incarnation dead. What
it says about its processes is level-triggered: the whole list, whenever something changed and to
every new health monitor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, assert_never

from engine.core import Send, Statistics
from engine.errors import StartError
from engine.ids import Incarnation
from engine.lifecycle import PROCESS, ProcessEvent, ProcessState, advance
from engine.messages import (
    Drain,
    Drained,
    Hello,
    Kill,
    ProcessFact,
    ProcessFacts,
    Ready,
    Roster,
    Stop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.messages import ToLauncher
    from engine.topology import Actor, LaunchTable

STABLE_S = 30.0
"""A life of so long forgives the failures before it."""

STOP_S = 2.0
"""Of the drain time, what is kept for stopping; then whoever is left is killed."""


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


class Announce(NamedTuple):
    """Tell the person at the terminal."""

    what: str
    message: str


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
        self, actors: Sequence[Actor], launch: LaunchTable, next_epoch: Callable[[int], int], now: float
    ) -> None:
        """`next_epoch(ordinal)` counts a start in shared memory, so that no epoch is used twice."""
        self.phase = Phase.STARTING
        self._launch = launch
        self._next_epoch = next_epoch
        self._children = {actor.name: Child(actor, spawn_at=now) for actor in actors}
        self._roster: Roster | None = None
        self._start_by = now + launch.start_s
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._outcome = Over(0, None)
        self._heartbeat = 0
        self._still_s = 0.0
        self.restarts = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def handle(self, source: Incarnation, message: ToLauncher, now: float) -> list[Command]:
        """Take one message."""
        child = self._children.get(source.name)
        if child is None or child.epoch != source.epoch:
            return []
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
                    commands.append(Announce("ready", "all actors are ready"))
                return commands
            case Drained():
                child.drained = True
                return self._stop_when_drained(now)
            case Roster():
                if self._roster is None or message.version > self._roster.version:
                    self._roster = message
                    return [
                        Send(other.incarnation, message)
                        for other in self._children.values()
                        if other.running and other.endpoint
                    ]
                return []
            case Kill():
                target = self._children.get(message.target.name)
                if target is None or target.incarnation != message.target or not target.running:
                    return []
                return [KillProcess(message.target, message.reason)]
            case _:
                assert_never(message)

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
            return [*commands, *self._over_when_all_exited()]
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
            self.phase = Phase.DRAINING
            self._kill_at = now + self._launch.drain_s
            self._stop_at = now + max(0.0, self._launch.drain_s - STOP_S)
            drains: list[Command] = [
                Announce("drain", f"draining for up to {self._launch.drain_s:g} s; once more to stop at once")
            ]
            drains += [
                Send(child.incarnation, Drain()) for child in self._children.values() if child.endpoint
            ]
            return [*drains, *self._stop_when_drained(now)]
        if self.phase in (Phase.STARTING, Phase.DRAINING):
            return self._stop(now)
        return []

    def tick(self, now: float) -> list[Command]:
        """Whatever is due by now."""
        commands: list[Command] = []
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            commands += [
                self._spawn(child, now)
                for child in self._children.values()
                if child.spawn_at is not None and child.spawn_at <= now
            ]
        if self.phase is Phase.STARTING and now >= self._start_by:
            late = [c.actor.name for c in self._children.values() if c.state is not ProcessState.READY]
            limit = f"launch.start_s = {self._launch.start_s:g} s"
            commands += self._give_up(3, f"not ready after {limit}: {', '.join(late)}", now)
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

    def _report(self) -> list[Command]:
        health = self._health()
        if health is None or not health.endpoint:
            return []
        facts = tuple(
            ProcessFact(
                child.actor.name,
                child.actor.kind,
                child.actor.ordinal,
                child.epoch,
                child.endpoint,
                child.state is ProcessState.READY,
                not child.running,
            )
            for child in self._children.values()
            if child.epoch
        )
        return [Send(health.incarnation, ProcessFacts(facts))]

    def _stop_when_drained(self, now: float) -> list[Command]:
        gateways = [c for c in self._children.values() if c.actor.kind == "gateway"]
        if self.phase is Phase.DRAINING and all(c.drained or not c.running for c in gateways):
            return self._stop(now)
        return []

    def _give_up(self, code: int, reason: str, now: float) -> list[Command]:
        self._outcome = Over(code, reason)
        return self._stop(now)

    def _stop(self, now: float) -> list[Command]:
        self.phase = Phase.STOPPING
        self._kill_at = now + STOP_S if self._kill_at is None else min(self._kill_at, now + STOP_S)
        stops: list[Command] = []
        for child in self._children.values():
            child.spawn_at = None
            if child.running and child.endpoint:
                stops.append(Send(child.incarnation, Stop()))
            elif child.running:
                # It has not said hello yet: there is nothing in it to be ended cleanly.
                stops.append(KillProcess(child.incarnation, "stopped while it started"))
        return [*stops, *self._over_when_all_exited()]

    def _over_when_all_exited(self) -> list[Command]:
        if self.phase is Phase.OVER or any(child.running for child in self._children.values()):
            return []
        self.phase = Phase.OVER
        return [self._outcome]

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
