"""The prefix cache of a pool: sealed pages that are found by their tokens, and which of them may go.

    cached   in the index
    idle     cached, held by no worker and not pinned: only these are evicted, in the policy's order
    pinned   so many readers that do not own it have not let go of it

A cached page may be held by any number of workers at once: it is never written again. What it holds is in
the page table, so that all of this is rebuilt by a scan after the allocator died.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from engine.layout import NO_KEY
from engine.lifecycle import PageState
from engine.messages import PagesCached
from engine.prefix_index import PrefixIndex, Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

    from engine.core import Statistics
    from engine.eviction import EvictionPolicy
    from engine.layout import PageTable
    from engine.shapes import PageRef

MOST_CUT = 1024


class PrefixCache:
    """The cached pages of one pool."""

    def __init__(self, table: PageTable, policy: EvictionPolicy) -> None:
        self.table = table
        self.policy = policy
        self.index = PrefixIndex(table.page_tokens)
        self._idle: set[int] = set()
        self._pins: Counter[int] = Counter()
        self._cut: dict[bytes, None] = {}
        self.tells = False
        """Whether others are told what is found here."""
        self._news: dict[bytes, PageRef | None] = {}
        self.evicted = 0
        self.idled = 0
        """How often a page became idle."""

    def __len__(self) -> int:
        return len(self.index)

    def __contains__(self, page: object) -> bool:
        return page in self.index

    @property
    def idle(self) -> int:
        """Pages that could be evicted."""
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        """Whether it could be evicted."""
        return page in self._idle

    # ── pages come and go ─────────────────────────────────────────────────────────────────────

    def add(self, page: int, now: float) -> bool:
        """Take a SEALED page in; False when it cannot be found by its tokens, or another page is."""
        if page in self.index:
            return True
        seal = self.table.sealed(page)
        if seal.key == NO_KEY or self.table.state(page) is not PageState.SEALED:
            return False
        if seal.parent in self._cut:
            self._cut_at(seal.key)
            return False
        answer = self.index.insert(page, seal.key, seal.parent, seal.tokens)
        if answer is Refused.COLLISION:
            self._cut_at(seal.key)
        if answer is not None:
            return False
        self.policy.added(page, self.index.find(seal.parent), self.table.block(page), seal.key, now)
        if self.tells:
            self._news[seal.key] = self.table.ref(page)
        self.look(page)
        return True

    def _cut_at(self, key: bytes) -> None:
        """Two prefixes share this key: what comes behind it is found for neither."""
        self._cut[key] = None
        if len(self._cut) > MOST_CUT:
            del self._cut[next(iter(self._cut))]

    def find(self, root: bytes, tokens: bytes, most: int, now: float) -> list[int]:
        """The pages of the longest cached prefix, at most so many; they count as used."""
        pages = self.index.lookup(root, tokens, most)
        if pages:
            self.policy.hit(pages, now)
        return pages

    def evict(self, count: int) -> list[int]:
        """Forget so many idle pages, or as many as there are; the caller frees them.

        Whoever is thought dead and has not ended may hold one by now that was granted to it before.
        """
        pages: list[int] = []
        while victims := self.policy.victims(min(count - len(pages), len(self._idle))):
            for page in victims:
                if self.held(page):
                    # Neither this one goes nor what is before it.
                    self.look(page)
                    break
                self.remove(page)
                pages.append(page)
        while len(pages) < count and self._idle:
            # Its children are held, by sequences that filled the same pages beside it: no leaf is left.
            page = max(self._idle, key=self.table.block)
            if self.held(page):
                self.look(page)
                continue
            for child in self._behind(page):
                self.remove(child)
            self.remove(page)
            pages.append(page)
        self.evicted += len(pages)
        return pages

    def _behind(self, page: int) -> list[int]:
        """The cached pages of all prefixes that go on from a page, the last ones first."""
        behind, last = [], {self.index.key_of(page)}
        while last:
            pages = [other for other in self.index if self.index.parent_of(other) in last]
            behind += pages
            last = {self.index.key_of(other) for other in pages}
        return behind[::-1]

    def coming(self, count: int) -> list[int]:
        """Pages that would be evicted next, at most so many; nothing changes."""
        return self.policy.victims(min(count, len(self._idle)))

    def remove(self, page: int) -> None:
        """It is in the cache no more."""
        if self.tells:
            self._news[self.index.key_of(page)] = None
        self.index.remove(page)
        self.policy.removed(page)
        self._idle.discard(page)

    # ── what others are told ──────────────────────────────────────────────────────────────────

    def all(self) -> PagesCached:
        """Everything that is found here."""
        self._news.clear()
        pages = tuple((self.index.key_of(page), self.table.ref(page)) for page in sorted(self.index))
        return PagesCached(pages, (), whole=True)

    def news(self) -> PagesCached | None:
        """What has changed since somebody asked; None when nothing has."""
        news, self._news = self._news, {}
        if not news:
            return None
        added = tuple((key, page) for key, page in news.items() if page is not None)
        return PagesCached(added, tuple(key for key, page in news.items() if page is None), whole=False)

    # ── who has them ──────────────────────────────────────────────────────────────────────────

    def held(self, page: int) -> bool:
        """Whether a worker holds the page, or a reader has pinned it."""
        return page in self._pins or self.table.held(page)

    def look(self, page: int) -> None:
        """Who holds the page may have changed."""
        if page not in self.index:
            return
        held = self.held(page)
        if held and page in self._idle:
            self._idle.remove(page)
            self.policy.held(page)
        elif not held and page not in self._idle:
            self._idle.add(page)
            self.idled += 1
            self.policy.unheld(page)

    def pin(self, pages: Iterable[int]) -> None:
        """Keep these until `unpin`, once for each time."""
        for page in pages:
            self._pins[page] += 1
            self.look(page)

    def unpin(self, pages: Iterable[int]) -> list[int]:
        """Let go; returns those that nobody has any more, cached or not."""
        gone = []
        for page in pages:
            self._pins[page] -= 1
            if self._pins[page] == 0:
                del self._pins[page]
                self.look(page)
                if not self.table.held(page):
                    gone.append(page)
        return gone

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def check(self) -> None:
        self.index.check()
        self.policy.check()
        assert all(count > 0 for count in self._pins.values())
        idle = self._idle.difference(self.index)
        assert not idle, f"pages {idle} are idle and not cached"
        states = self.table.states()
        for page in self.index:
            assert states[page] == PageState.SEALED, f"cached page {page} is not sealed"
            assert self.table.is_sealed_as(
                page, self.index.key_of(page), self.index.parent_of(page), self.index.tokens_of(page)
            ), f"page {page} holds other tokens than the index says"

    def statistics(self) -> Statistics:
        return {
            "pages_evicted": self.evicted,
            "pages_pinned": len(self._pins),
            **self.index.statistics(),
            **self.policy.statistics(),
        }
