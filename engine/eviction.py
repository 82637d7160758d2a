"""Which cached pages to give up when room is needed: the policies of the prefix cache.

    cached pages form trees: a page's parent is the page before it in its chain
    added (held) → unheld ⇄ held → removed    (a page enters held, by the sequence that wrote it)
    a candidate is unheld, and each of its cached children is a victim of the same call
    victims ⊆ candidates, children first: no victim has a cached child that stays
    `victims` proposes and changes nothing; `removed` says that a page went, children before parents

An allocator calls `hit` with the pages of a prefix that a request found, and `held` for those that had
no holder; `added` for a page that it seals and indexes; `unheld` when the last holder or pin lets go;
`victims` when room is needed, then `removed` for each page that leaves, for this reason or another.
Pages are known by their numbers; a number is free again after `removed`.

A victim costs O(log n), amortised, however few pages are candidates: heaps hold candidates only, and an
entry that is out of date is dropped when it comes up.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core import Statistics


class EvictionPolicy(Protocol):
    """What the allocator tells a policy, and what it asks. An event that cannot be is a ValueError."""

    def added(self, page: int, parent: int | None, block: int, key: bytes, now: float) -> None:
        """A page entered the cache, held.

        `block` is its index in its sequence, `parent` the page before it if that is cached, and `key`
        names its contents and outlives it (the chain hash). `now`, here and below, never goes back.
        """

    def hit(self, pages: Sequence[int], now: float) -> None:
        """A request found these: a path from a root, in order.

        A page whose parent was not cached when it was added is tied to the one before it here.
        """

    def held(self, page: int) -> None:
        """It may not be evicted from now on."""

    def unheld(self, page: int) -> None:
        """Nobody holds or pins it any more."""

    def removed(self, page: int) -> None:
        """It left the cache; it has no cached child."""

    def victims(self, count: int) -> list[int]:
        """Up to `count` pages to evict, in this order; fewer only when there are no more candidates."""

    def check(self) -> None:
        """AssertionError unless the invariants above hold."""

    def statistics(self) -> Statistics:
        """Counts and sizes, by name."""


class _Page:
    """A cached page: its place in its tree, and what is remembered of its use."""

    __slots__ = (
        "block", "bred", "children", "entry", "held", "hits", "key", "latest", "number", "parent", "reach",
        "segment", "superseded", "used",
    )  # fmt: skip

    def __init__(self, number: int, parent: _Page | None, block: int, key: bytes, used: int) -> None:
        self.number = number
        self.parent = parent
        self.block = block
        self.key = key
        self.used = used
        self.held = True
        self.children = 0
        self.entry = 0  # the entry that counts in the order of candidates; 0: none
        self.hits = 0
        self.segment = 0
        self.bred = 0
        self.latest: _Page | None = None
        self.superseded = False
        self.reach = -1


class _Entry(NamedTuple):
    """A candidate in order; out of date when it is not the entry that the page has."""

    rank: float
    depth: int
    """The negated block: of equal ranks the deepest goes first."""
    page: int
    number: int


class _Forest(ABC):
    """The bookkeeping of every policy: the trees, who is held, who is a candidate."""

    def __init__(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._heap: list[_Entry] = []
        self._entries = 0
        self._candidates = 0

    @abstractmethod
    def _rank(self, page: _Page) -> float:
        """The lowest goes first; of equal ones the deepest, then the lowest number."""

    @abstractmethod
    def _born(self, page: _Page) -> None:
        """A page was added."""

    @abstractmethod
    def _touch(self, path: Sequence[_Page]) -> None:
        """These were hit."""

    def _gone(self, page: _Page) -> None:
        """A page is about to leave."""

    def added(self, page: int, parent: int | None, block: int, key: bytes, now: float) -> None:
        if page in self._pages:
            raise ValueError(f"page {page} is in the cache already")
        above = None if parent is None else self._at(parent)
        if block <= (-1 if above is None else above.block):
            raise ValueError(f"page {page} cannot be block {block}")
        new = self._pages[page] = _Page(page, above, block, key, 0)
        if above is not None:
            above.children += 1
            self._review(above)
        self._born(new)

    def hit(self, pages: Sequence[int], now: float) -> None:
        found = [self._at(page) for page in pages]
        for above, page in pairwise(found):
            if page.parent not in (above, None) or page.block <= above.block:
                raise ValueError(f"page {page.number} does not follow page {above.number}")
        for above, page in pairwise(found):
            if page.parent is None:
                page.parent = above
                above.children += 1
        self._touch(found)
        for page in found:
            self._retire(page)
            self._review(page)

    def held(self, page: int) -> None:
        found = self._at(page)
        if found.held:
            raise ValueError(f"page {page} is held already")
        found.held = True
        self._review(found)

    def unheld(self, page: int) -> None:
        found = self._at(page)
        if not found.held:
            raise ValueError(f"page {page} is not held")
        found.held = False
        self._review(found)

    def removed(self, page: int) -> None:
        found = self._at(page)
        if found.children:
            raise ValueError(f"page {page} has a cached child")
        self._gone(found)
        self._retire(found)
        del self._pages[page]
        if found.parent is not None:
            found.parent.children -= 1
            self._review(found.parent)

    def victims(self, count: int) -> list[int]:
        if count < 0:
            raise ValueError(f"cannot choose {count} victims")
        chosen: list[tuple[_Page, _Entry]] = []
        while len(chosen) < count and (entry := self._pop()) is not None:
            page = self._pages[entry.page]
            self._retire(page)
            chosen.append((page, entry))
            if page.parent is not None:
                page.parent.children -= 1
                self._review(page.parent)
        # All as it was, the ranks that they had too: they are proposed, and gone when `removed` says so.
        for page, _ in chosen:
            if page.parent is not None:
                page.parent.children += 1
                self._retire(page.parent)
        for page, entry in chosen:
            if not page.children:
                page.entry = entry.number
                self._candidates += 1
                heapq.heappush(self._heap, entry)
        return [page.number for page, _ in chosen]

    def _at(self, page: int) -> _Page:
        try:
            return self._pages[page]
        except KeyError:
            raise ValueError(f"page {page} is not in the cache") from None

    def _review(self, page: _Page) -> None:
        """A candidate is in order, and nothing else is."""
        if page.held or page.children:
            self._retire(page)
        elif not page.entry:
            self._entries += 1
            page.entry = self._entries
            self._candidates += 1
            heapq.heappush(self._heap, _Entry(self._rank(page), -page.block, page.number, page.entry))
            if len(self._heap) > 2 * self._candidates + 64:
                self._heap = [entry for entry in self._heap if self._is_current(entry)]
                heapq.heapify(self._heap)

    def _retire(self, page: _Page) -> None:
        if page.entry:
            page.entry = 0
            self._candidates -= 1

    def _pop(self) -> _Entry | None:
        """Take the candidate that goes first."""
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                return entry
        return None

    def _is_current(self, entry: _Entry) -> bool:
        page = self._pages.get(entry.page)
        return page is not None and page.entry == entry.number

    def check(self) -> None:
        children = dict.fromkeys(self._pages, 0)
        for page in self._pages.values():
            if page.parent is not None:
                assert self._pages.get(page.parent.number) is page.parent, f"{page.number} lost its parent"
                children[page.parent.number] += 1
        for number, page in self._pages.items():
            assert page.children == children[number], f"{number} miscounts its children"
            assert bool(page.entry) == (not page.held and not page.children), f"{number} is out of order"
        assert self._candidates == sum(1 for page in self._pages.values() if page.entry)

    def statistics(self) -> Statistics:
        return {
            "eviction_pages": len(self._pages),
            "eviction_held": sum(page.held for page in self._pages.values()),
            "eviction_candidates": self._candidates,
        }


class LRU(_Forest):
    """Least recently used first; of pages used at once, the deepest, then the lowest number."""

    def __init__(self) -> None:
        super().__init__()
        self._uses = 0

    def _born(self, page: _Page) -> None:
        self._uses += 1
        page.used = self._uses

    def _touch(self, path: Sequence[_Page]) -> None:
        self._uses += 1
        for page in path:
            page.used = self._uses

    def _rank(self, page: _Page) -> float:
        return page.used


class RecomputeCost(NamedTuple):
    """What a page costs to compute again: flat + slope × its block index; only the ratio matters.

    A token costs 2·N operations for N parameters, and 4·layers·width for each position that it attends to
    (Kaplan et al. 2020, Scaling Laws for Neural Language Models, table 1, by position). So slope / flat =
    2·layers·width·tokens a page / N. The default is that of 8·10⁹ parameters, 32 layers, width 4,096 and
    pages of 16 tokens.
    """

    flat: float = 1.0
    slope: float = 0.00052

    def relative(self, block: int) -> float:
        """Of a page, against the first one of a sequence."""
        return 1.0 + self.slope / self.flat * block


HEAD_START = 0.1
READ = 0.3
SHORT = 0.1
LONGEST = -1.0
"""All but the last in return times; chosen on Mooncake's conversations, where 0.1 to 0.15, 0.2 to 0.5 and
0.05 to 0.1 do alike. A greater SHORT finds more in a small cache and less in a large one."""
FORKS = 3
"""A page that so many chains went on from is a shared prefix: a new chain says nothing of the others."""
SEGMENTS = 5
GHOSTS = 4
"""Evicted keys that are remembered, for each page of capacity."""
SMOOTHING = 1 / 4096
FAR = 1e15
"""Further back than any use."""


class CostAware(_Forest):
    """Keeps pages by recompute cost × chance of reuse: LRU in which a page is given a head start.

    A page ranks by the time of its last use, counted in pages added, plus

        head start = recompute cost × return time × (0.1 × segments + 0.3 if ever hit + 0.1 × shortness)

    *Segments*: how many requests, one after another, built the chain up to this page, at most 5. Most
    prompts never go on, and whoever went on once is likely to do so again. *Return time*: the mean age at
    which pages were hit, learnt as it goes. *Shortness*: log2 of the mean length of prompts over that of the
    longest prompt through the page, -1 at least: of a trace's first prompts 79 % of two blocks go on, 36 %
    of six, 26 % of forty; so what nobody came back to of a long one goes before its time. *Ghosts* are the
    keys of evicted pages, four for each page of capacity, so that a session that was evicted before it came
    back keeps its segments and its age counts. A rank does not change until the next use, hence one heap:
    this is GreedyDual with LFU-DA's ageing (Cao and Irani 1997; Cherkasova 1998) with segments instead of a
    count of hits; ghosts as in ARC (Megiddo and Modha 2003).

    Two kinds of page go before all others. *Superseded*: when a chain is gone on from in its middle, by a
    turn that rewrote what follows, what was behind that place is old history; unless three chains went on
    from there, then it is a shared prefix. *Ends*: the last page of a prompt, while sessions that come back
    go past it more than nine times in ten (a half-filled block in a trace; full pages are found again).
    """

    def __init__(self, capacity: int, cost: RecomputeCost | None = None) -> None:
        """`capacity`, in pages, sizes the ghosts, and is the return time before one is known."""
        super().__init__()
        if capacity < 1:
            raise ValueError(f"a cache of {capacity} pages has no use for a policy")
        cost = cost or RecomputeCost()
        if cost.flat <= 0 or cost.slope < 0:
            raise ValueError(f"{cost} is not the cost of a page")
        self._cost = cost
        self._added = 0
        self._return_time = capacity / 4
        self._ends_found = 1.0
        self._mean_length = 0.0
        self._most_ghosts = GHOSTS * capacity
        self._ghosts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()

    def _rank(self, page: _Page) -> float:
        if page.superseded or (self._ends_found < 0.1 and self._is_end(page)):
            return page.used - FAR
        chance = HEAD_START * min(page.segment, SEGMENTS) + (READ if page.hits else 0.0)
        chance += SHORT * max(LONGEST, math.log2(self._mean_length / (page.reach + 1)))
        return page.used + self._cost.relative(page.block) * chance * self._return_time

    def _review(self, page: _Page) -> None:
        if not page.held and not page.children and page.reach < page.block:
            self._mean_length += (page.block + 1 - self._mean_length) * (1 / 256 if self._mean_length else 1)
            above: _Page | None = page
            while above is not None and above.reach < page.block:
                above.reach, above = page.block, above.parent
        super()._review(page)

    @staticmethod
    def _is_end(page: _Page) -> bool:
        return not page.bred and not page.hits

    def _born(self, page: _Page) -> None:
        self._added += 1
        page.used = self._added
        above = page.parent
        if above is not None:
            # A parent that was hit is one that another request wrote.
            page.segment = above.segment + (above.hits > 0)
            if 0 < above.bred < FORKS:
                self._supersede(above.latest)
            above.bred += 1
            above.latest = page
        ghost = self._ghosts.pop(page.key, None)
        if ghost is not None:
            segment, used = ghost
            page.segment = max(page.segment, segment)
            page.hits = 1
            self._returned(self._added - used)

    def _supersede(self, page: _Page | None) -> None:
        while page is not None and not page.superseded:
            if self._is_end(page):
                self._ends_found -= self._ends_found / 64
            page.superseded = True
            if page.entry:
                self._retire(page)
                self._review(page)
            page = page.latest

    def _touch(self, path: Sequence[_Page]) -> None:
        for page in path:
            if self._is_end(page):
                self._ends_found += (1 - self._ends_found) / 64
            if page.bred < FORKS:
                self._returned(self._added - page.used)
            page.hits += 1
            page.used = self._added
            page.superseded = False

    def _returned(self, age: int) -> None:
        self._return_time += (age - self._return_time) * SMOOTHING

    def _gone(self, page: _Page) -> None:
        if page.parent is not None and page.parent.latest is page:
            page.parent.latest = None
        self._ghosts[page.key] = (page.segment, page.used)
        self._ghosts.move_to_end(page.key)
        if len(self._ghosts) > self._most_ghosts:
            self._ghosts.popitem(last=False)

    def check(self) -> None:
        super().check()
        assert len(self._ghosts) <= self._most_ghosts
        for page in self._pages.values():
            assert page.latest is None or page.latest.parent is page, f"{page.number} lost its child"
            assert page.used <= self._added

    def statistics(self) -> Statistics:
        return {
            **super().statistics(),
            "eviction_ghosts": len(self._ghosts),
            "eviction_superseded": sum(page.superseded for page in self._pages.values()),
            "eviction_return_pages": self._return_time,
        }
