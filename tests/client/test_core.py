"""Whatever happens between a client and its gateway: one uninterrupted text, or one typed error."""

from __future__ import annotations

import pytest
from fake_gateway import Reader, Trouble, World
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.client.errors import (
    ClientClosed,
    ConnectionLost,
    DeadlineExceeded,
    Diverged,
    GenerationFailed,
    ProtocolViolated,
    Refused,
)
from engine.client.patience import Patience
from engine.client.request import completion
from engine.stream_protocol import Cancel, Create, Delta, Failed, Opened, Resume, StreamError, encode

TIMES = st.floats(0.1, 25, allow_nan=False)
TROUBLES = st.builds(
    Trouble,
    loss=st.sampled_from((0.0, 0.0, 0.05, 0.3)),
    repetition=st.sampled_from((0.0, 0.2)),
    most_delay_s=st.sampled_from((0.001, 0.2, 1.5)),
    until=st.just(30.0),
    cuts=st.lists(TIMES, max_size=6),
    silences=st.lists(TIMES, max_size=2),
    restarts=st.lists(st.tuples(TIMES, st.booleans()), max_size=3),
)
PATIENT = Patience(lost_s=1000)
LONG_S = 600.0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 1 << 30),
    TROUBLES,
    st.lists(
        st.tuples(st.integers(1, 3), st.sampled_from((0.0, 0.0, 0.7, 3.0)), st.integers(1, 8)),
        min_size=1,
        max_size=4,
    ),
)
def test_every_text_equals_the_uninterrupted_one(
    seed: int, trouble: Trouble, readers: list[tuple[int, float, int]]
) -> None:
    world = World(seed, trouble, patience=PATIENT)
    reading = [
        Reader(world, seed + index, choices=choices, slow_s=slow_s, window=window)
        for index, (choices, slow_s, window) in enumerate(readers)
    ]
    world.run(lambda: all(reader.is_over for reader in reading), LONG_S)
    for reader in reading:
        reader.check_complete()
    world.run(lambda: world.core.is_idle, LONG_S)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 30), TROUBLES, st.floats(0, 20), st.booleans())
def test_what_is_cancelled_is_cancelled_everywhere(
    seed: int, trouble: Trouble, after: float, abandons: bool
) -> None:
    """Also when the word is lost, or the connection: the gateway does not work for nobody."""
    world = World(seed, trouble, patience=PATIENT)
    reader = Reader(world, seed, choices=2)
    leave = reader.exchange.abandon if abandons else reader.exchange.cancel
    world.at(after, lambda: leave(world.now))
    world.run(lambda: world.core.is_idle and world.now >= after, LONG_S)
    for asked in world.requests.values():
        ended = asked.known(world.now, world.token_s) >= max(map(len, asked.answer))
        assert ended or asked.cancelled is not None
    if not abandons:
        assert reader.exchange.is_complete
        assert reader.finishes
        assert reader.error is None


def test_a_stream_that_is_left_alone_is_asked_once() -> None:
    world = World(0, Trouble(), token_s=1.0)
    reader = Reader(world, 5)
    world.run(lambda: reader.is_over, LONG_S)
    reader.check_complete()
    assert [kind for kind in world.told if kind in (Create, Resume, Cancel)] == [Create]


def test_a_cut_is_resumed_and_nothing_is_told_twice() -> None:
    world = World(0, Trouble(cuts=[3.2, 7.7]), token_s=1.0)
    reader = Reader(world, 5, choices=2)
    world.run(lambda: reader.is_over, LONG_S)
    reader.check_complete()
    assert [kind for kind in world.told if kind in (Create, Resume)] == [Create, Resume, Resume]


def test_a_forgotten_request_is_asked_anew_and_what_is_known_left_out() -> None:
    world = World(0, Trouble(restarts=[(5.0, False)]), token_s=0.5)
    reader = Reader(world, 5, choices=2)
    world.run(lambda: reader.is_over, LONG_S)
    reader.check_complete()
    assert [kind for kind in world.told if kind in (Create, Resume)] == [Create, Resume, Create]


def test_another_answer_than_before_is_no_continuation() -> None:
    """A model that was exchanged meanwhile: the text so far is hashed, never guessed."""
    world = World(0, Trouble(restarts=[(5.0, False)]), token_s=0.5)
    reader = Reader(world, 5)
    world.run(lambda: len(reader.texts[0]) > 3, LONG_S)
    seen = reader.texts[0]

    def exchange_the_model() -> None:
        for asked in world.requests.values():
            asked.answer = [["?" * 10_000]]

    world.at(5.4, exchange_the_model)
    world.run(lambda: reader.is_over, LONG_S)
    assert isinstance(reader.error, Diverged)
    assert reader.texts[0].startswith(seen)
    assert "?" not in reader.texts[0]


def test_a_request_that_is_always_forgotten_is_given_up() -> None:
    world = World(0, Trouble(cuts=[1.5 * n for n in range(1, 40)]), token_s=1.0)
    world.forgets_at_once = True
    reader = Reader(world, 7)
    world.run(lambda: reader.is_over, LONG_S)
    assert isinstance(reader.error, ConnectionLost)
    assert "asked anew 3 times" in str(reader.error)


def test_without_a_gateway_patience_ends() -> None:
    world = World(0, Trouble(), patience=Patience(lost_s=30))
    world._forget()
    world.core.disconnected(0.0)
    reader = Reader(world, 1)
    world.run(lambda: world.core.is_idle, LONG_S)
    reader.read_all()
    assert world.now == 30
    assert isinstance(reader.error, ConnectionLost)
    assert "no gateway took the request of" in str(reader.error)


def test_a_deadline_cancels_at_the_gateway_too() -> None:
    world = World(0, Trouble(), token_s=1.0)
    request = completion("hello", {"deadline_s": 4.5}, key="k" * 16, seed=3, now=world.now)
    exchange = world.core.open(request, world.now)
    world.flush()
    world.run(lambda: exchange.is_complete, LONG_S)
    assert world.now == 4.5
    with pytest.raises(DeadlineExceeded):
        exchange.take(world.now)
    world.run(lambda: world.core.is_idle, 1)
    assert Cancel in world.told


def test_a_refusal_says_what_is_wrong() -> None:
    world = World(0, Trouble())
    world.refusal = StreamError("'top_p' is too large", 400, "bad", "top_p", 2.0)
    reader = Reader(world, 1)
    world.run(lambda: reader.is_over, 1)
    error = reader.error
    assert isinstance(error, Refused)
    assert (str(error), error.status, error.code, error.param, error.retry_after_s) == (
        "'top_p' is too large",
        400,
        "bad",
        "top_p",
        2.0,
    )


def test_a_gateway_that_is_busy_after_a_restart_is_asked_again() -> None:
    world = World(0, Trouble(restarts=[(3.0, False)]), token_s=0.5)
    reader = Reader(world, 5)
    world.run(lambda: bool(reader.texts[0]), LONG_S)
    world.refusal = StreamError("queue full", 429, "queue_full", retry_after_s=1.0)
    world.at(6.0, lambda: setattr(world, "refusal", None))
    world.run(lambda: reader.is_over, LONG_S)
    reader.check_complete()


def test_a_reader_that_stops_costs_its_window() -> None:
    world = World(0, Trouble(), token_s=0.01)
    reader = Reader(world, 11, window=3, slow_s=2.0)
    world.run(lambda: reader.is_over, LONG_S)
    reader.check_complete()
    assert 1 <= reader.most_waiting <= 3


def test_closing_cancels_what_is_open_and_says_so() -> None:
    world = World(0, Trouble(), token_s=1.0)
    readers = [Reader(world, seed) for seed in range(3)]
    world.run(lambda: all(reader.exchange.choices for reader in readers), 1)
    world.core.close(world.now)
    world.flush()
    world.run(lambda: world.core.is_idle, 1)
    assert all(isinstance(reader.error, ClientClosed) for reader in readers)
    assert all(asked.cancelled is not None for asked in world.requests.values())


OPENED = Opened("1.1", "r1", "m", 3, 2)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (Delta("1.1", 1, "x", choice=2), ProtocolViolated),
        (Delta("1.1", 1, "x", choice=-1), ProtocolViolated),
        (Failed(StreamError("broken", 500), "1.1"), GenerationFailed),
    ],
)
def test_nonsense_of_a_gateway_ends_its_stream_only(message: Delta | Failed, error: type[Exception]) -> None:
    world = World(0, Trouble())
    reader, other = Reader(world, 1, choices=2), Reader(world, 2)
    world.core.take_outgoing()
    world.core.receive(encode(OPENED), 0.0)
    world.core.receive(encode(message), 0.0)
    reader.read_all()
    assert isinstance(reader.error, error)
    world.run(lambda: other.is_over, LONG_S)
    other.check_complete()


@given(st.binary(max_size=200))
def test_garbage_is_counted(data: bytes) -> None:
    world = World(0, Trouble())
    reader = Reader(world, 1)
    world.core.receive(data, 0.0)
    assert world.core.strange == 1
    world.run(lambda: reader.is_over, LONG_S)
    reader.check_complete()
