"""Pages that came from elsewhere, published in the page table as if they had been filled here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.layout import Seal

if TYPE_CHECKING:
    from engine.layout import PageTable
    from engine.messages import PageWanted


def publish(table: PageTable, wanted: PageWanted, checksum: int | None) -> None:
    """LEASED → SEALED, once all bytes of the page are there and right; by the replicator, which leases it."""
    page = wanted.target.index
    table.open(page, 0, 0, 0, wanted.block)
    table.fill(page, table.page_tokens)
    table.seal(page, Seal(wanted.key, wanted.parent, wanted.tokens, checksum))
