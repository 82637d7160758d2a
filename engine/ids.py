"""Names of things on the wire: incarnations of actors, and requests that know who owns them."""

from __future__ import annotations

import re

import msgspec

EPOCH_BITS = 24
COUNTER_BITS = 32
LIFE_BITS = 12
"""Of an epoch: how often an actor may be started in one life of its host's launcher, and how many lives."""
MAX_EPOCH = (1 << EPOCH_BITS) - 1
_REQUEST_NAME = re.compile(r"req-([0-9a-f]{16})")
_PREFIX_NAME = re.compile(r"prefix-([0-9a-f]{16})")


class Incarnation(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """One life of an actor. The epoch goes up by one at every (re)start and is never reused."""

    name: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.name}@{self.epoch}"


def is_first_life(epoch: int) -> bool:
    """Whether an actor was started for the first time by the present launcher of its host."""
    return epoch % (1 << LIFE_BITS) == 1


class SequenceKey(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """One choice of one request: what a worker runs as a sequence."""

    request: int
    choice: int


def pack_request(gateway: int, epoch: int, counter: int) -> int:
    """The 64-bit id of a request.

        63       56 55        32 31          0
        [ gateway ] [  epoch   ] [  counter  ]

    The id names the incarnation of the gateway that owns the request, so that whoever holds a
    request can tell that its owner is gone without asking anybody.
    """
    if not (0 <= gateway < 256 and 0 < epoch <= MAX_EPOCH and 0 <= counter < 1 << COUNTER_BITS):
        raise ValueError(f"request id out of range: gateway {gateway}, epoch {epoch}, counter {counter}")
    return gateway << (EPOCH_BITS + COUNTER_BITS) | epoch << COUNTER_BITS | counter


def owner_of(request: int) -> tuple[int, int]:
    """(ordinal of the gateway, its epoch) that owns a request."""
    return request >> (EPOCH_BITS + COUNTER_BITS), request >> COUNTER_BITS & MAX_EPOCH


def request_name(request: int) -> str:
    """How logs and clients write a request id."""
    return f"req-{request:016x}"


def parse_request_name(name: str) -> int | None:
    """The request that a name means, or None when it means none."""
    found = _REQUEST_NAME.fullmatch(name)
    return None if found is None else int(found[1], 16)


def prefix_name(number: int) -> str:
    """How clients write the id of a prefix that is kept for them: it is packed like that of a request."""
    return f"prefix-{number:016x}"


def parse_prefix_name(name: str) -> int | None:
    """The number of the prefix that a name means, or None when it means none."""
    found = _PREFIX_NAME.fullmatch(name)
    return None if found is None else int(found[1], 16)
