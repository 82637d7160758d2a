"""Two hosts that give each other pages, over loopback: who fetches, who pins, and what is left of it."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator  # noqa: TC003  # pytest reads the annotation
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import trio
import trio.testing

from actors.landing import publish
from actors.other_hosts import OtherHosts
from engine.layout import Owner, PageState, PageTable
from engine.messages import (
    FetchEnded,
    FetchWanted,
    PageSite,
    PageSource,
    PageWanted,
    ReadEnded,
    ReadGranted,
    ReadWanted,
)
from transport.page_hosts import PageParty
from transport.page_wire import PageName
from transport.pages import PagePool

if TYPE_CHECKING:
    from engine.core import Send

PAGES, TOKENS, ACTORS, PAGE_BYTES = 8, 4, 16, 256
ME = Owner(3, 1)


class Host:
    """A host whose allocator grants every read, or waits until it is told to."""

    def __init__(self, name: str) -> None:
        memory = memoryview(bytearray(PageTable.size(PAGES, TOKENS, ACTORS)))
        self.table = PageTable(memory, PAGES, TOKENS, ACTORS, 0)
        self.memory = bytearray(PAGES * PAGE_BYTES)
        self.said: list[object] = []
        self.grants = True
        self.pool = PagePool(0, memoryview(self.memory), PAGE_BYTES)
        party = PageParty("model", name, 1)
        self.others = OtherHosts(party, "127.0.0.1", 0, self.table, self.pool, "allocator", self._post)

    def _post(self, sends: list[Send]) -> None:
        for send in sends:
            self.said.append(send.message)
            if isinstance(send.message, ReadWanted) and self.grants:
                self.others.answered(ReadGranted(send.message.ticket, (True,) * len(send.message.pages)))

    def fill(self, number: int) -> PageWanted:
        """A page that others may want."""
        target = self.table.lease(number, ME)
        self.memory[number * PAGE_BYTES : (number + 1) * PAGE_BYTES] = bytes([number + 1]) * PAGE_BYTES
        wanted = PageWanted(bytes([number]) * 16, bytes(16), bytes([number]) * (4 * TOKENS), number, target)
        publish(self.table, wanted, zlib.crc32(self.pool.slot(target)))
        return wanted

    def want(self, ticket: int, host: str, *there: PageWanted) -> FetchWanted:
        """As its allocator asks for pages of another host."""
        pages = tuple(
            PageWanted(
                page.key, page.parent, page.tokens, page.block, self.table.lease(page.block, ME), page.target
            )
            for page in there
        )
        return FetchWanted(ticket, PageSource("host", host), pages)


@asynccontextmanager
async def hosts() -> AsyncIterator[tuple[Host, Host]]:
    """Two that listen, and know of each other."""
    giver, taker = Host("giver"), Host("taker")
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for host in (giver, taker):
                await nursery.start(host.others.serve)
            assert giver.others.site is not None
            taker.others.told(giver.others.site)
            yield giver, taker
            giver.others.check()
            nursery.cancel_scope.cancel()


async def test_two_fetches_that_are_the_first_share_a_client() -> None:
    async with hosts() as (giver, taker):
        pages = [giver.fill(number) for number in range(4)]
        ended: list[Send] = []

        async def fetch(wanted: FetchWanted) -> None:
            ended.extend(await taker.others.fetch(wanted))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(fetch, taker.want(1, "giver", *pages[:2]))
            nursery.start_soon(fetch, taker.want(2, "giver", *pages[2:]))
        landed = {
            send.message.ticket: send.message.landed for send in ended if isinstance(send.message, FetchEnded)
        }
        assert landed == {1: 2, 2: 2}
        assert taker.memory[: 4 * PAGE_BYTES] == giver.memory[: 4 * PAGE_BYTES]
        assert [taker.table.state(page) for page in range(4)] == [PageState.SEALED] * 4
        reads = [message.ticket for message in giver.said if isinstance(message, ReadWanted)]
        assert [message for message in giver.said if isinstance(message, ReadEnded)] == [
            *map(ReadEnded, reads)
        ]


async def test_the_client_of_a_former_life_ends_with_it() -> None:
    async with hosts() as (giver, taker):
        assert giver.others.site is not None
        before = trio.lowlevel.current_statistics().tasks_living
        for number in range(4):
            [ended] = await taker.others.fetch(taker.want(number, "giver", giver.fill(number)))
            assert isinstance(ended.message, FetchEnded)
            assert ended.message.landed == 1
            taker.others.told(giver.others.site)
            taker.others.told(PageSite("giver", "127.0.0.1", 1))
            taker.others.told(giver.others.site)
            await trio.testing.wait_all_tasks_blocked()
        while trio.lowlevel.current_statistics().tasks_living > before:
            await trio.lowlevel.checkpoint()


async def test_who_stops_waiting_for_pins_gives_them_back() -> None:
    giver = Host("giver")
    giver.grants = False
    page = giver.fill(0)
    with trio.move_on_after(0.05):
        await giver.others.pin([PageName(page.target, page.key)])
        raise AssertionError("nobody has granted it")
    [wanted, ended] = giver.said
    assert isinstance(wanted, ReadWanted)
    assert ended == ReadEnded(wanted.ticket)
    giver.others.answered(ReadGranted(wanted.ticket, (True,)))
