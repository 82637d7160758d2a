"""What can go wrong between actors; all of it is logged, answered and survived by the caller."""

from __future__ import annotations


class TransportError(Exception):
    """Base of the errors below."""


class ProtocolError(TransportError):
    """A peer sent what this version of the protocol does not allow: garbage, or another version."""


class ChannelFull(TransportError):
    """A whole window of messages is unacknowledged: the peer is stuck or gone."""


class TransferCut(TransportError):
    """The stream of a page transfer ended in the middle; pages not receipted must be sent again."""
