"""What a door has to know of a request to answer it again, also after its gateway has died."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from actors.sessions import Generation


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """Kept, encoded, in `Generation.ticket`: small, since it lies in the shared token log."""

    kind: Literal["chat", "completion"]
    name: str | None
    """The client's own id of the request."""
    created: int
    """Unix time, equal in all chunks of a stream, also of one that was resumed."""
    include_usage: bool = False
    echo: int | None = None
    """Repeat the prompt, but for so many first tokens that are not the client's; None: do not."""
    cache: bool = False
    """Tell where the tokens of the prompt came from."""

    def encode(self) -> bytes:
        """As a generation carries it."""
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ticket).decode


def ticket_of(generation: Generation) -> Ticket:
    """The ticket that a generation carries; msgspec.DecodeError when another kind of door opened it."""
    return _decode(generation.ticket)
