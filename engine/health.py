"""The health monitor: who is alive in which epoch. It alone declares an incarnation dead.

Launchers report their processes whole and whenever something changes. Who is left out of the next roster
is dead: what was reported exited, and what is killed, stopped or not, because its heart stood still for
`deadline_s` or a peer suspects it. Others go on without it at once. It may still write until its process is
gone, so it is listed as dying until its launcher says so: who owned what it wrote waits for that, or for
proof of its own (`engine.allocator`).

Of other hosts (`engine.hosts`) launchers tell what hearts count, by the launcher of this one: whoever they
stop telling of is silent too. What is dying there stays so until its host is heard of again.

The monitor measures silence by its own turns, not by the wall clock alone: when the whole machine
stood still (suspended, or starved of CPU), everybody gets the time back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from engine.core import Send, Statistics
from engine.ids import Incarnation
from engine.messages import Drain, Kill, Member, ProcessFact, ProcessFacts, Roster, Stop, Suspicion

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.messages import ToHealth


@dataclass(slots=True)
class Pulse:
    """When the heartbeat of an incarnation was last seen to move."""

    count: int
    silent_s: float = 0.0


class HealthMonitor:
    """Turns process facts into rosters and still hearts into kills."""

    def __init__(self, me: Incarnation, *, deadline_s: float, tick_s: float) -> None:
        self.me = me
        self.deadline_s = deadline_s
        self.tick_s = tick_s
        self._launcher: str | None = None
        """That of this host, which also speaks for the others'."""
        self._facts: dict[Incarnation, ProcessFact] = {}
        self._pulses: dict[Incarnation, Pulse] = {}
        self._condemned: set[Incarnation] = set()
        """Killed, and not known to have exited."""
        self._members: tuple[Member, ...] = ()
        self._dying: tuple[Incarnation, ...] = ()
        self._version = 0
        self._last_tick: float | None = None
        self.deaths = 0
        self.kills = 0

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        return []

    def handle(self, source: Incarnation, message: ToHealth, now: float) -> list[Send]:
        """Take one message; the answer is a roster when it changed who is there."""
        match message:
            case ProcessFacts():
                self._launcher = source.name
                self._facts = {Incarnation(fact.name, fact.epoch): fact for fact in message.facts}
                self._condemned &= {one for one, fact in self._facts.items() if not fact.exited}
                return self._declare()
            case Suspicion():
                return self._kill(message.target, f"{source} says: {message.reason}")
            case Roster() | Drain() | Stop():
                return []
            case _:
                assert_never(message)

    def tick(self, heartbeats: Mapping[Incarnation, int], now: float) -> list[Send]:
        """Look at the hearts; `heartbeats` are the counters of those in `alive` that are of this host."""
        # At most two ticks a turn count as silence: what is more, the monitor itself slept through.
        turn = self.tick_s if self._last_tick is None else min(now - self._last_tick, 2 * self.tick_s)
        self._last_tick = now
        sends: list[Send] = []
        for incarnation, count in [*heartbeats.items(), *self._told()]:
            pulse = self._pulses.setdefault(incarnation, Pulse(count))
            if pulse.count != count:
                pulse.count, pulse.silent_s = count, 0.0
                continue
            pulse.silent_s += turn
            if pulse.silent_s > self.deadline_s:
                sends += self._kill(incarnation, f"its heart stood still for {pulse.silent_s:.1f} s")
        return sends

    def _told(self) -> list[tuple[Incarnation, int]]:
        """The hearts of other hosts."""
        alive = {member.incarnation for member in self._members}
        return [
            (incarnation, fact.heart)
            for incarnation, fact in self._facts.items()
            if fact.heart is not None and incarnation in alive
        ]

    def _kill(self, target: Incarnation, reason: str) -> list[Send]:
        fact = self._facts.get(target)
        if fact is None or target in self._condemned or fact.exited or self._launcher is None:
            return []
        self._condemned.add(target)
        self.kills += 1
        return [Send(self._launcher, Kill(target, reason)), *self._declare()]

    def _declare(self) -> list[Send]:
        members = tuple(
            Member(fact.name, fact.kind, fact.ordinal, fact.epoch, fact.endpoint, fact.ready)
            for incarnation, fact in self._facts.items()
            if not fact.exited and fact.endpoint and incarnation not in self._condemned
        )
        dying = tuple(sorted(self._condemned))
        if members == self._members and dying == self._dying:
            return []
        before = {member.incarnation for member in self._members}
        alive = {member.incarnation for member in members}
        self.deaths += len(before - alive)
        for gone in [pulse for pulse in self._pulses if pulse not in alive]:
            del self._pulses[gone]
        self._members, self._dying = members, dying
        self._version += 1
        roster = Roster((self.me.epoch, self._version), members, dying)
        return [] if self._launcher is None else [Send(self._launcher, roster)]

    @property
    def alive(self) -> tuple[Member, ...]:
        """Who is in the last roster."""
        return self._members

    def check(self) -> None:
        names = [member.name for member in self._members]
        assert len(names) == len(set(names)), "two incarnations of one actor are alive"
        assert not self._condemned & {member.incarnation for member in self._members}

    def statistics(self) -> Statistics:
        return {
            "members": len(self._members),
            "ready": sum(member.ready for member in self._members),
            "rosters": self._version,
            "deaths": self.deaths,
            "kills": self.kills,
        }
