"""Measures a backend alone, without actors, beside what this machine can do at best.

    python -m tools.bench kernels
    python -m tools.bench kernels --weights bf16 --batches 1 --json figures.json
    python -m tools.bench kernels --backend torch --model MODEL_FOLDER

First the floor, in the same process: how fast memory can be read and how many fp32 multiply-adds the
cores do. Then decode with so many sequences a step, prefill, a step that verifies four drafts, sampling:

  GB/s    weights a step reads once, by the time of the phases that read them; % of the read bandwidth
          just before and after, whichever was more
  GFLOP/s what those phases compute; % of the fp32 multiply-add rate (bf16 dot products do two at once,
          so that activations rounded to bf16 may pass 100 %)
  outside time that a step spends outside native code

Figures are medians; close what else uses the cores.
"""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from tqdm import tqdm

from engine.errors import EstafetError
from engine.model import read_config
from engine.sampling import GREEDY, SamplingParams
from engine.shapes import KVDtype
from engine.topology import ModelTable
from kernels.backends import NAMES, format_for, resolve
from kernels.cpu import native
from kernels.formats import KINDS, Activations, WeightFormat, activations_for
from kernels.prepare import cache_dir, prepare
from kernels.weights import matrix_sizes
from tools import machine
from tools.bench_ours import Driven, Floor, machine_floor, matrix_bytes, read_bandwidth
from tools.bench_system import count
from tools.fetch import default_model
from tools.install import say

if TYPE_CHECKING:
    import argparse

PREFILLS = (128, 512)
SAMPLED = SamplingParams(temperature=1.0, seed=1)
REPEATS = 5
"""Prefills of each length, and looks at the floor."""


class Decode(NamedTuple):
    """One row of the table: medians over the steps."""

    batch: int
    step_ms: float
    tok_s: float
    matrices_gb_s: float | None
    bandwidth_share: float | None
    matrices_gflop_s: float | None
    fma_share: float | None
    outside_share: float | None
    phases_ms: dict[str, float]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `tools.bench kernels`."""
    parser.add_argument("--model", type=Path, metavar="MODEL", help="a GGUF file or a model folder")
    parser.add_argument("--backend", default="auto", choices=("auto", *NAMES))
    parser.add_argument(
        "--weights", choices=KINDS, help="kind of the layers' matrices (default: the model's)"
    )
    parser.add_argument("--head", choices=KINDS, help="kind of embedding and LM head (default: as --weights)")
    parser.add_argument(
        "--activations", choices=get_args(Activations), help="default: bf16 beside fp8 weights"
    )
    parser.add_argument("--kv", default="float16", choices=get_args(KVDtype), help="of the pages")
    parser.add_argument("--threads", type=count, default=machine.cores(), help="default: all cores")
    parser.add_argument("--batches", type=count, nargs="+", default=[1, 2, 5, 8, 16, 32], metavar="B")
    parser.add_argument("--steps", type=count, default=32, help="steps timed for each batch")
    parser.add_argument("--context", type=count, default=128, help="tokens that each sequence holds before")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measure and print; the exit code."""
    try:
        report = measure(options)
    except EstafetError as error:
        say(str(error))
        return error.exit_code
    print("\n".join(lines_of(report)))
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures; StartError or ModelError when the backend cannot be opened."""
    folder = prepare(options.model or default_model(cache_dir(), progress=True), cache_dir())
    config, backend = read_config(folder), resolve(options.backend)
    weights = format_for(ModelTable(weights=options.weights or "auto", head=options.head or "auto"), folder)
    activations = options.activations or activations_for(weights)
    parts = REPEATS + len(PREFILLS) * REPEATS + (len(options.batches) + 2) * options.steps + 1
    with tqdm(total=parts, desc="measuring", unit="step", disable=None, leave=False) as bar:
        floor = floor_of(options.threads, bar) if backend == "native" else None
        most, longest = max(options.batches), max(*PREFILLS, options.context + 2 * options.steps + 2)
        driven = Driven(
            backend,
            folder,
            most,
            longest,
            threads=options.threads,
            kv=options.kv,
            weights=weights if backend == "native" else None,
            activations=activations if backend == "native" else None,
        )
        prefill = {}
        for tokens in PREFILLS:
            spent = []
            for _ in range(REPEATS):
                spent.append(driven.prefill(tokens).rate)
                bar.update()
            prefill[str(tokens)] = round(statistics.median(spent), 1)
        decode = [decode_of(driven, batch, weights, floor, options, bar) for batch in options.batches]
        sampled = {}
        for batch in (1, most):
            steps = driven.decode_steps(batch, options.context, options.steps, SAMPLED, bar.update)
            sampled[str(batch)] = round(batch / statistics.median(step.steps_wall_s for step in steps), 1)
        one, five = driven.step_times(options.context)
        bar.update()
    return {
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "python": platform.python_version(),
        "commit": machine.commit(),
        "command": getattr(options, "command_line", ""),
        "model": config.name,
        "numerics_id": driven.backend.numerics_id,
        "variant": getattr(driven.backend, "variant", backend),
        "threads": options.threads,
        "read_gb_s": None if floor is None else round(floor.bytes_s / 1e9, 2),
        "fma_gflop_s": None if floor is None else round(floor.flop_s / 1e9, 1),
        "prefill_tok_s": prefill,
        "decode": [row._asdict() for row in decode],
        "sampled_tok_s": sampled,
        "step5_over_step1": round(five / one, 3),
    }


def floor_of(threads: int, bar: Any) -> Floor:
    """The best of several looks: what disturbs only lowers it."""
    native()
    looks = []
    for _ in range(REPEATS):
        looks.append(machine_floor(threads))
        bar.update()
    return Floor(max(look.bytes_s for look in looks), max(look.flop_s for look in looks))


def decode_of(
    driven: Driven,
    batch: int,
    weights: WeightFormat,
    floor: Floor | None,
    options: argparse.Namespace,
    bar: Any,
) -> Decode:
    """Greedy decode of so many sequences."""

    def look() -> float:
        return 0.0 if floor is None else read_bandwidth(options.threads)

    before = look()
    steps = driven.decode_steps(batch, options.context, options.steps, GREEDY, bar.update)
    could_read = max(before, look())
    seconds = statistics.median(step.steps_wall_s for step in steps)
    matrices = [step.matrices_s for step in steps if step.matrices_s is not None]
    if not matrices:
        return Decode(batch, round(seconds * 1e3, 3), round(batch / seconds, 1), *(None,) * 5, {})
    inside = statistics.median(matrices)
    bytes_s = matrix_bytes(driven.config, weights) / inside
    flop_s = 2 * batch * sum(matrix_sizes(driven.config)) / inside
    outside = [step.outside_native for step in steps if step.outside_native is not None]
    names = steps[0].phases or {}
    return Decode(
        batch,
        round(seconds * 1e3, 3),
        round(batch / seconds, 1),
        round(bytes_s / 1e9, 2),
        None if floor is None else round(bytes_s / could_read, 3),
        round(flop_s / 1e9, 1),
        None if floor is None else round(flop_s / floor.flop_s, 3),
        round(statistics.median(outside), 4),
        {
            name: round(1e3 * statistics.median((step.phases or {})[name] for step in steps), 3)
            for name in names
        },
    )


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report as people read it."""
    lines = [
        f"{report['model']} on {report['threads']} threads of {report['cpu']}, {report['variant']}",
        f"{report['numerics_id']}",
    ]
    if report["read_gb_s"] is not None:
        lines.append(
            f"the machine: {report['read_gb_s']:.1f} GB/s read, {report['fma_gflop_s']:.0f} GFLOP/s of fp32 "
            "multiply-adds"
        )
    lines += [f"prefill {tokens:>4}  {rate:8.0f} tok/s" for tokens, rate in report["prefill_tok_s"].items()]
    lines.append("")
    heads = (
        f"{'batch':>5} {'ms/step':>9} {'tok/s':>8} {'GB/s':>7} {'':>6} {'GFLOP/s':>8} {'':>6} {'outside':>8}"
    )
    lines.append(f"{heads}  by phase, ms")
    for row in report["decode"]:
        phases = "  ".join(f"{name} {ms:.2f}" for name, ms in row["phases_ms"].items())
        lines.append(
            f"{row['batch']:5} {row['step_ms']:9.2f} {row['tok_s']:8.1f} {number(row['matrices_gb_s'], 7)} "
            f"{share(row['bandwidth_share'])} {number(row['matrices_gflop_s'], 8)} {share(row['fma_share'])} "
            f"{'' if row['outside_share'] is None else format(row['outside_share'], '8.1%')}  {phases}"
        )
    lines.append("")
    for batch, rate in report["sampled_tok_s"].items():
        lines.append(f"sampled without filters, batch {batch:>2}: {rate:.1f} tok/s")
    lines.append(f"a step of 5 rows of a sequence takes {report['step5_over_step1']:.2f} × one of 1 row")
    return lines


def number(value: float | None, width: int) -> str:
    """A figure, or nothing where there is none."""
    return " " * width if value is None else f"{value:{width}.1f}"


def share(value: float | None) -> str:
    """A share in per cent, or nothing."""
    return " " * 6 if value is None else f"{value:6.0%}"
