"""The scheduler over several hosts: each has pages and slots of its own, and a request is on one of them."""

from __future__ import annotations

import pytest
from scheduler_desk import FRONT, PAGE_TOKENS, Desk, key_of, places, preempted, waiting

from engine.ids import Incarnation
from engine.messages import PoolExhausted, RequestFact

NEAR, FAR = Incarnation("near", 1), Incarnation("far", 1)
POOLS = {"a": Incarnation("allocator-a", 1), "b": Incarnation("allocator-b", 1)}
HOSTS = {"near": "a", "allocator-a": "a", "far": "b", "allocator-b": "b"}


def desk(**free: int) -> Desk:
    made = Desk((NEAR, 4, 4), (FAR, 4, 4), free=None, hosts=HOSTS)
    for host, pages in free.items():
        made.pool(pages, POOLS[host])
    return made


def where(sends: list[object]) -> list[Incarnation]:
    """On which worker requests were placed; prefill and decode are on the same."""
    found = places(sends)  # type: ignore[arg-type]
    assert all(place.prefill == place.decode for place in found)
    return [place.decode for place in found]


def test_requests_go_to_the_host_that_has_less_to_do() -> None:
    one = desk(a=100, b=100)
    assert [where(one.tell(FRONT, waiting(n)))[0] for n in range(1, 5)] == [FAR, NEAR, FAR, NEAR]


def test_a_host_is_not_used_before_its_pool_is_known() -> None:
    one = desk(b=100)
    assert [where(one.tell(FRONT, waiting(n))) for n in range(1, 6)] == [[FAR]] * 4 + [[]]
    assert where(one.pool(100, POOLS["a"])) == [NEAR]


def test_pages_are_counted_by_host() -> None:
    """Host a has many free pages, which helps nobody on host b."""
    one = desk(a=100, b=3)
    assert where(one.tell(FRONT, waiting(1))) == [FAR]
    long = 10 * PAGE_TOKENS
    assert where(one.tell(FRONT, waiting(2, long))) == [NEAR]
    assert where(one.tell(FRONT, waiting(3, long))) == [NEAR], "where it fits, though more is to do there"
    assert where(one.tell(FRONT, waiting(4, 200 * PAGE_TOKENS))) == [], "nowhere"


def test_a_request_that_is_alone_on_its_host_always_goes() -> None:
    one = desk(a=100, b=3)
    assert where(one.tell(FRONT, waiting(1))) == [FAR]
    assert where(one.tell(FRONT, waiting(2, 1000 * PAGE_TOKENS))) == [NEAR]


@pytest.mark.parametrize("host", ["a", "b"])
def test_when_pages_run_out_somebody_of_that_host_gives_way(host: str) -> None:
    one = desk(a=100, b=100)
    on = {}
    for n in range(1, 5):
        [worker] = where(one.tell(FRONT, waiting(n)))
        on[n] = HOSTS[worker.name]
        fact = RequestFact(key_of(n), 2, "decoding", float(n), 5, 100, worker, worker)
        one.tell(FRONT, fact)
    sends = one.tell(POOLS[host], PoolExhausted(NEAR if host == "a" else FAR))
    newest = max(n for n, placed in on.items() if placed == host)
    assert preempted(sends) == [newest]


def test_a_dead_host_gives_no_places_and_comes_back_with_its_workers() -> None:
    one = desk(a=100, b=100)
    one.core.peers([], [FAR, POOLS["b"]], 0.0)
    assert [where(one.tell(FRONT, waiting(n))) for n in range(1, 6)] == [[NEAR]] * 4 + [[]]
