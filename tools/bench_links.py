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
import zlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

from engine.ids import Incarnation
from engine.shapes import PageRef
from transport.channel import Channel, decode_frame
from transport.page_fetch import PageFetcher
from transport.page_hosts import PageParty, PinnedPages
from transport.page_push import PageSender
from transport.page_server import PageServer
from transport.pages import PageCopy, PageFetch, PagePool, PagePools, SharedMemoryPages
from transport.segments import create_segment, map_segment, populate
from transport.tcp_pages import serve_tcp_pages, tcp_connector
from transport.zeromq import ZeroMQNetwork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from transport.link import Inbox
    from transport.page_wire import PageName

Kind = Literal["ipc", "tcp"]

MESSAGE = b"." * 204
ROUND_TRIPS = 2000
IN_FLIGHT = 50
CHANNEL_MESSAGES = 50_000
PAGE_BYTES = 360 * 1024
"""16 tokens of SmolLM2-135M in 16 bits."""
PAGES = 100


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


class Obliging:
    """Gives and takes every page."""

    def __init__(self, checksums: dict[PageRef, int]) -> None:
        self._checksums = checksums

    async def pin(self, names: Sequence[PageName]) -> PinnedPages:
        """All are there."""
        return PinnedPages(0, [True] * len(names))

    def unpin(self, read: int) -> None:
        """Nothing was pinned."""

    def still_valid(self, page: PageRef) -> bool:
        """Pages stay."""
        return True

    def checksum_of(self, page: PageRef) -> int | None:
        """As recorded."""
        return self._checksums.get(page)

    def accepts(self, target: PageRef) -> bool:
        """Everything is welcome."""
        return True

    def stored(self, target: PageRef) -> None:
        """Nobody is told."""


async def measure_pages() -> dict[str, float]:
    """GB/s of page copies between pools, and over TCP on this host with both ends in this thread."""
    segments = []
    for name in ("main", "standby"):
        fd = create_segment(name, PAGES * PAGE_BYTES)
        segments.append(map_segment(fd))
        os.close(fd)
        populate(segments[-1])
    source, target = (PagePool(number, segments[number].view, PAGE_BYTES) for number in (0, 1))
    source.slot(PageRef(0, 0, 1))[:] = os.urandom(PAGE_BYTES)
    copies = [PageCopy(PageRef(0, index, 1), PageRef(1, index, 1)) for index in range(PAGES)]
    fetches = [PageFetch(copy.source, bytes(16), copy.target) for copy in copies]
    host = Obliging({copy.source: zlib.crc32(source.slot(copy.source)) for copy in copies})

    async def rate(name: str, copy: Callable[[], Awaitable[list[bool]]]) -> dict[str, float]:
        rates, processor = [], []
        for _ in range(9):
            start, busy = time.perf_counter(), time.process_time()
            assert all(await copy())
            rates.append(PAGES * PAGE_BYTES / (time.perf_counter() - start) / 1e9)
            processor.append((time.process_time() - busy) / PAGES * 1e6)
        return {
            f"pages_{name}_gb_s": statistics.median(rates),
            f"pages_{name}_cpu_us_a_page": statistics.median(processor),
        }

    here, there = PageParty("bench", "here", 1), PageParty("bench", "there", 1)
    shared = SharedMemoryPages(source, target, host.still_valid)
    figures = await rate("shared_memory", lambda: shared.copy(copies))
    giving = PageServer(here, PagePools(source), giver=host)
    taking = PageServer(there, PagePools(target), taker=host)
    async with trio.open_nursery() as nursery:
        connects = [
            tcp_connector("127.0.0.1", await nursery.start(serve_tcp_pages, server, "127.0.0.1", 0))
            for server in (giving, taking)
        ]
        fetcher = PageFetcher(connects[0], there, PagePools(target))
        await nursery.start(fetcher.run)
        figures |= await rate("tcp_pull", lambda: fetcher.fetch(fetches))
        for name, checksum_of in (("tcp_push", host.checksum_of), ("tcp_push_unsealed", lambda _: None)):
            sender = PageSender(
                connects[1], here, PagePools(source), host.still_valid, checksum_of=checksum_of
            )
            await nursery.start(sender.run)
            figures |= await rate(name, partial(sender.push, copies))
        assert target.slot(PageRef(1, 0, 1)) == source.slot(PageRef(0, 0, 1))
        nursery.cancel_scope.cancel()
    for segment in segments:
        segment.close()
    return figures


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
