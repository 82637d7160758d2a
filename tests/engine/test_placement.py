"""Placement over hosts: the least time to the first token, from what each host has and has to do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.messages import PagesCached
from engine.placement import ClusterCache, HostLoad, offers
from engine.shapes import PageRef

KEYS = [bytes([number]) * 16 for number in range(20)]
PAGES = [(key, PageRef(0, number, 7)) for number, key in enumerate(KEYS)]


def cache_of(**pages: int) -> ClusterCache:
    """Hosts that have the first so many of KEYS."""
    cache = ClusterCache()
    for host, count in pages.items():
        cache.told(host, PagesCached(tuple(PAGES[:count]), (), whole=True))
    return cache


def test_a_host_that_has_the_prefix_is_taken_before_an_idle_one_that_has_not() -> None:
    loads = [HostLoad("a", 0.0), HostLoad("b", 1.0, page_fetch_s=0.02)]
    assert [offer.host for offer in offers(loads, cache_of(b=10), KEYS, 12)] == ["b", "a"]


def test_a_host_that_is_busy_enough_loses_its_prefix_to_an_idle_one_that_fetches_it() -> None:
    loads = [HostLoad("a", 0.0), HostLoad("b", 50.0)]
    best, other = offers(loads, cache_of(b=10), KEYS, 12)
    assert (best.host, best.elsewhere, best.elsewhere_pages, best.cached) == ("a", "b", 10, 0)
    assert (other.host, other.elsewhere) == ("b", "")


def test_pages_are_fetched_from_a_host_that_cannot_fill_any() -> None:
    [only] = offers([HostLoad("a")], cache_of(b=10), KEYS, 12, ["b"])
    assert (only.host, only.elsewhere, only.elsewhere_pages) == ("a", "b", 10)


def test_what_is_slower_to_move_than_to_fill_is_filled() -> None:
    [best, _] = offers([HostLoad("a", page_fetch_s=0.03), HostLoad("b", 99.0)], cache_of(b=10), KEYS, 12)
    assert (best.host, best.elsewhere, best.elsewhere_pages) == ("a", "", 0)
    assert best.seconds == pytest.approx(12 * 0.02)


def test_only_a_run_from_the_front_counts() -> None:
    cache = ClusterCache()
    cache.told("a", PagesCached((PAGES[0], PAGES[2], PAGES[3]), (), whole=True))
    assert cache.cached("a", KEYS) == 1
    cache.told("a", PagesCached((PAGES[1],), (KEYS[3],), whole=False))
    assert cache.cached("a", KEYS) == 3
    assert cache.pages("a", KEYS[:3]) == tuple(page for _, page in PAGES[:3])
    cache.lose("a")
    assert cache.cached("a", KEYS) == 0
    assert cache.statistics() == {"pages_known": 0}


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(0, 20), st.floats(0, 30), st.floats(0.001, 0.1), st.floats(0.001, 0.1)),
        min_size=1,
    )
)
def test_the_best_offer_is_the_least_of_all_ways_to_do_it(
    hosts: dict[str, tuple[int, float, float, float]],
) -> None:
    loads = [HostLoad(host, waiting, fill, fetch) for host, (_, waiting, fill, fetch) in hosts.items()]
    found = offers(loads, cache_of(**{host: count for host, (count, *_) in hosts.items()}), KEYS, 20)
    ways = [
        waiting * fill + (there - count) * fetch + (20 - there) * fill
        for count, waiting, fill, fetch in hosts.values()
        for there in (count, max(other for other, *_ in hosts.values()))
    ]
    assert found[0].seconds == pytest.approx(min(ways))
    assert [offer.seconds for offer in found] == sorted(offer.seconds for offer in found)
    for offer in found:
        assert offer.cached == hosts[offer.host][0]
        if offer.elsewhere:
            assert offer.elsewhere_pages == hosts[offer.elsewhere][0] > offer.cached
