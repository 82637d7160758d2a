"""Measures a gateway with very many streams open at once.

    python -m tools.bench streams --topology local --streams 1000
    python -m tools.bench streams --topology two-gateways --streams 1000 --output 16 --json streams.json

Opens so many streaming requests at the same time, over all gateways in turn, reads every one to its
end, and looks at the gateways from outside: what a stream costs of their memory while all are open,
what is left of it afterwards, and what a streamed token costs of their CPU (with its share of its
request, without what they use when nobody asks).

Exit codes: 0 measured, 1 requests failed, 2 bad usage or topology, 3 the system could not be started
or used, 70 it did not stop cleanly, 130 interrupted.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from tqdm import tqdm

from tools import observe
from tools.bench_client import Client
from tools.bench_load import BenchFailed
from tools.bench_serve import settled
from tools.bench_system import add_system_arguments, count, milliseconds, run_with_system
from tools.install import say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tools.bench_client import Outcome
    from tools.system import Running

IDLE_S = 5.0
PATIENCE_S = 3600.0
WHAT = {
    "streams": "streams",
    "gateways": "gateways",
    "open_at_once": "open at once",
    "tokens": "tokens",
    "kib_a_stream": "KiB a stream while open",
    "kib_left": "KiB left afterwards",
    "gateway_cpu_us_a_token": "µs of gateway CPU a token",
    "errors": "errors",
}
"""Keys of the report and what they mean."""
TICKS = os.sysconf("SC_CLK_TCK")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `streams` can be told."""
    add_system_arguments(parser)
    parser.add_argument("--streams", type=count, default=1000, metavar="N", help="open at once (1000)")
    parser.add_argument("--input", type=count, default=8, metavar="TOKENS", help="of a prompt (8)")
    parser.add_argument("--output", type=count, default=16, metavar="TOKENS", help="of an answer (16)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """`streams`: the exit code."""
    if options.url:
        say("--url: the gateways' processes are measured from outside, so the system has to be started here")
        return 2
    report = run_with_system(options, lambda system: bench(system, options), max_open=2 * options.streams)
    if isinstance(report, int):
        return report
    return 1 if report["errors"] else 0


def markdown(report: dict[str, Any]) -> list[str]:
    """The table of a report, line by line."""
    values = [f"{report[key]:,}" for key in WHAT]
    return [
        f"| {' | '.join(WHAT.values())} |",
        f"|{'---:|' * len(values)}",
        f"| {' | '.join(values)} |",
    ]


async def bench(system: Running, options: argparse.Namespace) -> dict[str, Any]:
    """Open all, look, read all, look again."""
    clients = [Client(url, PATIENCE_S) for url in system.urls.values()]
    client = clients[0]
    model = (await client.get("/v1/models"))["data"][0]["id"]
    for one_client in clients:
        one_client.model = model
        one_client.options = {**client.options, "ignore_eos": True}
    warm = await client.ask(prompt_of(options, -1), 1)
    if warm.error:
        raise BenchFailed(warm.error)
    lives = observe.lives(Path(system.run_dir))
    gateways = {name: lives[name][-1].pid for name in system.urls}
    await settled(client)
    idle = await idle_share(gateways)
    before, busy, began = memory(gateways), cpu_s(gateways), time.perf_counter()
    outcomes: list[Outcome] = []
    most = 0
    with tqdm(total=options.streams, desc="streams", unit="answer", leave=False, disable=None) as bar:
        async with trio.open_nursery() as nursery:
            for number in range(options.streams):
                asker = clients[number % len(clients)]
                nursery.start_soon(one, outcomes, asker, prompt_of(options, number), options.output, bar)
            peak = before
            while len(outcomes) < options.streams:
                await trio.sleep(1)
                figures = await client.get("/statistics")
                is_open = sum(int(figures[name].get("requests", 0)) for name in gateways)
                if is_open > most:
                    most, peak = is_open, memory(gateways)
    busy = cpu_s(gateways) - busy - idle * (time.perf_counter() - began)
    await settled(client)
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    if not tokens:
        raise BenchFailed(outcomes[0].error or "no token came")
    report = {
        "model": client.model,
        "streams": options.streams,
        "gateways": len(gateways),
        "open_at_once": most,
        "tokens": tokens,
        "kib_a_stream": round((peak - before) / max(1, most), 1),
        "kib_left": memory(gateways) - before,
        "gateway_cpu_us_a_token": round(1e6 * busy / tokens, 1),
        "ttft_ms": milliseconds([o.pieces[0] - o.sent for o in outcomes if o.pieces]),
        "errors": sum(bool(outcome.error) for outcome in outcomes),
    }
    for key, what in WHAT.items():
        print(f"{what:36} {report[key]:,}", flush=True)
    for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
        say(error)
    return report


async def idle_share(gateways: dict[str, int]) -> float:
    """CPU seconds a second that all gateways together use when nobody asks anything."""
    before, began = cpu_s(gateways), time.perf_counter()
    await trio.sleep(IDLE_S)
    return (cpu_s(gateways) - before) / (time.perf_counter() - began)


def prompt_of(options: argparse.Namespace, number: int) -> list[int]:
    """Some tokens that every vocabulary has: what they say is of no interest here."""
    draw = random.Random(f"{options.seed} {number}")
    return [draw.randrange(3, 200) for _ in range(options.input)]


async def one(outcomes: list[Outcome], client: Client, prompt: list[int], output: int, bar: Any) -> None:
    """One stream to its end."""
    outcomes.append(await client.ask(prompt, output))
    bar.update()


def memory(gateways: dict[str, int]) -> int:
    """KiB of their own that all gateways together hold."""
    held: Sequence[observe.Usage | None] = [observe.usage(pid) for pid in gateways.values()]
    return sum(usage.private_kib for usage in held if usage is not None)


def cpu_s(gateways: dict[str, int]) -> float:
    """CPU seconds that all gateways together have used, user and system."""
    ticks = 0
    for pid in gateways.values():
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / TICKS
