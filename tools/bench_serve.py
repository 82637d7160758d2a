"""Measures a running system through its HTTP door, as its clients see it.

    python -m tools.bench serve --topology local --concurrency 1,4,16,32 --input 128 --output 64
    python -m tools.bench serve --url http://127.0.0.1:8000 --concurrency 8 --json figures.json
    python -m tools.bench serve --topology local --trace mooncake.jsonl.gz --scale 64:100 --limit 50

Closed loop: so many clients, each of which asks again as soon as it is answered. With --trace open
loop: requests are sent at their time, whoever still waits.

  TTFT         from before the connection is made to the first piece of text
  inter-token  between pieces of text; a piece is a token, but for those that came together
  tokens/s     of answers that are complete, from the first request to the last answer
  utilisation  the share of that time which the busiest worker spent inside its backend

Prompts are ordinary words at random, each of which is one token of the served model, and have exactly
--input tokens with everything the template adds; the door's own count must agree.

Exit codes: 0 measured, 1 requests failed, 2 bad usage or topology, 3 the system could not be started
or used, 70 it did not stop cleanly, 130 interrupted.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio
from tqdm import tqdm

from tools import observe
from tools.bench_client import Client, Outcome
from tools.bench_load import (
    LEAD,
    WORDS,
    Arrival,
    BenchFailed,
    Prompts,
    Request,
    Scale,
    read_trace,
    scale_of,
    single_token_words,
)
from tools.bench_system import add_system_arguments, count, milliseconds, run_with_system
from tools.install import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

QUIET_S = 5.0
"""How long we wait after a run until all actors have published their last figures."""


def busy_shares(before: observe.Figures, after: observe.Figures, wall_s: float) -> dict[str, float]:
    """The share of the wall time that each worker was inside its backend.

    A worker that was started anew in between has counted from zero again.
    """
    shares = {}
    for name, figures in after.items():
        if "busy_s" in figures:
            was = before.get(name, {})
            began = was.get("busy_s", 0.0) if was.get("epoch") == figures["epoch"] else 0.0
            shares[name] = round((figures["busy_s"] - began) / wall_s, 3)
    return shares


def summary(concurrency: int, outcomes: Sequence[Outcome], shares: dict[str, float]) -> dict[str, Any]:
    """One entry of `runs`."""
    whole = [outcome for outcome in outcomes if not outcome.error]
    wall_s = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    output = sum(outcome.output_tokens for outcome in whole)
    prompt = sum(outcome.prompt_tokens for outcome in whole)
    gaps = [b - a for outcome in whole for a, b in zip(outcome.pieces, outcome.pieces[1:], strict=False)]
    return {
        "concurrency": concurrency,
        "ttft_ms": milliseconds([outcome.pieces[0] - outcome.sent for outcome in whole if outcome.pieces]),
        "itl_ms": milliseconds(gaps),
        "output_tokens_per_s": round(output / wall_s, 2),
        "total_tokens_per_s": round((output + prompt) / wall_s, 2),
        "utilisation": max(shares.values(), default=0.0),
        "utilisation_by_worker": shares,
        "output_tokens_mean": round(output / len(whole), 1) if whole else 0.0,
        "requests": len(outcomes),
        "errors": len(outcomes) - len(whole),
        "seconds": round(wall_s, 1),
    }


# ── a run ─────────────────────────────────────────────────────────────────────────────────────


async def get_ready(client: Client) -> Prompts:
    """Find out what the model's tokens are, by asking; warms the system up, too.

    BenchFailed when the system does not answer or cannot be measured.
    """
    client.model = (await client.get("/v1/models"))["data"][0]["id"]
    ignoring = {**client.options, "ignore_eos": True}
    client.options, plain = ignoring, client.options
    if (await client.ask(LEAD, 1)).error:  # a door that does not know it, yet
        client.options = plain

    async def tokens_of(words: Sequence[str]) -> int:
        outcome = await client.ask(" ".join([LEAD, *words]), 1)
        if outcome.error:
            raise BenchFailed(outcome.error)
        return outcome.prompt_tokens

    overhead = await tokens_of([])

    async def counted(words: Sequence[str]) -> int:
        return await tokens_of(words) - overhead

    words = await single_token_words(WORDS, counted)
    if not words:
        raise BenchFailed("none of our words is one token of this model")
    return Prompts(words, overhead)


async def closed_loop(
    client: Client, requests: Sequence[Request], concurrency: int, seconds: float, took: Callable[[], object]
) -> list[Outcome]:
    """So many clients at once; nobody starts another request after so many seconds."""
    left = iter(requests)
    outcomes: list[Outcome] = []
    until = time.perf_counter() + seconds

    async def one_client() -> None:
        for request in left:
            if time.perf_counter() > until:
                return
            outcomes.append(_checked(await client.ask(request.prompt, request.output), request))
            took()

    async with trio.open_nursery() as nursery:
        for _ in range(concurrency):
            nursery.start_soon(one_client)
    return outcomes


async def open_loop(
    client: Client, requests: Sequence[Request], seconds: float, took: Callable[[], object]
) -> tuple[list[Outcome], int]:
    """Each request at its time, up to so many seconds; and how many were open at once at most."""
    outcomes: list[Outcome] = []
    began = trio.current_time()
    is_open = most = 0

    async def one(request: Request) -> None:
        nonlocal is_open, most
        is_open += 1
        most = max(most, is_open)
        outcomes.append(_checked(await client.ask(request.prompt, request.output), request))
        is_open -= 1
        took()

    async with trio.open_nursery() as nursery:
        for request in requests:
            if request.at_s > seconds:
                break
            await trio.sleep_until(began + request.at_s)
            nursery.start_soon(one, request)
    return outcomes, most


def _checked(outcome: Outcome, request: Request) -> Outcome:
    if not outcome.error and outcome.prompt_tokens != request.input:
        outcome.error = f"the prompt has {outcome.prompt_tokens} tokens, not {request.input}"
    return outcome


async def settled(client: Client) -> observe.Figures:
    """What all actors published, as soon as nothing is left of any request."""
    deadline = trio.current_time() + QUIET_S
    while True:
        await trio.sleep(0.3)  # they publish every 250 ms: what stands there may be from before the run
        figures: observe.Figures = await client.get("/statistics")
        if not observe.held(figures) or trio.current_time() > deadline:
            return figures


async def measured(
    client: Client,
    requests: Sequence[Request],
    concurrency: int | None,
    seconds: float,
    took: Callable[[], object],
) -> tuple[dict[str, Any], list[Outcome]]:
    """A run between two looks at the statistics; an open loop when there is no concurrency."""
    before = await settled(client)
    if concurrency is None:
        outcomes, concurrency = await open_loop(client, requests, seconds, took)
    else:
        outcomes = await closed_loop(client, requests, concurrency, seconds, took)
    after = await settled(client)
    if not outcomes:
        raise BenchFailed("no request was sent")
    wall_s = max(outcome.ended for outcome in outcomes) - min(outcome.sent for outcome in outcomes)
    return summary(concurrency, outcomes, busy_shares(before, after, wall_s)), outcomes


# ── the command ───────────────────────────────────────────────────────────────────────────────

COLUMNS = (
    ("clients", 7),
    ("TTFT ms p50/p95/p99", 24),
    ("inter-token ms p50/p95/p99", 27),
    ("out tok/s", 10),
    ("all tok/s", 10),
    ("busy", 6),
    ("answers", 8),
    ("errors", 7),
)


def cells(run: dict[str, Any]) -> list[str]:
    """One run as texts for COLUMNS."""

    def three(values: dict[str, float | None]) -> str:
        return " / ".join("–" if value is None else f"{value:,.0f}" for value in values.values())

    return [
        str(run["concurrency"]),
        three(run["ttft_ms"]),
        three(run["itl_ms"]),
        f"{run['output_tokens_per_s']:.1f}",
        f"{run['total_tokens_per_s']:.1f}",
        f"{100 * run['utilisation']:.0f} %",
        str(run["requests"] - run["errors"]),
        str(run["errors"]),
    ]


def markdown(report: dict[str, Any]) -> list[str]:
    """The table of a report, line by line."""
    return [
        "| clients | TTFT p50 / p95 / p99, ms | inter-token p50 / p95 / p99, ms | output tokens/s "
        "| all tokens/s | busy | answers | errors |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(cells(run))} |" for run in report["runs"]),
    ]


def show(row: Sequence[str]) -> None:
    """Print a row of the table."""
    print("".join(f"{text:>{width}}" for text, (_, width) in zip(row, COLUMNS, strict=True)), flush=True)


async def bench(url: str, arrivals: Sequence[Arrival], options: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for; the runs, and the model. A trace's arrivals, or none."""
    client = Client(url)
    prompts = await get_ready(client)
    if "ignore_eos" not in client.options:
        say("this door does not know ignore_eos: an answer may end before --output")
    show([name for name, _ in COLUMNS])
    runs: list[dict[str, Any]] = []
    plans: list[int | None] = [None] if arrivals else options.concurrency
    for concurrency in plans:
        if concurrency is None:
            scaled = [options.scale(arrival, prompts.overhead) for arrival in arrivals]
        else:
            number = options.requests or max(4, 2 * concurrency)
            scaled = [Arrival(0.0, options.input, options.output)] * number
        requests = planned(prompts, scaled, f"{options.seed} {concurrency}")
        name = "trace" if arrivals else f"{concurrency} clients"
        with tqdm(total=len(requests), desc=name, unit="answer", leave=False, disable=None) as bar:
            figures, outcomes = await measured(client, requests, concurrency, options.seconds, bar.update)
        runs.append(figures)
        show(cells(figures))
        for error in sorted({outcome.error for outcome in outcomes if outcome.error}):
            say(error)
        if len(outcomes) < len(requests):
            say(f"{len(requests) - len(outcomes)} requests were not sent within {options.seconds:g} s")
        if not arrivals and figures["output_tokens_mean"] < options.output:
            say(f"answers had {figures['output_tokens_mean']} tokens on average, not {options.output}")
    return {"model": client.model, "runs": runs}


def planned(prompts: Prompts, arrivals: Iterable[Arrival], seed: str) -> list[Request]:
    """The requests of one run, with prompts drawn by the seed; BenchFailed when they cannot be made."""
    found = []
    for number, arrival in enumerate(arrivals):
        try:
            prompt = prompts.make(arrival.input, random.Random(f"{seed} {number}"))
        except ValueError as error:
            raise BenchFailed(f"--input: {error}") from error
        found.append(Request(arrival.at_s, prompt, arrival.input, arrival.output))
    return found


def run(options: argparse.Namespace) -> int:
    """`serve`: the exit code."""
    try:
        arrivals = read_trace(options.trace)[: options.limit] if options.trace else []
    except BenchFailed as error:
        say(str(error))
        return 2
    report = run_with_system(options, lambda system: bench(system.url, arrivals, options))
    if isinstance(report, int):
        return report
    return 1 if any(figures["errors"] for figures in report["runs"]) else 0


def _numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers from 1, such as 1,4,16")
    return [int(part) for part in parts]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `serve` can be told."""
    add_system_arguments(parser)
    parser.add_argument(
        "--concurrency", type=_numbers, default=[1, 4, 16, 32], metavar="N,…", help="default 1,4,16,32"
    )
    parser.add_argument("--input", type=count, default=128, metavar="TOKENS", help="of a prompt (128)")
    parser.add_argument("--output", type=count, default=64, metavar="TOKENS", help="of an answer (64)")
    parser.add_argument(
        "--requests", type=count, metavar="N", help="a run (twice the concurrency, at least 4)"
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=300.0, metavar="S", help="no request starts later in a run (300)"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="send a trace's requests at their times")
    parser.add_argument(
        "--scale",
        type=scale_of,
        default=Scale(),
        metavar="LENGTHS:TIMES",
        help="divide the trace's lengths and stretch its times by these",
    )
    parser.add_argument("--limit", type=count, metavar="N", help="the first N requests of a trace")
    parser.set_defaults(run=run)
