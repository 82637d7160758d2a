"""The entry point of every actor process: `python -m actors.run`, started by the launcher only.

What it is and whom it serves comes from an inherited memfd whose number is in ESTAFET_BOOT. The
process dies with its launcher, whatever happens to either.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import structlog
import trio

from actors.boot import WRITERS, Boot, World
from actors.logs import open_log
from engine.errors import EstafetError
from transport.segments import map_segment
from transport.writers import MAIN, WriterLocks
from transport.zeromq import ZeroMQNetwork

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.sessions import Sessions
    from actors.shell import Actor
    from engine.topology import Topology
    from kernels.backend import Backend

T = TypeVar("T")

PR_SET_PDEATHSIG = 1
HIGH_WATER_MARK = 10_000
RESERVED_DESCRIPTORS = 192
"""What a gateway may need for itself: links to all actors and their reconnections, files, epoll."""
FEWEST_CLIENTS = 64
DOOR_GRACE_S = 0.8
"""What clients have from a gateway's last word to its doors' end."""


class HostClock(trio.abc.Clock):
    """The host's monotonic clock as it is: all actors tell the same time.

    trio's own begins at a random moment, so the arrivals at two gateways, or at two incarnations of
    one, could not be compared. Monotonic clocks of two hosts begin when each was started: there an offset,
    the same for all of a launch, brings them as close as their wall clocks are.
    """

    def __init__(self, offset: float = 0.0) -> None:
        self._offset = offset

    def start_clock(self) -> None:
        """It runs."""

    def current_time(self) -> float:
        return time.monotonic() + self._offset

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()


def die_with(launcher_pid: int) -> None:
    """Have the kernel end this process when its launcher ends; end now if it has already."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:
        os._exit(70)


def read_boot() -> Boot:
    """The boot record that the launcher left in the inherited memfd."""
    descriptor = int(os.environ["ESTAFET_BOOT"])
    with os.fdopen(descriptor, "rb") as stream:
        stream.seek(0)
        return msgspec.json.decode(stream.read(), type=Boot)


def make_actor(world: World) -> Actor:
    """The actor of a kind; only a worker imports what makes numbers."""
    match world.boot.kind:
        case "gateway":
            from actors.gateway import GatewayActor

            return GatewayActor(world)
        case "scheduler":
            from actors.scheduler import SchedulerActor

            return SchedulerActor(world)
        case "allocator":
            from actors.allocator import AllocatorActor

            return AllocatorActor(world)
        case "worker":
            from actors.worker import WorkerActor

            return WorkerActor(world)
        case "replicator":
            from actors.replicator import ReplicatorActor

            return ReplicatorActor(world)
        case "health":
            from actors.health import HealthActor

            return HealthActor(world)
        case "launcher":
            raise ValueError("the launcher is not an actor of a topology")


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking call in a thread; never abandoned, since it may be writing pages."""
    return await trio.to_thread.run_sync(function)


def open_backend(locks: WriterLocks, boot: Boot, pool: memoryview) -> Backend:
    """The worker's backend over the shared pool; declares what its threads hold, before any writes."""
    import numpy as np

    from kernels import backends
    from kernels.backend import WriterSlots

    folder = Path(boot.model_folder)
    table, model = boot.topology.worker[boot.name], boot.topology.model
    sharing = sum(not worker.cores for worker in boot.topology.workers_on(boot.host).values())
    shared = max(1, len(os.sched_getaffinity(0)) // max(1, sharing))
    backend = backends.open_backend(
        backends.resolve(table.backend),
        folder,
        np.frombuffer(pool, np.uint8),
        boot.page_shape,
        table.threads or len(table.cores) or shared,
        backends.format_for(model, folder),
        None if model.activations == "auto" else model.activations,
        table.cores,
        WriterSlots(np.frombuffer(locks.slots(boot.ordinal), np.uint8), boot.epoch),
    )
    locks.declare(boot.ordinal, boot.epoch, backend.writer_slots)
    return backend


async def serve_doors(boot: Boot, sessions: Sessions, shutdown: trio.Event) -> None:
    """Serve HTTP and ZeroMQ on the sockets that the launcher bound.

    A descriptor that a client takes is one that the actor's own links may need: without it libzmq aborts.
    """
    from actors.doors.http import serve_http
    from actors.doors.http_server import ServerLimits
    from actors.doors.zeromq import DoorLimits, serve_zeromq

    assert boot.listener is not None
    for_clients = max(FEWEST_CLIENTS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - RESERVED_DESCRIPTORS)
    of_zeromq = min(DoorLimits().connections, for_clients // 4)
    max_body_bytes = boot.topology.gateway[boot.name].max_body_bytes
    http = partial(
        serve_http,
        sessions,
        listener_fd=boot.listener,
        shutdown=shutdown,
        max_body_bytes=max_body_bytes,
        limits=ServerLimits(grace_s=DOOR_GRACE_S, connections=for_clients - of_zeromq),
    )
    zeromq = partial(
        serve_zeromq,
        sessions,
        listeners=boot.clients,
        shutdown=shutdown,
        max_body_bytes=max_body_bytes,
        limits=DoorLimits(grace_s=DOOR_GRACE_S, connections=of_zeromq),
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(http)
        nursery.start_soon(zeromq)


def open_network(topology: Topology, host: str, run_dir: Path, port: int = 0) -> ZeroMQNetwork:
    """The links of an actor, or of the launcher: of several hosts by tcp at its own address, nowhere else.

    `port`: where the inbox is, 0 for a free one.
    """
    if host:
        address = topology.host[host].address
        return ZeroMQNetwork(run_dir, kind="tcp", host=address, port=port, high_water_mark=HIGH_WATER_MARK)
    return ZeroMQNetwork(run_dir, kind=topology.launch.link, high_water_mark=HIGH_WATER_MARK)


async def live(boot: Boot) -> None:
    """One incarnation from its first to its last breath."""
    network = open_network(boot.topology, boot.host, Path(boot.run_dir))
    segments = {name: map_segment(descriptor, None) for name, descriptor in boot.segments.items()}
    locks = WriterLocks(segments[WRITERS].view, len(boot.topology.actors()))
    try:
        if boot.kind == "worker":
            # To the end of the process: who was killed and who ended by itself look the same.
            locks.hold(boot.ordinal, MAIN, boot.epoch)
            locks.declare(boot.ordinal, boot.epoch, 1)  # no other thread writes before a backend is open
        world = World(
            boot=boot,
            links=network,
            segments={name: segment.view for name, segment in segments.items()},
            compute=in_thread,
            open_backend=partial(open_backend, locks),
            gone=locks.gone,
            writing=partial(locks.writing, boot.ordinal, boot.epoch),
            network=True,
            serve_door=partial(serve_doors, boot) if boot.listener is not None else None,
        )
        await make_actor(world).run()
    finally:
        network.close()


def main() -> int:
    """Run the actor; the exit code says how it ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    boot = read_boot()
    die_with(boot.launcher_pid)
    ours = os.sched_getaffinity(0)
    if (cores := boot.topology.cores_of(boot.name, boot.host, ours)) != ours:
        os.sched_setaffinity(0, cores)
    open_log(Path(boot.run_dir) / "logs" / f"{boot.name}.jsonl", boot.topology.launch.log_level)
    log = structlog.get_logger().bind(actor=boot.name, epoch=boot.epoch)
    try:
        trio.run(live, boot, clock=HostClock(boot.clock_offset))
    except BaseException as raised:
        error = first_cause(raised)
        if not isinstance(error, EstafetError):
            log.exception("actor_crashed")
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            return 70
        log.error("actor_failed", error=str(error))
        print(error, file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def first_cause(error: BaseException) -> BaseException:
    """What went wrong first, out of the exception groups that nurseries wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
