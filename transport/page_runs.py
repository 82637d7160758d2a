"""A run of pages in one direction: the same for those that were asked for and those that are handed over.

    giver    header, the bytes of the pages from where they lie, back to back, then what became of them
    taker    each page into its slot, its CRC-32 on the way, then the verdict on all of them

The giver reads a page while it sends it and looks at its generation afterwards: only that verdict makes the
bytes a page. What a slot holds before is nobody's business, for it is leased and not published.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import trio

from transport.checksum import page_checksum
from transport.errors import ProtocolError
from transport.page_wire import Verdict
from transport.pages import CHECKPOINT_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.shapes import PageRef
    from transport.page_wire import Give, Run, Wire
    from transport.pages import PagePools, StillValid


class Sink(NamedTuple):
    """Where a page goes, what it must be, and whether it is still wanted there."""

    slot: memoryview
    checksum: int
    wanted: Callable[[], bool]


class Taken(NamedTuple):
    """What came of a run."""

    whole: list[bool]
    mismatched: int
    """Pages that the giver called whole and whose bytes do not match their checksum."""


async def checksums(
    pages: Sequence[PageRef], pools: PagePools, checksum_of: Callable[[PageRef], int | None]
) -> list[int]:
    """The CRC-32 of each page: as recorded when it was sealed, or made now where nothing is recorded."""
    found = []
    made = 0
    for page in pages:
        checksum = checksum_of(page)
        if checksum is None:
            checksum = page_checksum(pools.slot(page))
            made += pools.page_bytes
            if made >= CHECKPOINT_BYTES:
                made = 0
                await trio.lowlevel.checkpoint()
        found.append(checksum)
    return found


async def give_run(
    wire: Wire, header: Run | Give, pages: Sequence[PageRef], pools: PagePools, still_valid: StillValid
) -> list[bool]:
    """Send pages that `header` announces and the verdict on them, which is returned."""
    await wire.send(header, [pools.slot(page) for page in pages])
    whole = [still_valid(page) for page in pages]
    await wire.send(Verdict(header.number, whole))
    return whole


async def take_run(wire: Wire, number: int, sinks: Sequence[Sink]) -> Taken:
    """Receive the pages of a run, of which the header has been read, and the verdict on them."""
    received = [await wire.take_page(sink.slot, sink.wanted) for sink in sinks]
    verdict = await wire.receive(Verdict)
    if verdict.number != number or len(verdict.whole) != len(sinks):
        raise ProtocolError(
            f"a verdict on {len(verdict.whole)} pages of run {verdict.number} "
            f"for {len(sinks)} of run {number}"
        )
    whole, mismatched = [], 0
    for sink, checksum, valid in zip(sinks, received, verdict.whole, strict=True):
        right = checksum == sink.checksum
        mismatched += valid and checksum is not None and not right
        whole.append(valid and right and sink.wanted())
    return Taken(whole, mismatched)
