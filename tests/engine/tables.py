"""Page tables of tests, and the plainest eviction policy there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layout import PageTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.core import Statistics


def page_table(pages: int, page_tokens: int = 4, actors: int = 16, pool: int = 0) -> PageTable:
    """An empty table in memory of its own."""
    size = PageTable.size(pages, page_tokens, actors)
    return PageTable(memoryview(bytearray(size)), pages, page_tokens, actors, pool)


class OldestFirst:
    """Evicts what has been in the cache for longest, children before their parents."""

    def __init__(self) -> None:
        self.pages: dict[int, int | None] = {}
        self.idle: set[int] = set()

    def added(self, page: int, parent: int | None, block: int, key: bytes, now: float) -> None:
        assert page not in self.pages
        self.pages[page] = parent

    def hit(self, pages: Sequence[int], now: float) -> None:
        assert all(page in self.pages for page in pages)

    def held(self, page: int) -> None:
        self.idle.remove(page)

    def unheld(self, page: int) -> None:
        assert page in self.pages
        assert page not in self.idle
        self.idle.add(page)

    def removed(self, page: int) -> None:
        assert page not in self.pages.values(), "a child of it is cached"
        del self.pages[page]
        self.idle.discard(page)

    def victims(self, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            left = {page: parent for page, parent in self.pages.items() if page not in found}
            leaves = [page for page in left if page not in left.values() and page in self.idle]
            if not leaves:
                break
            found.append(leaves[0])
        return found

    def check(self) -> None:
        assert self.idle <= self.pages.keys()

    def statistics(self) -> Statistics:
        return {}
