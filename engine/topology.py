"""The topology file: which actors there are, where they listen and how much they may hold.

    [model]              which model
    [kv]                 the pool of pages of a host
    [host.NAME]          one table a host; none: there is one host, which needs no name
    [gateway.NAME]       one table a gateway
    [worker.NAME]        one table a worker; its role says what may be placed there
    [scheduler] [allocator] [replicator] [health] [launch]

Every key has a default but the role of a worker and, where there are hosts, their addresses and who is on
which. Unknown keys are errors, and an error names the key, its value and what was expected.

With hosts each has an allocator and a replicator of its own, `allocator-NAME` and `replicator-NAME`; the
health monitor and the scheduler are on the first. The file is the same on every host, and so are ordinals.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from copy import deepcopy
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from engine.errors import UsageError
from engine.ids import EPOCH_BITS
from engine.messages import ActorKind
from engine.model import Activations, WeightKind
from engine.shapes import KVDtype

if TYPE_CHECKING:
    from collections.abc import Sequence

Role = Literal["prefill", "decode", "both"]
BackendName = Literal["auto", "native", "torch", "reference"]

Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=100)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False, kw_only=True):
    """Base of all tables: unknown keys are refused."""


class ModelTable(_Table, frozen=True):
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


class KVTable(_Table, frozen=True):
    """The pool of KV pages of this host."""

    page_tokens: Literal[8, 16, 32, 64] = 16
    pages: Annotated[int, msgspec.Meta(ge=2, le=1 << 24)] = 1024
    dtype: KVDtype = "float16"


class HostTable(_Table, frozen=True, kw_only=True):
    """One machine of several."""

    address: str
    """The IP address at which the other hosts reach it. Its actors listen there, and nowhere else."""
    control_port: Annotated[int, msgspec.Meta(ge=1, le=65_535)] = 7450
    """Where the launcher of the first host listens for the others; of them it is not used."""
    pages_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    """Where pages are fetched from; 0 takes a free one."""


class GatewayTable(_Table, frozen=True):
    """One front door."""

    on: str = ""
    """The host that it is on, where there are hosts."""
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 8000
    """0 takes a free one; the launcher prints it."""
    zmq_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None
    """Where ZeroMQ clients may connect by TCP; 0 takes a free one. Without, they do in the run directory."""
    max_open: Count = 256
    """Choices that may be open at once; one more is answered 429.

    The last ones, a share of `scheduler.reserve`, are for clients that have none.
    """
    max_body_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)] = 1 << 20
    resume_grace_s: Seconds = 30.0
    """For so long a resumable request is kept when its client is gone."""
    resume_most: Count = 256
    """Requests of one client that are kept so; of more, the oldest goes."""


class WorkerTable(_Table, frozen=True, kw_only=True):
    """One worker."""

    role: Role
    on: str = ""
    """The host that it is on, where there are hosts."""
    backend: BackendName = "auto"
    """auto: native, or torch on a machine without compiled kernels."""
    threads: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 0
    """0 takes the cores it is pinned to, or shares all among the workers."""
    cores: tuple[Annotated[int, msgspec.Meta(ge=0, le=4095)], ...] = ()
    """Cores that the worker is pinned to, each thread of a step to its own if there are as many; none: not
    pinned."""
    prefill_slots: Count = 8
    """Requests that may be in prefill here at once (roles prefill and both)."""
    decode_slots: Count = 36
    """Sequences that may decode here at once (roles decode and both)."""
    step_tokens: Count = 64
    """Rows of one step at most: decode rows first, prefill chunks fill the rest."""
    lease_ahead: Count = 4
    """Pages leased ahead of their tokens while there is work."""


class SchedulerTable(_Table, frozen=True):
    """How clients share the system."""

    weights: dict[str, Weight] = {}
    """Shares of clients that do not have 1, as in { "user:alice" = 4 }; "" is everybody without a name.

    A client with key and user, "key:…/user:…", is found by both, else by the user, else by the key.
    """
    reserve: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = 0.125
    """Share of the slots that only clients without a slot may take, at least one of several; 0 keeps none."""


class AllocatorTable(_Table, frozen=True):
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


class ReplicatorTable(_Table, frozen=True):
    """Where sealed pages are copied to."""

    standby_pages: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 64
    """Pages of the standby pool on this host; 0 keeps none."""


class HealthTable(_Table, frozen=True):
    """When silence is death."""

    tick_s: Seconds = 0.25
    deadline_s: Seconds = 5.0
    """An actor whose event loop stands still for so long is killed and started again."""


class LaunchTable(_Table, frozen=True):
    """How the launcher starts and stops."""

    link: Literal["ipc", "tcp"] = "ipc"
    """How actors of this host talk: unix sockets in the run directory, or tcp on loopback. Where there are
    several hosts it is tcp at the host's address."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    start_s: Seconds = 60.0
    """All actors must be ready within this time."""
    drain_s: Seconds = 10.0
    """From the first signal to the end of everything at most; open requests may end meanwhile."""
    restart_first_s: Seconds = 0.1
    restart_most_s: Seconds = 5.0
    restart_attempts: Count = 8
    """Failures in a row of one actor until the launcher gives up."""


class Topology(_Table, frozen=True, kw_only=True):
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


TABLES: dict[str, type[_Table]] = {
    "model": ModelTable,
    "kv": KVTable,
    "scheduler": SchedulerTable,
    "allocator": AllocatorTable,
    "replicator": ReplicatorTable,
    "health": HealthTable,
    "launch": LaunchTable,
}
NAMED_TABLES: dict[str, type[_Table]] = {
    "host": HostTable,
    "gateway": GatewayTable,
    "worker": WorkerTable,
}
FIXED_NAMES = ("health", "allocator", "scheduler", "replicator", "launcher")
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")

T = TypeVar("T", bound=_Table)


def parse(text: str, source: str, settings: Sequence[str] = ()) -> Topology:
    """Parse a topology file; UsageError with one line says what is wrong with it.

    `settings` are `key=value` with a dotted key and a TOML value (a bare word is taken as a
    string); they replace what the file says.
    """
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # tomllib lets pass what int() says of too many digits, and what the stack says of nesting.
        raise _wrong(f"{source}: not TOML: {error}") from None
    changed = deepcopy(data)
    for setting in settings:
        _set(changed, setting)
    try:
        return _resolve(changed, source)
    except UsageError:
        if settings:
            # Say what is at fault: the file, if it is wrong by itself, else the settings.
            _resolve(data, source)
            _resolve(changed, " ".join(f"--set {setting}" for setting in settings))
        raise


def _resolve(data: dict[str, Any], source: str) -> Topology:
    _refuse_unknown(data, [*TABLES, *NAMED_TABLES], source, "")
    tables: dict[str, Any] = {
        key: _convert(data.get(key, {}), kind, source, key) for key, kind in TABLES.items()
    }
    for key, kind in NAMED_TABLES.items():
        named = data.get(key, {})
        if not isinstance(named, dict) or not (named or key == "host"):
            raise _wrong(f"{source}: [{key}.NAME]: at least one such table is needed")
        for name in named:
            if not NAME.fullmatch(name) or name in FIXED_NAMES:
                expected = f"{NAME.pattern}, and none of {', '.join(FIXED_NAMES)}"
                raise _wrong(f"{source}: {key}.{name}: the name {name!r} should match {expected}")
        tables[key] = {name: _convert(table, kind, source, f"{key}.{name}") for name, table in named.items()}
    topology = Topology(**tables)
    _check(topology, source)
    return topology


def _set(data: dict[str, Any], setting: str) -> None:
    key, equals, value = setting.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise _wrong(f"--set {setting}: expected key=value, as in --set gateway.front.port=0")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        parsed = {}
    if len(path) > 2 and path[0] in NAMED_TABLES and path[1] not in (names := data.get(path[0], {})):
        there = ", ".join(names) or "none"
        raise _wrong(f"--set {setting}: the topology has no {path[0]} {path[1]!r}; it has: {there}")
    table = data
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise _wrong(f"--set {setting}: {part} is not a table")
    table[path[-1]] = parsed["value"] if len(parsed) == 1 else value


def _refuse_unknown(data: dict[str, Any], known: Sequence[str], source: str, prefix: str) -> None:
    for key, value in data.items():
        if key not in known:
            expected = ", ".join(known) or "no keys at all"
            raise _wrong(
                f"{source}: {prefix}{key} = {_show(value)}: unknown key; expected one of: {expected}"
            )


def _convert(data: object, kind: type[T], source: str, prefix: str) -> T:
    if not isinstance(data, dict):
        raise _wrong(f"{source}: {prefix} = {_show(data)}: expected a table")
    _refuse_unknown(data, kind.__struct_fields__, source, f"{prefix}.")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        # msgspec says «Expected `int` >= 1 - at `$.pages`»
        said, _, at = str(error).partition(" - at `$.")
        key, inside, _ = at.rstrip("`").partition("[...]")
        if inside and isinstance(entries := data.get(key), dict):
            _convert_entries(
                entries, get_type_hints(kind, include_extras=True)[key], f"{source}: {prefix}.{key}"
            )
        if key in data:
            choices = get_args(get_type_hints(kind)[key])
            if said.startswith("Invalid enum value"):
                said = f"expected one of {', '.join(map(repr, choices))}"
            said = said.replace("`", "").replace("Expected", "expected")
            raise _wrong(f"{source}: {prefix}.{key} = {_show(data[key])}: {said}") from None
        missing = re.fullmatch("Object missing required field `(.*)`", said)
        if missing:
            said = f"the key {missing[1]!r} is needed"
        raise _wrong(f"{source}: {prefix}: {said}") from None


def _convert_entries(entries: dict[str, object], kind: object, prefix: str) -> None:
    """Name the entry of a mapping that is wrong, which msgspec does not."""
    _, value_kind = get_args(kind)
    for name, value in entries.items():
        try:
            msgspec.convert(value, value_kind)
        except msgspec.ValidationError as error:
            said = str(error).replace("`", "").replace("Expected", "expected")
            raise _wrong(f"{prefix}.{_show(name)} = {_show(value)}: {said}") from None


def _wrong(said: str) -> UsageError:
    """One line, whatever the names in it contain."""
    return UsageError("".join(c if c.isprintable() else ascii(c)[1:-1] for c in said))


def _show(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:
        shown = "a number of thousands of digits"
    return shown if len(shown) <= 60 else shown[:57] + "…"


def _check(topology: Topology, source: str) -> None:
    _check_hosts(topology, source)
    roles = {table.role for table in topology.worker.values()}
    for needed in ("prefill", "decode"):
        if not roles & {needed, "both"}:
            raise _wrong(
                f'{source}: worker.*.role: no worker can {needed}; give one the role "{needed}" or "both"'
            )
    names = [actor.name for actor in topology.actors()]
    doors: dict[tuple[str, str, int], str] = {}
    for name in names:
        if names.count(name) > 1:
            raise _wrong(f"{source}: the name {name!r} is given to two actors")
    for name, gateway in topology.gateway.items():
        for key, port in (("port", gateway.port), ("zmq_port", gateway.zmq_port)):
            door = (gateway.on, gateway.host, port or 0)
            if port and door in doors:
                raise _wrong(
                    f"{source}: gateway.{name}.{key} = {port}: gateway.{doors[door]} listens there "
                    "already; expected another port, or 0 for a free one"
                )
            doors[door] = name
    health = topology.health
    if health.deadline_s < 2 * health.tick_s:
        raise _wrong(
            f"{source}: health.deadline_s = {health.deadline_s:g}: expected at least two turns of "
            f"health.tick_s = {health.tick_s:g}"
        )
    last = max(actor.ordinal for actor in topology.actors() if actor.kind == "gateway")
    if last > 255 or len(names) > 1 << (EPOCH_BITS // 2):
        raise _wrong(f"{source}: gateway.*, worker.*: {len(names)} actors are more than a topology may have")


def _check_hosts(topology: Topology, source: str) -> None:
    """Who is on which host, and that each host can be told from the others."""
    addresses: dict[str, str] = {}
    for host, table in topology.host.items():
        key = f"{source}: host.{host}.address = {_show(table.address)}"
        try:
            address = ipaddress.ip_address(table.address)
        except ValueError:
            raise _wrong(f"{key}: expected an IP address, as in 10.77.0.1") from None
        if address.is_unspecified or address.is_multicast:
            raise _wrong(f"{key}: expected the address of one machine, which the others reach")
        if str(address) in addresses:
            raise _wrong(f"{key}: host.{addresses[str(address)]} has it already; expected one of its own")
        addresses[str(address)] = host
        if table.control_port == table.pages_port:
            raise _wrong(
                f"{source}: host.{host}.pages_port = {table.pages_port}: is its control_port too; "
                "expected another port, or 0 for a free one"
            )
    there = ", ".join(topology.host) or "none"
    placed: list[tuple[str, str]] = [
        *((f"gateway.{name}", gateway.on) for name, gateway in topology.gateway.items()),
        *((f"worker.{name}", worker.on) for name, worker in topology.worker.items()),
    ]
    for actor, on in placed:
        if on not in topology.hosts():
            said = f"{actor}.on = {_show(on)}: no such host" if on else f"{actor}: the key 'on' is needed"
            raise _wrong(f"{source}: {said}; the hosts are: {there}")
    for host in topology.host:
        if host not in {on for _, on in placed}:
            raise _wrong(f"{source}: host.{host}: has no gateway and no worker; expected one `on` it")
