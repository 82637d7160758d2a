"""The post office of an actor: one inbox, a reliable channel a living peer.

It knows who is alive from the roster alone. A frame from an incarnation that the roster does not
list yet waits (its roster is on the way); one from an incarnation that is dead, or older than the
living one, is dropped, so that nobody hears from the dead.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import structlog
import trio

from engine.errors import StartError
from engine.ids import Incarnation
from engine.messages import RECEIVES, Hello, Join
from transport.channel import Channel, ChannelFull, ProtocolError, decode_frame
from transport.frames import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from engine.core import Send, Statistics
    from engine.messages import ActorKind, Message
    from transport.channel import Frame
    from transport.link import Inbox, LinkFactory, Outbox

log = structlog.get_logger()

FRAMES_A_TURN = 64
COUNTS = ("messages_out", "messages_in", "messages_dropped", "protocol_errors")
"""What is counted from zero and shown; rarer things are shown once they have happened."""
EARLY_FRAMES = 10_000
"""Frames of incarnations that the roster does not know yet, at most; more are lost and sent again."""


@dataclass(slots=True)
class Peer:
    """A living incarnation and the way to it."""

    incarnation: Incarnation
    channel: Channel
    outbox: Outbox


class PostOffice:
    """Posts messages without ever waiting, and hands out those that arrive, in order, once."""

    def __init__(
        self,
        me: Incarnation,
        kind: ActorKind,
        links: LinkFactory,
        introduces: Callable[[Incarnation], bool] | None = None,
    ) -> None:
        """`introduces`: whether an unknown incarnation may introduce itself, to a launcher."""
        self.me = me
        self._introduces = introduces
        self._links = links
        self.inbox: Inbox = links.bind(f"{me.name}.{me.epoch}")
        self._peers: dict[str, Peer] = {}
        self._newest: dict[str, int] = {}
        self._early: deque[Frame] = deque(maxlen=EARLY_FRAMES)
        self._ready: deque[tuple[Incarnation, Message]] = deque()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(RECEIVES[kind])
        self._due = math.inf
        self._earlier = trio.Event()
        self.stuck: list[Incarnation] = []
        self.counts: Counter[str] = Counter()

    # ── who is there ──────────────────────────────────────────────────────────────────────────

    def connect(self, peer: Incarnation, endpoint: str) -> None:
        """A peer is alive at this endpoint; its earlier incarnation is not. StartError: it is no endpoint."""
        outbox = self._links.connect(endpoint)
        self.disconnect(peer.name)
        self._newest[peer.name] = max(peer.epoch, self._newest.get(peer.name, 0))
        self._peers[peer.name] = Peer(peer, Channel(self.me, peer), outbox)
        waiting, self._early = self._early, deque(maxlen=EARLY_FRAMES)
        for frame in waiting:
            self._take(frame)
        self._reschedule()

    def disconnect(self, name: str) -> None:
        """A peer is dead: drop what is on its way to it, and hear nothing more from it."""
        peer = self._peers.pop(name, None)
        if peer is not None:
            peer.outbox.close()

    def knows(self, incarnation: Incarnation) -> bool:
        """Whether this incarnation is connected."""
        peer = self._peers.get(incarnation.name)
        return peer is not None and peer.incarnation == incarnation

    # ── sending ───────────────────────────────────────────────────────────────────────────────

    def post(self, sends: Iterable[Send]) -> None:
        """Send messages. One to somebody who is not alive is dropped (see engine.core.Send)."""
        now = trio.current_time()
        for to, message in sends:
            name = to if isinstance(to, str) else to.name
            peer = self._peers.get(name)
            if peer is None or (not isinstance(to, str) and peer.incarnation != to):
                self.counts["messages_dropped"] += 1
                continue
            try:
                frame = peer.channel.send(self._encoder.encode(message), now)
            except ChannelFull:
                if peer.incarnation not in self.stuck:
                    self.stuck.append(peer.incarnation)
                self.counts["messages_dropped"] += 1
                continue
            self._put(peer, frame)
            self.counts["messages_out"] += 1
        self._reschedule()

    def _put(self, peer: Peer, frame: bytes) -> None:
        try:
            peer.outbox.send_nowait(frame)
        except trio.WouldBlock:
            # The channel sends it again; a peer that takes nothing fills its window and is reported.
            self.counts["frames_refused"] += 1

    def _reschedule(self) -> None:
        due = min(
            (at for peer in self._peers.values() if (at := peer.channel.deadline()) is not None),
            default=math.inf,
        )
        if due < self._due:
            self._earlier.set()
        self._due = due

    async def keep_promises(self) -> None:
        """Send acknowledgements and repetitions when they are due; runs until cancelled."""
        while True:
            self._earlier = trio.Event()
            with trio.move_on_at(self._due):
                await self._earlier.wait()
            now = trio.current_time()
            for peer in self._peers.values():
                for frame in peer.channel.poll(now):
                    self._put(peer, frame)
            self._due = math.inf
            self._reschedule()

    # ── receiving ─────────────────────────────────────────────────────────────────────────────

    async def receive(self) -> tuple[Incarnation, Message]:
        """The next message and who sent it; nothing from somebody who has been declared dead since."""
        while True:
            while self._ready:
                source, message = self._ready.popleft()
                if self.knows(source):
                    return source, message
                self.counts["frames_of_the_dead"] += 1
            self._take_raw(await self.inbox.receive())
            # What arrived meanwhile comes along: waiting costs 20 times what taking does.
            with contextlib.suppress(trio.WouldBlock):
                for _ in range(FRAMES_A_TURN):
                    self._take_raw(self.inbox.receive_nowait())
            self._reschedule()

    def _take_raw(self, raw: bytes) -> None:
        try:
            frame = decode_frame(raw)
        except ProtocolError as error:
            self.counts["protocol_errors"] += 1
            log.warning("frame_refused", error=str(error))
            return
        self._take(frame)

    def _take(self, frame: Frame) -> None:
        peer = self._peers.get(frame.source)
        epoch = frame.source_epoch
        if peer is None or epoch != peer.incarnation.epoch:
            if epoch > self._newest.get(frame.source, 0):
                self._early.append(frame)
                self._introduce(frame)
            else:
                self.counts["frames_of_the_dead"] += 1
            return
        try:
            bodies = peer.channel.receive(frame, trio.current_time())
        except ProtocolError as error:
            self.counts["protocol_errors"] += 1
            log.warning("frame_refused", peer=str(peer.incarnation), error=str(error))
            return
        for body in bodies:
            try:
                message = self._decoder.decode(body)
            except MALFORMED as error:
                self.counts["protocol_errors"] += 1
                log.warning("message_refused", peer=str(peer.incarnation), error=str(error))
                continue
            self.counts["messages_in"] += 1
            self._ready.append((peer.incarnation, message))

    def _introduce(self, frame: Frame) -> None:
        """Connect to somebody who says hello and is expected."""
        incarnation = Incarnation(frame.source, frame.source_epoch)
        if self._introduces is None or frame.sequence != 1 or not self._introduces(incarnation):
            return
        try:
            hello = self._decoder.decode(frame.body)
        except MALFORMED:
            return
        if isinstance(hello, Hello | Join):
            try:
                self.connect(incarnation, hello.endpoint)
            except StartError as error:
                self.counts["protocol_errors"] += 1
                log.warning("hello_refused", peer=str(incarnation), error=str(error))

    def close(self) -> None:
        """Close the inbox and all outboxes."""
        self.inbox.close()
        for name in list(self._peers):
            self.disconnect(name)

    def statistics(self) -> Statistics:
        """Counts since the start."""
        return {
            **dict.fromkeys(COUNTS, 0),
            **self.counts,
            "peers": len(self._peers),
            "frames_early": len(self._early),
        }
