"""The frame of a channel: what one incarnation says to another, and how it looks on the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec

from transport.errors import ProtocolError

PROTOCOL_VERSION = 1

MALFORMED = (msgspec.DecodeError, RecursionError)
"""What decoding raises for bytes that are nothing, or nested thousands deep."""

NO_BODY = msgspec.Raw(b"\xc0")
"""The body of a pure acknowledgement: MessagePack's nil."""

Counter = Annotated[int, msgspec.Meta(ge=0)]


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One message of a channel, or a pure acknowledgement (sequence 0)."""

    version: int
    source: str
    source_epoch: Counter
    destination_epoch: Counter
    sequence: Counter
    """1, 2, 3 … for messages, 0 for a pure acknowledgement."""
    acknowledged: Counter
    """The source has delivered all messages of the destination up to this one."""
    body: msgspec.Raw
    """Exactly one MessagePack value; it keeps the received bytes alive, nothing is copied."""


class _Versioned(msgspec.Struct, frozen=True, array_like=True):
    """The part of a frame that every version of the protocol shares."""

    version: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)

encode_frame = _encoder.encode


def decode_frame(message: bytes) -> Frame:
    """Read a frame; a ProtocolError says what the peer did wrong, another version above all."""
    try:
        frame = _decoder.decode(message)
    except MALFORMED as error:
        _refuse_other_version(message)
        raise ProtocolError(f"a message of {len(message)} bytes is not a frame: {error}") from None
    if frame.version != PROTOCOL_VERSION:
        _refuse_other_version(message)
    return frame


def _refuse_other_version(message: bytes) -> None:
    try:
        version = _version_decoder.decode(message).version
    except MALFORMED:
        return
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the peer speaks protocol version {version}, this is {PROTOCOL_VERSION}")
