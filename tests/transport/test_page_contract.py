"""Every page transport there is, through the one contract suite."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from page_contract import PageTransportContract, PageWorld

from transport.page_fetch import PageFetcher
from transport.page_push import PageSender
from transport.page_server import PageServer
from transport.page_settings import TransferSettings
from transport.pages import SharedMemoryPages
from transport.tcp_pages import serve_tcp_pages, tcp_connector

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from transport.page_client import Connect
    from transport.pages import PageCopy, PageTransport

SETTINGS = TransferSettings(run_bytes=3 * PageTransportContract.PAGE_BYTES, window_bytes=50_000)


class Pulled:
    """A fetcher of the other host as PageTransport: pages under the keys they have in the world."""

    def __init__(self, fetcher: PageFetcher, world: PageWorld) -> None:
        self._fetcher = fetcher
        self._world = world

    async def copy(self, copies: Sequence[PageCopy]) -> list[bool]:
        return await self._fetcher.fetch(self._world.fetches(copies))


class TestSharedMemory(PageTransportContract):
    @pytest.fixture
    async def transport(self, world: PageWorld) -> PageTransport:  # type: ignore[override]
        return SharedMemoryPages(world.main, world.standby, world.still_valid)


async def reach(server: PageServer, over: str, nursery: trio.Nursery) -> Connect:
    """A way to the server: real sockets, or memory."""
    if over == "tcp":
        port = await nursery.start(partial(serve_tcp_pages, server, "127.0.0.1", 0))
        return tcp_connector("127.0.0.1", port)

    async def connect() -> trio.abc.Stream:
        here, there = trio.testing.memory_stream_pair()
        nursery.start_soon(server.handle, there)
        return here

    return connect


@pytest.mark.parametrize("over", ["tcp", "memory"])
class TestPull(PageTransportContract):
    @pytest.fixture
    async def transport(  # type: ignore[override]
        self, world: PageWorld, nursery: trio.Nursery, over: str
    ) -> AsyncIterator[PageTransport]:
        server = PageServer(world.here, world.mains, giver=world)
        connect = await reach(server, over, nursery)
        fetcher = PageFetcher(connect, world.there, world.standbys, SETTINGS)
        await nursery.start(fetcher.run)
        yield Pulled(fetcher, world)
        fetcher.check()
        server.check()
        assert fetcher.statistics().protocol_errors == fetcher.statistics().cuts == 0


@pytest.mark.parametrize("over", ["tcp", "memory"])
class TestPush(PageTransportContract):
    @pytest.fixture
    async def transport(  # type: ignore[override]
        self, world: PageWorld, nursery: trio.Nursery, over: str
    ) -> AsyncIterator[PageTransport]:
        server = PageServer(world.there, world.standbys, taker=world)
        connect = await reach(server, over, nursery)
        sender = PageSender(
            connect, world.here, world.mains, world.still_valid, SETTINGS, checksum_of=world.checksum_of
        )
        await nursery.start(sender.run)
        yield sender
        sender.check()
        server.check()
        assert sender.statistics().protocol_errors == sender.statistics().cuts == 0
