"""Puts measured figures as a table into a document, between two marks.

    python -m tools.bench serve --topology local --json figures.json
    python -m tools.figures figures.json README.md

The table stands between the lines `<!-- figures:begin -->` and `<!-- figures:end -->`; whatever was
there is replaced, so the same figures twice change nothing. Exit codes: 0 done, 2 the figures or the
document are not what they should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tools.bench_serve import cells
from tools.install import say

BEGIN = "<!-- figures:begin -->"
END = "<!-- figures:end -->"
BUSY = 0.5
"""With so many processes at work before, figures are not those of the machine."""


def table(report: dict[str, Any]) -> str:
    """The Markdown for a report of `tools.bench serve`."""
    machine = report["machine"]
    busy = ", so other programs took part of these cores" if report["load_before"] > BUSY else ""
    lines = [
        f"`{report['command']}`",
        "",
        f"{report['model']} on {machine['cores']} cores of {machine['cpu']}, {machine['memory']}, "
        f"{report['date']}, commit {report['commit']}, seed {report['seed']}; "
        f"load average before: {report['load_before']:.1f}{busy}.",
        "",
        "| clients | TTFT p50 / p95 / p99, ms | inter-token p50 / p95 / p99, ms | output tokens/s "
        "| all tokens/s | busy | answers | errors |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|",
        *(f"| {' | '.join(cells(run))} |" for run in report["runs"]),
    ]
    return "\n".join(lines)


def with_figures(text: str, figures: str) -> str:
    """A document with the figures between its marks; ValueError when it has not one pair of them."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"there must be one line {BEGIN} and behind it one {END}")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{figures}\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", type=Path, metavar="FILE.json", help="written by tools.bench serve --json")
    parser.add_argument("document", type=Path, metavar="README.md", help="has the two marks")
    options = parser.parse_args(arguments)
    try:
        figures = table(json.loads(options.figures.read_text(encoding="utf-8")))
    except (OSError, ValueError, LookupError, TypeError) as error:
        say(f"{options.figures}: these are no figures of tools.bench serve ({error})")
        return 2
    try:
        text = options.document.read_text(encoding="utf-8")
        changed = with_figures(text, figures)
        if changed != text:
            options.document.write_text(changed, encoding="utf-8")
    except (OSError, ValueError) as error:
        say(f"{options.document}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
