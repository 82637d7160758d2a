"""The two page clients: fair, bounded, aware of who answers, and hard to fool."""

from __future__ import annotations

import zlib
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing
from faulty_streams import FaultyPath
from page_contract import MAIN, STANDBY, PageWorld

from transport.errors import ProtocolError, TransferCut
from transport.page_fetch import PageFetcher
from transport.page_hosts import PageParty
from transport.page_push import PageSender
from transport.page_server import PageServer
from transport.page_settings import TransferSettings
from transport.page_streams import StreamBytes
from transport.page_wire import (
    Ask,
    Give,
    Hello,
    Receipt,
    Run,
    RunPage,
    Verdict,
    Wire,
    framed,
    preamble,
)
from transport.tcp_pages import serve_tcp_pages, tcp_connector

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PAGE, PAGES = 100, 40
SETTINGS = TransferSettings(run_bytes=4 * PAGE, window_bytes=8 * PAGE)
SERVER = Hello("numerics 1", "server", 1, "serve", True, True, PAGE, {MAIN: PAGES, STANDBY: PAGES})


@pytest.fixture
def world() -> PageWorld:
    return PageWorld(PAGE, PAGES)


def fetcher_of(world: PageWorld, connect: Any, **options: Any) -> PageFetcher:
    return PageFetcher(connect, world.there, world.standbys, SETTINGS, **options)


def sender_of(world: PageWorld, connect: Any, **options: Any) -> PageSender:
    return PageSender(connect, world.here, world.mains, world.still_valid, SETTINGS, **options)


def scripted(
    nursery: trio.Nursery, script: Callable[[Wire], Awaitable[None]], hello: Hello = SERVER
) -> Callable[[], Awaitable[trio.abc.Stream]]:
    """A server that greets, reads the client's greeting and goes on by a script of the test's own."""

    async def serve(stream: trio.abc.Stream) -> None:
        wire = Wire(StreamBytes(stream, 1000.0), PAGE, 1000.0)
        try:
            await wire.send_preamble()
            await wire.receive_preamble()
            await wire.receive(Hello)
            await wire.send(hello)
            await script(wire)
        except TransferCut:
            pass
        finally:
            await wire.aclose()

    async def connect() -> trio.abc.Stream:
        here, there = trio.testing.memory_stream_pair()
        nursery.start_soon(serve, there)
        return here

    return connect


async def silent(_wire: Wire) -> None:
    await trio.sleep_forever()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"identity": "numerics 2"},
            "server does not fit host-b: numerics id 'numerics 2' there",
        ),
        ({"page_bytes": 99}, "bytes a page 99 there, 100 here"),
        ({"gives": False}, "server gives no pages"),
        ({"does": "fetch"}, "both sides fetch"),
        ({"host": "impostor"}, "impostor answers where server was expected"),
    ],
)
async def test_a_server_that_does_not_fit(
    world: PageWorld, nursery: trio.Nursery, changes: dict[str, Any], match: str
) -> None:
    hello = msgspec.structs.replace(SERVER, **changes)
    fetcher = fetcher_of(world, scripted(nursery, silent, hello), peer_host="server")
    await nursery.start(fetcher.run)
    with trio.fail_after(10):
        for _ in range(2):
            with pytest.raises(ProtocolError, match=match):
                await fetcher.fetch(world.fetches(world.copies(1)))
    fetcher.check()
    assert fetcher.statistics().protocol_errors == 2
    assert fetcher.statistics().connections == 0


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not transfer pages: it begins with b'HTTP/1.1'"),
        (preamble(1) + framed(SERVER), "version 1, this is 2"),
        (preamble() + framed(Receipt(1, [])), "a Receipt where a Hello was due"),
    ],
)
async def test_what_is_not_a_page_server(
    world: PageWorld, nursery: trio.Nursery, answer: bytes, match: str
) -> None:
    async def connect() -> trio.abc.Stream:
        here, there = trio.testing.memory_stream_pair()
        await there.send_all(answer)
        return here

    sender = sender_of(world, connect)
    await nursery.start(sender.run)
    with trio.fail_after(10), pytest.raises(ProtocolError, match=match):
        await sender.push(world.copies(1))


def run_of(*pages: RunPage, number: int = 1) -> Run:
    return Run(number, [*pages])


PAGE_0 = RunPage(0, b"key of page 0000", zlib.crc32(bytes(PAGE)))
PAGE_1 = RunPage(1, b"key of page 0001", zlib.crc32(bytes(PAGE)))


@pytest.mark.parametrize(
    ("run", "verdict", "match"),
    [
        (run_of(PAGE_0, number=2), None, "run 2 where 1 was due"),
        (run_of(PAGE_1, PAGE_0), None, "page 0 after 1 in a run of 2"),
        (run_of(PAGE_0, PAGE_0), None, "page 0 after 0 in a run of 2"),
        (run_of(RunPage(2, b"", 0)), None, "page 2 after -1 in a run of 2"),
        (run_of(RunPage(-1, b"", 0)), None, "page -1 after -1 in a run of 2"),
        (run_of(RunPage(1, PAGE_0.key, 0)), None, "page 1 of run 1 comes under another key"),
        (run_of(PAGE_0), Verdict(2, [True]), "a verdict on 1 pages of run 2 for 1 of run 1"),
        (run_of(PAGE_0), Verdict(1, []), "a verdict on 0 pages"),
        (Receipt(1, [True]), None, "a Receipt where a Run was due"),
    ],
)
async def test_a_giver_that_talks_nonsense(
    world: PageWorld, nursery: trio.Nursery, run: Any, verdict: Verdict | None, match: str
) -> None:
    async def script(wire: Wire) -> None:
        await wire.receive(Ask)
        await wire.send(run, [memoryview(bytes(PAGE))] if verdict else [])
        if verdict is not None:
            await wire.send(verdict)

    fetcher = fetcher_of(world, scripted(nursery, script))
    await nursery.start(fetcher.run)
    with trio.fail_after(10), pytest.raises(ProtocolError, match=match):
        await fetcher.fetch(world.fetches(world.copies(0, 1)))
    fetcher.check()


@pytest.mark.parametrize(
    ("receipt", "match"),
    [
        (Receipt(2, [True, True]), "a receipt for 2 pages of run 2 answers 2 of run 1"),
        (Receipt(1, [True]), "a receipt for 1 pages of run 1 answers 2 of run 1"),
        (Verdict(1, [True, True]), "a Verdict where a Receipt was due"),
    ],
)
async def test_a_taker_that_talks_nonsense(
    world: PageWorld, nursery: trio.Nursery, receipt: Any, match: str
) -> None:
    async def script(wire: Wire) -> None:
        await wire.receive(Give)
        await wire.send(receipt)
        await trio.sleep_forever()

    sender = sender_of(world, scripted(nursery, script))
    await nursery.start(sender.run)
    with trio.fail_after(10), pytest.raises(ProtocolError, match=match):
        await sender.push(world.copies(0, 1))
    sender.check()


async def test_what_callers_may_not_ask(world: PageWorld, nursery: trio.Nursery) -> None:
    fetcher = fetcher_of(world, scripted(nursery, silent))
    sender = sender_of(world, scripted(nursery, silent))
    [fetch] = world.fetches(world.copies(1))
    with trio.fail_after(10):
        with pytest.raises(TransferCut, match="not running"):
            await fetcher.fetch([fetch])
        await nursery.start(fetcher.run)
        await nursery.start(sender.run)
        with pytest.raises(RuntimeError, match="runs already"):
            await fetcher.run()
        with pytest.raises(ValueError, match="two pages with one target"):
            await fetcher.fetch([fetch, fetch])
        with pytest.raises(ValueError, match="two pages with one target"):
            await sender.push(world.copies(1, 1))
        with pytest.raises(ValueError, match="a chain key has 16 bytes, not 3"):
            await fetcher.fetch([msgspec.structs.replace(fetch, key=b"key")])
    for wrong in (
        {"run_bytes": 0},
        {"run_bytes": 1 << 30},
        {"window_bytes": 0},
        {"stall_s": 0},
        {"give_up_s": -1},
    ):
        with pytest.raises(ValueError, match="TransferSettings"):
            TransferSettings(**wrong)


async def test_a_client_that_stops_tells_its_callers(world: PageWorld, nursery: trio.Nursery) -> None:
    fetcher = fetcher_of(world, scripted(nursery, silent))
    with trio.fail_after(10):
        async with trio.open_nursery() as running:
            await running.start(fetcher.run)

            async def fetch() -> None:
                with pytest.raises(TransferCut, match="the client stopped"):
                    await fetcher.fetch(world.fetches(world.copies(1)))

            nursery.start_soon(fetch)
            await trio.testing.wait_all_tasks_blocked()
            running.cancel_scope.cancel()
        await trio.testing.wait_all_tasks_blocked()
        fetcher.check()


@pytest.mark.parametrize("kind", ["pull", "push"])
async def test_no_more_than_a_window_is_in_flight(world: PageWorld, nursery: trio.Nursery, kind: str) -> None:
    """A peer that takes everything and answers nothing gets 8 pages, in two runs, and no more."""
    seen: list[int] = []

    async def script(wire: Wire) -> None:
        while True:
            if kind == "pull":
                seen.append(len((await wire.receive(Ask)).names))
            else:
                give = await wire.receive(Give)
                for _ in give.pages:
                    await wire.take_page(memoryview(bytearray(PAGE)), lambda: True)
                await wire.receive(Verdict)
                seen.append(len(give.pages))

    client: Any = (fetcher_of if kind == "pull" else sender_of)(world, scripted(nursery, script))
    await nursery.start(client.run)
    copies = world.copies(*range(PAGES))
    call = partial(client.fetch, world.fetches(copies)) if kind == "pull" else partial(client.push, copies)
    with trio.fail_after(10):
        async with trio.open_nursery() as calling:
            calling.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()
            assert seen == [4, 4]
            client.check()
            calling.cancel_scope.cancel()
        client.check()
        assert client.statistics().cancelled == 1


async def test_a_small_fetch_does_not_wait_for_a_huge_one(world: PageWorld, nursery: trio.Nursery) -> None:
    server = PageServer(world.here, world.mains, giver=world)
    path = FaultyPath(server.handle, nursery, [])
    fetcher = fetcher_of(world, path.connect)
    await nursery.start(fetcher.run)
    given_before: dict[str, int] = {}

    async def fetch(name: str, *indexes: int) -> None:
        assert all(await fetcher.fetch(world.fetches(world.copies(*indexes))))
        given_before[name] = len(world.asked)

    with trio.fail_after(10):
        async with trio.open_nursery() as calling:
            calling.start_soon(fetch, "huge", *range(38))
            while not world.asked:
                await trio.lowlevel.checkpoint()
            before = len(world.asked)
            calling.start_soon(fetch, "small", 38)
            calling.start_soon(fetch, "other", 39)
    # Behind the window of the huge one, a run of it that went at the same time, and each other.
    assert given_before["small"] <= before + 8 + 4 + 2 < 38
    assert given_before["other"] <= before + 8 + 4 + 2
    assert given_before["huge"] == 40
    assert path.connections == 1


class Restarting:
    """A host whose pools start anew, in another epoch, once some bytes have gone."""

    def __init__(self, world: PageWorld, nursery: trio.Nursery, way: Any, at: int) -> None:
        self.world = world
        self.epoch = 1
        first = PageServer(PageParty("numerics 1", "server", 1), world.mains, giver=world)
        taker = PageServer(PageParty("numerics 1", "server", 1), world.standbys, taker=world)
        self.servers = {"pull": first, "push": taker}
        self.paths = {
            kind: FaultyPath(server.handle, nursery, [(way, "cut", at)])
            for kind, server in self.servers.items()
        }

    def connect(self, kind: str) -> Callable[[], Awaitable[trio.abc.Stream]]:
        async def connect() -> trio.abc.Stream:
            path = self.paths[kind]
            if path.connections == 1:
                me = PageParty("numerics 1", "server", 2)
                server = (
                    PageServer(me, self.world.mains, giver=self.world)
                    if kind == "pull"
                    else PageServer(me, self.world.standbys, taker=self.world)
                )
                path.handle = server.handle
            return await path.connect()

        return connect


async def test_pages_of_a_host_that_started_anew_are_gone(world: PageWorld, nursery: trio.Nursery) -> None:
    """Field report 4: what was named by the old incarnation is False, whatever lies there now."""
    host = Restarting(world, nursery, "to client", 1600)
    fetcher = fetcher_of(world, host.connect("pull"))
    await nursery.start(fetcher.run)
    copies = world.copies(*range(20))
    with trio.fail_after(10):
        answers = await fetcher.fetch(world.fetches(copies))
        # Some had come before; nothing else was even asked for.
        assert any(answers)
        assert not all(answers)
        assert len(world.asked) <= sum(answers) + 8
        world.check_answers(copies, answers)
        assert await fetcher.fetch(world.fetches(world.copies(21)), epoch=1) == [False]
        assert await fetcher.fetch(world.fetches(world.copies(21)), epoch=2) == [True]
        assert await fetcher.fetch(world.fetches(world.copies(22))) == [True]
    assert fetcher.statistics().restarts == 1
    assert fetcher.peer is not None
    assert fetcher.peer.epoch == 2


async def test_pages_pushed_to_a_host_that_started_anew_are_lost(
    world: PageWorld, nursery: trio.Nursery
) -> None:
    host = Restarting(world, nursery, "to client", 180)
    sender = sender_of(world, host.connect("push"))
    await nursery.start(sender.run)
    with trio.fail_after(10):
        assert await sender.push(world.copies(*range(20))) == [False] * 20
        assert world.stored_targets  # in the old incarnation
        assert await sender.push(world.copies(21)) == [True]


async def test_an_epoch_is_checked_at_the_first_connection(world: PageWorld, nursery: trio.Nursery) -> None:
    server = PageServer(PageParty("numerics 1", "server", 5), world.mains, giver=world)
    fetcher = fetcher_of(world, FaultyPath(server.handle, nursery, []).connect)
    await nursery.start(fetcher.run)
    with trio.fail_after(10):
        assert await fetcher.fetch(world.fetches(world.copies(1)), epoch=4) == [False]
        assert await fetcher.fetch(world.fetches(world.copies(1)), epoch=5) == [True]
    assert len(world.asked) == 1


async def test_a_page_that_does_not_match_its_checksum_is_dropped_and_counted(
    world: PageWorld, nursery: trio.Nursery
) -> None:
    world.memory[3 * PAGE + 17] ^= 1  # since it was sealed
    server = PageServer(world.here, world.mains, giver=world)
    fetcher = fetcher_of(world, FaultyPath(server.handle, nursery, []).connect)
    await nursery.start(fetcher.run)
    with trio.fail_after(10):
        assert await fetcher.fetch(world.fetches(world.copies(2, 3, 4))) == [True, False, True]
    statistics = fetcher.statistics()
    assert (statistics.pages, statistics.mismatched, statistics.absent) == (2, 1, 0)
    assert statistics.bytes == 2 * PAGE


async def test_an_idle_connection_is_closed_and_another_opened(
    world: PageWorld, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    server = PageServer(world.here, world.mains, giver=world)
    path = FaultyPath(server.handle, nursery, [])
    fetcher = fetcher_of(world, path.connect)
    await nursery.start(fetcher.run)
    with trio.fail_after(1000):
        assert await fetcher.fetch(world.fetches(world.copies(1))) == [True]
        await trio.sleep(SETTINGS.idle_s / 2)
        assert await fetcher.fetch(world.fetches(world.copies(2))) == [True]
        assert path.connections == 1
        await trio.sleep(SETTINGS.idle_s + 1)
        assert server.statistics().open == 0
        assert await fetcher.fetch(world.fetches(world.copies(3))) == [True]
    assert path.connections == 2
    assert fetcher.statistics().cuts == server.statistics().cuts == 0


async def test_each_caller_is_given_up_on_in_its_own_time(
    world: PageWorld, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    async def connect() -> trio.abc.Stream:
        raise ConnectionRefusedError("connection refused")

    fetcher = fetcher_of(world, connect)
    await nursery.start(fetcher.run)
    took: list[float] = []

    async def fetch(after: float) -> None:
        await trio.sleep(after)
        start = trio.current_time()
        with pytest.raises(TransferCut, match=r"no page for 10\.0 s: connection refused"):
            await fetcher.fetch(world.fetches(world.copies(1)))
        took.append(trio.current_time() - start)

    with trio.fail_after(1000):
        async with trio.open_nursery() as calling:
            for after in (0.0, 3.0, 4.5):
                calling.start_soon(fetch, after)
    assert took == pytest.approx([10.0] * 3, abs=0.5)
    assert fetcher.statistics().given_up == 3


async def test_a_host_that_comes_back_is_found_again(
    world: PageWorld, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    server = PageServer(world.here, world.mains, giver=world)
    path = FaultyPath(server.handle, nursery, [])
    attempts: list[float] = []

    async def connect() -> trio.abc.Stream:
        attempts.append(trio.current_time())
        if trio.current_time() < 5:
            raise ConnectionRefusedError("connection refused")
        return await path.connect()

    fetcher = fetcher_of(world, connect)
    await nursery.start(fetcher.run)
    with trio.fail_after(1000):
        assert await fetcher.fetch(world.fetches(world.copies(1))) == [True]
    assert 5 <= trio.current_time() <= 6.1
    waits = [after - before for before, after in pairwise(attempts)]
    assert waits[:7] == pytest.approx([0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0], rel=0.3, abs=0.02)


async def test_over_real_sockets_a_server_that_goes_and_comes_back(world: PageWorld) -> None:
    """The listener and all its connections die in the middle; another one takes its port, same epoch."""
    big = PageWorld(1 << 16, 200)
    server = PageServer(big.here, big.mains, giver=big)
    first_asks = trio.Event()
    pin = big.pin

    async def watched(names: Any) -> list[bool]:
        if len(big.asked) >= 30:
            first_asks.set()
        return await pin(names)

    big.pin = watched  # type: ignore[method-assign]
    settings = TransferSettings(run_bytes=4 << 16, window_bytes=16 << 16, retry_first_s=0.001)
    copies = big.copies(*range(200))
    answers: list[bool] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            first = trio.CancelScope()

            async def serve(scope: trio.CancelScope, port: int, *, task_status: Any) -> None:
                with scope:
                    await serve_tcp_pages(server, "127.0.0.1", port, task_status=task_status)

            port = await nursery.start(serve, first, 0)
            fetcher = PageFetcher(tcp_connector("127.0.0.1", port), big.there, big.standbys, settings)
            await nursery.start(fetcher.run)

            async def fetch() -> None:
                answers.extend(await fetcher.fetch(big.fetches(copies)))
                nursery.cancel_scope.cancel()

            nursery.start_soon(fetch)
            await first_asks.wait()
            first.cancel()
            await nursery.start(serve, trio.CancelScope(), port)
    assert answers == [True] * 200
    big.check_answers(copies, answers)
    assert fetcher.statistics().cuts >= 1
    assert 200 <= len(big.asked) <= 216
    big.check()
