"""Slots of workers: a prefill and a decode slot together, on one host where that can be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.ids import Incarnation, SequenceKey
from engine.slots import Slots

P, D, E, B, C = (Incarnation(name, 1) for name in ("p", "d", "e", "b", "c"))


def key(number: int) -> SequenceKey:
    return SequenceKey(number, 0)


def two_hosts() -> Slots:
    """Host a: p prefills, d decodes. Host b: e decodes, c prefills."""
    slots = Slots()
    slots.offered(P, 2, 0, "a")
    slots.offered(D, 0, 2, "a")
    slots.offered(E, 0, 2, "b")
    slots.offered(C, 2, 0, "b")
    return slots


def test_both_slots_are_on_one_host() -> None:
    slots = two_hosts()
    assert slots.where((), ("a", "b")) == (C, E), "of equals the first by name"
    assert slots.where((), ("a",)) == (P, D)
    slots.occupy(key(1), C, E)
    assert slots.where((), ("a", "b")) == (P, D), "less loaded"


def test_a_prefill_slot_without_a_decode_slot_beside_it_is_no_place() -> None:
    slots = two_hosts()
    slots.occupy(key(1), None, D)
    slots.occupy(key(2), None, D)
    assert slots.where((), ("a",)) is None
    assert slots.where((), ("a", "b")) == (C, E)
    assert slots.free().prefill == 2, "those of host a cannot be used"
    assert slots.free().decode == 2
    slots.died(E)
    assert slots.where((), ("a", "b")) is None
    assert slots.free().prefill == 0


def test_a_host_that_only_fills_hands_over_to_another_one() -> None:
    slots = Slots()
    slots.offered(P, 2, 0, "a")
    slots.offered(E, 0, 1, "b")
    assert slots.where((), ("a", "b")) == (P, E)
    assert slots.where((), ("a",)) is None
    slots.occupy(key(1), None, E)
    assert slots.where((), ("a", "b")) is None
    assert slots.free().prefill == 0


def test_who_is_excluded_takes_its_host_along() -> None:
    slots = two_hosts()
    assert slots.where((E,), ("a", "b")) == (P, D)
    assert slots.where((P,), ("a", "b")) == (C, E)
    assert slots.where((P, E), ("a", "b")) is None


def test_of_equally_many_prefills_the_worker_that_decodes_less_is_taken() -> None:
    """Prefills are short: without this the first worker by name would get all."""
    slots = Slots()
    slots.offered(B, 8, 36, "b")
    slots.offered(C, 8, 36, "c")
    for number in range(10):
        place = slots.where((), ("b", "c"))
        assert place == ((B, B) if number % 2 == 0 else (C, C))
        slots.occupy(key(number), None, place[1])


WORKERS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from("ab"))


@given(
    st.lists(WORKERS, min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    st.sets(st.integers(0, 5)),
    st.sets(st.sampled_from("ab")),
)
def test_a_place_is_found_exactly_where_there_is_one(
    workers: list[tuple[int, int, str]],
    taken: list[tuple[int, int]],
    excluded: set[int],
    hosts: set[str],
) -> None:
    slots = Slots()
    names = [Incarnation(f"w{number}", 1) for number in range(6)]
    prefilling, decoding = [0] * 6, [0] * 6
    for number, offer in enumerate(workers):
        slots.offered(names[number], *offer)
    for number, (prefill, decode) in enumerate(taken):
        slots.occupy(key(number), names[prefill], names[decode])
        prefilling[prefill] += 1
        decoding[decode] += 1
    excluding = {names[number] for number in excluded}
    possible = {
        (names[p], names[d])
        for p, (prefills, _, host) in enumerate(workers)
        for d, (_, decodes, other) in enumerate(workers)
        if host in hosts
        and other in hosts
        and (host == other or not any(decodes for _, decodes, there in workers if there == host))
        and prefilling[p] < prefills
        and decoding[d] < decodes
        and not {p, d} & excluded
    }
    found = slots.where(excluding, hosts)
    assert found in possible if possible else found is None
    if not excluded and hosts == {"a", "b"}:
        assert (slots.free().prefill > 0 and slots.free().decode > 0) == bool(possible)


@pytest.mark.parametrize("host", ["", "a"])
def test_the_only_host_needs_no_name(host: str) -> None:
    slots = Slots()
    slots.offered(B, 1, 1, host)
    assert slots.where(()) == (None if host else (B, B))
