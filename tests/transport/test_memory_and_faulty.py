"""The two links for tests: losing an inbox, and every fault on purpose, in virtual time."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec
import pytest
import trio
import trio.testing

from transport.channel import Channel, Incarnation, decode_frame
from transport.faulty import EdgePlan, FaultyNetwork
from transport.memory import MemoryNetwork

if TYPE_CHECKING:
    from transport.faulty import Fate
    from transport.link import Inbox


async def receive_all(inbox: Inbox, patience_s: float = 100.0) -> list[bytes]:
    """Everything that arrives until nothing has for `patience_s`, of virtual time."""
    received = []
    with trio.fail_after(1e6):
        while True:
            with trio.move_on_after(patience_s) as scope:
                received.append(await inbox.receive())
            if scope.cancelled_caught:
                return received


async def test_a_killed_inbox_loses_what_is_under_way(autojump_clock: trio.testing.MockClock) -> None:
    network = MemoryNetwork(high_water_mark=3)
    inbox = network.bind("decode.1")
    outbox = network.connect(inbox.endpoint)
    outbox.send_nowait(b"lost")
    network.cut(inbox.endpoint)
    assert network.statistics()["lost"] == 1
    assert await receive_all(inbox) == []
    for _ in range(3):
        outbox.send_nowait(b"into the void")
    with pytest.raises(trio.WouldBlock):
        outbox.send_nowait(b"no more")
    inbox.close()
    network.check()
    # A name is free again once its inbox is gone, whoever was there.
    again = network.bind("decode.1")
    assert again.receive_nowait() == b"into the void"
    inbox.close()
    assert again.receive_nowait() == b"into the void"
    again.close()
    outbox.close()
    network.check()
    assert network.statistics() == {"inboxes": 0, "pipes": 0, "queued": 0, "lost": 2}


async def test_what_had_left_outlives_its_outbox() -> None:
    network = MemoryNetwork()
    inbox = network.bind("gateway.1")
    outbox = network.connect(inbox.endpoint)
    outbox.send_nowait(b"last words")
    outbox.close()
    network.check()
    with trio.fail_after(5):
        assert await inbox.receive() == b"last words"
    network.check()
    assert network.statistics()["pipes"] == 0


async def test_no_outbox_starves() -> None:
    network = MemoryNetwork()
    inbox = network.bind("gateway.1")
    for name in (b"a", b"b"):
        outbox = network.connect(inbox.endpoint)
        for _ in range(3):
            outbox.send_nowait(name)
    assert b"".join(inbox.receive_nowait() for _ in range(6)) == b"ababab"


def test_wrong_addresses_are_refused() -> None:
    network = MemoryNetwork()
    network.bind("gateway.1")
    with pytest.raises(ValueError, match="bound already"):
        network.bind("gateway.1")
    with pytest.raises(ValueError, match="not an endpoint"):
        network.connect("ipc:///run/s/gateway.1")


async def converse(plan: EdgePlan, count: int = 10, seed: int = 0) -> tuple[str, dict[str, int]]:
    """Send 0, 1, 2 … one each 10 ms over the plan; returns what arrived and what was done."""
    with trio.fail_after(1e6):
        return await _converse(plan, count, seed)


async def _converse(plan: EdgePlan, count: int, seed: int) -> tuple[str, dict[str, int]]:
    async with trio.open_nursery() as nursery:
        memory = MemoryNetwork(high_water_mark=2 * count)
        network = FaultyNetwork(memory, nursery, random.Random(seed), plan=plan)
        links = network.links("gateway")
        inbox = links.bind("decode.1")
        outbox = links.connect(inbox.endpoint)
        for number in range(count):
            await outbox.send(b"%d" % number)
            await trio.sleep(0.01)
        received = b"".join(await receive_all(inbox)).decode()
        memory.check()
        outbox.close()
        outbox.close()
    done = msgspec.structs.asdict(network.statistics())
    return received, {name: value for name, value in done.items() if value}


@pytest.mark.parametrize(
    ("fate", "arrives", "counter"),
    [
        ("pass", "0123456789", None),
        ("drop", "013456789", "dropped"),
        ("delay", "0123456789", "delayed"),
        ("duplicate", "01234567892", "duplicated"),
        ("reorder", "0134567892", "reordered"),
    ],
)
async def test_a_script_decides(
    autojump_clock: trio.testing.MockClock, fate: Fate, arrives: str, counter: str | None
) -> None:
    received, done = await converse(EdgePlan(script={2: fate}))
    assert received == arrives
    assert done == {"sent": 10} | ({counter: 1} if counter else {})


@pytest.mark.parametrize("name", ["drop", "delay", "duplicate", "reorder"])
async def test_rates(autojump_clock: trio.testing.MockClock, name: str) -> None:
    plan = msgspec.structs.replace(EdgePlan(), **{name: 0.3})
    received, done = await converse(plan, 1000, seed=7)
    kind = {"drop": "dropped", "delay": "delayed", "duplicate": "duplicated", "reorder": "reordered"}[name]
    assert 230 < done.pop(kind) < 370
    assert done == {"sent": 1000}
    whole = "".join(map(str, range(1000)))
    assert (received == whole) == (name == "delay")
    assert (received, {kind: 0}.keys()) == ((await converse(plan, 1000, seed=7))[0], {kind})


async def test_a_cut_ends_by_itself(autojump_clock: trio.testing.MockClock) -> None:
    received, done = await converse(EdgePlan(cut=0.02, cut_s=0.1), 300, seed=3)
    # Ten messages a cut, for one is sent each 10 ms (the last cut may be shorter).
    assert done["cut"] == done["dropped"] >= 20
    assert len(received) < len("".join(map(str, range(300))))


async def test_cut_and_heal(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = FaultyNetwork(MemoryNetwork(), nursery, random.Random(0))
        links = network.links("gateway")
        inbox = links.bind("decode.1")
        outbox = links.connect(inbox.endpoint)
        network.cut("gateway", inbox.endpoint)
        outbox.send_nowait(b"lost")
        network.heal(source="somebody else")
        outbox.send_nowait(b"lost")
        network.heal()
        outbox.send_nowait(b"heard")
        assert await receive_all(inbox) == [b"heard"]
        assert network.statistics().cut == 2


async def test_the_hook_sees_every_message_and_may_decide(autojump_clock: trio.testing.MockClock) -> None:
    seen: list[tuple[int, str, str, bytes]] = []

    def hook(number: int, source: str, destination: str, message: bytes) -> Fate | None:
        seen.append((number, source, destination, message))
        if message == b"kill":
            memory.cut(destination)
        return "drop" if message == b"drop" else None

    async with trio.open_nursery() as nursery:
        memory = MemoryNetwork()
        network = FaultyNetwork(memory, nursery, random.Random(0), on_message=hook)
        inbox = network.links("decode").bind("decode.1")
        for source, message in [("gateway", b"one"), ("scheduler", b"drop"), ("gateway", b"kill")]:
            network.links(source).connect(inbox.endpoint).send_nowait(message)
            if message == b"drop":
                assert await receive_all(inbox) == [b"one"]
        assert await receive_all(inbox) == []
    assert seen == [
        (0, "gateway", "memory:decode.1", b"one"),
        (1, "scheduler", "memory:decode.1", b"drop"),
        (2, "gateway", "memory:decode.1", b"kill"),
    ]


async def test_a_plan_may_differ_by_edge(autojump_clock: trio.testing.MockClock) -> None:
    def plan(source: str, destination: str) -> EdgePlan:
        return EdgePlan(drop=1.0 if source == "gateway" else 0.0)

    async with trio.open_nursery() as nursery:
        network = FaultyNetwork(MemoryNetwork(), nursery, random.Random(0), plan=plan)
        inbox = network.links("decode").bind("decode.1")
        for source in ("gateway", "scheduler"):
            network.links(source).connect(inbox.endpoint).send_nowait(source.encode())
        assert await receive_all(inbox) == [b"scheduler"]


async def test_a_closed_outbox_drops_what_is_held_back(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        network = FaultyNetwork(MemoryNetwork(), nursery, random.Random(0), plan=EdgePlan(delay=1.0))
        links = network.links("gateway")
        inbox = links.bind("decode.1")
        outbox = links.connect(inbox.endpoint)
        outbox.send_nowait(b"held back")
        await trio.testing.wait_all_tasks_blocked()
        outbox.close()
        with pytest.raises(trio.ClosedResourceError):
            outbox.send_nowait(b"")
        with pytest.raises(trio.ClosedResourceError):
            await outbox.send(b"")
        assert await receive_all(inbox) == []


async def test_a_channel_over_the_worst_of_links(autojump_clock: trio.testing.MockClock) -> None:
    """Everything at once, both ways: each message is delivered once and in order."""
    count = 300
    plan = EdgePlan(drop=0.2, delay=0.2, duplicate=0.2, reorder=0.2, cut=0.01, delay_s=0.3, cut_s=1.0)
    ends = (Incarnation("gateway", 1), Incarnation("decode", 5))
    delivered: dict[str, list[int]] = {end.name: [] for end in ends}

    async def actor(local: Incarnation, remote: Incarnation) -> None:
        links = network.links(local.name)
        inbox, outbox = links.bind(local.name), links.connect(f"memory:{remote.name}")
        channel = Channel(local, remote)
        sent = 0
        while True:
            now = trio.current_time()
            if sent < count:
                outbox.send_nowait(channel.send(msgspec.msgpack.encode(sent), now))
                sent += 1
            for frame in channel.poll(now):
                outbox.send_nowait(frame)
            deadline = channel.deadline()
            if sent < count:
                deadline = now + 0.02
            if deadline is None and len(delivered[local.name]) == count:
                finished.add(local.name)
                if len(finished) == len(ends):
                    nursery.cancel_scope.cancel()
            with trio.move_on_at(deadline if deadline is not None else float("inf")):
                bodies = channel.receive(decode_frame(await inbox.receive()), trio.current_time())
                delivered[local.name] += map(msgspec.msgpack.decode, bodies)
            channel.check()

    finished: set[str] = set()
    with trio.fail_after(3600):
        async with trio.open_nursery() as nursery:
            network = FaultyNetwork(MemoryNetwork(), nursery, random.Random(11), plan=plan)
            nursery.start_soon(actor, *ends)
            nursery.start_soon(actor, *reversed(ends))
    assert all(numbers == list(range(count)) for numbers in delivered.values())
    assert min(msgspec.structs.astuple(network.statistics())) > 0
