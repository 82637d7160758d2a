"""A whole topology in one trio run: real actors over memory links, killed and restarted at will."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from actors.boot import VITALS, Boot, World, longest_context, segment_sizes
from actors.gateway import GatewayActor
from actors.launcher import Launcher
from actors.run import first_cause, make_actor
from actors.sessions import Delta, End, Generation
from engine.ids import Incarnation
from engine.launch import read_topology
from engine.layout import Vitals
from engine.model import read_config
from engine.sampling import GREEDY
from engine.testing.models import generate
from kernels import backends
from transport.faulty import NO_FAULTS, EdgePlan, FaultyNetwork
from transport.memory import MemoryNetwork

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from actors.shell import Actor as ActorShell
    from engine.sampling import SamplingParams
    from engine.supervision import Over
    from engine.topology import Actor
    from kernels.backend import Backend
    from transport.faulty import Fate

T = TypeVar("T")

STEP_S = 0.01
"""How long a backend step takes, in virtual time."""

KILLED = -9


@dataclass(slots=True)
class Life:
    """One incarnation that runs as a task."""

    actor: ActorShell
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    killed: bool = False


class System:
    """Everything that `python -m engine.launch` starts, in memory.

    Shared memory is plain bytearrays, so it survives the actors as the memfds do. A kill cancels the
    actor's task, cuts its inbox and drops what it still sends; its exit is reported when the task is
    over, as a process's is when it has been reaped.
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
        self._nursery = nursery
        self._memory = MemoryNetwork(high_water_mark=10_000)
        self._on_message = on_message
        self._links = FaultyNetwork(
            self._memory, nursery, random.Random(seed), plan=plan, on_message=self._message
        )
        self._context_length = longest_context(self.topology, self.config)
        sizes = segment_sizes(self.topology, self.shape, self._context_length)
        self._segments = {name: memoryview(bytearray(size)) for name, size in sizes.items()}
        self._lives: dict[Incarnation, Life] = {}
        self.errors: list[BaseException] = []
        self.over: Over | None = None
        self._ended = trio.Event()
        self.vitals = Vitals(self._segments[VITALS], len(self.topology.actors()))
        self.launcher = Launcher(self.topology, self._links.links("launcher"), self.vitals)

    # ── start and end ─────────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        """Start all actors and wait until a token could be produced."""
        self._nursery.start_soon(self._run)
        await self.wait_ready()

    async def _run(self) -> None:
        self.over = await self.launcher.run(self)
        self._ended.set()

    async def wait_ready(self) -> None:
        """Wait until a gateway is there and says that it is ready."""
        await self.until(lambda: any(gateway.not_ready() is None for gateway in self.gateways()))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, in virtual time, until a condition holds."""
        while not condition():  # noqa: ASYNC110 - it watches state of others, in time that costs nothing
            await trio.sleep(0.05)

    async def stop(self) -> Over:
        """Drain and stop, and wait for the end; raises what an actor failed with that was not killed."""
        self.launcher.stop()
        await self._ended.wait()
        assert self.over is not None
        if self.errors:
            raise self.errors[0]
        return self.over

    # ── the nest of the launcher ──────────────────────────────────────────────────────────────

    def spawn(self, actor: Actor, incarnation: Incarnation) -> None:
        """Start an incarnation as a task."""
        boot = Boot(
            name=actor.name,
            kind=actor.kind,
            ordinal=actor.ordinal,
            epoch=incarnation.epoch,
            topology=self.topology,
            run_dir="",
            launcher=self.launcher.me,
            launcher_endpoint=self.launcher.endpoint,
            launcher_pid=0,
            model_folder=str(self.folder),
            page_shape=self.shape,
            context_length=self._context_length,
        )
        world = World(
            boot=boot,
            links=self._links.links(f"{incarnation.name}.{incarnation.epoch}"),
            segments=self._segments,
            compute=self._compute,
            open_backend=self._open_backend,
            gone=self.gone,
        )
        life = Life(make_actor(world))
        self._lives[incarnation] = life
        self._nursery.start_soon(self._live, incarnation, life)

    async def _live(self, incarnation: Incarnation, life: Life) -> None:
        code = 0
        try:
            with life.scope:
                await life.actor.run()
        except Exception as error:
            self.errors.append(first_cause(error))
            code = 70
        del self._lives[incarnation]
        self.launcher.exited(incarnation, KILLED if life.killed else code, "")

    def kill(self, incarnation: Incarnation) -> None:
        """End an incarnation as SIGKILL does."""
        life = self._lives.get(incarnation)
        if life is not None and not life.killed:
            life.killed = True
            self._memory.cut(life.actor.post.inbox.endpoint)
            life.scope.cancel()

    def gone(self, ordinal: int, epoch: int) -> bool | None:
        """What the writers' locks say of an incarnation: a task that was killed may write until it ends."""
        if epoch > self.vitals.epoch(ordinal):
            return None
        return not any(
            life.actor.boot.ordinal == ordinal and incarnation.epoch <= epoch
            for incarnation, life in self._lives.items()
        )

    def kill_actor(self, name: str) -> Incarnation | None:
        """Kill whichever incarnation of an actor lives; None when none does."""
        for incarnation, life in self._lives.items():
            if incarnation.name == name and not life.killed:
                self.kill(incarnation)
                return incarnation
        return None

    def _message(self, number: int, source: str, destination: str, message: bytes) -> Fate | None:
        if self._on_message is not None:
            self._on_message(number, source, destination)
        name, _, epoch = source.rpartition(".")
        life = self._lives.get(Incarnation(name, int(epoch))) if name else None
        return "drop" if name and (life is None or life.killed) else None

    async def _compute(self, function: Callable[[], T]) -> T:
        await trio.sleep(STEP_S)
        return function()

    def _open_backend(self, boot: Boot, pool: memoryview) -> Backend:
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
            self.folder, self.encode(text), max_tokens, sampling, stop_tokens=stop_tokens, **stopping
        )
        return self.decode(tokens[:-1] if tokens[-1] in stop_tokens else tokens)

    async def settle(self) -> None:
        """Wait until every actor is alive and has nothing left, then check everybody's invariants.

        After this every page is free or cached, every log slot free, and no request is left anywhere.
        """
        names = {actor.name for actor in self.topology.actors()}

        def settled() -> bool:
            serving = {actor.me.name for actor in self._living() if actor.serving}
            return serving == names and self.gateways()[0].not_ready() is None and self._quiet()

        await self.until(settled)
        for actor in self._living():
            actor.check()

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
