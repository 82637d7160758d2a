"""Start a topology: `python -m engine.launch TOPOLOGY`.

The launcher checks everything that can be wrong before it starts a process: the topology, the
ports, the model. It makes the shared memory and keeps its descriptors, starts the actors, restarts
those that die, and stops them all on SIGINT or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import textwrap
from contextlib import ExitStack, suppress

if __name__ == "__main__":

    def leave(number: int, frame: object) -> None:
        """Ctrl-C while the imports below run: there is nothing yet that could be left running."""
        os._exit(0)

    signal.signal(signal.SIGINT, leave)
    signal.signal(signal.SIGTERM, leave)

import argparse
import inspect
import json
import resource
import time
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio

from actors.boot import (
    FIRST_LAUNCHER_EPOCH,
    POOL,
    STANDBY,
    VITALS,
    WRITERS,
    Boot,
    longest_context,
    segment_sizes,
)
from actors.launcher import Launcher
from actors.listeners import address_of, bind_client_paths, bind_client_ports, bind_doors, check_address
from actors.logs import open_log
from actors.processes import Processes
from actors.run import first_cause, open_network
from actors.rundir import LOGS, READY, RunDir, default_base
from actors.signals import StopSignals
from actors.terminal import Terminal, say
from engine import __version__
from engine.errors import EstafetError, StartError, UsageError
from engine.layout import Vitals
from engine.model import ModelConfig, read_config
from engine.supervision import Announce, raise_if_failed
from engine.topology_file import NAMED_TABLES, TABLES, explanations, parse
from transport.segments import create_segment, map_segment
from transport.writers import WriterLocks

if TYPE_CHECKING:
    import socket
    from collections.abc import Sequence

    from engine.ids import Incarnation
    from engine.shapes import PageShape
    from engine.topology import Actor, Topology

TOPOLOGIES = Path(__file__).parent / "topologies"

LEAST_DESCRIPTORS = 256
"""Without so many a door has no room for clients beside what its process needs itself."""

EXAMPLES = """\
examples:
  python -m engine.launch engine/topologies/local.toml
      one of each actor, prefill and decode in separate processes
  python -m engine.launch engine/topologies/unified.toml --set gateway.front.port=0
      one worker for both, on a free port
  python -m engine.launch two-hosts.toml --host a
      the part of a topology of several hosts that is on this one
  python -m engine.launch my.toml --set model.path=/models/llama.gguf --check
      say what would run, and stop

exit codes: 0 clean, 2 bad usage or topology, 3 a component could not start, 70 internal
"""


@dataclass
class Launch:
    """Everything that was checked and made before the first actor starts."""

    topology: Topology
    config: ModelConfig
    model_folder: Path
    page_shape: PageShape
    context_length: int
    listeners: dict[str, socket.socket]
    """Of HTTP, by gateway."""
    clients: dict[str, dict[str, socket.socket]]
    """Of ZeroMQ, by gateway and endpoint."""
    run_dir: Path
    host: str = ""
    """Which of several hosts this is."""
    file_tier: str | None = None
    """Where pages lie that memory has no room for."""
    clock_offset: float = 0.0
    segments: dict[str, int] = field(default_factory=dict)

    def boot(self, launcher: Launcher, actor: Actor, incarnation: Incarnation) -> Boot:
        """What an incarnation is told."""
        listener = self.listeners.get(actor.name)
        needed = set(self.segments)
        if actor.kind not in ("worker", "replicator"):
            needed -= {POOL, STANDBY}
        return Boot(
            name=actor.name,
            kind=actor.kind,
            ordinal=actor.ordinal,
            epoch=incarnation.epoch,
            topology=self.topology,
            run_dir=str(self.run_dir),
            launcher=launcher.me,
            launcher_endpoint=launcher.endpoint,
            launcher_pid=os.getpid(),
            clock_offset=self.clock_offset,
            model_folder=str(self.model_folder),
            page_shape=self.page_shape,
            context_length=self.context_length,
            segments={name: self.segments[name] for name in sorted(needed)},
            listener=None if listener is None else listener.fileno(),
            clients={at: door.fileno() for at, door in self.clients.get(actor.name, {}).items()},
            file_tier=self.file_tier if actor.kind == "replicator" else None,
        )

    def url(self) -> str:
        """Where the first gateway of this host listens; empty when it has none."""
        return next(iter(self.urls().values()), "")

    def urls(self) -> dict[str, str]:
        """Where each gateway listens."""
        return {gateway: f"http://{address_of(door)}" for gateway, door in self.listeners.items()}

    def endpoints(self) -> dict[str, list[str]]:
        """Where each gateway's ZeroMQ clients connect, the one in the run directory first."""
        return {gateway: list(doors) for gateway, doors in self.clients.items()}


# ── before the first process ──────────────────────────────────────────────────────────────────


def read_topology(name: str, settings: Sequence[str]) -> Topology:
    """Read and check a topology file; a bare name may be one of those that ship."""
    path = Path(name)
    if not path.exists() and (TOPOLOGIES / f"{path.name.removesuffix('.toml')}.toml").exists():
        path = TOPOLOGIES / f"{path.name.removesuffix('.toml')}.toml"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        shipped = ", ".join(sorted(file.stem for file in TOPOLOGIES.glob("*.toml")))
        raise UsageError(f"{name}: no such topology file; those that ship are: {shipped}") from None
    except OSError as error:
        raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{name}: is not UTF-8 text: {error.reason}") from None
    return parse(text, str(path), settings)


def check_model(topology: Topology) -> None:
    """Refuse a model path that leads nowhere; what is in it is looked at when it is prepared."""
    path = topology.model.path
    if path != "default" and not (path and Path(path).expanduser().exists()):
        expected = 'expected a GGUF file, a model folder, or "default"'
        raise StartError(f"model.path = {path!r}: no such file or folder; {expected}")


def choose_host(topology: Topology, host: str | None) -> str:
    """The host of a topology that is this one; UsageError when it cannot be told."""
    there = ", ".join(topology.host)
    if host is None:
        if there:
            raise UsageError(f"the topology has several hosts: say by --host which one this is, of {there}")
        return ""
    if host not in topology.host:
        raise UsageError(f"--host {host}: the topology has no such host; it has: {there or 'none'}")
    return host


def find_model(topology: Topology, progress: bool, host: str = "") -> tuple[Path, ModelConfig]:
    """The prepared folder of the topology's model, made now if need be."""
    from kernels.backends import format_for, resolve
    from kernels.packed import pack
    from kernels.prepare import cache_dir, prepare

    path = topology.model.path
    if path == "default":
        from tools.fetch import default_model

        source = default_model(cache_dir(), progress)
    else:
        source = Path(path).expanduser()
    folder = prepare(source, cache_dir(), progress)
    config = read_config(folder)
    if any(resolve(worker.backend) == "native" for worker in topology.workers_on(host).values()):
        # Once, and its checksums compared once: workers that are started again only map it.
        pack(folder, format_for(topology.model, folder), progress)
    return folder, config


def file_of_pages(topology: Topology, model_folder: Path) -> str | None:
    """Where pages lie that memory has no room for; the folder, unless somebody named it, is made."""
    from kernels.prepare import cache_dir

    table = topology.allocator
    if not table.file_bytes:
        return None
    if table.file:
        return str(Path(table.file).expanduser().absolute())
    folder = cache_dir() / "pages"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"cannot keep pages in {folder}: {error.strerror}; set allocator.file") from None
    return str(folder / f"{model_folder.name}.pages")


def describe_kernels(topology: Topology, folder: Path, host: str = "") -> list[str]:
    """What the workers of a host compute with, and a line for those who could have it faster."""
    from kernels import cpu
    from kernels.backends import format_for, resolve
    from kernels.formats import activations_for

    workers = topology.workers_on(host).values()
    backends = {resolve(worker.backend) for worker in workers}
    lines = []
    if "native" in backends:
        weights = format_for(topology.model, folder)
        chosen = topology.model.activations
        activations = activations_for(weights) if chosen == "auto" else chosen
        lines.append(
            f"native kernels ({cpu.native().variants()[0]}), {weights} weights, {activations} activations, "
            f"{topology.kv.dtype} pages"
        )
    if "torch" in backends and any(worker.backend == "auto" for worker in workers):
        lines.append("the native kernels were not built here: the slow backend is used; `tools/up` says why")
    return lines


def check_workers(topology: Topology, host: str = "") -> None:
    """Refuse cores that are not there, before anything is made."""
    available = os.sched_getaffinity(0)
    for name, worker in topology.workers_on(host).items():
        if missing := [core for core in worker.cores if core not in available]:
            raise StartError(
                f"worker.{name}.cores = {list(worker.cores)}: core {missing[0]} is not ours; expected "
                f"some of {', '.join(map(str, sorted(available)))}"
            )


def make_segments(launch: Launch, stack: ExitStack) -> None:
    """The sealed memfds that outlive every actor and vanish with this process."""
    sizes = segment_sizes(launch.topology, launch.page_shape, launch.context_length, launch.host)
    check_memory(launch.topology, sizes[POOL] + sizes.get(STANDBY, 0))
    for name, size in sizes.items():
        launch.segments[name] = create_segment(name, size)
        stack.callback(os.close, launch.segments[name])
    writers = map_segment(launch.segments[WRITERS])
    locks = WriterLocks(writers.view, len(launch.topology.actors()))
    locks.initialise()
    locks.close()
    writers.close()


def check_memory(topology: Topology, needed: int) -> None:
    """Refuse pools that the machine could not fill: touching a page that is not there is SIGBUS."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == "MemAvailable":
            available = int(value.split()[0]) * 1024
            break
    else:
        return
    if needed > available:
        raise StartError(
            f"kv.pages = {topology.kv.pages} and replicator.standby_pages = "
            f"{topology.replicator.standby_pages} need {needed / 2**30:.1f} GiB, "
            f"{available / 2**30:.1f} GiB are available; lower kv.pages"
        )


# ── while it runs ─────────────────────────────────────────────────────────────────────────────


async def supervise(launch: Launch, started: float, ready_fd: int | None, signals: StopSignals) -> None:
    """Run the actors until they have all ended; raises what made the launch fail."""
    topology, host = launch.topology, launch.host
    first = topology.hosts()[0]
    control_port = topology.host[host].control_port if host and host == first else 0
    network = open_network(topology, host, launch.run_dir, control_port)
    vitals = map_segment(launch.segments[VITALS], None)
    terminal = Terminal()

    def ready() -> None:
        facts = {
            "url": launch.url(),
            "urls": launch.urls(),
            "run_dir": str(launch.run_dir),
            "pid": os.getpid(),
            "endpoints": launch.endpoints(),
        }
        line = json.dumps(facts) + "\n"
        with suppress(OSError):  # it is for people who look; the system serves without it
            (launch.run_dir / READY).write_text(line)
        if ready_fd is not None:
            with suppress(BrokenPipeError):  # whoever asked may have lost interest
                os.write(ready_fd, line.encode())
            os.close(ready_fd)
        seconds = time.monotonic() - started
        doors = " and ".join(f"{url}/v1" for url in launch.urls().values()) or f"host {host}"
        terminal.say(f"ready after {seconds:.1f} s at {doors} (Ctrl-C to stop)")

    def announce(announcement: Announce) -> None:
        if announcement.what == "ready":
            ready()
        else:
            terminal.say(announcement.message)

    try:
        launcher = Launcher(
            topology,
            network,
            Vitals(vitals.view, len(topology.actors())),
            announce,
            host=host,
            epoch=launcher_epoch(topology, host),
            first_endpoint=control_endpoint(topology),
        )
        stop_soon = partial(trio.lowlevel.current_trio_token().run_sync_soon, launcher.stop)
        async with trio.open_nursery() as nursery:
            make_boot = partial(launch.boot, launcher)
            nest = Processes(nursery, launch.run_dir, make_boot, launcher.exited)
            try:
                nursery.start_soon(terminal.show_start, launcher)
                with signals.calling(stop_soon):
                    over = await launcher.run(nest)
            finally:
                nest.kill_all()
            nursery.cancel_scope.cancel()
    finally:
        terminal.close()
        network.close()
    raise_if_failed(over)


def launcher_epoch(topology: Topology, host: str) -> int:
    """Later than that of any launcher of this host before, if it is not the first: by the wall clock."""
    return FIRST_LAUNCHER_EPOCH if host == topology.hosts()[0] else time.time_ns() // 1_000_000


def control_endpoint(topology: Topology) -> str:
    """Where the launcher of the first of several hosts listens; empty when there is only one."""
    for table in topology.host.values():
        address = f"[{table.address}]" if ":" in table.address else table.address
        return f"tcp://{address}:{table.control_port}"
    return ""


def launch(arguments: argparse.Namespace, signals: StopSignals) -> None:
    """Check, make, run, clean up."""
    started = time.monotonic()
    raise_descriptor_limit()
    check_descriptor(arguments.ready_fd)
    topology = read_topology(arguments.topology, arguments.settings)
    host = ""
    if not arguments.check or arguments.host is not None:
        host = choose_host(topology, arguments.host)
    check_model(topology)
    check_workers(topology, host)
    if arguments.check:
        with suppress(BrokenPipeError):
            print(describe(topology), flush=True)
        return
    with ExitStack() as stack:
        with signals.interrupting():
            if host:
                check_address(topology, host)
            listeners = bind_doors(topology, stack, host)
            ports = bind_client_ports(topology, stack, host)
            folder, config = find_model(topology, True, host)
        shape = config.page_shape(topology.kv.page_tokens, topology.kv.dtype)
        name = f"{Path(arguments.topology).stem}{host and '-'}{host}"
        run_dir = RunDir.create(arguments.run_dir or default_base(), name)
        stack.callback(run_dir.close)
        context = longest_context(topology, config)
        if context < config.context_length:
            say(f"kv.pages = {topology.kv.pages} holds {context} tokens: that is the longest context here")
        clients = bind_client_paths(ports, run_dir.path, stack)
        made = Launch(topology, config, folder, shape, context, listeners, clients, run_dir.path, host)
        made.file_tier = file_of_pages(topology, folder)
        if host:
            made.clock_offset = time.time() - time.monotonic()
        make_segments(made, stack)
        open_log(run_dir.path / LOGS / "launcher.jsonl", topology.launch.log_level)
        say(f"{__version__}, {topology.model.name or config.name}, topology {name}")
        for line in describe_kernels(topology, folder, host):
            say(line)
        say(f"run directory {run_dir.path}")
        for doors in ports.values():
            for endpoint in doors:
                say(f"ZeroMQ clients at {endpoint}")
        try:
            trio.run(supervise, made, started, arguments.ready_fd, signals)
        except BaseExceptionGroup as group:
            raise first_cause(group) from None
    say("stopped")


def raise_descriptor_limit() -> None:
    """Let this process and its actors have as many descriptors as the system allows; StartError if few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    if soft < LEAST_DESCRIPTORS:
        raise StartError(f"{soft} open files are allowed; `ulimit -n {LEAST_DESCRIPTORS}` or more is needed")


def check_descriptor(number: int | None) -> None:
    """UsageError unless --ready-fd can be written to when the time comes."""
    if number is not None:
        try:
            os.fstat(number)
        except OSError:
            raise UsageError(f"--ready-fd {number}: no such descriptor was inherited") from None


NOTE = "    # "


def describe(topology: Topology) -> str:
    """The resolved topology as TOML, every key shown and explained, with the actors it makes."""
    lines = [
        f"# actors{host and f' of host {host}'}: "
        + ", ".join(f"{actor.name} ({actor.kind})" for actor in topology.actors(host))
        for host in topology.hosts()
    ]
    for key, table in msgspec.to_builtins(topology).items():
        named = key in NAMED_TABLES
        kind = NAMED_TABLES[key] if named else TABLES[key]
        explained = explanations(kind)
        says = f"# {inspect.getdoc(kind)}"
        for name, values in table.items() if named else [(None, table)]:
            lines += ["", *filter(None, [says]), f"[{key}.{name}]" if named else f"[{key}]"]
            for entry, value in values.items():
                lines.append(f"# {entry} is not set" if value is None else f"{entry} = {json.dumps(value)}")
                lines += textwrap.wrap(explained[entry], 100, initial_indent=NOTE, subsequent_indent=NOTE)
            says, explained = "", dict.fromkeys(explained, "")  # once for all tables of a kind
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m engine.launch",
        description="Start the actors of a topology and keep them running until Ctrl-C.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("topology", help="a TOML file, or the name of one that ships (local, unified, …)")
    command.add_argument(
        "--set",
        dest="settings",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="replace a key of the file, as in --set worker.decode.threads=2 (may be repeated)",
    )
    command.add_argument(
        "--host", metavar="NAME", help="which host of the topology this is, where it has several"
    )
    command.add_argument("--check", action="store_true", help="print the resolved topology and stop")
    command.add_argument(
        "--run-dir", type=Path, help=f"where run directories are made (default: {default_base()})"
    )
    command.add_argument(
        "--ready-fd",
        type=int,
        metavar="N",
        help="write one JSON line (url, run_dir, pid, endpoints) to this inherited descriptor when ready",
    )
    command.add_argument("--version", action="version", version=f"estafet {__version__}")
    return command


def main() -> int:
    """The command; returns the exit code."""
    arguments = parser().parse_args()
    signals = StopSignals()
    signals.install()
    try:
        launch(arguments, signals)
    except EstafetError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted while starting; nothing is left running")
        return 0
    except Exception as error:
        traceback.print_exc()
        say(f"internal error: {error!r}")
        return 70
    finally:
        signals.ignore()
    return 0


if __name__ == "__main__":
    sys.exit(main())
