"""Bytes into slots: only while somebody wants them there, however long they were waited for."""

from __future__ import annotations

import os
import zlib
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from transport.errors import TransferCut
from transport.page_streams import SocketBytes, Stalled, StreamBytes, byte_stream
from transport.page_wire import Wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from transport.page_streams import ByteStream

PAGE = 5000


@pytest.fixture(params=["socket", "memory"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[tuple[trio.abc.Stream, ByteStream]]:
    """A raw stream and the ByteStream at its other end."""
    here: trio.abc.Stream
    there: trio.abc.Stream
    if request.param == "memory":
        here, there = trio.testing.memory_stream_pair()
        stream = byte_stream(there, 1.0)
        assert isinstance(stream, StreamBytes)
    else:
        listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
        here = await trio.testing.open_stream_to_socket_listener(listener)
        there = await listener.accept()
        await listener.aclose()
        stream = byte_stream(there, 1.0)
        assert isinstance(stream, SocketBytes)
    yield here, stream
    await stream.aclose()
    await stream.aclose()
    await here.aclose()


async def test_a_slot_given_up_while_its_page_is_waited_for_is_left_alone(
    pair: tuple[trio.abc.Stream, ByteStream],
) -> None:
    peer, stream = pair
    wire = Wire(stream, PAGE, 10.0)
    data = os.urandom(2 * PAGE)
    slot, other = bytearray(PAGE), bytearray(PAGE)
    wanted = True
    checksums: list[int | None] = []

    async def take() -> None:
        checksums.append(await wire.take_page(memoryview(slot), lambda: wanted))
        checksums.append(await wire.take_page(memoryview(other), lambda: True))

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            await peer.send_all(data[:2000])
            while slot[:2000] != data[:2000]:
                await trio.lowlevel.checkpoint()
            await trio.testing.wait_all_tasks_blocked(0.01)
            # Somebody waits for the rest of the page now, and the slot goes to somebody else.
            wanted = False
            slot[:] = b"\xee" * PAGE
            await peer.send_all(data[2000:])
    assert slot == b"\xee" * PAGE
    # The stream is where it should be: the next page is whole.
    assert other == data[PAGE:]
    assert checksums == [None, zlib.crc32(data[PAGE:])]


async def test_many_buffers_go_out_in_order(pair: tuple[trio.abc.Stream, ByteStream]) -> None:
    peer, stream = pair
    buffers = [os.urandom(size) for size in [*range(150), 100_000, 0, 1, 3_000_000, 7]]
    expected = b"".join(buffers)
    received = bytearray()

    async def receive() -> None:
        while len(received) < len(expected):
            received.extend(await peer.receive_some())

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await stream.send([memoryview(buffer) for buffer in buffers])
    assert received == expected


async def test_the_end_and_a_break_are_told_apart(pair: tuple[trio.abc.Stream, ByteStream]) -> None:
    peer, stream = pair
    room = memoryview(bytearray(10))
    with trio.fail_after(10):
        await peer.send_all(b"abc")
        await peer.aclose()
        assert await stream.receive_into(lambda: room, 5.0) == 3
        assert room[:3] == b"abc"
        assert await stream.receive_into(lambda: room, 5.0) == 0
        # More than a socket buffers, and it is not read.
        with pytest.raises(TransferCut, match=r"the (connection|stream) broke"):
            await stream.send([bytes(100_000)] * 100)


async def test_waiting_has_an_end(pair: tuple[trio.abc.Stream, ByteStream]) -> None:
    _, stream = pair
    with trio.fail_after(10), pytest.raises(Stalled, match=r"the peer sent nothing for 0\.02 s"):
        await stream.receive_into(lambda: memoryview(bytearray(1)), 0.02)


async def test_receiving_and_sending_are_checkpoints(pair: tuple[trio.abc.Stream, ByteStream]) -> None:
    peer, stream = pair
    with trio.fail_after(10):
        with trio.testing.assert_checkpoints():
            await stream.send([b"x"])
        await peer.send_all(b"abc")
        with trio.CancelScope() as scope:
            scope.cancel()
            await stream.receive_into(lambda: memoryview(bytearray(3)), 1.0)
        assert scope.cancelled_caught
        room = memoryview(bytearray(3))
        assert await stream.receive_into(lambda: room, 1.0) == 3
        assert room == b"abc"


async def test_a_peer_that_stops_reading_stops_the_sender() -> None:
    """The kernel's buffers fill up and the sender waits, but not for ever."""
    data = bytes(range(256)) * (1 << 17)
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    with trio.fail_after(20):
        peer = await trio.testing.open_stream_to_socket_listener(listener)
        stream = SocketBytes(await listener.accept(), 0.05)
        with pytest.raises(Stalled, match=r"the peer took nothing for 0\.05 s"):
            await stream.send([data])
        await stream.aclose()
        received = 0
        async for piece in peer:
            assert piece == data[received : received + len(piece)]
            received += len(piece)
        assert 0 < received < len(data)
        await peer.aclose()
        await listener.aclose()
