"""The contract of every link: bounded, one-directional, message-preserving byte pipes.

An actor owns one inbox, bound at an endpoint, and one outbox a peer. Every implementation
(memory, ZeroMQ, faulty) passes the same contract suite, `tests/transport/test_link_contract.py`.

    many outboxes ──▶ one inbox

- Messages of one outbox arrive in order and whole. Nothing is promised between two outboxes.
- A link may lose messages when the peer dies or a connection is cut; `transport.channel` is what
  makes a conversation reliable on top.
"""

from __future__ import annotations

from typing import Protocol


class Inbox(Protocol):
    """The receiving end; one task at a time may receive."""

    @property
    def endpoint(self) -> str:
        """Where outboxes connect to, with the real port where one was chosen at bind."""
        ...

    def receive_nowait(self) -> bytes:
        """The next message; raises trio.WouldBlock when there is none now."""
        ...

    async def receive(self) -> bytes:
        """Wait for the next message. A cancelled receive never loses one.

        Raises trio.ClosedResourceError once closed.
        """
        ...

    def close(self) -> None:
        """Unbind, wake the receiver and remove the socket file. Idempotent."""
        ...


class Outbox(Protocol):
    """The sending end to one inbox; one task at a time may send."""

    def send_nowait(self, message: bytes) -> None:
        """Queue a message; raises trio.WouldBlock when the high-water mark is reached."""
        ...

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting for room. A cancelled send has either queued it or not at all.

        Raises trio.ClosedResourceError once closed.
        """
        ...

    def close(self) -> None:
        """Drop what is still queued and disconnect. Idempotent."""
        ...


class LinkFactory(Protocol):
    """Makes the two ends; the only thing an actor knows about its transport."""

    def bind(self, name: str) -> Inbox:
        """Open the inbox of the incarnation `name` (unique a launch) at an address of its own."""
        ...

    def connect(self, endpoint: str) -> Outbox:
        """Open an outbox to an inbox; it need not exist yet."""
        ...
