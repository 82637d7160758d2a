"""The transition tables: every state is reachable, ends are ends, and nothing else is allowed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from engine.lifecycle import (
    PAGE,
    PIN,
    PROCESS,
    REQUEST,
    SEQUENCE,
    TABLES,
    IllegalTransition,
    PageEvent,
    PageState,
    PinEvent,
    PinState,
    ProcessEvent,
    ProcessState,
    RequestEvent,
    RequestState,
    SequenceEvent,
    SequenceState,
    advance,
)

if TYPE_CHECKING:
    from enum import Enum


class Life(NamedTuple):
    """A table, and what its text says about where lives begin and end."""

    table: dict[tuple[Any, Any], Any]
    states: type[Enum]
    events: type[Enum]
    first: set[Enum]
    last: set[Enum]


LIVES = [
    Life(REQUEST, RequestState, RequestEvent, {RequestState.WAITING}, {RequestState.ENDED}),
    # A sequence that is handed over begins at the decode worker as DECODE.
    Life(
        SEQUENCE,
        SequenceState,
        SequenceEvent,
        {SequenceState.PREFILL, SequenceState.DECODE},
        {SequenceState.GONE},
    ),
    Life(PAGE, PageState, PageEvent, {PageState.FREE}, set()),
    Life(PROCESS, ProcessState, ProcessEvent, {ProcessState.STARTING}, {ProcessState.EXITED}),
    Life(PIN, PinState, PinEvent, {PinState.ASKING}, {PinState.OVER}),
]


@pytest.fixture(params=LIVES, ids=lambda life: life.states.__name__)
def life(request: pytest.FixtureRequest) -> Life:
    """Each table in turn."""
    return request.param  # type: ignore[no-any-return]


def test_all_tables_are_shown_here() -> None:
    assert [id(life.table) for life in LIVES] == [id(table) for table in TABLES]


def reachable(life: Life, first: set[Enum]) -> set[Enum]:
    """All states that some events lead to."""
    found, new = set(first), set(first)
    while new:
        new = {after for (state, _), after in life.table.items() if state in new} - found
        found |= new
    return found


def test_every_state_is_reachable(life: Life) -> None:
    assert reachable(life, life.first) == set(life.states)


def test_every_event_does_something(life: Life) -> None:
    assert {event for _, event in life.table} == set(life.events)


def test_terminal_states_have_no_exits_and_the_others_reach_an_end(life: Life) -> None:
    assert {state for state in life.states if state not in {s for s, _ in life.table}} == life.last
    for state in life.states:
        assert reachable(life, {state}) & (life.last or life.first)


def test_whatever_the_table_lacks_raises(life: Life) -> None:
    for state in life.states:
        for event in life.events:
            if (state, event) in life.table:
                assert advance(life.table, state, event) is life.table[state, event]
            else:
                with pytest.raises(IllegalTransition, match=rf"{state.name} has no {event.name}"):
                    advance(life.table, state, event)


def test_an_event_of_another_table_is_illegal() -> None:
    with pytest.raises(IllegalTransition):
        advance(REQUEST, RequestState.WAITING, PageEvent.FREE)  # type: ignore[type-var]


def test_a_request_can_be_given_up_in_every_state_but_the_last() -> None:
    for state in set(RequestState) - {RequestState.ENDED}:
        for event in (RequestEvent.CANCELLED, RequestEvent.FAILED):
            assert advance(REQUEST, state, event) is RequestState.ENDED


def test_a_request_can_be_lost_wherever_a_worker_has_it() -> None:
    for state in (RequestState.PREFILLING, RequestState.DECODING):
        assert advance(REQUEST, state, RequestEvent.LOST) is RequestState.WAITING


def test_a_sequence_can_be_dropped_in_every_state_but_the_last() -> None:
    for state in set(SequenceState) - {SequenceState.GONE}:
        assert advance(SEQUENCE, state, SequenceEvent.DROP) is SequenceState.GONE


def test_a_process_can_exit_in_every_state_but_the_last() -> None:
    for state in set(ProcessState) - {ProcessState.EXITED}:
        assert advance(PROCESS, state, ProcessEvent.EXIT) is ProcessState.EXITED


def test_a_page_is_never_freed_twice_nor_written_when_sealed() -> None:
    """Field report 5."""
    with pytest.raises(IllegalTransition):
        advance(PAGE, PageState.FREE, PageEvent.FREE)
    with pytest.raises(IllegalTransition):
        advance(PAGE, PageState.SEALED, PageEvent.OPEN)
    assert PageState.FREE == 0, "a fresh memfd reads as zeros"
