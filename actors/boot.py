"""What a launcher tells a new incarnation of an actor, and the world it wakes up in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from engine.ids import Incarnation
from engine.messages import ActorKind
from engine.shapes import PageShape
from engine.topology import Topology

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kernels.backend import Backend
    from transport.link import LinkFactory

T = TypeVar("T")

LAUNCHER = Incarnation("launcher", 1)
"""There is one launcher a launch; when it dies everything does, so it has one epoch."""

POOL = "pool"
STANDBY = "standby"
PAGE_TABLE = "page-table"
TOKEN_LOG = "token-log"
VITALS = "vitals"


class Boot(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything a new process needs to know, as JSON in an inherited memfd."""

    name: str
    kind: ActorKind
    ordinal: int
    epoch: int
    topology: Topology
    run_dir: str
    launcher_endpoint: str
    launcher_pid: int
    model_folder: str
    page_shape: PageShape
    context_length: int
    segments: dict[str, int] = {}
    """Descriptors of the sealed memfds."""
    listener: int | None = None
    """Descriptor of a gateway's bound TCP socket."""

    @property
    def incarnation(self) -> Incarnation:
        """Name and epoch."""
        return Incarnation(self.name, self.epoch)


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
    serve_door: Callable[..., Any] | None = None
    """How a gateway serves its front door: an async function of (sessions, shutdown); None for none."""
