"""Puts measured figures as a table into a document, between two marks.

    python -m tools.bench serve --topology local --json figures.json
    python -m tools.figures figures.json README.md

The table of `tools.bench NAME`, or of `tools.evaluate`, stands between the lines
`<!-- figures:begin NAME -->` and `<!-- figures:end NAME -->`; whatever was there is replaced, so the same
figures twice change nothing.
Exit codes: 0 done, 2 the figures or the document are not what they should be.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tools import bench_fairness, bench_page_rows, bench_ratios, bench_serve, bench_streams, evaluate
from tools.install import say

TABLES = {
    "serve": bench_serve.markdown,
    "fairness": bench_fairness.markdown,
    "streams": bench_streams.markdown,
    "evaluate": evaluate.markdown,
    "pages": bench_page_rows.markdown,
    "peers": bench_ratios.markdown,
}
BUSY = 0.5
"""With so many processes at work before, figures are not those of the machine."""


def marks(name: str) -> tuple[str, str]:
    """The lines around the table of a benchmark."""
    return f"<!-- figures:begin {name} -->", f"<!-- figures:end {name} -->"


def table(report: dict[str, Any]) -> str:
    """The Markdown for a report of `tools.bench`."""
    machine = report["machine"]
    # what draws nothing at random has none
    seed = f", seed {report['seed']}" if "seed" in report else ""
    busy = ", so other programs took part of these cores" if report["load_before"] > BUSY else ""
    lines = [
        f"`{report['command']}`",
        "",
        f"{report['model']} on {machine['cores']} cores of {machine['cpu']}, {machine['memory']}, "
        f"{report['date']}, commit {report['commit']}{seed}; "
        f"load average before: {report['load_before']:.1f}{busy}.",
        "",
        *TABLES[report["bench"]](report),
    ]
    return "\n".join(lines)


def with_figures(text: str, figures: str, name: str) -> str:
    """A document with the figures between its marks; ValueError when it has not one pair of them."""
    begin, end = marks(name)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"there must be one line {begin} and behind it one {end}")
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{figures}\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", type=Path, metavar="FILE.json", help="written with --json")
    parser.add_argument("document", type=Path, metavar="README.md", help="has the two marks")
    options = parser.parse_args(arguments)
    try:
        report = json.loads(options.figures.read_text(encoding="utf-8"))
        figures = table(report)
    except (OSError, ValueError, LookupError, TypeError) as error:
        say(f"{options.figures}: these are no figures of tools.bench ({error})")
        return 2
    try:
        text = options.document.read_text(encoding="utf-8")
        changed = with_figures(text, figures, report["bench"])
        if changed != text:
            options.document.write_text(changed, encoding="utf-8")
    except (OSError, ValueError) as error:
        say(f"{options.document}: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
