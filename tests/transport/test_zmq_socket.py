"""What only ZeroMQ has: full duplex on one socket, addresses that can be wrong, several frames."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import zmq

from engine.errors import EstafetError
from transport.zeromq import IPC_PATH_LIMIT, ZeroMQNetwork
from transport.zmq_socket import ZmqSocket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Pair = tuple[ZmqSocket, ZmqSocket]


def connect(context: zmq.Context[zmq.Socket[bytes]], kinds: tuple[int, int], address: str) -> Pair:
    """Two connected sockets with room for three messages a side."""
    sockets = [context.socket(kind) for kind in kinds]
    for socket in sockets:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 3)
        socket.setsockopt(zmq.RCVHWM, 3)
        if socket.getsockopt(zmq.TYPE) == zmq.ROUTER:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    sockets[0].bind(address)
    endpoint = sockets[0].getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    sockets[1].connect(endpoint.rstrip(b"\0").decode())
    return ZmqSocket(sockets[0]), ZmqSocket(sockets[1])


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def fill(end: ZmqSocket) -> int:
    """Send until the high-water mark; returns how many messages went."""
    for sent in range(1000):
        try:
            end.send_nowait(b"%d" % sent)
        except trio.WouldBlock:
            return sent
    raise AssertionError("no high-water mark")


ADDRESSES = {"inproc": "inproc://stress", "ipc": "ipc://{}/stress", "tcp": "tcp://127.0.0.1:*"}


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("kinds", [(zmq.PAIR, zmq.PAIR), (zmq.DEALER, zmq.DEALER)], ids=["pair", "dealer"])
async def test_full_duplex_never_stands_still(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, kinds: tuple[int, int], address: str
) -> None:
    """Both ends send and receive at once, always at the high-water mark; wake-ups must not get lost."""
    ends = connect(context, kinds, ADDRESSES[address].format(tmp_path))
    count = 10_000
    done = trio.Event()
    receiving = 2

    async def send_all(end: ZmqSocket) -> None:
        for number in range(count):
            await end.send(b"%d" % number)

    async def receive_all(end: ZmqSocket) -> None:
        nonlocal receiving
        for number in range(count):
            assert await end.receive() == b"%d" % number
        receiving -= 1
        if not receiving:
            done.set()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            for end in ends:
                nursery.start_soon(send_all, end)
                nursery.start_soon(receive_all, end)
            await done.wait()
    for end in ends:
        end.close()


async def test_a_send_passes_the_receivers_wake_up_on(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """libzmq tells of a message once; if a send on the same socket hears it, the receiver must still."""
    one, two = connect(context, (zmq.PAIR, zmq.PAIR), "inproc://wake")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:

            async def receive() -> None:
                assert await one.receive() == b"news"

            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            two.send_nowait(b"news")
            fill(one)
    one.close()
    two.close()


async def test_a_receive_passes_the_senders_wake_up_on(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    one, two = connect(context, (zmq.PAIR, zmq.PAIR), "inproc://wake")
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            sent = fill(one)
            nursery.start_soon(one.send, b"waits for room")
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(sent):
                two.receive_nowait()
            with pytest.raises(trio.WouldBlock):
                one.receive_nowait()
    one.close()
    two.close()


async def test_a_refusal_is_never_spurious(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Room that the peer has made is seen at once: for a door, WouldBlock means a slow client."""
    one, two = connect(context, (zmq.PAIR, zmq.PAIR), "inproc://room")
    for _ in range(1000):
        for _ in range(fill(one)):
            two.receive_nowait()
        one.send_nowait(b"")
        two.receive_nowait()
    one.close()
    two.close()


async def test_dealers_and_a_router(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    """The router answers whom it hears from, by `_nowait`, while its other task keeps receiving."""
    router, dealer = connect(context, (zmq.ROUTER, zmq.DEALER), f"ipc://{tmp_path}/door")
    count = 3000

    async def answer() -> None:
        while True:
            frames = await router.receive_frames()
            while True:
                try:
                    router.send_frames_nowait(frames)
                except trio.WouldBlock:
                    await trio.lowlevel.checkpoint()
                else:
                    break

    async def ask() -> None:
        for number in range(count):
            await dealer.send_frames([b"", b"%d" % number])

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(answer)
            nursery.start_soon(ask)
            for number in range(count):
                assert await dealer.receive_frames() == [b"", b"%d" % number]
            with pytest.raises(TypeError, match="_nowait"):
                await router.send_frames([b"who", b"what"])
            nursery.cancel_scope.cancel()
    router.close()
    dealer.close()


async def test_close_wakes_both_directions(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    one, two = connect(context, (zmq.PAIR, zmq.PAIR), "inproc://close")

    async def expect_closed(send: bool) -> None:
        with pytest.raises(trio.ClosedResourceError):
            await (send_for_ever() if send else one.receive())

    async def send_for_ever() -> None:
        while True:
            await one.send(b"")

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_closed, True)
            nursery.start_soon(expect_closed, False)
            await trio.testing.wait_all_tasks_blocked()
            one.close()
            one.close()
    two.close()


def test_a_path_that_is_too_long_is_said_so(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * IPC_PATH_LIMIT)
    network = ZeroMQNetwork(folder)
    with pytest.raises(EstafetError, match=r"bytes, the system allows 107: choose a shorter run directory"):
        network.bind("inbox.1")
    assert not folder.exists()
    network.close()


def test_the_longest_path_works(tmp_path: Path) -> None:
    network = ZeroMQNetwork(tmp_path)
    room = IPC_PATH_LIMIT - len(str(tmp_path / "s")) - 1
    inbox = network.bind("n" * room)
    with pytest.raises(EstafetError, match="108 bytes"):
        network.bind("n" * (room + 1))
    inbox.close()
    network.close()


@pytest.mark.parametrize("name", ["", "a/b", "a\0b"])
def test_names_are_file_names(tmp_path: Path, name: str) -> None:
    network = ZeroMQNetwork(tmp_path)
    with pytest.raises(EstafetError, match="cannot be the name of an inbox"):
        network.bind(name)
    network.close()


@pytest.mark.parametrize("endpoint", ["", "nonsense", "carrier-pigeon://home", "tcp://127.0.0.1"])
def test_malformed_endpoints_are_said_so(tmp_path: Path, endpoint: str) -> None:
    network = ZeroMQNetwork(tmp_path)
    with pytest.raises(EstafetError, match="cannot connect to"):
        network.connect(endpoint)
    network.close()


def test_an_address_that_cannot_be_bound_is_said_so(tmp_path: Path) -> None:
    network = ZeroMQNetwork(tmp_path, kind="tcp", host="192.0.2.1")
    with pytest.raises(EstafetError, match=r"cannot open the inbox 'inbox\.1' at tcp://192\.0\.2\.1"):
        network.bind("inbox.1")
    network.close()
