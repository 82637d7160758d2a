"""What every link keeps, run over each of them: memory, ZeroMQ over ipc and tcp, faulty without faults."""

from __future__ import annotations

import os
import random
import socket
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing

from engine.errors import StartError
from transport.faulty import FaultyNetwork
from transport.memory import MemoryNetwork
from transport.zeromq import ZeroMQNetwork

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transport.link import Inbox, LinkFactory, Outbox

HIGH_WATER_MARK = 20
LIMIT_S = 20.0

Kind = str
KINDS: list[Kind] = ["memory", "faulty", "ipc", "tcp"]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return str(request.param)


@pytest.fixture
def links(kind: Kind, tmp_path: Path, nursery: trio.Nursery) -> Iterator[LinkFactory]:
    if kind == "faulty":
        inner = MemoryNetwork(high_water_mark=HIGH_WATER_MARK)
        faulty = FaultyNetwork(inner, nursery, random.Random(0))
        yield faulty.links("outbox")
        assert set(msgspec.structs.astuple(faulty.statistics())[1:]) == {0}
    elif kind == "memory":
        memory = MemoryNetwork(high_water_mark=HIGH_WATER_MARK)
        yield memory
        memory.check()
    elif kind in ("ipc", "tcp"):
        network = ZeroMQNetwork(tmp_path, kind=kind, high_water_mark=HIGH_WATER_MARK)  # type: ignore[arg-type]
        yield network
        network.close()


@pytest.fixture
def inbox(links: LinkFactory) -> Iterator[Inbox]:
    inbox = links.bind("inbox.1")
    yield inbox
    inbox.close()


@pytest.fixture
def outbox(links: LinkFactory, inbox: Inbox) -> Iterator[Outbox]:
    outbox = links.connect(inbox.endpoint)
    yield outbox
    outbox.close()


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def fill(outbox: Outbox, limit: int = 1_000_000) -> int:
    """Send until the high-water mark; returns how many messages went."""
    for sent in range(limit):
        try:
            # Large, so that the kernel's socket buffers do not hide the mark.
            outbox.send_nowait(b"%7d" % sent + b"." * 20_000)
        except trio.WouldBlock:
            return sent
    raise AssertionError("no high-water mark")


async def send_for_ever(outbox: Outbox) -> None:
    while True:
        await outbox.send(b"." * 20_000)


async def test_messages_arrive_in_order(inbox: Inbox, outbox: Outbox) -> None:
    messages = numbered(2000)

    async def send_all() -> None:
        for message in messages:
            await outbox.send(message)

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_all)
            assert [await inbox.receive() for _ in messages] == messages


@pytest.mark.parametrize("size", [0, 1, 1 << 20])
async def test_messages_arrive_whole(inbox: Inbox, outbox: Outbox, size: int) -> None:
    message = os.urandom(size)
    with trio.fail_after(LIMIT_S):
        await outbox.send(message)
        await outbox.send(b"next")
        assert await inbox.receive() == message
        assert await inbox.receive() == b"next"


async def test_many_outboxes_reach_one_inbox(links: LinkFactory, inbox: Inbox) -> None:
    senders, count = 5, 100

    async def send_all(sender: int) -> None:
        outbox = links.connect(inbox.endpoint)
        for number in range(count):
            await outbox.send(b"%d %d" % (sender, number))
        await all_received.wait()
        outbox.close()

    all_received = trio.Event()
    received: dict[int, list[int]] = {sender: [] for sender in range(senders)}
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            for sender in range(senders):
                nursery.start_soon(send_all, sender)
            for _ in range(senders * count):
                sender, number = map(int, (await inbox.receive()).split())
                received[sender].append(number)
            all_received.set()
    assert all(numbers == list(range(count)) for numbers in received.values())


@pytest.mark.parametrize("kind", ["memory", "faulty", "ipc"])  # a port is not known before bind
async def test_connect_before_bind(links: LinkFactory) -> None:
    early = links.bind("late.1")
    endpoint = early.endpoint
    early.close()
    outbox = links.connect(endpoint)
    with trio.fail_after(LIMIT_S):
        await outbox.send(b"early")
        late = links.bind("late.1")
        assert late.endpoint == endpoint
        assert await late.receive() == b"early"
        late.close()
        outbox.close()


async def test_high_water_mark_holds_senders_back(inbox: Inbox, outbox: Outbox) -> None:
    with trio.fail_after(LIMIT_S):
        sent = fill(outbox)
        # What the sender's thread moved on meanwhile makes room again; in the end there is none.
        while (more := fill(outbox)) > 0:
            sent += more
            await trio.lowlevel.checkpoint()
        assert sent >= HIGH_WATER_MARK

        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def send_last() -> None:
                await outbox.send(b"last")
                done.set()

            nursery.start_soon(send_last)
            for number in range(sent):
                assert int((await inbox.receive())[:7].strip() or b"-1") >= 0, number
            assert await inbox.receive() == b"last"
            await done.wait()


async def test_nothing_to_receive_would_block(inbox: Inbox) -> None:
    with pytest.raises(trio.WouldBlock):
        inbox.receive_nowait()


async def test_cancelled_receive_loses_nothing(inbox: Inbox, outbox: Outbox) -> None:
    """Receives are cancelled all the time, at every possible moment, while messages arrive."""
    messages = numbered(500)
    received: list[bytes] = []

    async def receive_one(scope: trio.CancelScope) -> None:
        with scope:
            received.append(await inbox.receive())

    async def send_all() -> None:
        for message in messages:
            await outbox.send(message)
            await trio.lowlevel.checkpoint()

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as sending:
            sending.start_soon(send_all)
            while len(received) < len(messages):
                scope = trio.CancelScope()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(receive_one, scope)
                    await trio.lowlevel.checkpoint()
                    scope.cancel()
    assert received == messages


async def test_cancelled_before_it_began_receives_nothing(inbox: Inbox, outbox: Outbox) -> None:
    with trio.fail_after(LIMIT_S):
        await outbox.send(b"one")
        with trio.CancelScope() as scope:
            scope.cancel()
            await inbox.receive()
        assert scope.cancelled_caught
        assert await inbox.receive() == b"one"


async def test_cancelled_send_has_sent_or_not(inbox: Inbox, outbox: Outbox) -> None:
    """A send that was cancelled never arrives; one that returned always does."""
    sent: list[bytes] = []
    received: list[bytes] = []

    async def send_one(message: bytes, scope: trio.CancelScope) -> None:
        with scope:
            await outbox.send(message)
            sent.append(message)

    async def receive_all() -> None:
        while True:
            received.append(await inbox.receive())

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as receiving:
            for number in range(400):
                scope = trio.CancelScope()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(send_one, b"%d " % number + b"." * 20_000, scope)
                    await trio.lowlevel.checkpoint()
                    scope.cancel()
                if number == 200:
                    receiving.start_soon(receive_all)
            await outbox.send(b"end")
            sent.append(b"end")
            while not received or received[-1] != b"end":
                await trio.lowlevel.checkpoint()
            receiving.cancel_scope.cancel()
    assert len(sent) > HIGH_WATER_MARK
    assert received == sent


async def test_close_wakes_the_receiver(inbox: Inbox) -> None:
    async def receive() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await inbox.receive()

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(receive)
            await trio.testing.wait_all_tasks_blocked()
            inbox.close()
        with pytest.raises(trio.ClosedResourceError):
            await inbox.receive()
        with pytest.raises(trio.ClosedResourceError):
            inbox.receive_nowait()


async def test_close_wakes_the_sender(inbox: Inbox, outbox: Outbox) -> None:
    async def send() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await send_for_ever(outbox)

    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            outbox.close()
        with pytest.raises(trio.ClosedResourceError):
            await outbox.send(b"")
        with pytest.raises(trio.ClosedResourceError):
            outbox.send_nowait(b"")


async def test_close_is_idempotent(inbox: Inbox, outbox: Outbox) -> None:
    for _ in range(3):
        inbox.close()
        outbox.close()


async def test_the_fast_path_is_a_checkpoint(inbox: Inbox, outbox: Outbox) -> None:
    with trio.fail_after(LIMIT_S):
        with trio.testing.assert_checkpoints():
            await outbox.send(b"one")
        await outbox.send(b"two")
        await inbox.receive()
        await trio.testing.wait_all_tasks_blocked()
        with trio.testing.assert_checkpoints():
            await inbox.receive()


async def test_one_task_at_a_time(inbox: Inbox, outbox: Outbox) -> None:
    with trio.fail_after(LIMIT_S):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(inbox.receive)
            await trio.testing.wait_all_tasks_blocked()
            with pytest.raises(trio.BusyResourceError):
                await inbox.receive()
            nursery.cancel_scope.cancel()


async def test_a_peer_goes_and_its_next_incarnation_comes(
    links: LinkFactory, inbox: Inbox, outbox: Outbox
) -> None:
    with trio.fail_after(LIMIT_S):
        await outbox.send(b"to the first")
        assert await inbox.receive() == b"to the first"
        second = links.bind("inbox.2")
        assert second.endpoint != inbox.endpoint
        inbox.close()
        # Nobody tells the sender: it goes on until the high-water mark, and then waits for ever.
        fill(outbox)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_for_ever, outbox)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert nursery.child_tasks
            nursery.cancel_scope.cancel()
        again = links.connect(second.endpoint)
        await again.send(b"to the second")
        assert await second.receive() == b"to the second"
        second.close()
        again.close()
        outbox.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("kind", ["ipc", "tcp"])
def test_nothing_is_left_behind(kind: Kind, tmp_path: Path) -> None:
    async def talk() -> None:
        network = ZeroMQNetwork(tmp_path, kind=kind)  # type: ignore[arg-type]
        inbox = network.bind("inbox.1")
        outbox = network.connect(inbox.endpoint)
        nowhere = network.connect("ipc:///nonexistent/socket")
        with trio.fail_after(LIMIT_S):
            await outbox.send(b"one")
            assert await inbox.receive() == b"one"
            await outbox.send(b"never received")
            await nowhere.send(b"never received")
            with trio.move_on_after(0.01):
                await inbox.receive()
                await inbox.receive()
        inbox.close()
        network.close()
        network.close()

    trio.run(talk)  # whatever libraries open once is open now
    before = open_fds()
    for _ in range(3):
        trio.run(talk)
    assert open_fds() == before
    assert list(tmp_path.rglob("*.*")) == []


@pytest.mark.parametrize("host", ["127.0.0.2", "::1"])
def test_a_tcp_inbox_is_where_it_was_asked_for(host: str, tmp_path: Path) -> None:
    """At one address and port, which the next one finds taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as probe:
            port = probe.getsockname()[1]
    except OSError:
        pytest.skip(f"this machine has no address {host}")

    async def talk() -> None:
        network = ZeroMQNetwork(tmp_path, kind="tcp", host=host, port=port)
        try:
            inbox = network.bind("launcher.1")
            shown = f"[{host}]" if ":" in host else host
            assert inbox.endpoint == f"tcp://{shown}:{port}"
            outbox = network.connect(inbox.endpoint)
            with trio.fail_after(LIMIT_S):
                await outbox.send(b"one")
                assert await inbox.receive() == b"one"
            with pytest.raises(StartError, match="in use"):
                network.bind("launcher.2")
        finally:
            network.close()

    trio.run(talk)
