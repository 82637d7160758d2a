"""A reliable conversation between two incarnations over links that may lose, repeat and reorder.

Without I/O: the caller puts the frames it gets on an outbox, hands in the frames that arrive, and
calls `poll` when `deadline` has come. Time is an argument, in seconds, and must not run backwards.

Invariants, with (s) the sending and (r) the receiving half:

    (s)  acknowledged ≤ sent,  sent − acknowledged = len(unacknowledged) ≤ window
    (s)  a retransmission is due  ⇔  something is unacknowledged
    (r)  bodies are delivered in the order 1, 2, 3 …, each once
    (r)  delivered + 1 is never among the early ones,  len(early) < window
    an idle channel has no deadline: nothing unacknowledged, no acknowledgement owed

How loss is repaired: one timer for the oldest unacknowledged message, `retransmit_s` after it was
sent, with exponential back-off as in TCP (RFC 6298, section 5). When it fires, the oldest messages
whose time is over go again, BURST of them; once the peer has acknowledged those the next are due at
once, so that a long gap closes at the speed of the link and not one burst a time-out.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from engine.ids import Incarnation
from transport.errors import ChannelFull, ProtocolError
from transport.frames import NO_BODY, PROTOCOL_VERSION, Frame, decode_frame, encode_frame

__all__ = [
    "PROTOCOL_VERSION",
    "Channel",
    "ChannelFull",
    "ChannelStatistics",
    "Frame",
    "Incarnation",
    "ProtocolError",
    "decode_frame",
]

BURST = 64
RETRANSMIT_MAX_S = 2.0
"""Where back-off ends: a peer that comes back is heard within this time."""


class ChannelStatistics(msgspec.Struct, frozen=True):
    """Counts since the channel was made, and what is under way now."""

    sent: int
    acknowledged: int
    delivered: int
    early: int
    retransmitted: int
    bursts: int
    acknowledgements: int
    duplicates: int
    foreign: int
    beyond_window: int


class Channel:
    """Both halves of one end of a conversation; see the module's text."""

    def __init__(
        self,
        local: Incarnation,
        remote: Incarnation,
        *,
        window: int = 10_000,
        retransmit_s: float = 0.2,
        ack_delay_s: float = 0.05,
        ack_every: int = 64,
    ) -> None:
        """Open this end; nothing is sent by that.

        `window`: messages that may be unacknowledged, the same at both ends. `retransmit_s`: how
        long an acknowledgement is waited for at first; more than the round trip plus `ack_delay_s`.
        `ack_delay_s`: how long one may wait for a message to ride on. `ack_every`: messages after
        which it goes at once.
        """
        if window < 1 or ack_every < 1 or not 0 <= ack_delay_s < retransmit_s:
            raise ValueError("need window ≥ 1, ack_every ≥ 1 and 0 ≤ ack_delay_s < retransmit_s")
        self.local = local
        self.remote = remote
        self.window = window
        self._retransmit_s = retransmit_s
        self._ack_delay_s = ack_delay_s
        self._ack_every = ack_every

        self._sent = 0
        self._acknowledged = 0
        self._unacknowledged: deque[tuple[float, bytes]] = deque()  # (when first sent, frame)
        self._retransmit_at: float | None = None
        self._backoff = 0
        self._resent_to = 0

        self._delivered = 0
        self._early: dict[int, msgspec.Raw] = {}
        self._owed = 0
        self._ack_at: float | None = None

        self._retransmitted = self._bursts = self._acknowledgements = 0
        self._duplicates = self._foreign = self._beyond_window = 0

    def send(self, body: bytes, now: float) -> bytes:
        """Take one MessagePack value into the conversation; returns the frame to put on the outbox.

        Losing that frame, by an outbox that is full too, only delays it. Raises ChannelFull when
        `window` messages are unacknowledged.
        """
        if len(self._unacknowledged) >= self.window:
            raise ChannelFull(f"{self.remote} has not acknowledged {len(self._unacknowledged)} messages")
        self._sent += 1
        frame = self._frame(self._sent, msgspec.Raw(body))
        self._unacknowledged.append((now, frame))
        if self._retransmit_at is None:
            self._retransmit_at = now + self._retransmit_s
        # The acknowledgement rides along.
        self._owed = 0
        self._ack_at = None
        return frame

    def receive(self, frame: Frame, now: float) -> list[msgspec.Raw]:
        """Take a frame from the link; returns the bodies that are now next in order, often one.

        A frame of another incarnation, on either side, is dropped and counted. Raises ProtocolError
        when the frame acknowledges what was never sent.
        """
        if (
            frame.source_epoch != self.remote.epoch
            or frame.destination_epoch != self.local.epoch
            or frame.source != self.remote.name
        ):
            self._foreign += 1
            return []
        if self._unacknowledged or frame.acknowledged > self._sent:
            self._take_acknowledgement(frame.acknowledged, now)
        sequence = frame.sequence
        if sequence == 0:
            return []
        if sequence == self._delivered + 1:
            self._delivered = sequence
            if self._early:
                return self._close_gap(frame.body, now)
            self._owed += 1
            if self._owed >= self._ack_every:
                self._ack_at = now
            elif self._ack_at is None:
                self._ack_at = now + self._ack_delay_s
            return [frame.body]
        # Out of order: the peer lacks our acknowledgement or we lack a message, so answer at once.
        self._ack_at = now
        if sequence <= self._delivered or sequence in self._early:
            self._duplicates += 1
        elif sequence > self._delivered + self.window:
            self._beyond_window += 1
        else:
            self._early[sequence] = frame.body
        return []

    def poll(self, now: float) -> list[bytes]:
        """The frames that are due now: retransmissions, and an acknowledgement that found no ride."""
        frames: list[bytes] = []
        if self._retransmit_at is not None and self._retransmit_at <= now:
            frames = self._retransmit(now)
        if self._ack_at is not None and self._ack_at <= now:
            frames.append(self._frame(0, NO_BODY))
            self._acknowledgements += 1
            self._owed = 0
            self._ack_at = None
        return frames

    def deadline(self) -> float | None:
        """When `poll` has something to do next, maybe already; None while the channel is quiet."""
        if self._ack_at is None:
            return self._retransmit_at
        if self._retransmit_at is None:
            return self._ack_at
        return min(self._ack_at, self._retransmit_at)

    def check(self) -> None:
        """Assert the invariants at the head of this module."""
        assert 0 <= self._acknowledged <= self._sent
        assert self._sent - self._acknowledged == len(self._unacknowledged) <= self.window
        assert (self._retransmit_at is not None) == bool(self._unacknowledged)
        assert self._resent_to <= self._sent
        assert len(self._early) < self.window
        assert all(self._delivered + 1 < early <= self._delivered + self.window for early in self._early)
        assert self._owed == 0 or self._ack_at is not None

    def statistics(self) -> ChannelStatistics:
        """Counts for the log and for metrics."""
        return ChannelStatistics(
            sent=self._sent,
            acknowledged=self._acknowledged,
            delivered=self._delivered,
            early=len(self._early),
            retransmitted=self._retransmitted,
            bursts=self._bursts,
            acknowledgements=self._acknowledgements,
            duplicates=self._duplicates,
            foreign=self._foreign,
            beyond_window=self._beyond_window,
        )

    def _frame(self, sequence: int, body: msgspec.Raw) -> bytes:
        return encode_frame(
            Frame(
                PROTOCOL_VERSION,
                self.local.name,
                self.local.epoch,
                self.remote.epoch,
                sequence,
                self._delivered,
                body,
            )
        )

    def _take_acknowledgement(self, acknowledged: int, now: float) -> None:
        if acknowledged > self._sent:
            raise ProtocolError(f"{self.remote} acknowledges message {acknowledged}, {self._sent} were sent")
        progress = acknowledged - self._acknowledged
        if progress <= 0:
            # It talks to us, so it is not gone: no reason to wait for the whole back-off.
            if self._backoff and self._retransmit_at is not None:
                self._retransmit_at = min(self._retransmit_at, now + self._retransmit_s)
            return
        for _ in range(progress):
            self._unacknowledged.popleft()
        self._acknowledged = acknowledged
        self._backoff = 0
        if not self._unacknowledged:
            self._retransmit_at = None
        elif acknowledged < self._resent_to:
            self._retransmit_at = now + self._retransmit_s
        else:
            self._retransmit_at = max(now, self._unacknowledged[0][0] + self._retransmit_s)

    def _retransmit(self, now: float) -> list[bytes]:
        """The oldest message, and those after it that have waited as long as the first wait."""
        frames = [
            frame
            for number, (sent_at, frame) in enumerate(islice(self._unacknowledged, BURST))
            if number == 0 or sent_at + self._retransmit_s <= now
        ]
        self._resent_to = max(self._resent_to, self._acknowledged + len(frames))
        self._retransmitted += len(frames)
        self._bursts += 1
        self._backoff += 1
        wait = self._retransmit_s * 2.0 ** min(self._backoff, 32)
        self._retransmit_at = now + min(wait, max(RETRANSMIT_MAX_S, self._retransmit_s))
        return frames

    def _close_gap(self, body: msgspec.Raw, now: float) -> list[msgspec.Raw]:
        bodies = [body]
        while (early := self._early.pop(self._delivered + 1, None)) is not None:
            bodies.append(early)
            self._delivered += 1
        # At once: the peer is repairing a loss and waits for this.
        self._owed += len(bodies)
        self._ack_at = now
        return bodies
