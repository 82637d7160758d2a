"""Handing pages over to another host: the one who has them knows where each belongs.

    sender = PageSender(tcp_connector("10.0.0.2", 7001), me, PagePools(pool), still_valid)
    await nursery.start(sender.run)
    stored = await sender.push([PageCopy(source, target), …], epoch=…)

For prefill → decode and for replicas: the targets were leased by the other host and named to us. Runs are
sent at most a window ahead of their receipts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from transport.errors import ProtocolError
from transport.page_client import PageClient
from transport.page_runs import checksums, give_run
from transport.page_wire import Give, GivenPage, Receipt
from transport.pages import PageCopy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.shapes import PageRef
    from transport.page_client import Connect
    from transport.page_hosts import PageParty
    from transport.page_jobs import Flight
    from transport.page_settings import TransferSettings
    from transport.page_wire import Wire
    from transport.pages import PagePools, StillValid


class PageSender(PageClient[PageCopy]):
    """PageTransport to another host's `PageServer`; any number of tasks at once."""

    does: Literal["fetch", "send"] = "send"
    keeps_settled = False

    def __init__(
        self,
        connect: Connect,
        me: PageParty,
        pools: PagePools,
        still_valid: StillValid,
        settings: TransferSettings | None = None,
        *,
        checksum_of: Callable[[PageRef], int | None] = lambda _: None,
        peer_host: str | None = None,
    ) -> None:
        """`checksum_of(page)`: the CRC-32 recorded when it was sealed, None where there is none."""
        super().__init__(connect, me, pools, settings, peer_host=peer_host)
        self._still_valid = still_valid
        self._checksum_of = checksum_of

    async def push(self, copies: Sequence[PageCopy], *, epoch: int | None = None) -> list[bool]:
        """Hand pages over; True where the whole page, of the generation asked for, is at its target.

        `epoch`: the incarnation of the other host that leased the targets; None for the one that is
        connected, or will be first. When it starts anew in the middle, all are False.

        False: the page has another generation by now, or the other host no longer wants it. Cancelled,
        nothing is known about any of them. Raises TransferCut when the host could not be reached for
        `give_up_s`, ProtocolError when it does not fit or talks nonsense, and IndexError for a slot
        outside its pools or ours; ValueError when two go to one target.
        """
        if len({copy.target for copy in copies}) != len(copies):
            raise ValueError("two pages with one target")
        for copy in copies:
            self._pools.slot(copy.source)
        return await self._call(copies, epoch)

    async def copy(self, copies: Sequence[PageCopy]) -> list[bool]:
        """`push` under its name in PageTransport."""
        return await self.push(copies)

    def _theirs(self, item: PageCopy) -> PageRef:
        return item.target

    async def _launch(self, wire: Wire, flight: Flight[PageCopy]) -> None:
        job = flight.job
        kept = [position for position in flight.positions if self._still_valid(job.items[position].source)]
        self._statistics.absent += len(flight.positions) - len(kept)
        self._line.keep(flight, kept)
        if not kept:
            return
        items = flight.items()
        sources = [item.source for item in items]
        sums = await checksums(sources, self._pools, self._checksum_of)
        pages = [GivenPage(item.target, checksum) for item, checksum in zip(items, sums, strict=True)]

        def still_meant(page: PageRef) -> bool:
            return job.live and self._still_valid(page)

        await give_run(wire, Give(flight.number, pages), sources, self._pools, still_meant)

    async def _land(self, wire: Wire, flight: Flight[PageCopy]) -> None:
        receipt = await wire.receive(Receipt)
        if receipt.number != flight.number or len(receipt.stored) != len(flight.positions):
            raise ProtocolError(
                f"a receipt for {len(receipt.stored)} pages of run {receipt.number} "
                f"answers {len(flight.positions)} of run {flight.number}"
            )
        self._landed(receipt.stored)
