"""What whole systems do for `tools.bench peers`: how busy a worker is, and what long prompts cost streams.

Both start a system, ask it through its HTTP door, and stop it. In `pinned` a worker that prefills and one
that decodes have a core each; some streams decode, and now and then somebody sends a prompt as long as
the model allows. The inter-token times inside such a prompt's prefill are compared with those outside.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import trio

from tools.bench_client import Client
from tools.bench_load import Arrival, BenchFailed
from tools.bench_serve import get_ready, measured, planned
from tools.bench_system import first_of, milliseconds, percentile, run_with_system
from tools.install import say

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tools.bench_client import Outcome
    from tools.bench_load import Prompts
    from tools.system import Running

STREAMS = 4
STREAM_INPUT, STREAM_OUTPUT = 64, 1024
LONG = 8192
"""Tokens of a long prompt, where the model's context has room for them."""
LONG_ASKS = 1
QUIET_S = 10.0
"""Before each long prompt, and after the last."""
FEW = 100
"""Of fewer gaps a 99th percentile says nothing."""
PATIENCE_S = 1800.0
SATURATED = 32
"""Streams at which a worker has no time to spare."""


class Plan(NamedTuple):
    """How the systems of one comparison are started."""

    settings: Sequence[str]
    """KEY=VALUE for `--set` of the launcher."""
    backend: str
    model: str
    """For `model.path`."""
    seed: int
    long: int
    """Tokens of a long prompt."""
    stream_output: int = STREAM_OUTPUT
    quiet_s: float = QUIET_S
    page_tokens: int = 16

    def launcher(self, workers: Sequence[str]) -> list[str]:
        """What the launcher is told besides the topology."""
        settings = [f"worker.{name}.backend={self.backend}" for name in workers]
        settings += [f"model.path={self.model}", *self.settings]
        return [word for setting in settings for word in ("--set", setting)]

    def options(self, topology: str, workers: Sequence[str]) -> argparse.Namespace:
        """As `run_with_system` wants them."""
        return argparse.Namespace(
            command="peers",
            command_line="",
            topology=topology,
            url=None,
            json=None,
            seed=self.seed,
            for_launcher=self.launcher(workers),
        )


# ── how busy ──────────────────────────────────────────────────────────────────────────────────


def saturation(plan: Plan, prompt: int, output: int) -> dict[str, Any]:
    """`unified` with as many streams as saturate it: an entry of `bench serve`'s runs; else a BenchFailed."""

    async def measure(system: Running) -> dict[str, Any]:
        client = Client(system.url, PATIENCE_S)
        prompts = await get_ready(client)
        arrivals = [Arrival(0.0, prompt, output)] * (2 * SATURATED)
        requests = planned(prompts, arrivals, f"{plan.seed} saturation")
        figures, outcomes = await measured(client, requests, SATURATED, PATIENCE_S, lambda: None)
        _check(outcomes)
        return figures

    return with_system(plan.options("unified", ["both"]), measure)


def with_system(
    options: argparse.Namespace, measure: Callable[[Running], Awaitable[dict[str, Any]]]
) -> dict[str, Any]:
    """What is measured of a system; of the report that goes around it there is one already."""
    kept: dict[str, Any] = {}
    why: list[BaseException] = []

    async def keep(system: Running) -> dict[str, Any]:
        try:
            kept.update(await measure(system))
        except Exception as error:
            why.append(first_of(error))
            raise
        return kept

    found = run_with_system(options, keep)
    if isinstance(found, int):
        if why and isinstance(why[0], BenchFailed):
            raise why[0]
        name = Path(options.topology or options.url).stem
        raise BenchFailed(f"{name}: it could not be measured (exit code {found})")
    return kept


def _check(outcomes: Sequence[Outcome]) -> None:
    wrong = sorted({outcome.error for outcome in outcomes if outcome.error})
    if wrong:
        raise BenchFailed(wrong[0])


# ── what long prompts cost streams ────────────────────────────────────────────────────────────


class Window(NamedTuple):
    """From when a long prompt was sent until its answer came, in seconds of time.perf_counter."""

    begin: float
    end: float


def split_gaps(
    streams: Sequence[Outcome], windows: Sequence[Window], began: float, ended: float
) -> tuple[list[float], list[float]]:
    """Inter-token times of the streams: those outside of all windows, and those that a window touches.

    Only between `began` and `ended`, while all streams were at work.
    """
    quiet: list[float] = []
    loaded: list[float] = []
    for stream in streams:
        for first, second in zip(stream.pieces, stream.pieces[1:], strict=False):
            if first < began or second > ended:
                continue
            touched = any(first < window.end and second > window.begin for window in windows)
            (loaded if touched else quiet).append(second - first)
    return quiet, loaded


def compared(quiet: Sequence[float], loaded: Sequence[float], windows: Sequence[Window]) -> dict[str, Any]:
    """One entry of the report; BenchFailed when there are too few gaps for a 99th percentile."""
    if min(len(quiet), len(loaded)) < FEW:
        raise BenchFailed(
            f"only {len(quiet)} inter-token times without and {len(loaded)} with a long prompt, not {FEW}"
        )
    return {
        "itl_p99_ratio": percentile(loaded, 0.99) / percentile(quiet, 0.99),
        "unloaded_ms": milliseconds(quiet),
        "loaded_ms": milliseconds(loaded),
        "gaps": [len(quiet), len(loaded)],
        "prefill_s": [round(window.end - window.begin, 2) for window in windows],
    }


async def watch_streams(system: Running, plan: Plan) -> dict[str, Any]:
    """Streams that decode all the time, with a long prompt now and then."""
    client = Client(system.url, PATIENCE_S)
    prompts = await get_ready(client)
    draw = random.Random(f"{plan.seed} pinned")
    outcomes: list[Outcome] = []
    windows: list[Window] = []
    ending = False
    started: list[float] = []

    async def stream(number: int) -> None:
        own = random.Random(f"{plan.seed} stream {number}")
        while not ending:
            outcomes.append(await client.ask(prompts.make(STREAM_INPUT, own), plan.stream_output))

    async with trio.open_nursery() as nursery:
        for number in range(STREAMS):
            nursery.start_soon(stream, number)
        await _decoding(client)
        started.append(time.perf_counter())
        for _ in range(LONG_ASKS):
            await trio.sleep(plan.quiet_s)
            windows.append(await _long_prompt(client, prompts, plan.long, draw))
        await trio.sleep(plan.quiet_s)
        stopped, ending = time.perf_counter(), True
    _check(outcomes)
    return compared(*split_gaps(outcomes, windows, started[0], stopped), windows)


async def _long_prompt(client: Client, prompts: Prompts, tokens: int, draw: random.Random) -> Window:
    outcome = await client.ask(prompts.make(tokens, draw), 1)
    _check([outcome])
    return Window(outcome.sent, outcome.ended)


async def _decoding(client: Client) -> None:
    """Until all streams are past their prefill."""
    with trio.move_on_after(PATIENCE_S) as patience:
        while True:
            figures = await client.get("/statistics")
            if sum(of_actor.get("sequences_decode", 0) for of_actor in figures.values()) >= STREAMS:
                break
            await trio.sleep(0.3)
    if patience.cancelled_caught:
        raise BenchFailed(f"there are never {STREAMS} streams that decode")


def pinned_topology(cores: Sequence[int], pages: int, *, separate: bool) -> str:
    """A topology file: one worker for each role on a core of its own, or one that does both on two cores."""
    head = f"[kv]\npages = {pages}\n\n[gateway.front]\nport = 0\n"
    workers = {"prefill": cores[:1], "decode": cores[1:2]} if separate else {"both": cores[:2]}
    tables = (
        f'\n[worker.{name}]\nrole = "{name}"\nthreads = {len(on)}\ncores = {list(on)}\n'
        for name, on in workers.items()
    )
    return head + "".join(tables)


def pinned(plan: Plan, cores: Sequence[int], *, separate: bool) -> dict[str, Any]:
    """Start such a system and compare its streams' inter-token times; BenchFailed when that fails."""
    per_stream = -(-(STREAM_INPUT + plan.stream_output) // plan.page_tokens)
    long = -(-(plan.long + 1) // plan.page_tokens)
    pages = 2 * (STREAMS * per_stream + long)  # sealed pages of the prompts before stay cached
    name = "separate" if separate else "unified"
    say(f"{name}: {STREAMS} streams, {LONG_ASKS} prompts of {plan.long} tokens")
    with tempfile.TemporaryDirectory(prefix="estafet-bench-") as folder:
        file = Path(folder) / f"{name}.toml"
        file.write_text(pinned_topology(cores, pages, separate=separate), encoding="utf-8")
        workers = ["prefill", "decode"] if separate else ["both"]
        return with_system(plan.options(str(file), workers), lambda system: watch_streams(system, plan))
