"""The hosts at the two ends of a page transfer: who they are, and what a server asks of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.shapes import PageRef
    from transport.page_wire import PageName


class PageParty(msgspec.Struct, frozen=True):
    """Who a host is to others that exchange pages with it."""

    identity: str
    """`numerics_id`: pages of another one are other numbers."""
    host: str
    epoch: int
    """The incarnation of its pools: another one when page names given out before mean nothing any more."""


class PinnedPages(NamedTuple):
    """What is kept for a reader until it gives it back."""

    read: int
    """What to give back."""
    there: Sequence[bool]
    """Which of the pages it asked for."""


class PageGiver(Protocol):
    """Whose pages are given: what the server asks of its host."""

    async def pin(self, names: Sequence[PageName]) -> PinnedPages:
        """Pin the pages that are there, in this generation and under this key.

        Pins run out by themselves. Nothing is to be given back when the call is cancelled.
        """
        ...

    def unpin(self, read: int) -> None:
        """Give back what was pinned by one call."""
        ...

    def still_valid(self, page: PageRef) -> bool:
        """Whether its slot still holds this generation; asked after the bytes were read."""
        ...

    def checksum_of(self, page: PageRef) -> int | None:
        """The CRC-32 recorded when the page was sealed; None where there is none."""
        ...


class PageTaker(Protocol):
    """Who takes pages that are handed over."""

    def accepts(self, target: PageRef) -> bool:
        """Whether that slot is still leased for this page.

        Asked before each piece that is written there, with no waiting in between, and once at the end.
        """
        ...

    def stored(self, target: PageRef) -> None:
        """Told once when the whole page is there, before the receipt goes out."""
        ...
