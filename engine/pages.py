"""The pages of a pool as the allocator keeps them: free, cached, or in somebody's hands.

    free + cached + held + leased + open + quarantined = total      (`census`)
      cached       sealed, found by its tokens, held by nobody: leased anew when no page is free
      held         sealed, and a worker has it in a block table, or a reader has pinned it
      leased open  its owner may write it
      quarantined  leased or open, and its owner is dead and not proven gone

A page is freed once: freeing raises its generation, and whoever names it names its generation.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from engine.lifecycle import PageState
from engine.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from engine.eviction import EvictionPolicy
    from engine.layout import Owner, PageTable
    from engine.shapes import PageRef

WRITABLE = (PageState.LEASED, PageState.OPEN)


class Pages:
    """Free list and cache over one page table."""

    def __init__(self, table: PageTable, policy: EvictionPolicy) -> None:
        self.table = table
        self.cache = PrefixCache(table, policy)
        self.may_evict = False
        """Not before all who live have said what they hold: a predecessor may have granted more."""
        self.freed = 0
        self._free: deque[int] = deque()
        self._free.extend(self.in_state(PageState.FREE))
        for page in self.in_state(PageState.SEALED):
            self.cache.add(page, 0.0)

    @property
    def free(self) -> int:
        """Pages that are nobody's and hold nothing of use."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that could be leased now."""
        return len(self._free) + (self.cache.idle if self.may_evict else 0)

    def take(self, count: int, owner: Owner) -> list[PageRef]:
        """Lease so many pages, evicting if need be; fewer when there are not so many."""
        missing = count - len(self._free)
        if missing > 0 and self.may_evict:
            for page in self.cache.evict(missing):
                self.put_back(page)
        pages = [self._free.popleft() for _ in range(min(count, len(self._free)))]
        return [self.table.lease(page, owner) for page in pages]

    def put_back(self, page: int) -> None:
        """It is free."""
        self.table.free(page)
        self._free.append(page)
        self.freed += 1

    def let_go(self, page: int) -> None:
        """A sealed page has a holder less: it stays in the cache, or is free when it cannot be found.

        Nothing is freed while a predecessor's grant may be taken: of two pages with the same tokens it may
        have known the other one.
        """
        if page in self.cache:
            self.cache.look(page)
        elif self.may_evict and not self.cache.held(page):
            self.put_back(page)

    def look_at_all(self) -> None:
        """Somebody may hold less than was known, of any page."""
        for page in self.in_state(PageState.SEALED):
            self.let_go(page)

    def unpin(self, pages: Iterable[int]) -> None:
        """A reader lets go of these."""
        for page in self.cache.unpin(pages):
            if page not in self.cache and self.table.state(page) is PageState.SEALED:
                self.put_back(page)

    def in_state(self, *states: PageState) -> list[int]:
        """All pages that are in one of these states."""
        return [page for page, state in enumerate(self.table.states()) if state in states]

    def owners(self) -> set[Owner]:
        """Who holds any page by the table, or may write one."""
        return {*self.table.holding(), *map(self.table.owner, self.in_state(*WRITABLE))}

    def writable_by(self, owner: Owner) -> list[PageRef]:
        """The pages that an incarnation may write, by the table."""
        return [self.table.ref(page) for page in self.in_state(*WRITABLE) if self.table.owner(page) == owner]

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def census(self, dead: Collection[Owner]) -> Counter[str]:
        """Every page once; `dead` are those whose pages are in quarantine."""
        states = self.table.states()
        idle = self.cache.idle
        count = Counter(
            free=states.count(PageState.FREE),
            cached=idle,
            held=states.count(PageState.SEALED) - idle,
            leased=states.count(PageState.LEASED),
            open=states.count(PageState.OPEN),
            quarantined=0,
        )
        for owner in dead:
            for ref in self.writable_by(owner):
                count[self.table.state(ref.index).name.lower()] -= 1
                count["quarantined"] += 1
        return count

    def check(self, living: Iterable[Owner]) -> None:
        """`living`: the workers that the allocator thinks alive."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is twice in the free list"
        assert free == set(self.in_state(PageState.FREE)), "the free list is not what the table says"
        self.cache.check()
        if self.may_evict:
            # The other way round need not be: word that a page is let go of may be under way.
            for owner in living:
                row = self.table.holders(owner) or ()
                held = [page for page, holds in enumerate(row) if holds and self.cache.is_idle(page)]
                assert not held, f"pages {held} are held by {owner} and may be evicted"
