"""The transition tables: every life-cycle of the engine as one literal table.

An illegal event of ours is a bug and raises IllegalTransition; the same event from a peer is
answered by the actor that receives it (see `engine.ledger` and `engine.worker`).
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class IllegalTransition(Exception):
    """Our own code asked for a transition that the table does not have."""


State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


def advance(table: Mapping[tuple[State, Event], State], state: State, event: Event) -> State:
    """The state after an event, or IllegalTransition."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{type(state).__name__}.{state.name} has no {event.name}") from None


class RequestState(Enum):
    """Where a choice of a request is, as its gateway (the owner of its term) sees it."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    ENDED = "ended"


class RequestEvent(Enum):
    """What changes a request. PLACED, HANDED_OVER and LOST raise the term."""

    PLACED = "placed"
    HANDED_OVER = "handed_over"
    LOST = "lost"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


#             PLACED          HANDED_OVER        FINISHED / CANCELLED / FAILED
#   WAITING ─────────▶ PREFILLING ─────────▶ DECODING ─────────▶ ENDED
#      ▲                   │                     │
#      └────── LOST ───────┴──────── LOST ───────┘
REQUEST: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (RequestState.WAITING, RequestEvent.PLACED): RequestState.PREFILLING,
    (RequestState.WAITING, RequestEvent.CANCELLED): RequestState.ENDED,
    (RequestState.WAITING, RequestEvent.FAILED): RequestState.ENDED,
    (RequestState.PREFILLING, RequestEvent.HANDED_OVER): RequestState.DECODING,
    (RequestState.PREFILLING, RequestEvent.LOST): RequestState.WAITING,
    (RequestState.PREFILLING, RequestEvent.CANCELLED): RequestState.ENDED,
    (RequestState.PREFILLING, RequestEvent.FAILED): RequestState.ENDED,
    (RequestState.DECODING, RequestEvent.FINISHED): RequestState.ENDED,
    (RequestState.DECODING, RequestEvent.LOST): RequestState.WAITING,
    (RequestState.DECODING, RequestEvent.CANCELLED): RequestState.ENDED,
    (RequestState.DECODING, RequestEvent.FAILED): RequestState.ENDED,
}


class SequenceState(Enum):
    """Where a sequence is, as the worker that holds its pages sees it."""

    PREFILL = "prefill"
    OFFERED = "offered"
    DECODE = "decode"
    GONE = "gone"


class SequenceEvent(Enum):
    """What changes a sequence in a worker."""

    OFFER = "offer"
    ADOPT = "adopt"
    PASS_ON = "pass_on"
    DROP = "drop"


#              OFFER               PASS_ON (the decode worker owns the pages now)
#   PREFILL ──────────▶ OFFERED ──────────▶ GONE ◀── DROP from every state (pages are released)
#      └──── ADOPT (the worker decodes it itself) ───▶ DECODE
SEQUENCE: dict[tuple[SequenceState, SequenceEvent], SequenceState] = {
    (SequenceState.PREFILL, SequenceEvent.OFFER): SequenceState.OFFERED,
    (SequenceState.PREFILL, SequenceEvent.ADOPT): SequenceState.DECODE,
    (SequenceState.PREFILL, SequenceEvent.DROP): SequenceState.GONE,
    (SequenceState.OFFERED, SequenceEvent.PASS_ON): SequenceState.GONE,
    (SequenceState.OFFERED, SequenceEvent.DROP): SequenceState.GONE,
    (SequenceState.DECODE, SequenceEvent.DROP): SequenceState.GONE,
}


class PageState(IntEnum):
    """What a page is, in the shared page metadata. FREE must be 0: a fresh memfd reads as zeros."""

    FREE = 0
    LEASED = 1
    OPEN = 2
    SEALED = 3


class PageEvent(Enum):
    """What changes a page. LEASE and FREE are the allocator's; OPEN and SEAL the owning worker's."""

    LEASE = "lease"
    OPEN = "open"
    SEAL = "seal"
    FREE = "free"


#          LEASE            OPEN           SEAL (all slots valid: never written again)
#   FREE ────────▶ LEASED ────────▶ OPEN ────────▶ SEALED
#     ▲               │               │               │
#     └──────────── FREE (the generation goes up) ────┘
PAGE: dict[tuple[PageState, PageEvent], PageState] = {
    (PageState.FREE, PageEvent.LEASE): PageState.LEASED,
    (PageState.LEASED, PageEvent.OPEN): PageState.OPEN,
    (PageState.LEASED, PageEvent.FREE): PageState.FREE,
    (PageState.OPEN, PageEvent.SEAL): PageState.SEALED,
    (PageState.OPEN, PageEvent.FREE): PageState.FREE,
    (PageState.SEALED, PageEvent.FREE): PageState.FREE,
}


class ProcessState(Enum):
    """Where an incarnation of an actor is, as its launcher sees it."""

    STARTING = "starting"
    UP = "up"
    READY = "ready"
    EXITED = "exited"


class ProcessEvent(Enum):
    """What changes an incarnation."""

    HELLO = "hello"
    READY = "ready"
    EXIT = "exit"


#               HELLO (inbox bound)     READY (can serve)       EXIT (reaped: every thread is gone)
#   STARTING ──────────────────▶ UP ──────────────────▶ READY ────────▶ EXITED
PROCESS: dict[tuple[ProcessState, ProcessEvent], ProcessState] = {
    (ProcessState.STARTING, ProcessEvent.HELLO): ProcessState.UP,
    (ProcessState.STARTING, ProcessEvent.EXIT): ProcessState.EXITED,
    (ProcessState.UP, ProcessEvent.READY): ProcessState.READY,
    (ProcessState.UP, ProcessEvent.EXIT): ProcessState.EXITED,
    (ProcessState.READY, ProcessEvent.EXIT): ProcessState.EXITED,
}


class PinState(Enum):
    """Where a prefix is that a gateway keeps in the cache for a client."""

    ASKING = "asking"
    FILLING = "filling"
    PAUSING = "pausing"
    SETTLED = "settled"
    OVER = "over"


class PinEvent(Enum):
    """What changes a pin.

    FAILED: it was not filled; RETRIED: it is to be filled again; FORGOTTEN: there is a new allocator.
    """

    ANSWERED = "answered"
    SHORT = "short"
    FILLED = "filled"
    FAILED = "failed"
    RETRIED = "retried"
    FORGOTTEN = "forgotten"
    ENDED = "ended"


#             ANSWERED                  SHORT              FAILED
#   SETTLED ◀────────── ASKING ─────────────────▶ FILLING ─────────▶ PAUSING
#      └─── FORGOTTEN ────▲ ▲─────── FILLED ─────────┘ ▲─── RETRIED ────┘         any ── ENDED ──▶ OVER
PIN: dict[tuple[PinState, PinEvent], PinState] = {
    (PinState.ASKING, PinEvent.ANSWERED): PinState.SETTLED,
    (PinState.ASKING, PinEvent.SHORT): PinState.FILLING,
    (PinState.ASKING, PinEvent.ENDED): PinState.OVER,
    (PinState.FILLING, PinEvent.FILLED): PinState.ASKING,
    (PinState.FILLING, PinEvent.FAILED): PinState.PAUSING,
    (PinState.FILLING, PinEvent.ENDED): PinState.OVER,
    (PinState.PAUSING, PinEvent.RETRIED): PinState.FILLING,
    (PinState.PAUSING, PinEvent.ENDED): PinState.OVER,
    (PinState.SETTLED, PinEvent.FORGOTTEN): PinState.ASKING,
    (PinState.SETTLED, PinEvent.ENDED): PinState.OVER,
}

TABLES: tuple[dict[Any, Any], ...] = (REQUEST, SEQUENCE, PAGE, PROCESS, PIN)
