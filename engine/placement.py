"""Where a request is computed, when there are several hosts: by cached prefix, load and the cost of fetching.

    seconds to the first token on a host = waiting + moving + filling
      waiting   rows that are placed on its workers and not filled, for the least loaded of them
      moving    pages that another host has and this one has not, over the page transport
      filling   pages that nobody has, or that are not worth moving

The host with the least goes first. The sum is that of Mooncake's scheduler (Qin et al., "Mooncake: A
KVCache-centric Disaggregated Architecture for LLM Serving", 2024, section 6.1: T_queue + T_transfer +
T_prefill); rates are what each host's allocator measures. What decodes on a host slows its prefill: it counts
as waiting rows, one a sequence.

All of it is soft: which pages a host has is told by its allocator and may be outdated. A hint that proves
wrong costs an attempt to fetch; the tokens are the same wherever they are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from engine.core import Statistics
    from engine.messages import PagesCached
    from engine.shapes import PageRef

PAGE_FILL_S = 0.02
PAGE_FETCH_S = 0.004
"""Seconds a page, until a host has measured them: a small model on two cores, and a link of 1 Gbit/s."""


class ClusterCache:
    """Which pages each host has, by their chain keys."""

    def __init__(self) -> None:
        self._pages: dict[str, dict[bytes, PageRef]] = {}

    def told(self, host: str, message: PagesCached) -> None:
        """A host's allocator says what it has."""
        known = {} if message.whole else self._pages.setdefault(host, {})
        for key in message.removed:
            known.pop(key, None)
        known.update(message.added)
        self._pages[host] = known

    def lose(self, host: str) -> None:
        """Nobody speaks for this host: it may have anything, and nothing is counted on."""
        self._pages.pop(host, None)

    def cached(self, host: str, keys: Sequence[bytes]) -> int:
        """How many of these keys, from the front, a host has."""
        there = self._pages.get(host, {})
        return next((number for number, key in enumerate(keys) if key not in there), len(keys))

    def pages(self, host: str, keys: Sequence[bytes]) -> tuple[PageRef, ...]:
        """What the pages of these keys are there; KeyError for one that is not."""
        return tuple(self._pages[host][key] for key in keys)

    def statistics(self) -> Statistics:
        return {"pages_known": sum(len(pages) for pages in self._pages.values())}


@dataclass(slots=True)
class HostLoad:
    """What a host has to do, and how fast it is."""

    host: str
    waiting_pages: float = 0.0
    """Of prompts on its least loaded worker, with a share for what decodes there."""
    page_fill_s: float = PAGE_FILL_S
    page_fetch_s: float = PAGE_FETCH_S


class Offer(NamedTuple):
    """What a request would cost on a host, and from where its pages would come."""

    seconds: float
    host: str
    cached: int
    """Pages that the host has."""
    elsewhere: str
    """The host that has more of them and from which they should be fetched; empty: none."""
    elsewhere_pages: int


def offers(
    loads: Iterable[HostLoad],
    cache: ClusterCache,
    keys: Sequence[bytes],
    pages: int,
    others: Iterable[str] = (),
) -> list[Offer]:
    """What each host offers for a prompt of so many pages with these keys, the best first.

    `others` are hosts that offer nothing, but whose pages may be fetched. Hosts that cost the same come in
    the order of their names.
    """
    loads = list(loads)
    there = {host: cache.cached(host, keys) for host in (*(load.host for load in loads), *others)}
    return sorted(
        (_offer(load, there, pages) for load in loads), key=lambda offer: (offer.seconds, offer.host)
    )


def _offer(load: HostLoad, there: dict[str, int], pages: int) -> Offer:
    here = there[load.host]
    most = max(there, key=lambda host: (there[host], host == load.host))
    waiting = load.waiting_pages * load.page_fill_s
    filling = (pages - here) * load.page_fill_s
    moving = (there[most] - here) * load.page_fetch_s + (pages - there[most]) * load.page_fill_s
    if there[most] > here and moving < filling:
        return Offer(waiting + moving, load.host, here, most, there[most])
    return Offer(waiting + filling, load.host, here, "", 0)
