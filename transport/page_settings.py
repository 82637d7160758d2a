"""How patient the two ends of a page transfer are, and what they have seen."""

from __future__ import annotations

import msgspec

from transport.page_wire import RUN_BYTES


class TransferSettings(msgspec.Struct, frozen=True):
    """How patient a client is, and how much it has in flight; seconds and bytes."""

    window_bytes: int = 8 << 20
    """In flight: asked for and not here, or sent and not receipted. At least one run is."""
    run_bytes: int = RUN_BYTES
    """Pages of one job that go together: how long others wait for their turn."""
    stall_s: float = 2.0
    """A peer that owes something and neither sends nor takes a byte for so long is cut off."""
    connect_s: float = 2.0
    retry_first_s: float = 0.02
    """The wait after a connection that brought nothing; it doubles up to `retry_most_s`."""
    retry_most_s: float = 1.0
    give_up_s: float = 10.0
    """A call without a settled page for so long, its connections cut, ends in TransferCut."""
    idle_s: float = 30.0
    """A connection that nobody has used for so long is closed; the next call opens another."""

    def __post_init__(self) -> None:
        if not 1 <= self.run_bytes <= RUN_BYTES or self.window_bytes < 1:
            raise ValueError(f"a run has 1 to {RUN_BYTES} bytes and a window some: {self}")
        waits = (self.stall_s, self.connect_s, self.retry_first_s, self.retry_most_s, self.give_up_s)
        if min(*waits, self.idle_s) <= 0:
            raise ValueError(f"no wait is forever short: {self}")


class ClientStatistics(msgspec.Struct):
    """What a client has seen; pages and bytes count those that came to be whole at their target."""

    pages: int = 0
    bytes: int = 0
    absent: int = 0
    """Pages that one side no longer had, no longer wanted, or changed meanwhile."""
    mismatched: int = 0
    """Pages that did not match their checksum: dropped, to be computed again."""
    connections: int = 0
    cuts: int = 0
    protocol_errors: int = 0
    restarts: int = 0
    """Connections that found another incarnation of the peer than the one before."""
    cancelled: int = 0
    given_up: int = 0


class ServerSettings(msgspec.Struct, frozen=True):
    """Whom a server puts up with, and for how long; seconds."""

    connections: int = 64
    """Clients that have greeted."""
    greetings: int = 16
    """Connections that have not said yet who they are; a flood of those keeps no client out for long."""
    stall_s: float = 2.0
    """A peer that owes something and neither sends nor takes a byte for so long is cut off."""
    pin_s: float = 1.0
    """How long pinning may take before the pages count as absent."""
    idle_s: float = 60.0
    """A connection on which nothing was asked for so long is closed; longer than the clients' own."""


class ServerStatistics(msgspec.Struct):
    """What a server has seen."""

    open: int = 0
    """Clients that are connected."""
    greeting: int = 0
    connections: int = 0
    refused: int = 0
    """Connections for which there was no room."""
    superseded: int = 0
    cuts: int = 0
    protocol_errors: int = 0
    """Peers that talked nonsense or did not fit."""
    given: int = 0
    """Pages sent whole, as far as this side can tell."""
    taken: int = 0
    repeated: int = 0
    """Pages that came again because their receipt was lost; they were left as they were."""
    absent: int = 0
    """Pages that were asked for and not there, changed while they were sent, or were not accepted."""
    mismatched: int = 0
    """Pages handed over that did not match their checksum."""
    pins_late: int = 0
