"""Prefixes that clients keep in memory, whatever the pressure, for a time.

A gateway says what it wants kept, again to every new allocator; a pin goes with it, at its time, or at its
word. All together may have a part of the pool: the rest must do for those who compute. Where it does not,
for a single request that is as long as the pool allows, the newest pin gives way: a request that was let in
is never left standing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.chain import chain_root
from engine.messages import PinFact, PinWanted, ReadGranted, ReadWanted

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from engine.core import Statistics
    from engine.ids import Incarnation
    from engine.pages import Pages

PINNED_MOST = 0.5
"""Of the pool."""


READ_S = 10.0
"""For so long a page stays pinned for a reader that does not say that it has finished."""


@dataclass(slots=True)
class Pin:
    """Pages that are kept for a client or a reader."""

    pages: list[int]
    until: float


class Reads:
    """Pages that are being read for other hosts, by replicator and ticket: a read runs out of itself."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._reads: dict[tuple[Incarnation, int], Pin] = {}

    def want(self, reader: Incarnation, message: ReadWanted, now: float) -> ReadGranted:
        """Pin those pages that are still there in that life and under that key."""
        index, table = self._pages.cache.index, self._pages.table
        there = tuple(
            table.is_current(page) and index.find(key) == page.index
            for page, key in zip(message.pages, message.keys, strict=True)
        )
        pages = [page.index for page, found in zip(message.pages, there, strict=True) if found]
        if pages:
            self._pages.cache.pin(pages)
            self._reads[reader, message.ticket] = Pin(pages, now + READ_S)
        return ReadGranted(message.ticket, there)

    def ended(self, reader: Incarnation, ticket: int) -> None:
        """Let go of what was pinned for that read, unless it ran out before."""
        read = self._reads.pop((reader, ticket), None)
        if read is not None:
            self._pages.unpin(read.pages)

    def expire(self, now: float) -> bool:
        """Let go of what was read for too long; whether there was any."""
        over = [name for name, read in self._reads.items() if read.until <= now]
        for name in over:
            self.ended(*name)
        return bool(over)

    def deadline(self) -> float | None:
        """When the next one runs out."""
        return min((read.until for read in self._reads.values()), default=None)

    def statistics(self) -> Statistics:
        return {"pages_read": len({page for read in self._reads.values() for page in read.pages})}


class Pinned:
    """All pins, by gateway and name."""

    def __init__(self, pages: Pages) -> None:
        self.identities: dict[Incarnation, str] = {}
        """What keys and values of each worker depend on beside the tokens."""
        self._pages = pages
        self._pins: dict[tuple[Incarnation, str], Pin] = {}

    def want(self, gateway: Incarnation, message: PinWanted, now: float) -> list[PinFact]:
        """Keep the cached pages of a prefix, in place of what that name kept, or let go of them."""
        name = (gateway, message.name)
        before = self._pins.pop(name, None)
        if before is not None:
            self._pages.unpin(before.pages)
        if not message.tokens or message.until <= now:
            return []
        most = len(message.tokens) // (4 * self._pages.table.page_tokens)
        found: list[int] = []
        for identity in sorted(set(self.identities.values())):
            pages = self._pages.cache.find(chain_root(identity, message.salt), message.tokens, most, now)
            found = max(found, pages, key=len)
        kept = self._kept()
        limit = int(PINNED_MOST * self._pages.table.pages)
        # Of all its pages, also those that are to be filled: else that would be in vain.
        more = most - len(kept.intersection(found))
        if len(kept) + more > limit:
            refused = f"{len(kept)} pages are pinned, {more} more would pass the {limit} that may be"
            return [PinFact(message.name, 0, refused)]
        self._pages.cache.pin(found)
        self._pins[name] = Pin(found, message.until)
        return [PinFact(message.name, len(found))]

    def _kept(self) -> set[int]:
        return {page for pin in self._pins.values() for page in pin.pages}

    def lose(self, gateways: Collection[Incarnation]) -> None:
        """These are dead, and their pins with them."""
        self._drop(name for name in tuple(self._pins) if name[0] in gateways)

    def expire(self, now: float) -> bool:
        """Let go of what has had its time; whether there was any."""
        return self._drop(name for name, pin in tuple(self._pins.items()) if pin.until <= now)

    def give_way(self) -> list[tuple[Incarnation, PinFact]]:
        """Let go of the newest pin, if there is one; who is to be told what."""
        if not self._pins:
            return []
        gateway, name = next(reversed(self._pins))
        self._drop([(gateway, name)])
        return [(gateway, PinFact(name, 0, "its pages were needed for a request"))]

    def _drop(self, names: Iterable[tuple[Incarnation, str]]) -> bool:
        dropped = [self._pins.pop(name) for name in names]
        for pin in dropped:
            self._pages.unpin(pin.pages)
        return bool(dropped)

    def deadline(self) -> float | None:
        """When the next one runs out."""
        return min((pin.until for pin in self._pins.values()), default=None)

    def check(self) -> None:
        assert len(self._kept()) <= PINNED_MOST * self._pages.table.pages
        assert all(self._pages.cache.held(page) for page in self._kept())

    def statistics(self) -> Statistics:
        return {"prefixes_pinned": len(self._pins), "pages_kept": len(self._kept())}
