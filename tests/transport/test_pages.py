"""Page transports: whole pages of the right generation, or a plain no."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing

from engine.shapes import PageRef
from transport.errors import ProtocolError, TransferCut
from transport.pages import PageCopy, PagePool, SharedMemoryPages
from transport.segments import create_segment, map_segment
from transport.tcp_pages import HEADER_LIMIT, BatchEnd, Page, PageReceiver, Receipt, TcpPages

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from transport.segments import Segment

PAGE = 5000
PAGES = 8
MAIN, STANDBY = 0, 1


@pytest.fixture
def segments() -> Iterator[tuple[Segment, Segment]]:
    mapped = []
    for name in ("main", "standby"):
        fd = create_segment(name, PAGES * PAGE + 7)
        mapped.append(map_segment(fd))
        os.close(fd)
    mapped[0].view[:] = os.urandom(mapped[0].size)
    yield mapped[0], mapped[1]
    for segment in mapped:
        segment.close()


class Generations:
    """Stands for the generations in shared memory; `reused` is bumped right after its first check."""

    def __init__(self) -> None:
        self.current = dict.fromkeys(range(PAGES), 1)
        self.reused: set[int] = set()

    def still_valid(self, page: PageRef) -> bool:
        valid = self.current[page.index] == page.generation
        if page.index in self.reused:
            self.reused.discard(page.index)
            self.current[page.index] += 1
        return valid


def copies(*indexes: int, generation: int = 1) -> list[PageCopy]:
    """Each page goes to the mirrored slot."""
    return [
        PageCopy(PageRef(MAIN, index, generation), PageRef(STANDBY, PAGES - 1 - index, 4))
        for index in indexes
    ]


def page_of(segment: Segment, index: int) -> bytes:
    return bytes(segment.view[index * PAGE : (index + 1) * PAGE])


class Host:
    """Both ends of a TCP transfer, over any pair of streams."""

    def __init__(self, segments: tuple[Segment, Segment]) -> None:
        self.main = PagePool(MAIN, segments[0].view, PAGE)
        self.standby = PagePool(STANDBY, segments[1].view, PAGE)
        self.generations = Generations()
        self.refused: set[int] = set()
        self.stored: list[PageRef] = []

    def sender(self, stream: trio.abc.Stream) -> TcpPages:
        return TcpPages(stream, self.main, self.generations.still_valid)

    def receiver(self, stream: trio.abc.Stream) -> PageReceiver:
        return PageReceiver(
            stream, self.standby, lambda target: target.index not in self.refused, self.stored.append
        )


@pytest.fixture
def host(segments: tuple[Segment, Segment]) -> Host:
    return Host(segments)


@pytest.fixture(params=["shared memory", "memory stream", "tcp"])
async def transport(
    request: pytest.FixtureRequest, host: Host, nursery: trio.Nursery
) -> AsyncIterator[SharedMemoryPages | TcpPages]:
    if request.param == "shared memory":
        yield SharedMemoryPages(host.main, host.standby, host.generations.still_valid)
        return

    async def serve(stream: trio.abc.Stream) -> None:
        async with stream:
            await host.receiver(stream).serve()

    here: trio.abc.Stream
    if request.param == "memory stream":
        here, there = trio.testing.memory_stream_pair()
        nursery.start_soon(serve, there)
    else:
        listeners = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        here = await trio.testing.open_stream_to_socket_listener(listeners[0])
    async with here:
        yield host.sender(here)


async def test_pages_arrive_whole(
    transport: SharedMemoryPages | TcpPages, segments: tuple[Segment, Segment]
) -> None:
    main, standby = segments
    with trio.fail_after(10):
        assert await transport.copy(copies(0, 3)) == [True, True]
        assert await transport.copy(copies(7)) == [True]
        assert await transport.copy([]) == []
    for index in range(PAGES):
        expected = page_of(main, index) if index in (0, 3, 7) else bytes(PAGE)
        assert page_of(standby, PAGES - 1 - index) == expected


async def test_a_page_of_another_generation_is_not_copied(
    transport: SharedMemoryPages | TcpPages, segments: tuple[Segment, Segment], host: Host
) -> None:
    host.generations.current[2] = 9
    with trio.fail_after(10):
        assert await transport.copy(copies(1, 2, 4)) == [True, False, True]
    assert page_of(segments[1], PAGES - 1 - 2) == bytes(PAGE)


async def test_a_page_reused_while_it_was_copied_does_not_count(
    transport: SharedMemoryPages | TcpPages, host: Host
) -> None:
    host.generations.reused = {4}
    with trio.fail_after(10):
        assert await transport.copy(copies(1, 4, 5)) == [True, False, True]


async def test_a_slot_outside_the_pool_is_our_fault(transport: SharedMemoryPages | TcpPages) -> None:
    with trio.fail_after(10), pytest.raises((IndexError, KeyError)):
        await transport.copy(copies(PAGES))


async def test_copying_lets_others_run(transport: SharedMemoryPages | TcpPages) -> None:
    with trio.fail_after(10), trio.testing.assert_checkpoints():
        await transport.copy(copies(1))


def test_pools_must_fit(segments: tuple[Segment, Segment]) -> None:
    pool = PagePool(MAIN, segments[0].view, PAGE)
    with pytest.raises(ValueError, match="do not fit"):
        SharedMemoryPages(pool, PagePool(STANDBY, segments[1].view, PAGE + 1), lambda _: True)
    with pytest.raises(ValueError, match="must have bytes"):
        PagePool(MAIN, segments[0].view, 0)
    assert pool.pages == PAGES
    for wrong in (PageRef(STANDBY, 0, 1), PageRef(MAIN, -1, 1), PageRef(MAIN, PAGES, 1)):
        with pytest.raises(IndexError):
            pool.slot(wrong)


async def test_a_receiver_may_refuse(host: Host, nursery: trio.Nursery) -> None:
    here, there = trio.testing.memory_stream_pair()
    nursery.start_soon(host.receiver(there).serve)
    host.refused = {PAGES - 1 - 1}
    with trio.fail_after(10):
        assert await host.sender(here).copy(copies(0, 1, 2)) == [True, False, True]
    assert [page.index for page in host.stored] == [PAGES - 1, PAGES - 3]


def framed(header: msgspec.Struct, body: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return len(encoded).to_bytes(4, "big") + encoded + body


async def record(host: Host, wanted: list[PageCopy]) -> bytes:
    """The bytes that a sender sends for these pages."""
    here, there = trio.testing.memory_stream_pair()
    async with trio.open_nursery() as nursery:

        async def copy() -> None:
            with pytest.raises(TransferCut):
                await host.sender(here).copy(wanted)

        nursery.start_soon(copy)
        await trio.testing.wait_all_tasks_blocked()
        sent = bytes(await there.receive_some())
        await there.send_eof()
    return sent


async def receive(host: Host, sent: bytes) -> bytes:
    """Serve these bytes and then the end of the stream; returns the answer."""
    here, there = trio.testing.memory_stream_pair()
    await here.send_all(sent)
    await here.send_eof()
    await host.receiver(there).serve()
    await there.send_eof()
    return bytes(await here.receive_some())


async def test_a_stream_cut_anywhere_leaves_whole_pages_only(
    host: Host, segments: tuple[Segment, Segment]
) -> None:
    sent = await record(host, copies(0, 1))
    main, standby = segments
    with trio.fail_after(60):
        assert await receive(host, b"") == b""
        for cut in [*range(1, 80), *range(80, len(sent), 97), len(sent) - 1]:
            standby.view[:] = bytes(standby.size)
            host.stored.clear()
            with pytest.raises(TransferCut):
                await receive(host, sent[:cut])
            for index in (0, 1):
                target = PAGES - 1 - index
                whole = target in [page.index for page in host.stored]
                assert page_of(standby, target) == (page_of(main, index) if whole else bytes(PAGE))
        assert await receive(host, sent) == framed(Receipt(1, [True, True]))


async def test_a_wrong_bit_in_a_page_is_noticed(host: Host, segments: tuple[Segment, Segment]) -> None:
    sent = bytearray(await record(host, copies(0)))
    sent[PAGE // 2] ^= 4
    with trio.fail_after(10), pytest.raises(ProtocolError, match="do not match their checksum"):
        await receive(host, bytes(sent))
    assert not host.stored
    assert not any(segments[1].view)


TARGET = PageRef(STANDBY, 0, 4)


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "a header of 1195725856 bytes"),
        (b"\0\0\0\1\xc1", "not a header"),
        (framed(Receipt(1, [])), "not a header"),
        (framed(Page(2, TARGET, PAGE, 0)), "version 2, this is 1"),
        (framed(Page(1, TARGET, PAGE + 1, 0)), "a page of 5001 bytes, those here have 5000"),
        (framed(Page(1, PageRef(MAIN, 0, 4), PAGE, 0)), "pool 1 of 8 pages has no"),
        (framed(Page(1, PageRef(STANDBY, PAGES, 4), PAGE, 0)), "pool 1 of 8 pages has no"),
        (framed(BatchEnd(1, 1)), "ends after 0 of 1 pages"),
    ],
)
async def test_a_sender_that_talks_nonsense(host: Host, sent: bytes, match: str) -> None:
    with trio.fail_after(10), pytest.raises(ProtocolError, match=match):
        await receive(host, sent)
    assert not host.stored


@pytest.mark.parametrize(
    ("answer", "error", "match"),
    [
        (framed(Receipt(2, [True])), ProtocolError, "batch 2 answers 1 pages of batch 1"),
        (framed(Receipt(1, [])), ProtocolError, "a receipt for 0 pages"),
        ((HEADER_LIMIT + 1).to_bytes(4, "big"), ProtocolError, "a header of"),
        (framed(Receipt(1, [True]))[:-1], TransferCut, "1 bytes to come"),
        (b"", TransferCut, "4 bytes to come"),
    ],
)
async def test_a_receiver_that_talks_nonsense(
    host: Host, answer: bytes, error: type[Exception], match: str
) -> None:
    here, there = trio.testing.memory_stream_pair()
    await there.send_all(answer)
    await there.send_eof()
    sender = host.sender(here)
    with trio.fail_after(10):
        with pytest.raises(error, match=match):
            await sender.copy(copies(0))
        with pytest.raises(TransferCut, match="was not finished"):
            await sender.copy(copies(0))


async def test_a_broken_stream_is_a_cut(host: Host) -> None:
    here, there = trio.testing.memory_stream_pair()
    await there.aclose()
    with trio.fail_after(10), pytest.raises(TransferCut):
        await host.sender(here).copy(copies(0))


async def test_a_stream_closed_between_batches_is_an_orderly_end(host: Host) -> None:
    here, there = trio.testing.memory_stream_pair()
    await here.aclose()
    with trio.fail_after(10):
        await host.receiver(there).serve()


async def test_a_cancelled_copy_ends_the_stream(host: Host) -> None:
    here, _ = trio.testing.memory_stream_pair()
    sender = host.sender(here)
    with trio.fail_after(10):
        with trio.CancelScope() as scope:
            scope.cancel()
            await sender.copy(copies(0))
        assert scope.cancelled_caught
        with pytest.raises(TransferCut, match="was not finished"):
            await sender.copy(copies(0))
