"""What a page server puts up with: nonsense, floods, peers that do not fit, do not read or come twice."""

from __future__ import annotations

import zlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import trio
import trio.testing
from faulty_streams import FaultyStream
from hypothesis import given, settings
from hypothesis import strategies as st
from page_contract import MAIN, STANDBY, PageWorld

from engine.shapes import PageRef
from transport.errors import ProtocolError, TransferCut, TransportError
from transport.page_hosts import PageParty
from transport.page_server import PageServer
from transport.page_settings import ServerSettings
from transport.page_streams import StreamBytes
from transport.page_wire import (
    HEADER_LIMIT,
    HELLO_LIMIT,
    Ask,
    Give,
    GivenPage,
    Hello,
    PageName,
    Receipt,
    Refused,
    Run,
    Verdict,
    Wire,
    framed,
    preamble,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PAGE, PAGES = 100, 6
STALL_S = 2.0


class Desk:
    """A server and raw connections to it, in virtual time."""

    def __init__(self, nursery: trio.Nursery, **options: Any) -> None:
        self.world = PageWorld(PAGE, PAGES)
        self.errors: list[tuple[str, TransportError]] = []
        self.server = PageServer(
            PageParty("numerics 1", "server", 1),
            self.world.mains,
            ServerSettings(**options),
            giver=self.world,
            taker=self.world,
            on_error=lambda peer, error: self.errors.append((peer, error)),
        )
        self.nursery = nursery
        self.hello = Hello("numerics 1", "client", 7, "fetch", False, False, PAGE, {STANDBY: PAGES}, 77)

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[trio.testing.StapledStream, Wire]]:  # type: ignore
        here, there = trio.testing.memory_stream_pair()
        self.nursery.start_soon(self.server.handle, there)
        wire = Wire(StreamBytes(here, STALL_S), PAGE, STALL_S)
        try:
            yield here, wire
        finally:
            await wire.aclose()

    async def greet(self, wire: Wire, **changes: Any) -> Hello:
        await wire.send_preamble()
        await wire.send(msgspec.structs.replace(self.hello, **changes))
        await wire.receive_preamble()
        return await wire.receive(Hello)

    @property
    def last_error(self) -> str:
        return str(self.errors[-1][1])


@pytest.fixture
async def desk(nursery: trio.Nursery) -> AsyncIterator[Desk]:
    desk = Desk(nursery, connections=3, greetings=2, stall_s=STALL_S, idle_s=60.0)
    yield desk  # no test can hang: every wait of a Wire has its end
    await trio.testing.wait_all_tasks_blocked()
    desk.server.check()
    desk.world.check()


class Clogged(FaultyStream):
    """Buffers that are full once the test says so."""

    full = False

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        if self.full:
            await trio.sleep_forever()
        await super().send_all(data)


async def all_that_comes(stream: trio.abc.ReceiveStream) -> bytes:
    data = b""
    try:
        async for piece in stream:
            data += piece
    except trio.BrokenResourceError:
        pass
    return data


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"identity": "numerics 2"}, "numerics id 'numerics 2' there, 'numerics 1' here"),
        ({"page_bytes": 101}, "bytes a page 101 there, 100 here"),
        ({"identity": "x", "page_bytes": 101}, "numerics id 'x' there, .*; bytes a page 101"),
        ({"does": "serve"}, "both sides serve"),
    ],
)
async def test_a_peer_that_does_not_fit_is_told_what_differs(
    desk: Desk, changes: dict[str, Any], match: str
) -> None:
    async with desk.connection() as (stream, wire):
        # The other side gets a Hello to compare for itself, then the reason in the server's words.
        assert (await desk.greet(wire, **changes)).host == "server"
        with pytest.raises(ProtocolError, match=f"the peer refused: client does not fit server: {match}"):
            await wire.receive(Run)
        assert await all_that_comes(stream) == b""
    with pytest.raises(ProtocolError, match=f"client does not fit server: {match}"):
        raise desk.errors[0][1]
    assert desk.server.statistics().protocol_errors == 1
    assert desk.server.statistics().open == 0


async def test_another_version_is_named(desk: Desk) -> None:
    async with desk.connection() as (stream, wire):
        await stream.send_all(preamble(3))
        await wire.receive_preamble()
        with pytest.raises(ProtocolError, match="refused: the peer transfers pages in version 3, this is 2"):
            await wire.receive(Hello)
    assert desk.server.statistics().protocol_errors == 1


HELLO = Hello("numerics 1", "client", 7, "fetch", False, False, PAGE, {STANDBY: PAGES}, 77)
NAME = PageName(PageRef(MAIN, 0, 1), b"key of page 0000"[:16])


def raw(size: int, body: bytes) -> bytes:
    checked = size.to_bytes(4, "big") + zlib.crc32(body).to_bytes(4, "big")
    return checked + zlib.crc32(checked).to_bytes(4, "big") + body


@pytest.mark.parametrize(
    ("sent", "error", "match"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ProtocolError, "does not transfer pages: it begins with b'GET / HT'"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03", ProtocolError, "does not transfer pages"),
        (preamble() + framed(Ask(1, [NAME])), ProtocolError, "a Ask where a Hello was due"),
        (preamble() + raw(HELLO_LIMIT + 1, b""), ProtocolError, "a header of 4097 bytes, where 4096"),
        (preamble() + raw(1, b"\xc1"), ProtocolError, "not a header of a page transfer"),
        (preamble() + raw(2, b"\x91\xc0"), ProtocolError, "not a header of a page transfer"),
        (preamble() + b"\0" * 64, TransferCut, "damaged"),
        (b"", TransferCut, "the connection ended"),
        (preamble()[:4], TransferCut, "the connection ended"),
        (preamble() + framed(HELLO)[:-1], TransferCut, "the connection ended"),
    ],
)
async def test_what_is_not_a_greeting(desk: Desk, sent: bytes, error: type[Exception], match: str) -> None:
    async with desk.connection() as (stream, _):
        if sent:
            await stream.send_all(sent)
        await stream.send_eof()
        await all_that_comes(stream)
    assert isinstance(desk.errors[0][1], error)
    with pytest.raises(error, match=match):
        raise desk.errors[0][1]


@pytest.mark.parametrize(
    ("does", "sent", "match"),
    [
        ("fetch", Ask(1, []), "0 pages in one run, where 1 to 1024"),
        ("fetch", Ask(1, [NAME] * 1025), "1025 pages in one run"),
        ("fetch", Ask(1, [PageName(PageRef(MAIN, 6, 1), bytes(16))]), "pool 0 of 6 pages has no"),
        ("fetch", Ask(1, [PageName(PageRef(MAIN, -1, 1), bytes(16))]), "pool 0 of 6 pages has no"),
        ("fetch", Ask(1, [PageName(PageRef(9, 0, 1), bytes(16))]), "no pool 9, only"),
        ("fetch", Ask(1, [PageName(PageRef(MAIN, 0, 1), bytes(15))]), "a chain key has 16 bytes"),
        ("fetch", Give(1, [GivenPage(PageRef(MAIN, 0, 1), 0)]), "a Give where a Ask was due"),
        ("fetch", Receipt(1, [True]), "a Receipt where a Ask was due"),
        ("send", Ask(1, [NAME]), "a Ask where a Give was due"),
        ("send", Give(1, []), "0 pages in one run"),
        ("send", Give(1, [GivenPage(PageRef(MAIN, 6, 1), 0)]), "pool 0 of 6 pages has no"),
        ("send", Give(1, [GivenPage(PageRef(MAIN, 1, 1), 0)] * 2), "names a target twice"),
    ],
)
async def test_what_is_not_a_request(desk: Desk, does: str, sent: Any, match: str) -> None:
    async with desk.connection() as (_, wire):
        await desk.greet(wire, does=does)
        await wire.send(sent)
        with pytest.raises(ProtocolError, match=f"the peer refused: .*{match}"):
            await wire.receive(Run)
    assert desk.errors[0][0] == "client"
    assert not desk.world.stored_targets


async def test_headers_are_bounded(desk: Desk) -> None:
    async with desk.connection() as (stream, wire):
        await desk.greet(wire)
        await stream.send_all(raw(HEADER_LIMIT + 1, b""))
        with pytest.raises(ProtocolError, match=f"refused: a header of {HEADER_LIMIT + 1} bytes"):
            await wire.receive(Run)


async def test_a_verdict_for_another_run_is_nonsense(desk: Desk) -> None:
    give = Give(4, [GivenPage(PageRef(MAIN, 0, 1), zlib.crc32(bytes(PAGE)))])
    for verdict in (Verdict(5, [True]), Verdict(4, []), Verdict(4, [True, True])):
        async with desk.connection() as (_, wire):
            await desk.greet(wire, does="send")
            await wire.send(give, [memoryview(bytes(PAGE))])
            await wire.send(verdict)
            with pytest.raises(ProtocolError, match="refused: a verdict on"):
                await wire.receive(Receipt)
    assert not desk.world.stored_targets


async def test_a_page_that_does_not_match_its_checksum_is_counted_and_not_stored(desk: Desk) -> None:
    async with desk.connection() as (_, wire):
        await desk.greet(wire, does="send")
        await wire.send(Give(1, [GivenPage(PageRef(MAIN, 0, 1), 1234)]), [memoryview(bytes(PAGE))])
        await wire.send(Verdict(1, [True]))
        assert await wire.receive(Receipt) == Receipt(1, [False])
    assert desk.server.statistics().mismatched == 1
    assert desk.server.statistics().absent == 0
    assert not desk.world.stored_targets


async def test_a_page_nobody_wants_any_more_when_its_verdict_comes_is_not_stored(desk: Desk) -> None:
    page = desk.world.page(1)
    async with desk.connection() as (_, wire):
        await desk.greet(wire, does="send")
        give = Give(1, [GivenPage(PageRef(MAIN, 2, 1), zlib.crc32(page))])
        await wire.send(give, [memoryview(page)])
        await trio.testing.wait_all_tasks_blocked()
        assert desk.world.mains.slot(PageRef(MAIN, 2, 1)) == page
        desk.world.refused.add(2)
        await wire.send(Verdict(1, [True]))
        assert await wire.receive(Receipt) == Receipt(1, [False])
    assert not desk.world.stored_targets
    assert desk.server.statistics().absent == 1


async def test_connections_that_say_nothing_are_few_and_short(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    silent = [desk.connection() for _ in range(2)]
    for connection in silent:
        await connection.__aenter__()
    await trio.testing.wait_all_tasks_blocked()
    assert desk.server.statistics().greeting == 2
    for _ in range(100):
        async with desk.connection() as (stream, _):
            assert await all_that_comes(stream) == b""
    assert desk.server.statistics().refused == 100
    # Those that say nothing make room by themselves.
    await trio.sleep(STALL_S)
    await trio.testing.wait_all_tasks_blocked()
    assert desk.server.statistics().greeting == 0
    assert [str(error) for _, error in desk.errors] == ["no greeting for 2.0 s"] * 2
    async with desk.connection() as (_, wire):
        await desk.greet(wire)
    for connection in silent:
        await connection.__aexit__(None, None, None)


async def test_a_greeting_that_trickles_is_cut_off(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    async with desk.connection() as (stream, _):
        for byte in preamble() + framed(HELLO):
            try:
                await stream.send_all(bytes([byte]))
            except trio.BrokenResourceError:
                break
            await trio.sleep(STALL_S / 4)
        assert desk.server.statistics().greeting == 0
    assert desk.last_error == "no greeting for 2.0 s"


async def test_clients_beyond_the_limit_are_told_to_come_later(desk: Desk) -> None:
    connections = [desk.connection() for _ in range(3)]
    for session, connection in enumerate(connections):
        _, wire = await connection.__aenter__()
        await desk.greet(wire, session=session)
    for session in range(3, 50):
        async with desk.connection() as (_, wire):
            with pytest.raises(TransferCut, match="refused: server has no room for more clients"):
                await desk.greet(wire, session=session)
    desk.server.check()
    assert desk.server.statistics().refused == 47
    assert len(desk.server._sessions) == 3
    await connections[0].__aexit__(None, None, None)
    async with desk.connection() as (_, wire):
        await desk.greet(wire, session=99)
    for connection in connections[1:]:
        await connection.__aexit__(None, None, None)


async def test_many_clients_that_come_and_go_leave_little_behind(desk: Desk) -> None:
    for session in range(200):
        async with desk.connection() as (_, wire):
            await desk.greet(wire, session=session)
        await trio.testing.wait_all_tasks_blocked()
        desk.server.check()
    assert desk.server.statistics().connections == 200


async def test_an_idle_connection_is_closed_without_complaint(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    async with desk.connection() as (stream, wire):
        await desk.greet(wire)
        start = trio.current_time()
        assert await all_that_comes(stream) == b""
        assert trio.current_time() - start == pytest.approx(60.0)
    assert desk.errors == []


async def test_a_peer_that_does_not_read_is_cut_off_and_its_pins_come_back(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    here, there = trio.testing.memory_stream_pair()
    clogged = Clogged(there)
    desk.nursery.start_soon(desk.server.handle, clogged)
    wire = Wire(StreamBytes(here, STALL_S), PAGE, STALL_S)
    await desk.greet(wire)
    clogged.full = True
    await wire.send(Ask(1, [PageName(PageRef(MAIN, 3, 1), desk.world.key(3))]))
    await trio.testing.wait_all_tasks_blocked()
    assert desk.world.pinned[PageRef(MAIN, 3, 1)] == 1
    start = trio.current_time()
    assert await all_that_comes(here) == b""
    assert trio.current_time() - start == pytest.approx(STALL_S, abs=0.2)
    assert desk.last_error == "the peer took nothing for 2.0 s"
    desk.world.check()
    await wire.aclose()


async def test_a_giver_that_stops_within_a_page_is_cut_off(
    desk: Desk, autojump_clock: trio.testing.MockClock
) -> None:
    async with desk.connection() as (stream, wire):
        await desk.greet(wire, does="send")
        await stream.send_all(framed(Give(1, [GivenPage(PageRef(MAIN, 0, 1), 0)])) + bytes(PAGE - 1))
        start = trio.current_time()
        await all_that_comes(stream)
        assert trio.current_time() - start == pytest.approx(STALL_S)
    assert desk.last_error == "the peer sent nothing for 2.0 s"


async def test_pins_that_take_too_long_are_a_no(desk: Desk, autojump_clock: trio.testing.MockClock) -> None:
    async def pin(names: object) -> list[bool]:
        await trio.sleep_forever()
        raise AssertionError

    desk.world.pin = pin  # type: ignore[assignment,method-assign]
    async with desk.connection() as (_, wire):
        await desk.greet(wire)
        await wire.send(Ask(1, [NAME]))
        assert await wire.receive(Run) == Run(1, [])
        assert await wire.receive(Verdict) == Verdict(1, [])
    assert desk.server.statistics().pins_late == 1


async def test_a_page_under_another_key_is_not_there(desk: Desk) -> None:
    async with desk.connection() as (_, wire):
        await desk.greet(wire)
        await wire.send(Ask(1, [PageName(PageRef(MAIN, 1, 1), desk.world.key(2))]))
        assert await wire.receive(Run) == Run(1, [])


async def test_a_client_that_comes_again_ends_its_old_connection(desk: Desk) -> None:
    """What is left in the old connection must not be written over a page that came by the new one."""
    target = PageRef(MAIN, 0, 1)
    right, wrong = b"r" * PAGE, b"w" * PAGE
    give = Give(1, [GivenPage(target, zlib.crc32(right))])
    async with desk.connection() as (old, old_wire):
        await desk.greet(old_wire, does="send")
        await old.send_all(framed(give) + wrong[:50])
        await trio.testing.wait_all_tasks_blocked()
        async with desk.connection() as (_, wire):
            await desk.greet(wire, does="send")
            await wire.send(give, [memoryview(right)])
            await wire.send(Verdict(1, [True]))
            assert await wire.receive(Receipt) == Receipt(1, [True])
            with pytest.raises(trio.BrokenResourceError):
                await old.send_all(wrong[50:])
            await trio.testing.wait_all_tasks_blocked()
            assert desk.world.mains.slot(target) == right
            # Its receipt was lost, say: it comes again and is left as it is, whatever arrives.
            await wire.send(give, [memoryview(wrong)])
            await wire.send(Verdict(1, [True]))
            assert await wire.receive(Receipt) == Receipt(1, [True])
            assert desk.world.mains.slot(target) == right
            # Unless the slot holds something else by now: then it is written like any other.
            desk.world.mains.slot(target)[:] = wrong
            desk.world.stored_targets.clear()
            await wire.send(give, [memoryview(right)])
            await wire.send(Verdict(1, [True]))
            assert await wire.receive(Receipt) == Receipt(1, [True])
            assert desk.world.mains.slot(target) == right
    statistics = desk.server.statistics()
    assert (statistics.superseded, statistics.repeated, statistics.taken) == (1, 1, 2)


async def test_a_server_that_only_gives_takes_nothing(nursery: trio.Nursery) -> None:
    desk = Desk(nursery)
    desk.server = PageServer(PageParty("numerics 1", "server", 1), desk.world.mains, giver=desk.world)
    with trio.fail_after(10):
        async with desk.connection() as (_, wire):
            await desk.greet(wire, does="send")
            with pytest.raises(ProtocolError, match="server takes no pages"):
                await wire.receive(Receipt)


def mutations() -> st.SearchStrategy[Callable[[bytes], bytes]]:
    """Changes to a conversation: bytes exchanged, cut out, put in."""

    def change(place: float, cut: int, put: bytes) -> Callable[[bytes], bytes]:
        def apply(data: bytes) -> bytes:
            at = int(place * len(data))
            return data[:at] + put + data[at + cut :]

        return apply

    return st.builds(change, st.floats(0, 1), st.integers(0, 20), st.binary(max_size=40))


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["fetch", "send"]), st.lists(mutations(), max_size=3), st.binary(max_size=200))
def test_no_bytes_at_all_upset_a_server(
    does: Any, changes: list[Callable[[bytes], bytes]], tail: bytes
) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            desk = Desk(nursery, connections=3, greetings=2, stall_s=STALL_S)
            sent = preamble() + framed(msgspec.structs.replace(desk.hello, does=does))
            if does == "fetch":
                sent += framed(Ask(1, [PageName(PageRef(MAIN, 1, 1), desk.world.key(1))]))
            else:
                page = desk.world.page(1)
                sent += framed(Give(1, [GivenPage(PageRef(MAIN, 2, 1), zlib.crc32(page))])) + page
                sent += framed(Verdict(1, [True]))
            for change in changes:
                sent = change(sent)
            async with desk.connection() as (stream, _):
                if sent + tail:
                    await stream.send_all(sent + tail)
                await stream.send_eof()
                await all_that_comes(stream)
            desk.world.check()
            desk.server.check()
            for target in desk.world.stored_targets:
                assert desk.world.mains.slot(target) == desk.world.page(1)
            assert desk.server.statistics().open == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_no_header_at_all_upsets_a_server(body: bytes) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            desk = Desk(nursery)
            async with desk.connection() as (stream, _):
                await stream.send_all(preamble() + raw(len(body), body))
                await stream.send_eof()
                await all_that_comes(stream)
            assert desk.server.statistics().open == 0
            assert len(desk.errors) == 1

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


async def test_headers_nested_without_end(desk: Desk) -> None:
    encoded = msgspec.msgpack.encode(["Receipt", 1, [True]])
    nested = bytes([encoded[0] + 1]) + encoded[1:] + b"\x91" * 100_000 + b"\xc0"
    async with desk.connection() as (stream, wire):
        await desk.greet(wire)
        await stream.send_all(raw(len(nested), nested))
        with pytest.raises(ProtocolError, match="refused: "):
            await wire.receive(Run)


async def test_a_refusal_is_a_cut_when_it_is_temporary() -> None:
    with trio.fail_after(10):
        for temporary, error in ((True, TransferCut), (False, ProtocolError)):
            here, there = trio.testing.memory_stream_pair()
            await here.send_all(framed(Refused("no", temporary)))
            with pytest.raises(error, match="the peer refused: no"):
                await Wire(StreamBytes(there, 1.0), PAGE, 1.0).receive(Run)
