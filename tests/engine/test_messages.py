"""Messages: frozen, tagged, closed; each comes back from bytes as itself through its receiver's union."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import get_args, get_origin

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import messages
from engine.ids import Incarnation, SequenceKey
from engine.messages import RECEIVES, Message, PageRef, StepTokens, Stop, TokenRow

UNIONS: dict[str, tuple[type[Message], ...]] = {kind: get_args(union) for kind, union in RECEIVES.items()}
ALL = sorted(
    {message for union in UNIONS.values() for message in union}, key=lambda message: message.__name__
)
EVERY_PAIR = [(kind, message) for kind, union in UNIONS.items() for message in union]

# Integers as wide as msgpack has them: seeds and request ids use all 64 bits.
WIDE = st.integers(0, 2**64 - 1)


def values(hint: object) -> st.SearchStrategy[object]:
    """Any value of a field."""
    if hint is int:
        return WIDE
    if hint is float:
        return st.floats(allow_nan=False)
    if hint is str:
        return st.text(max_size=5)
    if get_origin(hint) is tuple:
        first, *rest = get_args(hint)
        if rest == [...]:
            return st.lists(values(first), max_size=3).map(tuple)
        return st.tuples(*map(values, get_args(hint)))
    if isinstance(hint, UnionType):
        return st.one_of(*map(values, get_args(hint)))
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return instances(hint)
    if hint is NoneType:
        return st.none()
    return st.from_type(hint)  # type: ignore[arg-type]


def instances(kind: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    """Any instance of a message or of one of its parts."""
    fields = {field.name: values(field.type) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda chosen: kind(**chosen))


@pytest.mark.parametrize(
    ("kind", "message"), EVERY_PAIR, ids=lambda x: x if isinstance(x, str) else x.__name__
)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_every_message_comes_back_from_bytes(kind: str, message: type[Message], data: st.DataObject) -> None:
    sent = data.draw(instances(message))
    body = msgspec.msgpack.encode(sent)
    received = msgspec.msgpack.decode(body, type=RECEIVES[kind])  # type: ignore[index]
    assert received == sent
    assert type(received) is message
    assert hash(received) == hash(sent), "frozen all the way down"


@pytest.mark.parametrize("kind", UNIONS)
def test_tags_are_unique_in_a_union(kind: str) -> None:
    tags = [message.__struct_config__.tag for message in UNIONS[kind]]
    assert len(tags) == len(set(tags))


def test_all_messages_are_frozen_array_like_and_tagged_with_their_names() -> None:
    for message in ALL:
        config = message.__struct_config__
        assert config.frozen, message
        assert config.array_like, message
        assert config.tag == message.__name__
        assert not config.gc, f"{message} would be looked at by the garbage collector"


def test_every_message_of_the_file_has_a_receiver() -> None:
    defined = {
        thing
        for thing in vars(messages).values()
        if isinstance(thing, type) and issubclass(thing, Message) and thing is not Message
    }
    assert defined == set(ALL)


@pytest.mark.parametrize("kind", UNIONS)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_a_message_for_somebody_else_is_refused(kind: str, data: st.DataObject) -> None:
    foreign = data.draw(st.sampled_from([message for message in ALL if message not in UNIONS[kind]]))
    body = msgspec.msgpack.encode(data.draw(instances(foreign)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=RECEIVES[kind])  # type: ignore[index]


@given(st.binary(max_size=60), st.sampled_from(sorted(UNIONS)))
def test_bytes_that_are_no_message_are_refused(body: bytes, kind: str) -> None:
    """Whatever arrives is a message of the union or a DecodeError, never another exception."""
    try:
        received = msgspec.msgpack.decode(body, type=RECEIVES[kind])  # type: ignore[index]
    except msgspec.DecodeError:
        return
    assert isinstance(received, Message)


def test_a_message_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        StepTokens(()).rows = ()  # type: ignore[misc]


def test_a_truncated_message_is_refused() -> None:
    row = TokenRow(SequenceKey(1, 0), 2, 3, 4, None)
    body = msgspec.msgpack.encode(StepTokens((row,)))
    for length in range(len(body)):
        with pytest.raises(msgspec.DecodeError):
            msgspec.msgpack.decode(body[:length], type=RECEIVES["gateway"])  # type: ignore[arg-type]


def test_everybody_can_be_told_who_is_there_and_to_stop() -> None:
    for kind, union in UNIONS.items():
        if kind != "launcher":
            assert Stop in union


def test_names_are_ordered_and_short_on_the_wire() -> None:
    assert Incarnation("a", 2) < Incarnation("a", 10) < Incarnation("b", 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(PageRef(0, 1, 2))) == [0, 1, 2]
