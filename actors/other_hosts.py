"""Pages between hosts, as a replicator gives and fetches them over TCP.

    PageSite (replicator → those of other hosts): where pages of this host are given
    another host asks ──▶ ReadWanted (to the allocator here) ──▶ pinned ──▶ sent ──▶ ReadEnded
    FetchWanted ──▶ fetched into leased pages ──▶ the run of whole ones is sealed ──▶ FetchEnded

A host that cannot be reached, or has the pages no more, is no error of a request: they are filled here.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING

import structlog
import trio

from actors.landing import publish
from engine.core import Send
from engine.lifecycle import PageState
from engine.messages import FetchEnded, PageSite, ReadEnded, ReadGranted, ReadWanted
from transport.checksum import page_checksum
from transport.errors import TransportError
from transport.page_fetch import PageFetcher
from transport.page_hosts import PageParty, PinnedPages
from transport.page_server import PageServer
from transport.page_settings import TransferSettings
from transport.pages import PageFetch, PagePools
from transport.tcp_pages import serve_tcp_pages, tcp_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from engine.core import Statistics
    from engine.layout import PageTable
    from engine.messages import FetchWanted
    from engine.shapes import PageRef
    from transport.page_wire import PageName
    from transport.pages import PagePool

log = structlog.get_logger()

PATIENCE = TransferSettings(give_up_s=3.0)
"""Filling the pages takes a few seconds at most: waiting longer than that for another host is in vain."""


class OtherHosts:
    """What this host gives to others, and gets from them."""

    def __init__(
        self,
        me: PageParty,
        address: str,
        port: int,
        table: PageTable,
        pool: PagePool,
        allocator: str,
        send: Callable[[list[Send]], None],
    ) -> None:
        """`allocator`: that of this host; `send` posts messages."""
        self._me = me
        self._address = address
        self._port = port
        self._table = table
        self._pool = pool
        self._pools = PagePools(pool)
        self._allocator = allocator
        self._send = send
        self._tickets = itertools.count(1)
        self._asked: dict[int, tuple[trio.Event, list[bool]]] = {}
        self._fetchers: dict[str, tuple[PageFetcher, trio.CancelScope]] = {}
        """Of each host, and what ends it."""
        self._starting = trio.Lock()
        self._sites: dict[str, PageSite] = {}
        self._nursery: trio.Nursery | None = None
        self._server = PageServer(me, self._pools, giver=self, on_error=_log_error)
        self.site: PageSite | None = None
        """Where pages of this host are given; None until it listens."""

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Give pages to whoever asks, until it is cancelled; started once it listens.

        StartError when the address cannot be had.
        """
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            port = await nursery.start(serve_tcp_pages, self._server, self._address, self._port)
            self.site = PageSite(self._me.host, self._address, port)
            log.info("pages_given", address=self._address, port=port)
            task_status.started()

    def told(self, site: PageSite) -> None:
        """Where another host gives its pages; a new one when its replicator was started again."""
        if self._sites.get(site.host) != site:
            self._sites[site.host] = site
            if site.host in self._fetchers:
                self._fetchers.pop(site.host)[1].cancel()

    # ── fetching ──────────────────────────────────────────────────────────────────────────────

    async def fetch(self, message: FetchWanted) -> list[Send]:
        """Fetch a run of pages; whatever is whole up to the first that is not counts."""
        began = trio.current_time()
        landed = 0
        fetcher = await self._fetcher(message.source.host)
        items = [PageFetch(page.source, page.key, page.target) for page in message.pages if page.source]
        if fetcher is not None and len(items) == len(message.pages):
            try:
                whole = await fetcher.fetch(items)
            except TransportError as error:
                log.warning("pages_not_fetched", host=message.source.host, why=str(error))
                whole = []
            for page, arrived in zip(message.pages, whole, strict=False):
                if not arrived:
                    break
                publish(self._table, page, page_checksum(self._pool.slot(page.target)))
                landed += 1
        seconds = trio.current_time() - began
        log.info(
            "pages_fetched",
            host=message.source.host,
            pages=landed,
            of=len(message.pages),
            s=round(seconds, 4),
        )
        return [Send(self._allocator, FetchEnded(message.ticket, landed, seconds))]

    async def _fetcher(self, host: str) -> PageFetcher | None:
        async with self._starting:
            if host not in self._fetchers and host in self._sites and self._nursery is not None:
                site = self._sites[host]
                connect = tcp_connector(site.address, site.port)
                fetcher = PageFetcher(connect, self._me, self._pools, PATIENCE, peer_host=host)
                running = await self._nursery.start(_run, fetcher)
                if site != self._sites[host]:
                    running.cancel()
                    return None
                self._fetchers[host] = fetcher, running
            return self._fetchers[host][0] if host in self._fetchers else None

    # ── giving (`transport.page_hosts.PageGiver`) ─────────────────────────────────────────────

    async def pin(self, names: Sequence[PageName]) -> PinnedPages:
        ticket, answered, there = next(self._tickets), trio.Event(), [False] * len(names)
        self._asked[ticket] = answered, there
        pages = tuple(name.page for name in names)
        self._send([Send(self._allocator, ReadWanted(ticket, pages, tuple(name.key for name in names)))])
        try:
            await answered.wait()
        except trio.Cancelled:
            self.unpin(ticket)
            raise
        finally:
            del self._asked[ticket]
        return PinnedPages(ticket, there)

    def answered(self, message: ReadGranted) -> None:
        """The allocator has pinned what is there."""
        if message.ticket in self._asked:
            event, there = self._asked[message.ticket]
            there[:] = message.there[: len(there)]
            event.set()

    def unpin(self, read: int) -> None:
        self._send([Send(self._allocator, ReadEnded(read))])

    def still_valid(self, page: PageRef) -> bool:
        return self._table.is_current(page) and self._table.state(page.index) is PageState.SEALED

    def checksum_of(self, page: PageRef) -> int | None:
        return self._table.sealed(page.index).checksum

    def check(self) -> None:
        self._server.check()

    def statistics(self) -> Statistics:
        given = self._server.statistics()
        return {"pages_given": given.given, "pages_not_given": given.absent, "page_clients": given.open}


async def _run(fetcher: PageFetcher, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    """Have it fetch until the scope that it tells is cancelled."""
    with trio.CancelScope() as running:
        task_status.started(running)
        await fetcher.run()


def party_of(host: str, run_dir: str, identity: str) -> PageParty:
    """Who a host is to the others: the pages of another launch are other pages."""
    launch = int.from_bytes(hashlib.blake2b(run_dir.encode(), digest_size=4).digest(), "little")
    return PageParty(identity, host, launch)


def _log_error(peer: str, error: TransportError) -> None:
    log.warning("page_client_failed", peer=peer, why=str(error))
