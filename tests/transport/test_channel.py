"""The channel: exactly once and in order over anything, against a naive model."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from transport.channel import (
    PROTOCOL_VERSION,
    Channel,
    ChannelFull,
    Incarnation,
    ProtocolError,
    decode_frame,
)
from transport.frames import NO_BODY, Frame, encode_frame

GATEWAY = Incarnation("gateway", 3)
DECODE = Incarnation("decode.0", 7)


def pair(**settings: float) -> tuple[Channel, Channel]:
    return Channel(GATEWAY, DECODE, **settings), Channel(DECODE, GATEWAY, **settings)  # type: ignore[arg-type]


def body(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def values(bodies: list[msgspec.Raw]) -> list[int]:
    return [msgspec.msgpack.decode(raw) for raw in bodies]


def take(channel: Channel, frame: bytes, now: float) -> list[int]:
    return values(channel.receive(decode_frame(frame), now))


def test_messages_pass_and_the_channel_falls_quiet() -> None:
    a, b = pair()
    assert a.deadline() is b.deadline() is None
    frames = [a.send(body(number), 0.0) for number in range(3)]
    assert [take(b, frame, 0.01) for frame in frames] == [[0], [1], [2]]
    assert a.deadline() == pytest.approx(0.2)
    assert b.deadline() == pytest.approx(0.06)
    assert b.poll(0.05) == []
    [acknowledgement] = b.poll(0.0601)
    assert a.receive(decode_frame(acknowledgement), 0.07) == []
    assert a.deadline() is b.deadline() is None
    assert a.statistics().retransmitted == 0
    a.check()
    b.check()


def test_an_acknowledgement_rides_on_a_message() -> None:
    a, b = pair()
    take(b, a.send(body(1), 0.0), 0.0)
    take(a, b.send(body(2), 0.01), 0.01)
    assert a.deadline() == pytest.approx(0.06)  # owed to b; a's own message is acknowledged
    assert b.statistics().acknowledgements == 0


def test_many_messages_are_acknowledged_at_once() -> None:
    a, b = pair(ack_every=4)
    frames = [a.send(body(number), 0.0) for number in range(4)]
    for frame in frames:
        assert b.poll(0.0) == []
        take(b, frame, 0.0)
    assert b.deadline() == 0.0
    assert len(b.poll(0.0)) == 1


def test_reordered_and_repeated_frames() -> None:
    a, b = pair()
    one, two, three = (a.send(body(number), 0.0) for number in (1, 2, 3))
    assert take(b, three, 0.0) == []
    assert take(b, three, 0.0) == []
    assert take(b, one, 0.0) == [1]
    assert take(b, two, 0.0) == [2, 3]
    assert take(b, two, 0.0) == []
    assert b.statistics().duplicates == 2
    assert b.deadline() == 0.0  # the sender is answered at once: it repairs a loss


def test_back_off_doubles_up_to_its_end() -> None:
    a, _ = pair()
    a.send(body(1), 0.0)
    waits = []
    now = 0.0
    for _ in range(7):
        deadline = a.deadline()
        assert deadline is not None
        waits.append(deadline - now)
        now = deadline
        assert len(a.poll(now)) == 1
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0])


def test_a_peer_that_speaks_again_cuts_the_back_off_short() -> None:
    a, b = pair()
    a.send(body(1), 0.0)
    for now in (0.2, 0.61, 1.42):
        assert len(a.poll(now)) == 1
    assert a.deadline() == pytest.approx(3.02)
    take(a, b.send(body(2), 1.5), 1.5)
    a.poll(1.56)
    assert a.deadline() == pytest.approx(1.7)


def test_a_long_gap_closes_at_the_speed_of_the_link() -> None:
    """5,000 lost messages take one time-out and then one round trip a burst."""
    a, b = pair()
    count = 5000
    for number in range(count):
        a.send(body(number), 0.0)
    now = 0.2
    received: list[int] = []
    while len(received) < count:
        frames = a.poll(now)
        assert frames, "repair stands still"
        for frame in frames:
            received += take(b, frame, now)
        now += 0.05
        for acknowledgement in b.poll(now):
            take(a, acknowledgement, now)
    assert received == list(range(count))
    assert a.statistics().retransmitted == count
    assert now < 0.2 + 0.05 * (count / 64 + 2)


def test_only_what_has_waited_goes_again() -> None:
    a, _ = pair()
    old = a.send(body(1), 0.0)
    a.send(body(2), 0.19)
    assert a.poll(0.2) == [old]
    assert len(a.poll(0.61)) == 2


def test_a_full_window_refuses() -> None:
    a, b = pair(window=3)
    frames = [a.send(body(number), 0.0) for number in range(3)]
    with pytest.raises(ChannelFull, match=r"decode\.0@7 has not acknowledged 3"):
        a.send(body(3), 0.0)
    a.check()
    assert [value for frame in frames for value in take(b, frame, 0.0)] == [0, 1, 2]
    for acknowledgement in b.poll(1.0):
        take(a, acknowledgement, 1.0)
    assert take(b, a.send(body(3), 1.0), 1.0) == [3]


def test_frames_beyond_the_window_are_dropped_and_sent_again() -> None:
    a = Channel(GATEWAY, DECODE, window=10)
    b = Channel(DECODE, GATEWAY, window=2)
    frames = [a.send(body(number), 0.0) for number in range(4)]
    assert take(b, frames[3], 0.0) == []
    assert b.statistics().beyond_window == 1
    received = [value for frame in frames[:3] for value in take(b, frame, 0.0)]
    received += [value for frame in a.poll(1.0) for value in take(b, frame, 1.0)]
    assert received == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("source", "destination"),
    [
        (Incarnation("gateway", 2), DECODE),
        (Incarnation("gateway", 4), DECODE),
        (Incarnation("gateway.1", 3), DECODE),
        (GATEWAY, Incarnation("decode.0", 6)),
    ],
)
def test_another_incarnation_is_never_heard(source: Incarnation, destination: Incarnation) -> None:
    stranger = Channel(source, destination)
    b = Channel(DECODE, GATEWAY)
    assert take(b, stranger.send(body(1), 0.0), 0.0) == []
    assert b.statistics().foreign == 1
    assert b.deadline() is None


def test_acknowledging_what_was_never_sent_is_the_peers_fault() -> None:
    a, _ = pair()
    a.send(body(1), 0.0)
    frame = Frame(PROTOCOL_VERSION, DECODE.name, DECODE.epoch, GATEWAY.epoch, 0, 2, NO_BODY)
    with pytest.raises(ProtocolError, match="acknowledges message 2, 1 were sent"):
        a.receive(frame, 0.0)
    a.check()


def test_another_version_names_both() -> None:
    frame = Frame(9, "gateway", 1, 1, 1, 0, NO_BODY)
    with pytest.raises(ProtocolError, match="version 9, this is 1"):
        decode_frame(encode_frame(frame))
    # Also when that version's frame has another form altogether.
    with pytest.raises(ProtocolError, match="version 9, this is 1"):
        decode_frame(body([9, {"some": "thing"}]))


@given(st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_garbage_is_a_protocol_error(garbage: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        decode_frame(garbage)


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_damaged_frame_is_a_protocol_error_or_a_frame(data: st.DataObject) -> None:
    message = bytearray(Channel(GATEWAY, DECODE).send(body([1, "two", 3.0]), 0.0))
    position = data.draw(st.integers(0, len(message) - 1))
    message[position] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        Channel(DECODE, GATEWAY).receive(decode_frame(bytes(message)), 0.0)


def test_negative_counters_are_refused() -> None:
    with pytest.raises(ProtocolError, match="not a frame"):
        decode_frame(body([PROTOCOL_VERSION, "gateway", 1, 1, -1, 0, None]))


class Conversation(RuleBasedStateMachine):
    """Two channels over a network that does what it likes; the model is two lists of numbers."""

    @initialize(window=st.sampled_from([1, 2, 5, 100]), ack_every=st.sampled_from([1, 3, 64]))
    def open(self, window: int, ack_every: int) -> None:
        self.now = 0.0
        self.ends = pair(window=window, ack_every=ack_every)
        self.window = window
        self.sent: tuple[list[int], list[int]] = ([], [])
        self.delivered: tuple[list[int], list[int]] = ([], [])
        # Under way to each end, in no order.
        self.network: tuple[list[bytes], list[bytes]] = ([], [])

    def deliver(self, end: int, frame: bytes) -> None:
        self.delivered[end].extend(take(self.ends[end], frame, self.now))

    @rule(end=st.sampled_from([0, 1]))
    def send(self, end: int) -> None:
        under_way = self.ends[end].statistics()
        number = len(self.sent[end])
        try:
            frame = self.ends[end].send(body(number), self.now)
        except ChannelFull:
            assert under_way.sent - under_way.acknowledged == self.window
        else:
            self.sent[end].append(number)
            self.network[1 - end].append(frame)

    @precondition(lambda self: any(self.network))
    @rule(data=st.data(), keep=st.booleans())
    def pass_any(self, data: st.DataObject, keep: bool) -> None:
        """Deliver a frame out of order; kept, it will come again."""
        end = 0 if self.network[0] and (not self.network[1] or data.draw(st.booleans())) else 1
        at = data.draw(st.integers(0, len(self.network[end]) - 1))
        frame = self.network[end][at] if keep else self.network[end].pop(at)
        self.deliver(end, frame)

    @precondition(lambda self: any(self.network))
    @rule(end=st.sampled_from([0, 1]), data=st.data())
    def drop(self, end: int, data: st.DataObject) -> None:
        if self.network[end]:
            self.network[end].pop(data.draw(st.integers(0, len(self.network[end]) - 1)))

    @rule(step=st.floats(0.0, 3.0))
    def pass_time(self, step: float) -> None:
        """Move on, stopping wherever an end has something to do; before that it has nothing."""
        end_of_step = self.now + step
        while True:
            due = [deadline for channel in self.ends if (deadline := channel.deadline()) is not None]
            if not due or min(due) > end_of_step:
                break
            before = (self.now + min(due)) / 2
            if self.now < before < min(due):
                assert not any(channel.poll(before) for channel in self.ends)
            self.now = max(self.now, min(due))
            self.poll()
        self.now = end_of_step

    def poll(self) -> None:
        for end, channel in enumerate(self.ends):
            deadline = channel.deadline()
            frames = channel.poll(self.now)
            assert bool(frames) == (deadline is not None and deadline <= self.now)
            self.network[1 - end].extend(frames)

    @rule()
    def heal(self) -> None:
        """From now on nothing is lost: all of it arrives, soon, and both ends fall quiet."""
        for _ in range(40):
            self.poll()
            for end in (0, 1):
                frames, self.network[end][:] = list(self.network[end]), []
                for frame in frames:
                    self.deliver(end, frame)
            due = [deadline for channel in self.ends if (deadline := channel.deadline()) is not None]
            if not due:
                break
            self.now = max(self.now, min(due))
        else:
            raise AssertionError("the ends do not fall quiet")
        assert self.delivered == (self.sent[1], self.sent[0])

    @invariant()
    def delivered_is_a_prefix(self) -> None:
        for end, channel in enumerate(getattr(self, "ends", ())):
            channel.check()
            got = self.delivered[end]
            assert got == self.sent[1 - end][: len(got)]


TestConversation = Conversation.TestCase
TestConversation.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
