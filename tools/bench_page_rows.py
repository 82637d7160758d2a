"""What `tools.bench pages` shows: its rows, the bars for them, and the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tools.bench_ratios import Row, verdict

if TYPE_CHECKING:
    from collections.abc import Mapping

ROWS = (
    Row("waste_page16", "allocated slots that are not used, 64 sequences: pages of 16, leases included",
        "waste_page16_share", None, 0.04, at_least=False, part="waste"),
    Row("waste_page8", "the same: pages of 8", "waste_page8_share", None, None, part="waste"),
    Row("waste_page32", "the same: pages of 32", "waste_page32_share", None, None, part="waste"),
    Row("waste_static", "the same: each sequence has the slots of the longest", "waste_static_share", None,
        None, part="waste"),
    Row("concurrency_vs_static", "sequences that decode at once: against slots for the longest each",
        "running_sequences", "static_sequences", 4.0, part="concurrency"),
    Row("concurrency_vs_lengths", "that ratio: of longest / mean length of the trace",
        "concurrency_times", "longest_over_mean_times", 0.9, part="concurrency"),
    Row("concurrency_vs_running_lengths", "that ratio: of longest / mean length of those that run",
        "concurrency_times", "longest_over_running_times", None, part="concurrency"),
    Row("cached_ttft_p50_ms", "TTFT, a 2,048-token prefix that another worker has filled: p50",
        "cached_ttft_p50_ms", None, 60.0, at_least=False, part="ttft"),
    Row("cached_ttft_p99_ms", "the same: p99", "cached_ttft_p99_ms", None, 100.0, at_least=False,
        part="ttft"),
    Row("cached_over_cold_ttft", "the same: p50 against that of prompts of this length that nobody has",
        "cached_ttft_p50_ms", "cold_ttft_p50_ms", 0.03, at_least=False, part="ttft"),
    Row("trace_hits_5_vs_lru", "hits of the trace with room for 5 % of its blocks: against plain LRU",
        "hits_5_share", "hits_5_lru_share", 1.25, part="trace"),
    Row("trace_hits_20_vs_infinite", "hits with room for 20 %: against a cache without end",
        "hits_20_share", "hits_infinite_share", 0.97, part="trace"),
    Row("page_life_us", "a page's life: leased, taken and opened, freed", "page_life_us", None, 2.0,
        at_least=False, part="allocator"),
    Row("lookup_4096_us", "look-up of a cached prefix of 4,096 tokens", "lookup_4096_us", None, 150.0,
        at_least=False, part="allocator"),
    Row("lookup_4096_first_us", "the same: the first time", "lookup_4096_first_us", None, None,
        part="allocator"),
    Row("remote_over_computed_ttft", "TTFT, a 2,048-token prefix only another host has: against computing it",
        "remote_ttft_p50_ms", "computed_ttft_p50_ms", 0.15, at_least=False, part="hosts"),
)  # fmt: skip

UNITS = (
    ("_share", 100.0, " %", 1),
    ("_ms", 1.0, " ms", 1),
    ("_us", 1.0, " µs", 2),
    ("_sequences", 1.0, "", 1),
    ("_times", 1.0, " ×", 2),
)
"""Of figures, by the ending of their names: factor, unit, digits."""


def figure(name: str, value: float | None) -> str:
    """A figure with its unit; KeyError for a name without one."""
    if value is None:
        return "–"
    for ending, factor, unit, digits in UNITS:
        if name.endswith(ending):
            return f"{factor * value:,.{digits}f}{unit}"
    raise KeyError(name)


def bars() -> dict[str, dict[str, Any]]:
    """The bar of every row that has one."""
    return {row.name: {"bar": row.bar, "at_least": row.at_least} for row in ROWS if row.bar is not None}


def markdown(report: Mapping[str, Any]) -> list[str]:
    """The table of a report, line by line; rows whose part was not asked for are left out."""
    figures = report["figures"]
    lines = ["| what | figure | against | ratio | bar | |", "|:---|---:|---:|---:|---:|:---|"]
    for row in ROWS:
        ratio, why = report["ratios"].get(row.name), report["missing"].get(row.name, "")
        if why.startswith("not asked for"):
            continue
        sign = "≥" if row.at_least else "≤"
        bar = "" if row.bar is None else f"{sign} {row.bar:g}"
        if row.bar is not None and row.bottom is None:
            bar = f"{sign} {figure(row.top, row.bar)}"
        cells = (
            row.what,
            figure(row.top, figures.get(row.top)),
            "" if row.bottom is None else figure(row.bottom, figures.get(row.bottom)),
            "" if row.bottom is None else "–" if ratio is None else f"{ratio:.3f}",
            bar,
            f"not measured: {why}" if ratio is None else verdict(row, ratio, figures),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", *(f"{who}: {says}." for who, says in report["facts"].items())]
