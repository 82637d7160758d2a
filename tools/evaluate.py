"""What a model's weight formats cost in accuracy and bring in speed, measured side by side in one run.

    python -m tools.evaluate
    python -m tools.evaluate my-llama-FP8 --formats bf16,fp8 --reference bf16
    python -m tools.evaluate my-llama.gguf --text essay.txt --tokens 20000 --context 1024 --json figures.json
    python -m tools.figures figures.json README.md

MODEL is a GGUF file, a Hugging Face folder or a prepared folder; by default the default model. Every format
reads the same text in windows of --context positions, each window from an empty cache and each position
given the text's own tokens before it. The text is the prose of Python's language reference, which comes with
Python, or --text.

Exit codes: 0 done, 2 bad usage, 3 the model or the kernels could not be started, 130 interrupted.
"""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()  # before the long imports begin

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from engine.errors import EstafetError, ModelError, StartError, UsageError
from engine.model import read_config
from engine.sampling import GREEDY
from engine.shapes import KVDtype
from engine.text import TextCodec
from kernels.backend import Rows
from kernels.cpu.backend import NativeBackend
from kernels.formats import KINDS, Activations, WeightFormat
from kernels.packed import pack
from kernels.prepare import cache_dir, prepare
from kernels.weights import tensor_shapes
from tools import machine
from tools.bench_system import count
from tools.divergence import NotFiniteError, Predictions, Scores
from tools.fetch import default_model
from tools.install import say
from tools.prose import read_prose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from engine.shapes import PageShape

    Ids = NDArray[np.int32]

FORMATS = "fp32,bf16,fp8,fp8+bf16-activations,fp8+bf16-head,fp8-per-tensor,int8"
HEAD_SUFFIX = "-head"
ACTIVATIONS_SUFFIX = "-activations"
CHUNK = 128
"""Positions of a step while the text is read: the logits of so many are held at once, of two formats."""
PAGE_TOKENS = 16
BATCHES = (1, 8)
"""Sequences of the decode steps that are timed."""
STEPS = 9
"""Decode steps of a format in a row; the first is not timed, since the caches are still another's."""
PHASES = ("qkv", "attention", "output", "ffn", "head")
"""Told one by one; the others are small."""
KL_SPREAD = ("median", "p99", "max")
EPILOG = f"""\
what the numbers mean:
  perplexity     exp of the mean of −log q(token): among so many tokens the model seems to choose, less is
                 better. Behind it the difference to the reference, ± one standard error of that difference,
                 which is small, since all formats predict the same tokens.
  KL             Kullback–Leibler divergence KL(reference ‖ format) of a position's next token, over the
                 whole vocabulary: what the format changes, whether or not the text likes it. 0 is no change;
                 mean ± its standard error, median, 99th percentile and largest, in thousandths of a nat
                 (--json: in nats). Standard errors take positions for independent of each other.
  same choice    share of positions at which both find the same token the likeliest.
  MB             bytes of the layers' matrices and of the whole model as the kernels read them, and the same
                 beside bfloat16's.
  reading        tokens/s of just these windows in steps of {CHUNK} rows, with the LM head at every position
                 (serving computes it at the last one only), median of the windows.
  decode         ms of a step that gives each of so many sequences one token behind a full window: the time
                 between two tokens. Median of steps, the formats taking turns.
The second table has the milliseconds of one sequence's step by phase (medians), from the kernels' own
clocks: queries, keys and values, attention, its output, the feed-forward network, the LM head, all the rest.

formats are {", ".join(KINDS)}, and any of them with another one for the embedding and the LM
head, as in fp8+bf16-head. fp8 and int8 have a scale for each block of 128 × 128. In fp8+bf16-activations the
inputs of the FP8 matrices are rounded too, which processors with bf16 dot products compute faster. The
matrices are made for this run in $ESTAFET_CACHE or ~/.cache/estafet and deleted after it, unless the model
has been served in that format.
"""


@dataclass(frozen=True, slots=True)
class Choice:
    """The kinds of the matrices, and what the inputs of those in FP8 are computed in."""

    weights: WeightFormat
    activations: Activations = "fp32"

    def __str__(self) -> str:
        rounded = self.activations != "fp32"
        return f"{self.weights}+{self.activations}{ACTIVATIONS_SUFFIX}" if rounded else str(self.weights)


def choice_named(text: str) -> Choice:
    """fp8, bf16, …, perhaps with a head of another kind, fp8+bf16-head, or with rounded activations,
    fp8+bf16-activations; UsageError for what is none of these."""
    layers, *others = text.split("+")
    head, activations = layers, "fp32"
    known = layers in KINDS
    for part in others:
        if part.endswith(HEAD_SUFFIX):
            head = part.removesuffix(HEAD_SUFFIX)
        elif part.endswith(ACTIVATIONS_SUFFIX) and layers.startswith("fp8"):
            activations = part.removesuffix(ACTIVATIONS_SUFFIX)
        else:
            known = False
    if not known or head not in KINDS or activations not in get_args(Activations):
        raise UsageError(
            f"{text!r} is no weight format; known are {', '.join(KINDS)}, with another head, such as "
            f"fp8+bf16{HEAD_SUFFIX}, and of the fp8 kinds fp8+bf16{ACTIVATIONS_SUFFIX}"
        )
    return Choice(WeightFormat(layers, head), activations)  # type: ignore[arg-type]  # they were looked up


def choices_of(names: str, reference: str) -> list[Choice]:
    """What to compare, the reference first, named or not; UsageError as in `choice_named`."""
    found = [choice_named(reference)]
    for name in names.split(","):
        one = choice_named(name.strip())
        if one in found[1:]:
            raise UsageError(f"--formats names {one} twice")
        if one != found[0]:
            found.append(one)
    if len(found) < 2:
        raise UsageError(f"--formats {names}: nothing to compare with the reference {found[0]}; name another")
    return found


# ── the text ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Window:
    """Positions that are read together from an empty cache."""

    tokens: Ids
    """[n] what the positions consume."""
    targets: Ids
    """[n] what they should predict."""


def windows_of(tokens: Sequence[int], start: Sequence[int], context: int, total: int) -> list[Window]:
    """The text cut into windows of `context` positions, the last one shorter, until `total` predict.

    Each begins with `start`, what the model wants before every text (at most one token), which so predicts
    the first token; without it the first token of the text is predicted by nothing. UsageError when the text
    is too short.
    """
    needed = total + 1 - len(start)
    if len(tokens) < needed:
        raise UsageError(
            f"the text has {len(tokens):,} tokens, {needed:,} are needed; name a longer one with --text, or "
            "fewer --tokens"
        )
    windows = []
    for first in range(0, total, context):
        size = min(context, total - first)
        piece = np.array([*start, *tokens[first : first + size + 1 - len(start)]], np.int32)
        windows.append(Window(piece[:-1], piece[1:]))
    return windows


# ── the formats ───────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Side:
    """One format of the model, its pages, and what was measured of it."""

    choice: Choice
    backend: NativeBackend
    table: Ids
    """The block table of its window."""
    packed_bytes: int
    scores: Scores = field(default_factory=Scores)
    window_rates: list[float] = field(default_factory=list)
    """Tokens a second of each full window."""
    decode_s: dict[int, list[float]] = field(default_factory=lambda: {batch: [] for batch in BATCHES})
    phase_s: dict[int, dict[str, list[float]]] = field(
        default_factory=lambda: {batch: {} for batch in BATCHES}
    )
    """By batch and phase."""

    def read(self, position: int, tokens: Ids) -> tuple[NDArray[np.float32], float]:
        """The logits [n, vocab_size] of some positions of the window, and the seconds it took."""
        rows = rows_of([self.table], position, tokens, np.ones(len(tokens), np.bool_))
        started = time.perf_counter()
        logits = self.backend.step(rows, return_logits=True).logits
        seconds = time.perf_counter() - started
        assert logits is not None
        return logits, seconds

    def decode(self, tables: Sequence[Ids], position: int, token: int) -> None:
        """Some steps that give every table's sequence the token at the position; all but the first count."""
        rows = rows_of(tables, position, np.array([token], np.int32), np.ones(1, np.bool_))
        self.backend.step(rows)
        phases = self.phase_s[len(tables)]
        before = self.backend.phase_seconds()
        for _ in range(STEPS - 1):
            started = time.perf_counter()
            self.backend.step(rows)
            self.decode_s[len(tables)].append(time.perf_counter() - started)
            after = self.backend.phase_seconds()
            for name, seconds in after.items():
                phases.setdefault(name, []).append(seconds - before[name])
            before = after


def rows_of(tables: Sequence[Ids], position: int, tokens: Ids, needs_logits: NDArray[np.bool_]) -> Rows:
    """The same tokens [n] from the same position on for every table's sequence."""
    sequences, n = len(tables), len(tokens)
    return Rows(
        sequence=np.repeat(np.arange(sequences, dtype=np.int32), n),
        position=np.tile(np.arange(position, position + n, dtype=np.int32), sequences),
        token=np.tile(tokens, sequences),
        is_draft=np.zeros(sequences * n, np.bool_),
        needs_logits=np.tile(needs_logits, sequences),
        masks=(None,) * (sequences * n),
        block_tables=tuple(tables),
        sampling=(GREEDY,) * sequences,
    )


class Pool:
    """The KV pages of a run: a window for each format, and the sequences whose decode is timed."""

    def __init__(self, shape: PageShape, context: int, formats: int) -> None:
        self.shape = shape
        self._pages = shape.pages_for(context)
        self.memory = np.zeros((formats + max(BATCHES)) * self._pages * shape.page_bytes, np.uint8)
        self.windows = [self._table(number) for number in range(formats)]
        self.sequences = [self._table(formats + number) for number in range(max(BATCHES))]

    def _table(self, number: int) -> Ids:
        return np.arange(number * self._pages, (number + 1) * self._pages, dtype=np.int32)

    def fill_sequences(self) -> None:
        """Give every sequence a copy of the first window's pages: times do not depend on whose they are."""
        size = self._pages * self.shape.page_bytes
        for table in self.sequences:
            start = int(table[0]) * self.shape.page_bytes
            self.memory[start : start + size] = self.memory[:size]


def open_sides(folder: Path, choices: Sequence[Choice], pool: Pool, threads: int) -> list[Side]:
    """Pack the model in each choice's format where that is not done yet, and open it.

    What is packed here takes no room afterwards: the kernels keep their maps of the deleted files.
    """
    sides = []
    with _scratch(folder) as scratch:
        for choice, table in zip(choices, pool.windows, strict=True):
            path = pack(scratch, choice.weights, progress=True, verify=False)
            backend = NativeBackend(
                scratch, pool.memory, pool.shape, threads, choice.weights, activations=choice.activations
            )
            sides.append(Side(choice, backend, table, path.stat().st_size))
    return sides


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A prepared folder that is gone afterwards, with links to all that `folder` has."""
    cache = cache_dir()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".evaluate-", dir=cache, ignore_cleanup_errors=True) as name:
            scratch = Path(name)
            (scratch / "packed").mkdir()
            for file in (*folder.glob("*"), *folder.glob("packed/*.packed")):
                if file.is_file():
                    link = scratch / file.relative_to(folder)
                    link.symlink_to(file.resolve())
                    # a link's own time says of which weights it was made (kernels.weight_files)
                    changed = file.lstat().st_mtime_ns
                    os.utime(link, ns=(changed, changed), follow_symlinks=False)
            try:
                yield scratch
            except ModelError as error:
                raise ModelError(str(error).replace(str(scratch), str(folder))) from None
    except OSError as error:
        raise StartError(
            f"{cache}: cannot hold the packed weights: {error.strerror or error}; set ESTAFET_CACHE to a "
            "directory with room"
        ) from error


# ── measuring ─────────────────────────────────────────────────────────────────────────────────


def read_window(sides: Sequence[Side], window: Window, full: bool, tick: Callable[[int], object]) -> None:
    """Have every format read the window, chunk by chunk, and compare each with the first."""
    spent = [0.0] * len(sides)
    for start in range(0, len(window.tokens), CHUNK):
        tokens, targets = window.tokens[start : start + CHUNK], window.targets[start : start + CHUNK]
        reference: Predictions | None = None
        for number, side in enumerate(sides):
            logits, seconds = side.read(start, tokens)
            spent[number] += seconds
            try:
                found = Predictions.of(logits)
            except NotFiniteError as error:
                raise ModelError(
                    f"as {side.choice} this model gives {error}; it cannot be evaluated so: leave the format "
                    "out, or fetch the model again"
                ) from None
            reference = reference or found
            side.scores.add(found, reference, targets)
            tick(len(tokens))
    for side, seconds in zip(sides, spent, strict=True):
        if full:
            side.window_rates.append(len(window.tokens) / seconds)


def time_decode(
    sides: Sequence[Side], pool: Pool, window: Window, rounds: int, tick: Callable[[int], object]
) -> None:
    """Time decode at the last position of the window, one format after another, again and again."""
    pool.fill_sequences()
    position = len(window.tokens) - 1
    token = int(window.tokens[position])
    for turn in range(rounds):
        # who comes first differs from round to round, as what another program does meanwhile may
        for side in (*sides[turn % len(sides) :], *sides[: turn % len(sides)]):
            for batch in BATCHES:
                side.decode(pool.sequences[:batch], position, token)
                tick(STEPS)


def matrix_bytes(side: Side, config: ModelConfig) -> tuple[int, int]:
    """Of the layers' matrices with their scales: as this format has them, and as bfloat16."""
    layers = side.backend.matrices()[:-1]  # the last one is the head
    shapes = [shape for name, shape in tensor_shapes(config).items() if name.startswith("model.layers.")]
    return (
        sum(matrix.data.nbytes + matrix.scales.nbytes for matrix in layers),
        sum(2 * outputs * inputs for outputs, inputs in (shape for shape in shapes if len(shape) == 2)),
    )


def figures_of(side: Side, reference: Side, config: ModelConfig) -> dict[str, Any]:
    """All that was found of one format."""
    layers, layers_bf16 = matrix_bytes(side, config)
    elements = sum(int(np.prod(shape)) for shape in tensor_shapes(config).values())
    return {
        "weights": str(side.choice),
        "numerics_id": side.backend.numerics_id,
        **side.scores.summary(reference.scores),
        "layer_bytes": layers,
        "layer_bytes_over_bf16": layers / layers_bf16,
        "model_bytes": side.packed_bytes,
        "model_bytes_over_bf16": side.packed_bytes / (2 * elements),
        "reading_tokens_per_s": statistics.median(side.window_rates),
        "decode_ms": {str(batch): 1e3 * statistics.median(side.decode_s[batch]) for batch in BATCHES},
        "decode_phase_ms": {
            str(batch): {
                name: 1e3 * statistics.median(seconds) for name, seconds in side.phase_s[batch].items()
            }
            for batch in BATCHES
        },
    }


def evaluate(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the command line asks for; the report. An EstafetError says what is wrong with it."""
    choices = choices_of(options.formats, options.reference)
    prose = read_prose(options.text)
    report: dict[str, Any] = {
        "bench": "evaluate",
        "machine": {"cpu": machine.cpu(), "cores": machine.cores(), "memory": f"{machine.memory_gib()} GiB"},
        "load_before": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "command": options.command_line,
    }
    folder = prepare(options.model or default_model(cache_dir(), progress=True), cache_dir())
    config = read_config(folder)
    if options.context > config.context_length:
        raise UsageError(f"--context {options.context}: {config.name} has {config.context_length} at most")
    codec = TextCodec.load(folder)
    start = codec.encode("", special=False)
    # Control tokens that the text spells are its text. One tokeniser's call for all of it costs little.
    tokens = codec.encode(prose.text, special=False, bos=False)
    windows = windows_of(tokens, start[:1], options.context, options.tokens)
    pool = Pool(config.page_shape(PAGE_TOKENS, options.kv), options.context, len(choices))
    sides = open_sides(folder, choices, pool, options.threads)
    from tqdm import tqdm

    full = [len(window.tokens) == len(windows[0].tokens) for window in windows]
    steps = options.rounds * len(BATCHES) * STEPS
    total = len(sides) * (options.tokens + steps)
    with tqdm(total=total, desc=f"evaluating {config.name}", unit="step", disable=None, leave=False) as bar:
        for side in sides:
            side.read(0, windows[0].tokens[:1])  # the weights come from the disk
        for number, window in enumerate(windows):
            read_window(sides, window, full[number], bar.update)
        time_decode(sides, pool, windows[0], options.rounds, bar.update)
    return report | {
        "model": config.name,
        "reference": str(choices[0]),
        "text": {"source": prose.source, "sha256": prose.sha256, "tokens": len(tokens)},
        "tokens": options.tokens,
        "context": len(windows[0].tokens),
        "kv": options.kv,
        "threads": options.threads,
        "variant": sides[0].backend.variant,
        "decode_steps": options.rounds * (STEPS - 1),
        "formats": [figures_of(side, sides[0], config) for side in sides],
    }


# ── telling ───────────────────────────────────────────────────────────────────────────────────


def about(report: dict[str, Any]) -> str:
    """What was read, and how."""
    text = report["text"]
    return (
        f"{report['tokens']:,} tokens of {text['source']} (SHA-256 {text['sha256'][:12]}…) in windows of "
        f"{report['context']:,}; KV pages {report['kv']}, {report['threads']} threads, kernels "
        f"{report['variant']}; medians of {report['decode_steps']} decode steps."
    )


def accuracy_table(report: dict[str, Any]) -> list[list[str]]:
    """Column names, and a row for each format."""
    batches = " / ".join(map(str, BATCHES))
    return [
        [
            "weights",
            "perplexity",
            f"− {report['reference']}'s",
            "KL, 10⁻³ nats",
            "median / p99 / max",
            "same choice",
            "MB, layers / all",
            "× bf16",
            "reading, tokens/s",
            f"decode of {batches}, ms",
        ],
        *([one["weights"], *_cells(one, one["weights"] == report["reference"])] for one in report["formats"]),
    ]


def _cells(one: dict[str, Any], is_reference: bool) -> list[str]:
    difference = f"{one['perplexity_difference']:+.4f} ± {one['perplexity_difference_se']:.4f}"
    return [
        f"{one['perplexity']:.3f}",
        "" if is_reference else difference,
        "" if is_reference else f"{1e3 * one['kl_mean']:.3g} ± {1e3 * one['kl_se']:.1g}",
        "" if is_reference else " / ".join(f"{1e3 * one[f'kl_{what}']:.3g}" for what in KL_SPREAD),
        "" if is_reference else f"{100 * one['same_choice']:.2f} %",
        f"{one['layer_bytes'] / 1e6:.1f} / {one['model_bytes'] / 1e6:.1f}",
        f"{one['layer_bytes_over_bf16']:.3f} / {one['model_bytes_over_bf16']:.3f}",
        f"{one['reading_tokens_per_s']:,.0f}",
        " / ".join(f"{ms:.1f}" for ms in one["decode_ms"].values()),
    ]


def phase_table(report: dict[str, Any]) -> list[list[str]]:
    """Milliseconds of a decode step of one sequence: column names, and a row for each format."""
    table = [["ms of a step of 1", *PHASES, "rest", "all of it"]]
    for one in report["formats"]:
        phases = one["decode_phase_ms"]["1"]
        rest = sum(ms for name, ms in phases.items() if name not in PHASES)
        values = [*(phases[name] for name in PHASES), rest, sum(phases.values())]
        table.append([one["weights"], *(f"{ms:.2f}" for ms in values)])
    return table


def markdown(report: dict[str, Any]) -> list[str]:
    """The tables of a report, line by line."""
    lines = [about(report)]
    for table in (accuracy_table(report), phase_table(report)):
        head, *rows = (f"| {' | '.join(cells)} |" for cells in table)
        lines += ["", head, f"|:---|{'---:|' * (len(table[0]) - 1)}", *rows]
    return lines


def show(table: list[list[str]]) -> None:
    """Print a table in columns."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for first, *others in table:
        cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
        print("  ".join(cells).rstrip(), flush=True)


def plot(report: dict[str, Any], path: Path) -> None:
    """A PNG: each format at its time of a token and its divergence, as large as its bytes."""
    importlib.import_module("matplotlib").use("Agg")
    figure, axes = importlib.import_module("matplotlib.pyplot").subplots(figsize=(8, 5), layout="constrained")
    others = [one for one in report["formats"] if one["weights"] != report["reference"]]
    slowest = max(one["decode_ms"]["1"] for one in others)
    largest = max(one["model_bytes"] for one in others)
    for one in others:
        place = one["decode_ms"]["1"], one["kl_mean"]
        axes.scatter(*place, s=400 * one["model_bytes"] / largest, alpha=0.5)
        axes.annotate(one["weights"], place, ha="right" if place[0] > slowest / 2 else "left", va="bottom")
    least = min((one["kl_mean"] for one in others if one["kl_mean"] > 0), default=1e-6)
    axes.set_yscale("symlog", linthresh=10 ** np.floor(np.log10(least)))
    axes.set_xlim(0, 1.1 * slowest)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_xlabel("decode of one sequence, ms a token")
    axes.set_ylabel(f"mean KL from {report['reference']}, nats")
    axes.set_title(f"{report['model']}: areas are bytes")
    figure.savefig(path, dpi=120)


# ── the command line ──────────────────────────────────────────────────────────────────────────


def main(arguments: list[str] | None = None) -> int:
    """Tables on stdout, progress on stderr; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL", help="default: the default model")
    parser.add_argument("--formats", default=FORMATS, metavar="A,B,…", help="default: %(default)s")
    parser.add_argument(
        "--reference", default="fp32", metavar="FORMAT", help="what all are compared with (%(default)s)"
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="UTF-8; default: Python's own reference")
    parser.add_argument(
        "--tokens", type=_several, default=4096, metavar="N", help="positions that predict (%(default)s)"
    )
    parser.add_argument(
        "--context", type=_several, default=512, metavar="N", help="positions of a window (%(default)s)"
    )
    parser.add_argument("--threads", type=count, default=2, metavar="N", help="of the kernels (%(default)s)")
    parser.add_argument("--kv", default="float32", choices=get_args(KVDtype), help="default: %(default)s")
    parser.add_argument(
        "--rounds",
        type=count,
        default=5,
        metavar="N",
        help=f"of {STEPS - 1} timed decode steps of each format (%(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here too")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw KL over speed; needs the package matplotlib"
    )
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser.parse_args(given)
    options.command_line = command_line(given)
    try:
        _check_files(options)
        report = evaluate(options)
    except EstafetError as error:
        say(str(error))
        return error.exit_code
    print(f"{report['model']}: {about(report)}\n")
    show(accuracy_table(report))
    print()
    show(phase_table(report))
    try:
        if options.json:
            options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if options.plot:
            plot(report, options.plot)
    except OSError as error:
        say(f"{error.filename}: cannot be written: {error.strerror}")
        return StartError.exit_code
    return 0


def _several(text: str) -> int:
    """An argument that is a number from 2: of one position there is no standard error."""
    number = count(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 2")
    return number


def _check_files(options: argparse.Namespace) -> None:
    """UsageError for what could not be written after minutes of work."""
    for name in ("json", "plot"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"--{name} {path}: there is no such folder")
    if options.plot:
        if options.plot.suffix != ".png":
            raise UsageError(f"--plot {options.plot}: a name that ends in .png is expected")
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError(
                "--plot needs the package matplotlib, which Estafet does not install: "
                f"{sys.executable} -m pip install matplotlib"
            )


def command_line(arguments: Sequence[str]) -> str:
    """What a reader can type to measure the same; where the figures were written to is no part of it."""
    left = iter(arguments)
    kept = []
    for argument in left:
        if argument in ("--json", "--plot"):
            next(left, None)
        elif not argument.startswith(("--json=", "--plot=")):
            kept.append(argument)
    return shlex.join(["python", "-m", "tools.evaluate", *kept])


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
