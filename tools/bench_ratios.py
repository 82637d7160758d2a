"""What comparisons are made of: ratios, the bars for them, and the table and report that show both."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from tools.bench_rounds import BUSY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from tools.bench_rounds import Findings


class Row(NamedTuple):
    """A ratio of two figures, and the bar for it."""

    name: str
    what: str
    top: str
    bottom: str | None
    """None: the figure is the ratio."""
    bar: float | None
    """None: there to be seen only."""
    at_least: bool = True
    part: str = ""

    def met(self, ratio: float) -> bool:
        """Whether a ratio reaches the bar."""
        return self.bar is None or (ratio >= self.bar if self.at_least else ratio <= self.bar)


ROWS = (
    Row("decode_b1_vs_llamacpp_q8", "batch-1 decode, tokens/s: FP8, against llama.cpp Q8_0",
        "ours_decode_tok_s", "llamacpp_q8_decode_tok_s", 1.35, part="decode"),
    Row("decode_b1_vs_own_bf16", "batch-1 decode, tokens/s: FP8, against our own bf16",
        "ours_decode_tok_s", "ours_bf16_decode_tok_s", 1.5, part="decode"),
    Row("bandwidth_share_fp8", "bytes/s that the FP8 matrices are read at, of the read bandwidth then",
        "ours_bandwidth_share", None, 0.75, part="decode"),
    Row("bandwidth_share_bf16", "bytes/s that the bf16 matrices are read at, of the read bandwidth then",
        "ours_bf16_bandwidth_share", None, 0.85, part="decode"),
    Row("outside_native_b1", "share of a decode step outside native code, batch 1",
        "ours_outside_native_b1", None, 0.08, at_least=False, part="decode"),
    Row("total32_vs_openvino", "32 sequences, all tokens/s: against OpenVINO GenAI, its own precision",
        "ours_total32_tok_s", "openvino_total32_tok_s", 1.2, part="total32"),
    Row("total32_vs_openvino_f32", "32 sequences, all tokens/s: against OpenVINO GenAI in f32",
        "ours_total32_tok_s", "openvino_f32_total32_tok_s", None, part="total32"),
    Row("total32_vs_llamacpp_best", "32 sequences, all tokens/s: against llama.cpp, best of Q8_0 and F16",
        "ours_total32_tok_s", "llamacpp_best_total32_tok_s", 1.4, part="total32"),
    Row("fma_floor_share_total32", "32 sequences, operations/s: of the rate of fused multiply-adds",
        "ours_total32_flop_s", "floor_flop_s", 0.7, part="total32"),
    Row("outside_native_b32", "share of a decode step outside native code, batch 32",
        "ours_outside_native_b32", None, 0.04, at_least=False, part="total32"),
    Row("prefill512_vs_llamacpp_f16", "prefill of 512 tokens, tokens/s: against llama.cpp F16",
        "ours_prefill512_tok_s", "llamacpp_f16_prefill512_tok_s", 1.15, part="prefill"),
    Row("step5_over_step1", "seconds of a step of 5 rows, against a step of 1",
        "ours_step5_s", "ours_step1_s", 1.6, at_least=False, part="step5"),
    Row("utilisation_32", "share of the time that the worker of unified.toml is in its backend, 32 streams",
        "utilisation", None, 0.9, part="utilisation"),
    Row("pd_itl_p99_ratio", "inter-token p99 while long prompts prefill, against without: a core each",
        "pd_loaded_p99_ms", "pd_unloaded_p99_ms", 1.3, at_least=False, part="pd"),
    Row("unified_itl_p99_ratio", "the same with one worker that does both on both cores",
        "unified_loaded_p99_ms", "unified_unloaded_p99_ms", None, at_least=False, part="pd"),
)  # fmt: skip


def ratios(medians: Mapping[str, float], rows: Sequence[Row] = ROWS) -> dict[str, float | None]:
    """Every row's ratio; None where a figure is missing."""
    found: dict[str, float | None] = {}
    for row in rows:
        top = medians.get(row.top)
        bottom = 1.0 if row.bottom is None else medians.get(row.bottom)
        found[row.name] = top / bottom if top is not None and bottom else None
    return found


def missing(
    found: Mapping[str, float | None],
    findings: Findings,
    parts: Sequence[str],
    rows: Sequence[Row] = ROWS,
) -> dict[str, str]:
    """Why a ratio is None."""
    why = {}
    for row in rows:
        if found[row.name] is None:
            if row.part not in parts:
                why[row.name] = f"not asked for: --only {','.join(parts)}"
                continue
            names = [name for name in (row.top, row.bottom) if name and not findings.values.get(name)]
            reasons = [findings.reasons[name] for name in names if name in findings.reasons]
            why[row.name] = reasons[0] if reasons else f"no figure {' or '.join(names)}"
    return why


def figure(name: str, value: float | None) -> str:
    """A figure with its unit, by the ending of its name."""
    if value is None:
        return "–"
    for ending, factor, unit in (
        ("tok_s", 1, ""),
        ("bytes_s", 1e-9, " GB/s"),
        ("flop_s", 1e-9, " GFLOP/s"),
        ("_ms", 1, " ms"),
        ("_s", 1e3, " ms"),
    ):
        if name.endswith(ending):
            return f"{value * factor:,.{0 if value * factor >= 100 else 1}f}{unit}"
    return f"{100 * value:.1f} %"


def markdown(report: dict[str, Any]) -> list[str]:
    """The table of a report, line by line; rows whose part was not asked for are left out."""
    medians = report["medians"]
    lines = ["| what | ours | against | ratio | bar | |", "|:---|---:|---:|---:|---:|:---|"]
    for row in ROWS:
        ratio = report["ratios"].get(row.name)
        why = report["missing"].get(row.name, "")
        if why.startswith("not asked for"):
            continue
        best = max(("Q8_0", "F16"), key=lambda kind: medians.get(_LLAMA_TOTAL[kind], -math.inf))
        what = row.what + (f" (here {best})" if row.name == "total32_vs_llamacpp_best" and not why else "")
        if row.name == "total32_vs_openvino" and "openvino" in report:
            what += f" ({report['openvino']['precision']})"
        sign = "≥" if row.at_least else "≤"
        cells = (
            what,
            figure(row.top, medians.get(row.top)),
            "" if row.bottom is None else figure(row.bottom, medians.get(row.bottom)),
            "–" if ratio is None else f"{ratio:.3f}" if row.bottom is None else f"{ratio:.2f}",
            "" if row.bar is None else f"{sign} {row.bar:g}",
            f"not measured: {why}" if ratio is None else verdict(row, ratio, medians),
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"{report['threads']} threads; medians of {report['rounds']} interleaved rounds.",
    ]
    if "weights" in report:
        lines.append(
            f"Our weights: {report['weights']}, LM head and embedding too; activations "
            f"{report['activations']}, KV {report['kv']}."
        )
    if {"ours_matrix_bytes_s", "ours_bf16_matrix_bytes_s"} <= medians.keys():
        lines.append(
            f"Matrices are read at {figure('bytes_s', medians['ours_matrix_bytes_s'])} (FP8) and "
            f"{figure('bytes_s', medians['ours_bf16_matrix_bytes_s'])} (bf16); the read bandwidth is "
            "looked at before and after every few tokens, and the greater counts."
        )
    if "floor_bytes_s" in medians:
        lines.append(
            f"The machine's floor, best of all rounds: {figure('bytes_s', medians['floor_bytes_s'])} read, "
            f"{figure('flop_s', medians['floor_flop_s'])} of fused multiply-adds."
        )
    lines += [f"{who}: {says}." for who, says in report.get("schedules", {}).items()]
    return lines


_LLAMA_TOTAL = {"Q8_0": "llamacpp_q8_total32_tok_s", "F16": "llamacpp_f16_total32_tok_s"}


def verdict(row: Row, ratio: float, medians: Mapping[str, float]) -> str:
    """Whether the bar is met, where there is one, and whether others were at work meanwhile."""
    says = "" if row.bar is None else "met" if row.met(ratio) else "missed"
    others = medians.get(f"others_{row.part}", 0.0)
    return f"{says} (others took {100 * others:.0f} % of the cores)".strip() if others > BUSY else says


def some_of(parts: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of `--only`: names of parts, taken in the order in which they are measured."""

    def named(text: str) -> list[str]:
        asked = text.split(",")
        for name in asked:
            if name not in parts:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(parts)}")
        return [name for name in parts if name in asked]

    return named


def tell(report: Mapping[str, Any], lines: Iterable[str], path: Path | None) -> int:
    """Print a report, and write it where that is asked for; the exit code: 3 when nothing was measured."""
    print("\n".join(lines))
    if path:
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if any(ratio is not None for ratio in report["ratios"].values()) else 3
