"""Reading a topology file: what is wrong with it is said in one line.

Unknown keys are errors, and an error names the key, its value and what was expected.
"""

from __future__ import annotations

import ast
import inspect
import ipaddress
import re
import tomllib
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

import msgspec

from engine.errors import UsageError
from engine.ids import EPOCH_BITS
from engine.topology import (
    AllocatorTable,
    GatewayTable,
    HealthTable,
    HostTable,
    KVTable,
    LaunchTable,
    ModelTable,
    ReplicatorTable,
    SchedulerTable,
    Table,
    Topology,
    WorkerTable,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

TABLES: dict[str, type[Table]] = {
    "model": ModelTable,
    "kv": KVTable,
    "scheduler": SchedulerTable,
    "allocator": AllocatorTable,
    "replicator": ReplicatorTable,
    "health": HealthTable,
    "launch": LaunchTable,
}
NAMED_TABLES: dict[str, type[Table]] = {
    "host": HostTable,
    "gateway": GatewayTable,
    "worker": WorkerTable,
}
FIXED_NAMES = ("health", "allocator", "scheduler", "replicator", "launcher")
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")

T = TypeVar("T", bound=Table)


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


def explanations(kind: type[Table]) -> dict[str, str]:
    """What each key of a table means, in the words of its class."""
    (body,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    for entry, after in pairwise(body.body):
        match entry, after:
            case ast.AnnAssign(target=ast.Name(id=key)), ast.Expr(value=ast.Constant(value=str() as says)):
                found[key] = " ".join(says.split())
    return {key: found.get(key, "") for key in kind.__struct_fields__}


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
                said = f"expected one of {', '.join(map(repr, _words(choices)))}"
            said = said.replace("`", "").replace("Expected", "expected")
            raise _wrong(f"{source}: {prefix}.{key} = {_show(data[key])}: {said}") from None
        missing = re.fullmatch("Object missing required field `(.*)`", said)
        if missing:
            said = f"the key {missing[1]!r} is needed"
        raise _wrong(f"{source}: {prefix}: {said}") from None


def _words(choices: Iterable[object]) -> Iterator[object]:
    """The words of a Literal, and of those that it is made of."""
    for choice in choices:
        yield from _words(inside) if (inside := get_args(choice)) else (choice,)


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
