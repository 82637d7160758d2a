"""What every benchmark of a running system has in common: the system, the signals, the report."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from tools import machine
from tools.bench_load import BenchFailed
from tools.install import say
from tools.system import Running, SystemFailed, launch_command, running_system

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

Figures = dict[str, Any]


async def until_signal(work: Callable[[], Awaitable[dict[str, Any]]]) -> dict[str, Any] | int:
    """Do the work, or give it up at the first signal that asks us to end; then the signal's number."""
    ended: dict[str, Any] | int = 0

    async with trio.open_nursery() as nursery:

        async def watch() -> None:
            nonlocal ended
            with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
                nursery.start_soon(do)
                async for number in signals:
                    ended = number
                    nursery.cancel_scope.cancel()

        async def do() -> None:
            nonlocal ended
            ended = await work()
            nursery.cancel_scope.cancel()

        nursery.start_soon(watch)
    return ended


def run_with_system(
    options: argparse.Namespace,
    measure: Callable[[Running], Awaitable[Figures]],
    **of_gateways: int,
) -> int | Figures:
    """Measure a system that runs already, or one that is started for it and stopped after.

    `of_gateways` are keys of every gateway's table in one that is started.

    The whole report, also written to --json; an exit code when there is none.
    """
    report: Figures = {
        "bench": options.command,
        "machine": {"cpu": machine.cpu(), "cores": machine.cores(), "memory": f"{machine.memory_gib()} GiB"},
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "seed": options.seed,
        "command": options.command_line,
    }
    # What is wrong with files is said before anything is started.
    if options.json and not options.json.absolute().parent.is_dir():
        say(f"--json {options.json}: there is no such folder")
        return 2
    try:
        there = (
            nullcontext(Running(options.url, "", 0))
            if options.url
            else running_system(launch_command(options.topology, options.for_launcher, **of_gateways))
        )
        with there as system:
            try:
                found = trio.run(until_signal, lambda: measure(system))
            except BaseExceptionGroup as group:
                raise first_of(group) from None
            if isinstance(found, int):
                raise KeyboardInterrupt if found == signal.SIGINT else SystemExit(128 + found)
            report |= found
    except BenchFailed as error:
        say(str(error))
        return 3
    except SystemFailed as error:
        say(str(error))
        return error.code
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def first_of(error: BaseException) -> BaseException:
    """What went wrong, out of the groups that nurseries wrap it in."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


# ── what all such commands can be told ────────────────────────────────────────────────────────


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of all lies, between two of them by their distance; nan of none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def milliseconds(seconds: Sequence[float]) -> dict[str, float | None]:
    """p50, p95 and p99 in milliseconds; None where there is nothing to say."""
    found = {f"p{share}": percentile(seconds, share / 100) for share in (50, 95, 99)}
    return {name: None if math.isnan(value) else round(1e3 * value, 2) for name, value in found.items()}


def count(text: str) -> int:
    """An argument that is a number from 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1")
    return int(text)


def add_system_arguments(parser: argparse.ArgumentParser) -> None:
    """Which system is measured, and where the figures go."""
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument(
        "--topology", metavar="NAME", help="start this system (or topology file), stop it after"
    )
    where.add_argument("--url", help="measure a system that runs")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
