"""Measures what a flood of one client costs another one.

    python -m tools.bench fairness --topology local --flood 200
    python -m tools.bench fairness --topology local --flood 200 --priority 5 --json fairness.json

A quiet client asks one thing after another, first alone, then again while a flooding client keeps so
many requests open that most of them wait: whenever one is answered it sends another. What counts is how
much later the first token of the quiet client comes: the last column. A third run, under the flood's own
name, shows what it would be without fair queues. The flood is measured too: it may be slowed down, and
must not be starved.

Exit codes: 0 measured, 1 requests failed, 2 bad usage or topology, 3 the system could not be started
or used, 70 it did not stop cleanly, 130 interrupted.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import trio
from tqdm import tqdm

from tools.bench_client import Client
from tools.bench_load import BenchFailed
from tools.bench_serve import get_ready, settled
from tools.bench_system import add_system_arguments, count, milliseconds, run_with_system
from tools.install import say

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from tools.bench_client import Outcome
    from tools.bench_load import Prompts
    from tools.system import Running

COLUMNS = (("who", 34), ("TTFT ms p50/p95/p99", 28), ("answers", 9), ("errors", 8), ("p95 × alone", 13))
QUIET, FLOOD = "quiet", "flood"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `fairness` can be told."""
    add_system_arguments(parser)
    parser.add_argument(
        "--flood", type=count, default=200, metavar="N", help="requests that the flood keeps open (200)"
    )
    parser.add_argument("--asks", type=count, default=20, metavar="N", help="of the quiet client a run (20)")
    parser.add_argument("--input", type=count, default=128, metavar="TOKENS", help="of a prompt (128)")
    parser.add_argument("--output", type=count, default=64, metavar="TOKENS", help="of the flood's (64)")
    parser.add_argument(
        "--quiet-output", type=count, default=8, metavar="TOKENS", help="of the quiet client's answers (8)"
    )
    parser.add_argument(
        "--priority", type=int, default=0, help="that the flood gives itself, from -100 (first) to 100"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """`fairness`: the exit code."""
    report = run_with_system(options, lambda system: bench(system, options), max_open=2 * options.flood + 16)
    if isinstance(report, int):
        return report
    return 1 if any(figures["errors"] for figures in report["runs"]) else 0


def markdown(report: dict[str, Any]) -> list[str]:
    """The table of a report, line by line."""
    lines = [
        "| who | TTFT p50 / p95 / p99, ms | answers | errors | p95 × alone |",
        "|:---|---:|---:|---:|---:|",
    ]
    return [*lines, *(f"| {' | '.join(cells(run))} |" for run in report["runs"])]


async def bench(system: Running, options: argparse.Namespace) -> dict[str, Any]:
    """The quiet client alone, beside the flood, and under its name."""
    client = Client(system.url)
    prompts = await get_ready(client)
    print("".join(f"{name:>{width}}" for name, width in COLUMNS), flush=True)
    runs: list[dict[str, Any]] = []

    async def asks(who: str, name: str, number: int) -> None:
        outcomes = await quiet(system.url, client, prompts, name, number, options)
        alone = runs[0]["ttft_ms"]["p95"] if runs else None
        runs.append(shown(who, outcomes, alone))

    await asks("quiet, alone", QUIET, options.asks)
    await settled(client)
    outcomes: list[Outcome] = []
    over = False
    flood = named(system.url, client, FLOOD, priority=options.priority)

    async def flooding(number: int) -> None:
        draw = random.Random(f"{options.seed} flood {number}")
        while not over:
            outcomes.append(await flood.ask(prompts.make(options.input, draw), options.output))
            if outcomes[-1].error:
                return  # who is refused at once would ask without end

    async with trio.open_nursery() as nursery:
        for number in range(options.flood):
            nursery.start_soon(flooding, number)
        await waiting(client, options.flood // 2)
        await asks("quiet, beside the flood", QUIET, options.asks)
        await asks("quiet, by the flood's name", FLOOD, max(1, options.asks // 10))
        over = True
        say(f"waiting for the rest of the flood: {options.flood} answers")
    runs.append(shown("the flood itself", outcomes, None))
    return {"model": client.model, "runs": runs, "p95_ratio": runs[1]["p95_ratio"]}


async def waiting(client: Client, number: int) -> None:
    """Until so many requests wait."""
    with trio.move_on_after(30) as patience:
        while (await client.get("/statistics"))["scheduler"].get("requests_waiting", 0) < number:  # noqa: ASYNC110
            await trio.sleep(0.3)
    if patience.cancelled_caught:
        raise BenchFailed(f"there are never {number} requests waiting: is --flood large enough?")


def named(url: str, like: Client, user: str, **options: object) -> Client:
    """A client of that name."""
    client = Client(url)
    client.model = like.model
    client.options = {**like.options, "user": user, **options}
    return client


async def quiet(
    url: str, like: Client, prompts: Prompts, name: str, number: int, options: argparse.Namespace
) -> list[Outcome]:
    """One request after the other, with pauses of a random length, so that no rhythm is met by chance."""
    client = named(url, like, name)
    draw = random.Random(f"{options.seed} quiet")
    outcomes: list[Outcome] = []
    with tqdm(total=number, desc=name, unit="answer", leave=False, disable=None) as bar:
        for _ in range(number):
            await trio.sleep(draw.uniform(0, 0.5))
            prompt = prompts.make(options.input, draw)
            outcomes.append(await client.ask(prompt, options.quiet_output))
            bar.update()
    return outcomes


def cells(run: dict[str, Any]) -> tuple[str, ...]:
    """One run as texts for COLUMNS."""
    latencies = " / ".join("–" if value is None else f"{value:,.0f}" for value in run["ttft_ms"].values())
    ratio = "" if run["p95_ratio"] is None else f"{run['p95_ratio']:.2f}"
    return run["who"], latencies, str(run["requests"] - run["errors"]), str(run["errors"]), ratio


def shown(who: str, outcomes: Sequence[Outcome], alone: float | None) -> dict[str, Any]:
    """One entry of `runs`, printed."""
    whole = [outcome for outcome in outcomes if not outcome.error]
    ttft = milliseconds([outcome.pieces[0] - outcome.sent for outcome in whole if outcome.pieces])
    ratio = round(ttft["p95"] / alone, 2) if alone and ttft["p95"] is not None else None
    for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
        say(error)
    seconds = max(o.ended for o in outcomes) - min(o.sent for o in outcomes) if outcomes else 0.0
    run = {
        "who": who,
        "ttft_ms": ttft,
        "requests": len(outcomes),
        "errors": len(outcomes) - len(whole),
        "p95_ratio": ratio,
        "seconds": round(seconds, 1),
    }
    print(
        "".join(f"{text:>{width}}" for text, (_, width) in zip(cells(run), COLUMNS, strict=True)), flush=True
    )
    return run
