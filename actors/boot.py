"""What a launcher tells a new incarnation of an actor, and the world it wakes up in."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from engine.ids import Incarnation
from engine.layout import PageTable, TokenLogArena, Vitals
from engine.messages import ActorKind
from engine.shapes import PageShape
from engine.topology import Topology
from transport.writers import WriterLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from engine.model import ModelConfig
    from kernels.backend import Backend
    from transport.link import LinkFactory

T = TypeVar("T")

FIRST_LAUNCHER_EPOCH = 1
"""Of the launcher of the first host, or the only one: when it dies everything does, so it has one epoch."""

POOL = "pool"
POOL_NUMBER = 0
STANDBY = "standby"
PAGE_TABLE = "page-table"
TOKEN_LOG = "token-log"
VITALS = "vitals"
WRITERS = "writers"


def segment_sizes(
    topology: Topology, shape: PageShape, context_length: int, host: str = ""
) -> dict[str, int]:
    """The shared segments of a host and their bytes; one that would be empty is not made."""
    sizes = {
        POOL: topology.kv.pages * shape.page_bytes,
        STANDBY: topology.replicator.standby_pages * shape.page_bytes,
        PAGE_TABLE: PageTable.size(topology.kv.pages, shape.tokens, len(topology.actors())),
        TOKEN_LOG: topology.log_slots(host) * TokenLogArena.slot_bytes(context_length),
        VITALS: len(topology.actors()) * Vitals.BYTES,
        WRITERS: len(topology.actors()) * WriterLocks.BYTES,
    }
    return {name: size for name, size in sizes.items() if size}


def longest_context(topology: Topology, config: ModelConfig) -> int:
    """Tokens that one request may have: what the model allows and the pool can hold of one alone."""
    return min((topology.kv.pages - 1) * topology.kv.page_tokens, config.context_length)


class Boot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a new process needs to know, as JSON in an inherited memfd."""

    name: str
    kind: ActorKind
    ordinal: int
    epoch: int
    topology: Topology
    run_dir: str
    launcher: Incarnation
    launcher_endpoint: str
    launcher_pid: int
    model_folder: str
    page_shape: PageShape
    context_length: int
    clock_offset: float = 0.0
    """What this host's monotonic clock lacks, in seconds, to tell the same time as those of other hosts."""
    segments: dict[str, int] = {}
    """Descriptors of the sealed memfds."""
    listener: int | None = None
    """Descriptor of a gateway's bound TCP socket."""
    clients: dict[str, int] = {}
    """Endpoints at which a gateway's ZeroMQ clients connect, and the descriptors that listen there."""
    file_tier: str | None = None
    """Where a replicator keeps pages that memory has no room for."""

    @property
    def incarnation(self) -> Incarnation:
        """Name and epoch."""
        return Incarnation(self.name, self.epoch)

    @property
    def host(self) -> str:
        """The host that it is on."""
        return self.topology.host_of(self.name)


class Compute(Protocol):
    """Runs a blocking call without stopping the event loop."""

    async def __call__(self, function: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class World:
    """What surrounds an actor: real in a process of its own, in memory in a test."""

    boot: Boot
    links: LinkFactory
    segments: Mapping[str, memoryview]
    compute: Compute
    open_backend: Callable[[Boot, memoryview], Backend]
    writing: Callable[[], AbstractContextManager[None]] = nullcontext
    """What a thread of a worker, not its main one, holds while it writes pages outside of a step."""
    gone: Callable[[int, int], bool | None] = lambda ordinal, epoch: None
    """Whether all threads of an incarnation that could write have ended; None: only its reaping tells."""
    network: bool = False
    """Whether pages can be exchanged with other hosts: there are real sockets."""
    serve_door: Callable[..., Any] | None = None
    """How a gateway serves its front door: an async function of (sessions, shutdown); None for none."""
