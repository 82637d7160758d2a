"""Pulling pages from another host: the one who wants them says where each belongs.

    async with trio.open_nursery() as nursery:
        fetcher = PageFetcher(tcp_connector("10.0.0.1", 7001), me, PagePools(pool))
        await nursery.start(fetcher.run)
        whole = await fetcher.fetch([PageFetch(source, key, target), …], epoch=…)

The bytes go from the socket into the target slots, which the caller leases and publishes only when the
answer is True. Asking in runs, at most a window ahead, is all the flow control there is: the other host
never sends what was not asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from transport.errors import ProtocolError
from transport.page_client import PageClient
from transport.page_runs import Sink, take_run
from transport.page_wire import KEY_BYTES, Ask, PageName, Run
from transport.pages import PageFetch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.shapes import PageRef
    from transport.page_jobs import Flight
    from transport.page_wire import RunPage, Wire


class PageFetcher(PageClient[PageFetch]):
    """Fetches pages that another host has, from its `PageServer`; any number of tasks at once."""

    does: Literal["fetch", "send"] = "fetch"
    keeps_settled = True

    async def fetch(self, items: Sequence[PageFetch], *, epoch: int | None = None) -> list[bool]:
        """Fetch pages; True where the whole page, of the generation and key asked for, is at its target.

        `epoch`: the incarnation of the other host that named these pages; None for the one that is
        connected, or will be first. Items of any other incarnation are False.

        False: that host no longer has the page, it changed on its way, or it does not match its
        checksum; what the target slot holds is undefined. Cancelled, nothing is known about any of
        them, and nothing is written to their targets any more. Raises TransferCut when the host could
        not be reached for `give_up_s`, ProtocolError when it does not fit or talks nonsense, and
        IndexError for a slot outside its pools or ours; ValueError when two go to one target.
        """
        if len({item.target for item in items}) != len(items):
            raise ValueError("two pages with one target")
        for item in items:
            self._pools.slot(item.target)
            if len(item.key) != KEY_BYTES:
                raise ValueError(f"a chain key has {KEY_BYTES} bytes, not {len(item.key)}")
        return await self._call(items, epoch)

    def _theirs(self, item: PageFetch) -> PageRef:
        return item.source

    async def _launch(self, wire: Wire, flight: Flight[PageFetch]) -> None:
        names = [PageName(item.source, item.key) for item in flight.items()]
        await wire.send(Ask(flight.number, names))

    async def _land(self, wire: Wire, flight: Flight[PageFetch]) -> None:
        run = await wire.receive(Run)
        items = flight.items()
        must_answer(run, flight.number, items)
        sinks = [self._sink(flight, items[page.position], page) for page in run.pages]
        taken = await take_run(wire, run.number, sinks)
        answers = [False] * len(items)
        for page, whole in zip(run.pages, taken.whole, strict=True):
            answers[page.position] = whole
        self._landed(answers, taken.mismatched)

    def _sink(self, flight: Flight[PageFetch], item: PageFetch, page: RunPage) -> Sink:
        return Sink(self._pools.slot(item.target), page.checksum, lambda: flight.job.live)


def must_answer(run: Run, number: int, items: Sequence[PageFetch]) -> None:
    """Raise ProtocolError unless a run is an answer to what was asked under that number."""
    if run.number != number:
        raise ProtocolError(f"run {run.number} where {number} was due")
    last = -1
    for page in run.pages:
        if not last < page.position < len(items):
            raise ProtocolError(f"page {page.position} after {last} in a run of {len(items)}")
        if page.key != items[page.position].key:
            raise ProtocolError(f"page {page.position} of run {number} comes under another key")
        last = page.position
