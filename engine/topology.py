"""The topology: which actors there are, where they listen and how much they may hold.

    [model]              which model
    [kv]                 the pool of pages of a host
    [host.NAME]          one table a host; none: there is one host, which needs no name
    [gateway.NAME]       one table a gateway
    [worker.NAME]        one table a worker; its role says what may be placed there
    [scheduler] [allocator] [replicator] [health] [launch]

Every key has a default but the role of a worker and, where there are hosts, their addresses and who is on
which. `engine.topology_file` reads one and says what is wrong with it.

With hosts each has an allocator and a replicator of its own, `allocator-NAME` and `replicator-NAME`; the
health monitor and the scheduler are on the first. The file is the same on every host, and so are ordinals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from engine.messages import ActorKind
from engine.model import Activations, WeightKind
from engine.shapes import KVDtype

if TYPE_CHECKING:
    from collections.abc import Set

Role = Literal["prefill", "decode", "both"]
BackendName = Literal["auto", "native", "torch", "reference"]

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=100)]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """Base of all tables: unknown keys are refused."""


class ModelTable(Table, frozen=True):
    """Which model is served."""

    path: str = "default"
    """A GGUF file, a Hugging Face or prepared folder, or "default" (SmolLM2-135M-Instruct from the cache)."""
    name: str = ""
    """What clients call it; empty: the name of the model's file, without its weight format."""
    weights: Literal["auto"] | WeightKind = "auto"
    """How the native backend keeps the layers' matrices; auto: as the model's file suggests, FP8 what it
    stores in 8 bits or fewer (but Q8_0 as bf16), else as it is."""
    head: Literal["auto"] | WeightKind = "auto"
    """The same for the embedding and the LM head; auto: as the model's file suggests or, when `weights` is
    set, like them."""
    activations: Literal["auto"] | Activations = "auto"
    """What the inputs of FP8 matrices are rounded to; auto: bf16."""


class KVTable(Table, frozen=True):
    """The pool of KV pages of this host."""

    page_tokens: Literal[8, 16, 32, 64] = 16
    """Positions of a page."""
    pages: Annotated[int, msgspec.Meta(ge=2, le=1 << 24)] = 1024
    """Pages of the pool; together they hold all sequences that run and all prompts that are found again."""
    dtype: KVDtype = "float16"
    """What keys and values are rounded to: float32, float16, bfloat16, or float8 (with a scale each)."""


class HostTable(Table, frozen=True, kw_only=True):
    """One machine of several."""

    address: str
    """The IP address at which the other hosts reach it. Its actors listen there, and nowhere else."""
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 7450
    """Where the launcher of the first host listens for the others; of them it is not used."""
    pages_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Where pages are fetched from; 0 takes a free one."""


class GatewayTable(Table, frozen=True):
    """One front door."""

    on: str = ""
    """The host that it is on, where there are hosts."""
    host: str = "127.0.0.1"
    """The address of HTTP and WebSocket clients: anybody who reaches it may ask."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8000
    """0 takes a free one; the launcher prints it."""
    zmq_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """Where ZeroMQ clients may connect by TCP; 0 takes a free one. Without, they do in the run directory."""
    max_open: Count = 256
    """Choices that may be open at once; one more is answered 429.

    The last ones, a share of `scheduler.reserve`, are for clients that have none.
    """
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 1 << 20
    """Of a request's body; a longer one is answered 413."""
    resume_grace_s: Seconds = 30.0
    """For so long a resumable request is kept when its client is gone."""
    resume_most: Count = 256
    """Requests of one client that are kept so; of more, the oldest goes."""


class WorkerTable(Table, frozen=True, kw_only=True):
    """One worker."""

    role: Role
    """prefill computes prompts, decode generates, both does both."""
    on: str = ""
    """The host that it is on, where there are hosts."""
    backend: BackendName = "auto"
    """auto: native, or torch on a machine without compiled kernels."""
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """0 takes the cores it is pinned to, or shares all among the workers."""
    cores: tuple[Annotated[int, msgspec.Meta(ge=0, le=4095)], ...] = ()
    """Cores that the worker is pinned to, each thread of a step to its own if there are as many; other actors
    keep off them where they can. None: not pinned."""
    prefill_slots: Count = 8
    """Requests that may be in prefill here at once (roles prefill and both)."""
    decode_slots: Count = 36
    """Sequences that may decode here at once (roles decode and both)."""
    step_tokens: Count = 64
    """Rows of one step at most: decode rows first, prefill chunks fill the rest."""
    lease_ahead: Count = 4
    """Pages leased ahead of their tokens while there is work."""


class SchedulerTable(Table, frozen=True):
    """How clients share the system."""

    weights: dict[str, Weight] = {}
    """Shares of clients that do not have 1, as in { "user:alice" = 4 }; "" is everybody without a name.

    A client with key and user, "key:…/user:…", is found by both, else by the user, else by the key.
    """
    reserve: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.125
    """Share of the slots that only clients without a slot may take, at least one of several; 0 keeps none."""


class AllocatorTable(Table, frozen=True):
    """How pages are kept that no request holds."""

    prefix_cache: bool = True
    """Find the pages of prompts by their tokens; false computes every prompt anew."""
    eviction: Literal["cost", "lru"] = "cost"
    """Which cached pages go first: by what they cost and how likely they are wanted again, or the least
    recently used."""
    file_bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)] = 0
    """A file of so many bytes keeps pages that memory has no room for, across launches too; 0: none."""
    file: str = ""
    """Where it lies; empty: in the cache folder, by the model's name. One launch at a time can use it."""


class ReplicatorTable(Table, frozen=True):
    """Where sealed pages are copied to."""

    standby_pages: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 64
    """Pages of the standby pool on this host; 0 keeps none."""


class HealthTable(Table, frozen=True):
    """When silence is death."""

    tick_s: Seconds = 0.25
    """How often the launcher and the health monitor look whose heart goes on."""
    deadline_s: Seconds = 5.0
    """An actor whose event loop stands still for so long is killed and started again."""


class LaunchTable(Table, frozen=True):
    """How the launcher starts and stops."""

    link: Literal["ipc", "tcp"] = "ipc"
    """How actors of this host talk: unix sockets in the run directory, or tcp on loopback. Where there are
    several hosts it is tcp at the host's address."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Of the lines in the run directory's logs, and above."""
    start_s: Seconds = 60.0
    """All actors must be ready within this time."""
    drain_s: Seconds = 10.0
    """From the first signal to the end of everything at most; open requests may end meanwhile."""
    restart_first_s: Seconds = 0.1
    """How long an actor that died waits until it is started again; twice as long after each failure."""
    restart_most_s: Seconds = 5.0
    """The longest such wait."""
    restart_attempts: Count = 8
    """Failures in a row of one actor until the launcher gives up."""


class Topology(Table, frozen=True, kw_only=True):
    """A whole topology, resolved and checked."""

    model: ModelTable = ModelTable()
    kv: KVTable = KVTable()
    host: dict[str, HostTable] = {}
    gateway: dict[str, GatewayTable]
    worker: dict[str, WorkerTable]
    scheduler: SchedulerTable = SchedulerTable()
    allocator: AllocatorTable = AllocatorTable()
    replicator: ReplicatorTable = ReplicatorTable()
    health: HealthTable = HealthTable()
    launch: LaunchTable = LaunchTable()

    def hosts(self) -> tuple[str, ...]:
        """The names of all hosts, that of the scheduler and the health monitor first; "" is the only one."""
        return tuple(self.host) or ("",)

    def actors(self, host: str | None = None) -> tuple[Actor, ...]:
        """All actors, or those of a host, in start order.

        The ordinal is the position among all: by it shared memory knows them, and every host the same.
        """
        first, hosts = self.hosts()[0], self.hosts()
        places: list[tuple[str, ActorKind, str]] = [
            ("health", "health", first),
            *((of_host("allocator", name), "allocator", name) for name in hosts),
            ("scheduler", "scheduler", first),
            *((of_host("replicator", name), "replicator", name) for name in hosts),
            *((name, "gateway", table.on) for name, table in self.gateway.items()),
            *((name, "worker", table.on) for name, table in self.worker.items()),
        ]
        return tuple(
            Actor(name, kind, ordinal, on)
            for ordinal, (name, kind, on) in enumerate(places)
            if host is None or on == host
        )

    def host_of(self, actor: str) -> str:
        """The host that an actor is on; KeyError when the topology has no such actor."""
        for known in self.actors():
            if known.name == actor:
                return known.host
        raise KeyError(actor)

    def allocator_of(self, actor: str) -> str:
        """The allocator of the pages that an actor of this name can map."""
        return of_host("allocator", self.host_of(actor))

    def replicator_of(self, actor: str) -> str:
        """The replicator of an actor's host."""
        return of_host("replicator", self.host_of(actor))

    def gateways_on(self, host: str) -> dict[str, GatewayTable]:
        """The gateways of a host."""
        return {name: table for name, table in self.gateway.items() if table.on == host}

    def workers_on(self, host: str) -> dict[str, WorkerTable]:
        """The workers of a host."""
        return {name: table for name, table in self.worker.items() if table.on == host}

    def cores_of(self, actor: str, host: str, ours: Set[int]) -> Set[int]:
        """Those of `ours` on which an actor of a host runs.

        A worker has the cores that it is pinned to. All others keep off them, or where none is left off those
        of workers that decode: a token is waited for, and a prompt takes its time anyway.
        """
        workers = self.workers_on(host)
        if actor in workers and workers[actor].cores:
            return frozenset(workers[actor].cores)
        pinned = {core for table in workers.values() for core in table.cores}
        decode = {core for table in workers.values() if table.role != "prefill" for core in table.cores}
        return ours - pinned or ours - decode or ours

    def log_slots(self, host: str = "") -> int:
        """Slots of a host's token-log arena."""
        return sum(table.max_open for table in self.gateways_on(host).values())

    def log_slots_of(self, gateway: str) -> range:
        """The slots that belong to one gateway, in the arena of its host."""
        first = 0
        for name, table in self.gateways_on(self.gateway[gateway].on).items():
            if name == gateway:
                return range(first, first + table.max_open)
            first += table.max_open
        raise KeyError(gateway)

    def agreement(self) -> str:
        """What the launchers of all hosts must have read alike, as text to be compared.

        Who is where, what listens for other hosts, and what a page is. The rest may differ by `--set`.
        """
        actors = [(actor.name, actor.kind, actor.host) for actor in self.actors()]
        roles = [table.role for table in self.worker.values()]
        return msgspec.json.encode((self.host, actors, roles, self.kv)).decode()


def of_host(name: str, host: str) -> str:
    """What the one of a kind on a host is called, as in "allocator-a"; the only host needs no name."""
    return f"{name}-{host}" if host else name


class Actor(msgspec.Struct, frozen=True):
    """One actor of a topology, whatever its incarnation."""

    name: str
    kind: ActorKind
    ordinal: int
    host: str = ""
