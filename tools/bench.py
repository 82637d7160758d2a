"""Measure the engine: its kernels alone, or a whole system through its HTTP door.

python -m tools.bench kernels --model FOLDER [--json FILE]
python -m tools.bench serve --topology local --concurrency 1,4,16,32 [--json FILE]
python -m tools.bench fairness --topology local --flood 200 [--json FILE]
python -m tools.bench streams --topology local --streams 1000 [--json FILE]
python -m tools.bench peers [--llama-bin DIR] [--openvino-python PYTHON] [--json FILE]
"""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()  # before the long imports begin

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from engine.model import read_config
from engine.sampling import GREEDY, SamplingParams
from kernels.backend import Backend, Rows
from kernels.backends import NAMES, open_backend
from tools import bench_fairness, bench_peers, bench_serve, bench_streams, machine

PROMPT = 128
"""Tokens that each sequence holds before decode is timed, and of the timed prefill."""


def main(arguments: list[str] | None = None) -> int:
    """Run a benchmark; figures as a table on stdout, progress on stderr, and as JSON when asked."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    kernels = commands.add_parser("kernels", help="decode and prefill speed of a backend, no actors")
    kernels.add_argument(
        "--model", type=Path, required=True, metavar="FOLDER", help="a prepared model folder"
    )
    kernels.add_argument("--backend", default="torch", choices=NAMES)
    kernels.add_argument("--threads", type=int, default=2)
    kernels.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="B")
    kernels.add_argument("--steps", type=int, default=16, help="decode steps timed for each batch")
    kernels.add_argument("--kv", default="float32", choices=("float32", "float16", "bfloat16"))
    kernels.add_argument("--seed", type=int, default=0)
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    kernels.set_defaults(run=print_kernels)
    for name, module, says in (
        ("serve", bench_serve, "latency and throughput of a system, as its clients see it"),
        ("fairness", bench_fairness, "what a flood of one client costs another one"),
        ("streams", bench_streams, "what very many open streams cost a gateway"),
        ("peers", bench_peers, "our speed against other engines on this machine"),
    ):
        command = commands.add_parser(
            name,
            help=says,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options = parser.parse_args(given[:split])
    options.for_launcher = given[split + 1 :]
    if options.for_launcher and not getattr(options, "topology", None):
        parser.error("what follows -- goes to a launcher, and only --topology has one")
    options.command_line = command_line(given)
    code: int = options.run(options)
    return code


def command_line(arguments: list[str]) -> str:
    """What a reader can type to measure the same; where the figures were written to is no part of it."""
    left = iter(arguments)
    kept = []
    for argument in left:
        if argument == "--json":
            next(left, None)
        elif not argument.startswith("--json="):
            kept.append(argument)
    return shlex.join(["python", "-m", "tools.bench", *kept])


def print_kernels(options: argparse.Namespace) -> int:
    """`kernels`: the exit code."""
    report = {
        "cpu": machine.cpu(),
        "cores": machine.cores(),
        "python": platform.python_version(),
        "commit": machine.commit(),
        **bench_kernels(options),
    }
    for name, value in report.items():
        print(f"{name:28} {value:.1f}" if isinstance(value, float) else f"{name:28} {value}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def bench_kernels(options: argparse.Namespace) -> dict[str, Any]:
    """Time prefill of one prompt, and greedy and sampled decode at each batch size (medians of steps)."""
    config = read_config(options.model)
    shape = config.page_shape(16, options.kv)
    # one step that warms up and the timed ones, greedy and sampled
    table_pages = shape.pages_for(PROMPT + 2 * options.steps + 2)
    most = max(options.batches)
    pool = np.zeros(most * table_pages * shape.page_bytes, np.uint8)
    _note(f"opening {options.backend} on {config.name}")
    started = time.perf_counter()
    backend = open_backend(options.backend, options.model, pool, shape, options.threads)
    figures: dict[str, Any] = {
        "model": config.name,
        "numerics_id": backend.numerics_id,
        "threads": options.threads,
        "seed": options.seed,
        "open_seconds": round(time.perf_counter() - started, 2),
    }
    random = np.random.default_rng(options.seed)
    prompt = random.integers(0, config.vocab_size, PROMPT)
    _note(f"prefill of {PROMPT} tokens, {most} times")
    times = [_step(backend, [s], table_pages, 0, prompt, GREEDY) for s in range(most)]
    figures["prefill_tok_s"] = PROMPT / statistics.median(times)
    for batch in options.batches:
        _note(f"decode, batch {batch}")
        position = PROMPT
        for name, params in (("", GREEDY), ("sampled_", SamplingParams(temperature=1.0, seed=1))):
            times = []
            for _ in range(options.steps + 1):
                tokens = random.integers(0, config.vocab_size, 1)
                times.append(_step(backend, list(range(batch)), table_pages, position, tokens, params))
                position += 1
            figures[f"decode_{name}batch_{batch}_tok_s"] = batch / statistics.median(times[1:])
    return figures


def _step(
    backend: Backend,
    sequences: list[int],
    table_pages: int,
    position: int,
    tokens: Any,
    params: SamplingParams,
) -> float:
    """Seconds of one step that gives each sequence the tokens; the last one samples."""
    count = len(tokens)
    need = np.zeros(count, np.bool_)
    need[-1] = True
    total = count * len(sequences)
    rows = Rows(
        sequence=np.repeat(np.arange(len(sequences), dtype=np.int32), count),
        position=np.tile(np.arange(position, position + count, dtype=np.int32), len(sequences)),
        token=np.tile(tokens.astype(np.int32), len(sequences)),
        is_draft=np.zeros(total, np.bool_),
        needs_logits=np.tile(need, len(sequences)),
        masks=(None,) * total,
        block_tables=tuple(
            np.arange(s * table_pages, (s + 1) * table_pages, dtype=np.int32) for s in sequences
        ),
        sampling=(params,) * len(sequences),
    )
    started = time.perf_counter()
    backend.step(rows)
    return time.perf_counter() - started


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
