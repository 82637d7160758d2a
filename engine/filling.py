"""Prefixes on their way: who fills which pages, and who waits for them, so that nothing is computed twice.

    a filling = one log whose pages are being found, awaited, filled or fetched
    it stands at a page of its chain: all before are granted to it, or were announced by it as sealed

                      cached: granted
                    ┌────────────────┐
    wanted ──▶ at page n ◀───────────┘      somebody who fills stands here too, with the same next page: wait
                    │                       the next page is in a tier below: a fetch fills it, wait
                    └── else: fill          until it announces pages, ends or dies

Of those that stand at one key with the same next page, one fills and the others wait for it. Who fills never
waits; so somebody always goes on, and when it ends, however it ends, those who waited for it decide anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.chain import Chain
    from engine.ids import Incarnation, SequenceKey
    from engine.shapes import PageRef

FillingName = tuple["Incarnation", "SequenceKey", int]
"""The worker (or replicator), the choice of a request, and its term (or the ticket of a fetch)."""


class Ahead(NamedTuple):
    """A page of a log that its filling has not come to."""

    key: bytes
    parent: bytes
    tokens: bytes
    block: int


@dataclass(slots=True, eq=False)
class Filling:
    """One log on its way into the pages of one worker."""

    name: FillingName
    tokens: bytes
    """Of its whole pages."""
    chain: Chain
    """It stands behind `chain.pages` pages."""
    waits: bool = False
    """It is told when the next page is there; else it fills that page itself."""
    granted: int = 0
    """Pages granted to it."""
    taken: int = 0
    pinned: list[int] = field(default_factory=list)
    """Pages granted and not known to be taken."""
    elsewhere: str = ""
    """Another host that may have some of its pages,"""
    elsewhere_pages: tuple[PageRef, ...] = ()
    """and what they are there, from the first on."""
    since: float = 0.0
    """When it began to fill the page before which it stands."""

    @property
    def source(self) -> Incarnation:
        """Who fills it."""
        return self.name[0]

    @property
    def next_page(self) -> bytes:
        """The tokens of the page it stands before; empty at its end."""
        size = self.chain.page_bytes
        return self.tokens[self.chain.pages * size : (self.chain.pages + 1) * size]

    def ahead(self) -> Iterator[Ahead]:
        """The pages from where it stands, as long as somebody wants to know."""
        chain, size = self.chain.copy(), self.chain.page_bytes
        while tokens := self.tokens[chain.pages * size : (chain.pages + 1) * size]:
            parent, block = chain.parent, chain.pages
            yield Ahead(chain.append(tokens), parent, tokens, block)

    def go_to(self, pages: int) -> None:
        """Stand behind so many pages of the log."""
        size = self.chain.page_bytes
        while self.chain.pages < pages:
            self.chain.append(self.tokens[self.chain.pages * size : (self.chain.pages + 1) * size])


class Fillings:
    """All of them, by name and by where they stand."""

    def __init__(self) -> None:
        self._by_name: dict[FillingName, Filling] = {}
        self._standing: dict[bytes, dict[FillingName, Filling]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Filling]:
        return iter(tuple(self._by_name.values()))

    def get(self, name: FillingName) -> Filling | None:
        """The filling of that name, if there is one."""
        return self._by_name.get(name)

    def put(self, filling: Filling) -> None:
        """A new one."""
        assert filling.name not in self._by_name
        self._by_name[filling.name] = filling
        self._stand(filling)

    def _stand(self, filling: Filling) -> None:
        self._standing.setdefault(filling.chain.parent, {})[filling.name] = filling

    def _leave(self, filling: Filling) -> list[Filling]:
        """It stands here no more; returns those that waited for it, perhaps."""
        here = self._standing[filling.chain.parent]
        del here[filling.name]
        if not here:
            del self._standing[filling.chain.parent]
        return [] if filling.waits else [other for other in here.values() if other.waits]

    def advance(self, filling: Filling, pages: int) -> list[Filling]:
        """Move on to behind so many pages; returns those that waited where it stood."""
        if pages <= filling.chain.pages:
            return []
        waiters = self._leave(filling)
        filling.go_to(pages)
        self._stand(filling)
        return waiters

    def end(self, name: FillingName) -> tuple[Filling | None, list[Filling]]:
        """Forget one; returns it, and those that waited where it stood."""
        filling = self._by_name.pop(name, None)
        return filling, [] if filling is None else self._leave(filling)

    def of(self, source: Incarnation) -> list[FillingName]:
        """The names of all that one worker or replicator has."""
        return [name for name in self._by_name if name[0] == source]

    def filled_by_another(self, filling: Filling) -> bool:
        """Whether somebody else fills the page that this one stands before."""
        page = filling.next_page
        here = self._standing.get(filling.chain.parent, {})
        return bool(page) and any(
            other is not filling and not other.waits and other.next_page == page for other in here.values()
        )

    def check(self) -> None:
        standing: dict[bytes, set[FillingName]] = {}
        for name, filling in self._by_name.items():
            assert name == filling.name
            assert 0 <= filling.taken <= filling.granted
            assert len(filling.pinned) == filling.granted - filling.taken
            assert len(filling.tokens) >= filling.chain.pages * filling.chain.page_bytes
            standing.setdefault(filling.chain.parent, set()).add(name)
            if filling.waits:
                assert self.filled_by_another(filling), f"{name} waits for nobody"
        assert standing == {key: set(here) for key, here in self._standing.items()}
