"""Launchers of several hosts and the health monitor, as pure cores, with processes that obey.

A process that is spawned says hello and is ready at once; told to stop it exits, killed it is reaped. Mail
between hosts waits while the link is cut and arrives in order afterwards, as a channel has it.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from engine.core import Send
from engine.health import HealthMonitor
from engine.hosts import Membership, OtherHosts
from engine.ids import Incarnation
from engine.messages import Drain, Drained, Hello, Join, Ready, Roster, Stop
from engine.supervision import Announce, KillProcess, Over, Phase, Spawn, Supervisor
from engine.topology import of_host
from engine.topology_file import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.messages import Message
    from engine.supervision import Command
    from engine.topology import Actor, Topology

TOPOLOGY = """
[host.a]
address = "10.0.0.1"
[host.b]
address = "10.0.0.2"
[gateway.front]
on = "a"
[gateway.back]
on = "b"
port = 8001
[worker.wa]
on = "a"
role = "both"
[worker.wb]
on = "b"
role = "both"
[health]
tick_s = 1.0
deadline_s = 5.0
"""
TICK, DEADLINE = 1.0, 5.0


class Host:
    """One life of a launcher and the processes under it."""

    def __init__(self, name: str, me: Incarnation, topology: Topology, now: float) -> None:
        first, *others = topology.hosts()
        self.name, self.me = name, me
        self.epochs: Counter[int] = Counter()
        self.hearts: Counter[int] = Counter()
        self.alive: dict[Incarnation, Actor] = {}
        self.still: set[Incarnation] = set()
        """Processes whose event loop stands still."""
        self.busy: set[str] = set()
        """Gateways that have open requests when they are told to drain."""
        self.membership: Membership | None = None
        if name != first:
            head = Incarnation(of_host("launcher", first), 1)
            self.membership = Membership(name, head, "there", "here", topology.agreement(), DEADLINE)
        self.core = Supervisor(
            topology.actors(name),
            topology.launch,
            self._next_epoch,
            now,
            others=OtherHosts(others if name == first else (), topology.agreement(), DEADLINE),
            membership=self.membership,
            heartbeat=self.hearts.__getitem__,
        )

    def _next_epoch(self, ordinal: int) -> int:
        after = 0 if self.membership is None else self.membership.epochs_after
        self.epochs[ordinal] = max(self.epochs[ordinal], after) + 1
        return self.epochs[ordinal]


class Cluster:
    """All hosts, the link between them, and time."""

    def __init__(self, *settings: str) -> None:
        self.topology = parse(TOPOLOGY, "", settings)
        self.now = 100.0
        self.hosts: dict[str, Host] = {}
        self.monitor: HealthMonitor | None = None
        self.over: dict[str, Over] = {}
        self.said: list[tuple[str, Announce]] = []
        self.rosters: dict[Incarnation, Roster] = {}
        self.born: set[Incarnation] = set()
        self.is_cut = False
        self.doubtful: set[Incarnation] = set()
        """Those who may have been silent for a while."""
        self._lives: Counter[str] = Counter()
        self._mail: deque[tuple[str, Incarnation, Incarnation | str, Message]] = deque()
        self._held: list[tuple[str, Incarnation, Incarnation | str, Message]] = []

    # ── what happens ──────────────────────────────────────────────────────────────────────────

    def start(self, name: str, topology: Topology | None = None) -> Host:
        """Start a launcher; one that ran there before must have ended."""
        assert name not in self.hosts
        self._lives[name] += 1
        me = Incarnation(of_host("launcher", name), self._lives[name])
        self.hosts[name] = host = Host(name, me, topology or self.topology, self.now)
        self.over.pop(name, None)
        self._do(host, host.core.tick(self.now))
        if not self.is_cut:
            self.heal()  # who waited for this one
        self.pump()
        return host

    def kill_launcher(self, name: str) -> None:
        """SIGKILL: its processes die with it, and what it said last may be on its way."""
        host = self.hosts.pop(name)
        for incarnation in host.alive:
            self.rosters.pop(incarnation, None)
        if any(incarnation.name == "health" for incarnation in host.alive):
            self.monitor = None

    def kill(self, name: str, code: int = -9) -> None:
        """A process ends by itself."""
        for host in list(self.hosts.values()):
            for incarnation in [one for one in host.alive if one.name == name]:
                self._exit(host, incarnation, code)
        self.pump()

    def signal(self, name: str) -> None:
        """Ctrl-C at a launcher."""
        host = self.hosts[name]
        self._do(host, host.core.signalled(self.now))
        self.pump()

    def drained(self, gateway: str) -> None:
        """A gateway's last request has ended."""
        for host in self.hosts.values():
            host.busy.discard(gateway)
            for incarnation in [one for one in host.alive if one.name == gateway]:
                self._mail.append((host.name, incarnation, host.me, Drained()))
        self.pump()

    def cut(self) -> None:
        """The link between the hosts breaks."""
        self.is_cut = True
        self.doubtful |= {one for host in self.hosts.values() for one in host.alive}

    def heal(self) -> None:
        """It is whole again."""
        self.is_cut = False
        self._mail.extend(self._held)
        self._held.clear()
        self.pump()

    def turns(self, number: int = 1) -> None:
        """Time passes, turn by turn."""
        for _ in range(number):
            self.now += TICK
            for host in list(self.hosts.values()):
                self.doubtful |= host.still
                if self.is_cut:
                    self.doubtful.update(host.alive)
                for incarnation, actor in host.alive.items():
                    host.hearts[actor.ordinal] += incarnation not in host.still
                self._do(host, host.core.tick(self.now))
                if host.name in self.hosts:
                    self._do(host, host.core.turn(TICK, self.now))
                self.pump()
            first = self.hosts.get("a")
            if self.monitor is not None and first is not None:
                hearts = {
                    member.incarnation: first.hearts[member.ordinal]
                    for member in self.monitor.alive
                    if member.incarnation in first.alive and member.name != "health"
                }
                self._tell(first, self.monitor.tick(hearts, self.now))
            self.pump()
            self.check()

    # ── what comes of it ──────────────────────────────────────────────────────────────────────

    def pump(self) -> None:
        """Deliver all mail that can be."""
        while self._mail:
            sender, source, to, message = self._mail.popleft()
            receiver = next((h for h in self.hosts.values() if str(to) in (h.me.name, str(h.me))), None)
            waits = receiver is None and isinstance(message, Join)
            if waits or (
                self.is_cut
                and (receiver is None or receiver.name != sender)
                and str(to).startswith("launcher")
            ):
                self._held.append((sender, source, to, message))
            elif receiver is not None:
                self._deliver(receiver, source, message)
            else:
                self._obey(sender, to, message)

    def _deliver(self, host: Host, source: Incarnation, message: Message) -> None:
        """To a launcher; an incarnation that its post office would not know is not heard."""
        known = source in host.alive or host.core.others.find(source) is not None
        first = host.membership is not None and source == host.membership.first
        if known or first or (isinstance(message, Join) and host.core.others.expects(source)):
            self._do(host, host.core.handle(source, message, self.now))  # type: ignore[arg-type]

    def _obey(self, sender: str, to: Incarnation | str, message: Message) -> None:
        """To a process of the host."""
        host = self.hosts.get(sender)
        if host is None or not isinstance(to, Incarnation) or to not in host.alive:
            return
        match message:
            case Stop():
                self._exit(host, to, 0)
            case Drain():
                if host.alive[to].kind == "gateway" and to.name not in host.busy:
                    self._mail.append((sender, to, host.me, Drained()))
            case Roster():
                self._listen(to, message)
        if to.name == "health" and self.monitor is not None:
            self._tell(host, self.monitor.handle(host.me, message, self.now))  # type: ignore[arg-type]

    def _listen(self, to: Incarnation, roster: Roster) -> None:
        """Nobody is declared dead who lives, was seen to, and could be."""
        before = self.rosters.get(to)
        self.rosters[to] = roster
        alive = {incarnation for host in self.hosts.values() for incarnation in host.alive}
        listed = {member.incarnation for member in roster.members}
        for gone in {member.incarnation for member in before.members} - listed if before else ():
            assert gone not in alive or gone in self.doubtful, f"{gone} was declared dead"

    def _tell(self, host: Host, sends: Sequence[Send]) -> None:
        """What the health monitor says."""
        assert self.monitor is not None
        self._mail.extend((host.name, self.monitor.me, send.to, send.message) for send in sends)

    def _exit(self, host: Host, incarnation: Incarnation, code: int) -> None:
        del host.alive[incarnation]
        self.rosters.pop(incarnation, None)
        if incarnation.name == "health":
            self.monitor = None
        self._do(host, host.core.exited(incarnation, code, "", self.now))

    def _do(self, host: Host, commands: Iterable[Command]) -> None:
        host.core.check()
        host.core.others.check()
        for command in commands:
            match command:
                case Send(to=to, message=message):
                    self._mail.append((host.name, host.me, to, message))
                case Spawn(actor=actor, incarnation=incarnation):
                    assert incarnation not in self.born, f"{incarnation} has lived before"
                    self.born.add(incarnation)
                    host.alive[incarnation] = actor
                    if actor.kind == "health":
                        self.monitor = HealthMonitor(incarnation, deadline_s=DEADLINE, tick_s=TICK)
                    hello = Hello(actor.kind, actor.ordinal, 1, f"e:{incarnation}")
                    self._mail.append((host.name, incarnation, host.me, hello))
                    self._mail.append((host.name, incarnation, host.me, Ready()))
                case KillProcess(incarnation=incarnation):
                    if incarnation in host.alive:
                        self._exit(host, incarnation, -9)
                case Announce():
                    self.said.append((host.name, command))
                case Over():
                    assert not host.alive, "a launcher has left processes behind"
                    self.over[host.name] = command
                    del self.hosts[host.name]

    # ── how it stands ─────────────────────────────────────────────────────────────────────────

    @property
    def listed(self) -> set[str]:
        """Who is alive as the health monitor says."""
        return set() if self.monitor is None else {member.name for member in self.monitor.alive}

    @property
    def all(self) -> set[str]:
        """All actors."""
        return {actor.name for actor in self.topology.actors()}

    def of(self, host: str) -> set[str]:
        """The actors of a host."""
        return {actor.name for actor in self.topology.actors(host)}

    def heard(self, host: str) -> list[str]:
        """What was announced at a host."""
        return [announcement.what for name, announcement in self.said if name == host]

    def settled(self) -> bool:
        """Everybody is alive and ready, and everybody knows of everybody."""
        alive = {incarnation for host in self.hosts.values() for incarnation in host.alive}
        return (
            {incarnation.name for incarnation in alive} == self.all
            and set(self.rosters) == alive
            and all(
                {member.incarnation for member in roster.members if member.ready} == alive
                for roster in self.rosters.values()
            )
            and all(host.core.phase is Phase.RUNNING for host in self.hosts.values())
        )

    def check(self) -> None:
        if self.monitor is not None:
            self.monitor.check()
