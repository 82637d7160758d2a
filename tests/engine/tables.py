"""Page tables of tests, and the plainest eviction policy there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layout import PageTable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core import Statistics


def page_table(pages: int, page_tokens: int = 4, actors: int = 16, pool: int = 0) -> PageTable:
    """An empty table in memory of its own."""
    size = PageTable.size(pages, page_tokens, actors)
    return PageTable(memoryview(bytearray(size)), pages, page_tokens, actors, pool)


class OldestFirst:
    """Evicts what has been in the cache for longest, children before their parents."""

    def __init__(self) -> None:
        self.pages: dict[int, int | None] = {}

    def added(self, page: int, key: bytes, parent: int | None, block: int, now: float) -> None:
        self.pages[page] = parent

    def hit(self, pages: Sequence[int], now: float) -> None:
        assert all(page in self.pages for page in pages)

    def removed(self, page: int) -> None:
        del self.pages[page]

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            left = {page: parent for page, parent in self.pages.items() if page not in found}
            leaves = [page for page in left if page not in left.values() and evictable(page)]
            if not leaves:
                break
            found.append(leaves[0])
        return found

    def check(self) -> None:
        pass

    def statistics(self) -> Statistics:
        return {}
