"""A whole topology in one trio run: real actors over memory links, killed and restarted at will."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from actors.boot import longest_context
from actors.gateway import GatewayActor
from actors.sessions import Delta, End, Generation
from engine.ids import Incarnation
from engine.launch import read_topology
from engine.model import read_config
from engine.sampling import GREEDY
from engine.testing.machine import Machine
from engine.testing.models import generate
from kernels import backends
from transport.faulty import NO_FAULTS, EdgePlan, FaultyNetwork
from transport.memory import SCHEME, MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from actors.boot import Boot
    from actors.launcher import Launcher
    from actors.shell import Actor as ActorShell
    from engine.layout import Vitals
    from engine.sampling import SamplingParams
    from engine.supervision import Over
    from engine.testing.machine import Life
    from kernels.backend import Backend
    from transport.faulty import Fate

T = TypeVar("T")

STEP_S = 0.01
"""How long a backend step takes, in virtual time."""


class System:
    """Everything that `python -m engine.launch` starts, in memory; of several hosts all of them.

    Plans and hooks know a launcher as `launcher-HOST.EPOCH`, that of the only host as `launcher`.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        topology: str,
        model_folder: Path,
        *,
        settings: Sequence[str] = (),
        plan: EdgePlan = NO_FAULTS,
        seed: int = 0,
        on_message: Callable[[int, str, str], None] | None = None,
    ) -> None:
        """`on_message(k, source, destination)` is called before the k-th message of the run goes out."""
        self.topology = read_topology(topology, ["replicator.standby_pages=8", "kv.pages=64", *settings])
        self.config = read_config(model_folder)
        self.shape = self.config.page_shape(self.topology.kv.page_tokens, self.topology.kv.dtype)
        self.folder = model_folder
        self.nursery = nursery
        self.memory = MemoryNetwork(high_water_mark=10_000)
        self._on_message = on_message
        self._links = FaultyNetwork(
            self.memory, nursery, random.Random(seed), plan=plan, on_message=self._message
        )
        self.links = self._links.links
        self.context_length = longest_context(self.topology, self.config)
        self.errors: list[BaseException] = []
        self.messages = 0
        """How many messages have gone out so far."""
        self._hosts = {actor.name: actor.host for actor in self.topology.actors()}
        self._apart: set[str] = set()
        self._starts: Counter[str] = Counter()
        self._machines: dict[str, Machine] = {}
        self._first = self.topology.hosts()[0]
        self._machine(self._first)

    # ── start and end ─────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start all actors of all hosts and wait until a token could be produced."""
        for host in self.topology.hosts():
            self.start_host(host)
        await self.wait_ready()

    def start_host(self, host: str) -> None:
        """Start the launcher of a host, again when it was killed or has left."""
        machine = self._machines.get(host)
        if machine is None or machine.lost or machine.over is not None:
            machine = self._machine(host)
        self.nursery.start_soon(machine.run)

    def _machine(self, host: str) -> Machine:
        self._starts[host] += 1
        first = "" if host == self._first else self.launcher.endpoint
        self._machines[host] = machine = Machine(self, host, self._starts[host], first)
        return machine

    def kill_host(self, host: str) -> None:
        """End a launcher as SIGKILL does: its actors and its shared memory go with it."""
        self._machines[host].lose()

    def cut_host(self, host: str) -> None:
        """Lose everything between a host and the others, until it is healed."""
        self._apart.add(host)

    def heal_host(self, host: str) -> None:
        """Join a host to the others again."""
        self._apart.discard(host)

    @property
    def launcher(self) -> Launcher:
        """That of the first host."""
        return self._machines[self._first].launcher

    def launcher_of(self, host: str) -> Launcher:
        """The present one of a host."""
        return self._machines[host].launcher

    @property
    def vitals(self) -> Vitals:
        """Those of the first host."""
        return self._machines[self._first].vitals

    @property
    def over(self) -> Over | None:
        """How the launch ended on the first host, if it has."""
        return self._machines[self._first].over

    def is_lost(self, host: str) -> bool:
        """Whether a host was killed, and not started again since."""
        return self._machines[host].lost

    def over_at(self, host: str) -> Over | None:
        """How the present launcher of a host has ended, if it has."""
        return self._machines[host].over

    async def wait_ready(self) -> None:
        """Wait until a gateway is there and says that it is ready; of several hosts, until all are there."""
        await self.until(lambda: any(gateway.not_ready() is None for gateway in self.gateways()))
        if self.topology.host:
            await self.until(lambda: self._serving == set(self._hosts))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, in virtual time, until a condition holds."""
        while not condition():  # noqa: ASYNC110 - it watches state of others, in time that costs nothing
            await trio.sleep(0.05)

    async def stop(self) -> Over:
        """Drain and stop, and wait for the end; raises what an actor failed with that was not killed."""
        self.launcher.stop()
        for machine in self._machines.values():
            await machine.ended.wait()
        assert self.over is not None
        if self.errors:
            raise self.errors[0]
        return self.over

    # ── what happens to actors ────────────────────────────────────────────────────────────────

    @property
    def _lives(self) -> dict[Incarnation, Life]:
        """All that live, or have been killed and have not noticed yet."""
        return {
            incarnation: life
            for machine in self._machines.values()
            for incarnation, life in machine.lives.items()
        }

    def kill(self, incarnation: Incarnation) -> None:
        """End an incarnation as SIGKILL does."""
        self._machines[self._hosts[incarnation.name]].kill(incarnation)

    def kill_actor(self, name: str) -> Incarnation | None:
        """Kill whichever incarnation of an actor lives; None when none does."""
        for incarnation, life in self._lives.items():
            if incarnation.name == name and not life.killed:
                self.kill(incarnation)
                return incarnation
        return None

    def _message(self, number: int, source: str, destination: str, message: bytes) -> Fate | None:
        self.messages = number + 1
        if self._on_message is not None:
            self._on_message(number, source, destination)
        if self._apart:
            ends = {self._host_of(source), self._host_of(destination)}
            if len(ends) > 1 and ends & self._apart:
                return "drop"
        if source in {machine.source for machine in self._machines.values() if not machine.lost}:
            return None
        name, _, epoch = source.rpartition(".")
        machine = self._machines[self._host_of(source)]
        life = machine.lives.get(Incarnation(name, int(epoch)))
        return "drop" if life is None or life.killed else None

    def _host_of(self, name: str) -> str:
        """The host of an actor or a launcher, by the name of its link or the endpoint of its inbox."""
        actor = name.removeprefix(SCHEME).rpartition(".")[0] or name
        return self._hosts.get(actor, actor.removeprefix("launcher").removeprefix("-"))

    async def compute(self, function: Callable[[], T]) -> T:
        await trio.sleep(STEP_S)
        return function()

    def open_backend(self, boot: Boot, pool: memoryview) -> Backend:
        import numpy as np

        return backends.open_backend(
            "reference", self.folder, np.frombuffer(pool, np.uint8), self.shape, threads=1
        )

    # ── using it ──────────────────────────────────────────────────────────────────────────────

    def gateways(self) -> list[GatewayActor]:
        """The living gateways that are ready for requests."""
        return [
            life.actor
            for life in self._lives.values()
            if isinstance(life.actor, GatewayActor) and life.actor.serving and not life.killed
        ]

    def actor(self, name: str) -> ActorShell:
        """The living incarnation of an actor; KeyError when there is none."""
        for incarnation, life in self._lives.items():
            if incarnation.name == name and not life.killed:
                return life.actor
        raise KeyError(name)

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a text, as the gateways do it."""
        return tuple(self.gateways()[0].text.encode(text, special=False))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of tokens, as the gateways do it."""
        return self.gateways()[0].text.decode(tokens)

    async def complete(
        self,
        text: str,
        *,
        max_tokens: int = 8,
        sampling: SamplingParams = GREEDY,
        stop: tuple[str, ...] = (),
        **stopping: Any,
    ) -> tuple[str, End]:
        """The answer to a prompt, whole, and how it ended; `stopping` is the rest of a `Generation`."""
        generation = Generation(self.encode(text), max_tokens, sampling, stop, **stopping)
        session = self.gateways()[0].open(generation)
        pieces = []
        async for event in session.events():
            if isinstance(event, Delta):
                pieces.append(event.text)
            else:
                return "".join(pieces), event
        raise AssertionError("a session ended without an End")

    def expected(
        self,
        text: str,
        *,
        max_tokens: int = 8,
        sampling: SamplingParams = GREEDY,
        stop_tokens: tuple[int, ...] = (),
        **stopping: Any,
    ) -> str:
        """The text that the model answers when it runs alone, computed without any actor."""
        tokens = generate(
            self.folder,
            self.encode(text),
            max_tokens,
            sampling,
            stop_tokens=stop_tokens,
            kv_dtype=self.topology.kv.dtype,
            **stopping,
        )
        return self.decode(tokens[:-1] if tokens[-1] in stop_tokens else tokens)

    async def settle(self) -> None:
        """Wait until every actor is alive and has nothing left, then check everybody's invariants.

        After this every page is free or cached, every log slot free, and no request is left anywhere.
        """

        def settled() -> bool:
            everybody = self._serving == set(self._hosts)
            return everybody and self.gateways()[0].not_ready() is None and self._quiet()

        await self.until(settled)
        for actor in self._living():
            actor.check()

    @property
    def _serving(self) -> set[str]:
        return {actor.me.name for actor in self._living() if actor.serving}

    def _living(self) -> list[ActorShell]:
        return [life.actor for life in self._lives.values() if not life.killed]

    def _quiet(self) -> bool:
        for actor in self._living():
            figures = actor.statistics()
            if figures.get("requests", 0) or figures.get("sequences", 0) or figures.get("fences_waiting", 0):
                return False
            unused = figures.get("pages_free", 0) + figures.get("pages_cached", 0)
            if unused != figures.get("pages_total", 0):
                return False
        return True
