"""Measures what a message and a page cost: `python -m tools.bench_links [--json FILE]`.

Both ends of a link run in processes of their own, as actors do. Figures are medians of several runs
on whatever machine this is; run it while nothing else does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from engine.ids import Incarnation
from engine.shapes import PageRef
from transport.channel import Channel, decode_frame
from transport.pages import PageCopy, PagePool, SharedMemoryPages
from transport.segments import create_segment, map_segment, populate
from transport.tcp_pages import PageReceiver, TcpPages
from transport.zeromq import ZeroMQNetwork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from transport.link import Inbox

Kind = Literal["ipc", "tcp"]

MESSAGE = b"." * 204
ROUND_TRIPS = 2000
IN_FLIGHT = 50
CHANNEL_MESSAGES = 50_000
PAGE_BYTES = 368 * 1024
"""16 tokens of SmolLM2-135M in 16 bits."""
PAGES = 64


async def receive_some(inbox: Inbox) -> list[bytes]:
    """Wait for a message and take what else is there: one turn of the scheduler for all of them."""
    messages = [await inbox.receive()]
    with contextlib.suppress(trio.WouldBlock):
        while len(messages) < IN_FLIGHT:
            messages.append(inbox.receive_nowait())
    return messages


def echo(kind: Kind, folder: str, endpoint: str) -> None:
    """The other process: sends back whatever it gets, to the inbox that the first message names."""

    async def run() -> None:
        network = ZeroMQNetwork(Path(folder), kind=kind, high_water_mark=10 * IN_FLIGHT)
        inbox, first = network.bind("echo"), network.connect(endpoint)
        await first.send(inbox.endpoint.encode())
        while True:
            for message in await receive_some(inbox):
                if not message:
                    network.close()
                    return
                first.send_nowait(message)

    trio.run(run)


async def measure_link(kind: Kind, folder: Path) -> dict[str, float]:
    """Round trip of one message in µs, and round trips a second with many in flight."""
    network = ZeroMQNetwork(folder, kind=kind)
    inbox = network.bind("bench")
    process = multiprocessing.get_context("spawn").Process(
        target=echo, args=(kind, str(folder), inbox.endpoint), daemon=True
    )
    process.start()
    with trio.fail_after(120):
        outbox = network.connect((await inbox.receive()).decode())
        times = []
        for _ in range(ROUND_TRIPS):
            start = time.perf_counter()
            await outbox.send(MESSAGE)
            await inbox.receive()
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        for _ in range(IN_FLIGHT):
            await outbox.send(MESSAGE)
        received = 0
        while received < 10 * ROUND_TRIPS:
            for message in await receive_some(inbox):
                received += 1
                outbox.send_nowait(message)
        rate = received / (time.perf_counter() - start)
        for _ in range(IN_FLIGHT):
            await inbox.receive()
        await outbox.send(b"")
        await trio.to_thread.run_sync(process.join)
    network.close()
    return {
        f"{kind}_round_trip_us": statistics.median(times) * 1e6,
        f"{kind}_round_trips_a_second_50_in_flight": rate,
    }


def channel_us() -> float:
    """One message through a channel: send, decode, receive, and its share of acknowledgements, in µs."""
    ends = Incarnation("gateway", 1), Incarnation("decode", 1)
    here, there = Channel(ends[0], ends[1]), Channel(ends[1], ends[0])
    body = msgspec.msgpack.encode(MESSAGE)
    start = time.perf_counter()
    for number in range(CHANNEL_MESSAGES):
        there.receive(decode_frame(here.send(body, 0.0)), 0.0)
        if number % 64 == 63:
            for frame in there.poll(0.0):
                here.receive(decode_frame(frame), 0.0)
    return (time.perf_counter() - start) / CHANNEL_MESSAGES * 1e6


async def measure_pages() -> dict[str, float]:
    """GB/s of page copies between pools, and over TCP on this host with both ends in this process."""
    segments = []
    for name in ("main", "standby"):
        fd = create_segment(name, PAGES * PAGE_BYTES)
        segments.append(map_segment(fd))
        os.close(fd)
        populate(segments[-1])
    source, target = (PagePool(number, segments[number].view, PAGE_BYTES) for number in (0, 1))
    copies = [PageCopy(PageRef(0, index, 1), PageRef(1, index, 1)) for index in range(PAGES)]

    async def serve(stream: trio.SocketStream) -> None:
        await PageReceiver(stream, target, lambda _: True, lambda _: None).serve()

    async def rate(transport: SharedMemoryPages | TcpPages) -> float:
        rates = []
        for _ in range(9):
            start = time.perf_counter()
            assert all(await transport.copy(copies))
            rates.append(PAGES * PAGE_BYTES / (time.perf_counter() - start) / 1e9)
        return statistics.median(rates)

    shared = await rate(SharedMemoryPages(source, target, lambda _: True))
    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(lambda task_status: serve_on_loopback(serve, task_status))
        stream = await trio.open_tcp_stream("127.0.0.1", listeners[0].socket.getsockname()[1])
        async with stream:
            tcp = await rate(TcpPages(stream, source, lambda _: True))
        nursery.cancel_scope.cancel()
    for segment in segments:
        segment.close()
    return {"pages_shared_memory_gb_s": shared, "pages_tcp_gb_s": tcp}


async def serve_on_loopback(
    handler: Callable[[trio.SocketStream], Awaitable[object]],
    task_status: trio.TaskStatus[list[trio.SocketListener]],
) -> None:
    """Serve on a port that the system chooses."""
    await trio.serve_tcp(handler, 0, host="127.0.0.1", task_status=task_status)


def main(arguments: list[str] | None = None) -> int:
    """Run all measurements and print them, as JSON into a file too when asked."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench_links", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    options = parser.parse_args(arguments)
    figures: dict[str, float] = {}
    for kind in ("ipc", "tcp"):
        with tempfile.TemporaryDirectory() as folder:
            figures |= trio.run(measure_link, kind, Path(folder))
    figures["channel_us_a_message"] = statistics.median(channel_us() for _ in range(5))
    figures |= trio.run(measure_pages)
    for name, value in figures.items():
        print(f"{name:45} {value:12,.1f}")
    if options.json:
        machine = {
            "machine": platform.machine(),
            "processors": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
        }
        options.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
