"""Several hosts under one health monitor: what their launchers know of each other.

The launcher of the first host (`OtherHosts`) hears every other one (`Membership`), tells the health
monitor of their processes, and passes on rosters, kills, drain and stop. All is said whole, each turn:

    other launcher                                 first launcher
      │ ── Join (what it has read) ──────────────▶ │  one more life of that host
      │ ◀───────────── HostOrder(life, "run") ──── │
      │ ── HostFacts (processes, hearts) ────────▶ │ ── ProcessFacts (of all) ──▶ health monitor
      │ ◀───────────── HostOrder, Roster, Kill ─── │
      │ ── HostFacts(over) ──────────────────────▶ │  the host has left
      │ ◀───────────── HostOrder("leave") ──────── │

Silence is counted in turns of one's own, as the health monitor does. A host that says nothing for
`deadline_s` is lost: its actors' hearts stand still and the monitor declares them dead, while the launcher
there may still be alive behind a broken link. When it is heard again it is told whom to kill, and starts them
anew. Unheard itself for `DEADLINES` times that long, it ends what it started, and itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine.core import Send
from engine.ids import LIFE_BITS, Incarnation
from engine.messages import HostFacts, HostOrder, Join, Kill
from engine.topology import of_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.messages import Message, ProcessFact

DEADLINES = 2.0
"""Times `deadline_s` without a word of the first host, after which another host gives up."""

LEAVE_S = 1.0
"""How long a launcher waits at its end for the first host to have heard of it."""

Want = Literal["run", "drain", "stop"]


class Announce(NamedTuple):
    """Tell the person at the terminal."""

    what: str
    message: str


@dataclass(slots=True)
class OtherHost:
    """What the first host knows of another one."""

    name: str
    launcher: Incarnation | None = None
    """Who speaks for it; None before it has joined and after it has left."""
    life: int = 0
    facts: HostFacts | None = None
    silent_s: float = 0.0
    lost: bool = False

    @property
    def present(self) -> bool:
        """It has joined, and was heard of late."""
        return self.launcher is not None and not self.lost

    @property
    def ready(self) -> bool:
        """All of its actors can serve."""
        facts = self.facts
        return self.present and facts is not None and all(fact.ready for fact in facts.facts)


class OtherHosts:
    """The other hosts as the launcher of the first one knows them; there may be none."""

    def __init__(self, names: Sequence[str] = (), agreement: str = "", deadline_s: float = math.inf) -> None:
        self._hosts = {of_host("launcher", name): OtherHost(name) for name in names}
        self._agreement = agreement
        self._deadline_s = deadline_s

    def expects(self, launcher: Incarnation) -> bool:
        """Whether this may be a new launcher of another host; the newest is believed."""
        host = self._hosts.get(launcher.name)
        return host is not None and (host.launcher is None or host.launcher.epoch < launcher.epoch)

    def find(self, source: Incarnation) -> OtherHost | None:
        """The host that a launcher speaks for; None when it does not speak for any, or no more."""
        host = self._hosts.get(source.name)
        return host if host is not None and host.launcher == source else None

    def join(self, source: Incarnation, message: Join, want: Want) -> list[Send | Announce]:
        """A launcher of another host presents itself; whatever ran there before does no more."""
        host = self._hosts.get(source.name)
        if host is None or host.name != message.host or host.launcher == source:
            return []
        if message.agreement != self._agreement:
            refused = "its topology has other hosts, actors or pages than that of the first host"
            return [
                Send(source, HostOrder(0, "stop", refused)),
                Announce("refused", f"host {host.name} was refused: {refused}"),
            ]
        if host.life + 1 >= 1 << LIFE_BITS:
            return [Send(source, HostOrder(0, "stop", "it has joined too often; start the first host again"))]
        host.launcher, host.facts = source, None
        host.silent_s, host.lost = 0.0, False
        host.life += 1
        return [
            Send(source, HostOrder(host.life, want)),
            Announce("joined", f"host {host.name} has joined"),
        ]

    def told(self, host: OtherHost, message: HostFacts, want: Want) -> list[Send | Announce]:
        """A host says how it is; the answer, and a line where that is news."""
        assert host.launcher is not None
        source, was_lost = host.launcher, host.lost
        host.facts, host.silent_s, host.lost = message, 0.0, False
        if message.over:
            host.launcher = host.facts = None
            return [
                Send(source, HostOrder(host.life, "leave")),
                Announce("left", f"host {host.name} has left"),
            ]
        order = Send(source, HostOrder(host.life, want))
        return [order, Announce("heard", f"host {host.name} is heard again")] if was_lost else [order]

    def order(self, want: Want) -> list[Send]:
        """Tell everybody what to do now; they hear it again with every answer."""
        return [
            Send(host.launcher, HostOrder(host.life, want))
            for host in self._hosts.values()
            if host.launcher is not None
        ]

    def send(self, message: Message) -> list[Send]:
        """The same to every launcher that has joined."""
        return [Send(host.launcher, message) for host in self._hosts.values() if host.launcher is not None]

    def route(self, kill: Kill) -> list[Send]:
        """A kill, to the launcher of the host where its target runs."""
        return [
            Send(host.launcher, kill)
            for host in self._hosts.values()
            if host.launcher is not None
            and host.facts is not None
            and any(
                (fact.name, fact.epoch) == (kill.target.name, kill.target.epoch) for fact in host.facts.facts
            )
        ]

    def turn(self, turn_s: float) -> list[Announce]:
        """One more turn of our own without a word of theirs; a line for each that is lost by it."""
        lines = []
        for host in self._hosts.values():
            if not host.present:
                continue
            host.silent_s += turn_s
            if host.silent_s > self._deadline_s:
                host.lost = True
                said = f"host {host.name} is silent for {host.silent_s:.1f} s; going on without it"
                lines.append(Announce("lost", said))
        return lines

    def processes(self) -> tuple[ProcessFact, ...]:
        """All actors of the hosts that have joined, as they said last."""
        told = [host.facts.facts for host in self._hosts.values() if host.facts is not None]
        return tuple(fact for facts in told for fact in facts)

    @property
    def missing(self) -> list[str]:
        """Hosts that are not there."""
        return [host.name for host in self._hosts.values() if not host.present]

    @property
    def ready(self) -> bool:
        """All of them are there, and all of their actors can serve."""
        return all(host.ready for host in self._hosts.values())

    @property
    def drained(self) -> bool:
        """No gateway of those that are there has an open request."""
        present = [host for host in self._hosts.values() if host.present]
        return all(host.facts is None or host.facts.drained for host in present)

    @property
    def present(self) -> list[str]:
        """Hosts that are there: whose end the last word is waited for."""
        return [host.name for host in self._hosts.values() if host.present]

    def check(self) -> None:
        for host in self._hosts.values():
            assert host.facts is None or host.launcher is not None
            assert not host.lost or host.launcher is not None


class Membership:
    """Another host's place among the hosts, as its own launcher knows it."""

    def __init__(
        self, host: str, first: Incarnation, where: str, endpoint: str, agreement: str, deadline_s: float
    ) -> None:
        """`first`: the launcher of the first host, which is at `where`; `endpoint`: where we are."""
        self.first = first
        self.where = where
        self.life = 0
        """Which life of this host's launcher this is; 0 before the first host has said so."""
        self.silent_s = 0.0
        self._deadline_s = DEADLINES * deadline_s
        self._join = Join(host, endpoint, agreement)

    def join(self) -> Send:
        """Present this host; said again by the channel until the first host is there."""
        return Send(self.first, self._join)

    def heard(self, life: int) -> bool:
        """The first host has spoken; whether it is for the first time, so that actors may start."""
        new = self.life == 0
        self.life = life
        self.silent_s = 0.0
        return new

    @property
    def epochs_after(self) -> int:
        """The epochs of this life of the launcher come after this one: no earlier life used them."""
        return (self.life - 1) << LIFE_BITS

    @property
    def silent(self) -> bool:
        """Too long for us to go on."""
        return self.silent_s > self._deadline_s

    def turn(self, turn_s: float) -> None:
        """One more turn of our own without a word from the first host, once it has spoken."""
        if self.life:
            self.silent_s += turn_s
