"""How a pool of pages looks in a terminal: a map with a cell a page, or for several, and its sums."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tools.page_pool import KINDS, QUARANTINED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from tools.logreader.render import Paint
    from tools.page_pool import Look

GLYPHS = "·░▒▓█!"
COLOURS = ("grey", "cyan", "yellow", "yellow", "green", "red")
APART = "   "
WIDTH = 100
"""Of a table."""
REQUESTS_SHARE = SUMS_SHARE = 3
"""Requests get a third of the lines at most, and so do sums; the map has the rest."""

Line = list[tuple[str, str | None]]
"""Pieces of text and their colours."""


class Grid(NamedTuple):
    """The cells of a map, row after row."""

    cells: NDArray[np.uint8]
    """The kind of each; the last row may be shorter."""
    width: int
    pages_per_cell: int


def grid(kinds: NDArray[np.uint8], width: int, height: int) -> Grid:
    """At most so many cells, each for as many pages in a row.

    A cell is drawn as most of its pages are, at equal numbers as the later of KINDS; but a single one that
    is quarantined shows.
    """
    width, height = max(1, width), max(1, height)
    each = max(1, -(-len(kinds) // (width * height)))
    number = -(-len(kinds) // each)
    padded = np.full(number * each, len(KINDS), np.uint8)
    padded[: len(kinds)] = kinds
    by_cell = padded.reshape(number, each)
    counts = np.stack([(by_cell == kind).sum(axis=1) for kind in reversed(range(len(KINDS)))])
    cells = (len(KINDS) - 1 - counts.argmax(axis=0)).astype(np.uint8)
    cells[(by_cell == QUARANTINED).any(axis=1)] = QUARANTINED
    return Grid(cells, width, each)


def map_lines(shown: Grid) -> list[Line]:
    """The map, with neighbours of a kind in one piece."""
    lines: list[Line] = []
    for start in range(0, len(shown.cells), shown.width):
        row = shown.cells[start : start + shown.width]
        breaks = [0, *(np.flatnonzero(np.diff(row)) + 1).tolist(), len(row)]
        lines.append([(GLYPHS[row[a]] * (b - a), COLOURS[row[a]]) for a, b in pairwise(breaks)])
    return lines


def census(look: Look) -> list[Line]:
    """Every kind with its sign and number; they add up to the last."""
    signs = zip(GLYPHS, COLOURS, look.census.items(), strict=True)
    parts: list[Line] = [[(sign, colour), (f" {name} {n:,}", None)] for sign, colour, (name, n) in signs]
    return [*parts, [(f"of {len(look.kinds):,}", "bold")]]


def said(look: Look) -> list[Line]:
    """What only the allocator knows."""

    def number(name: str) -> str:
        return f"{look.said.get(name, 0):,.0f}"

    parts = (
        f"pinned {number('pinned')}, for clients {number('kept')}",
        f"in the file {number('in_file')}",
        f"coming {number('fetching')}, going {number('spilling')}",
        f"so far: found {number('hit')}, evicted {number('evicted')}, "
        f"taken back from the dead {number('reclaimed')}",
    )
    return [[(part, "grey")] for part in parts]


def flow(parts: Iterable[Line], width: int) -> list[Line]:
    """Parts beside each other, on as many lines as they need."""
    lines: list[Line] = [[]]
    for part in parts:
        room = width - sum(len(text) for text, _ in lines[-1]) - len(APART)
        if lines[-1] and room < sum(len(text) for text, _ in part):
            lines.append([])
        lines[-1] += [(APART, None), *part] if lines[-1] else part
    return lines


def request_lines(look: Look, most: int) -> list[Line]:
    """The requests that hold most, with a line for the rest."""
    if not look.shares or most < 2:
        return []
    lines: list[Line] = [[(f"{'request':<22} {'pages':>7} {'tokens':>9} {'unused':>7}  filled by", "bold")]]
    shown = look.shares[: most - 1]
    if len(shown) < len(look.shares):
        shown = shown[:-1]
    for share in shown:
        name = f"{share.request}{f'/{share.choice}' if share.choice else ''}"
        unused = share.pages * look.page_tokens - share.slots
        lines.append([(f"{name:<22} {share.pages:>7,} {share.slots:>9,} {unused:>7,}  {share.worker}", None)])
    if rest := look.shares[len(shown) :]:
        pages = sum(share.pages for share in rest)
        lines.append([(f"{len(rest):,} more with {pages:,} pages", "grey")])
    return lines


def frame(title: str, look: Look, width: int, height: int) -> list[Line]:
    """A picture of at most so many columns and lines."""
    requests = request_lines(look, height // REQUESTS_SHARE)
    sums = [*flow(census(look), width), *flow(said(look), width)][: height // SUMS_SHARE]
    rows = height - 3 - len(sums) - len(requests)
    shown = grid(look.kinds, width, rows)
    each = shown.pages_per_cell
    scale = "a cell is a page" if each == 1 else f"a cell is {each:,} pages, drawn as most of them are"
    head: Line = [
        (title, "bold"),
        (f"   {len(look.kinds):,} pages of {look.page_tokens} tokens; {scale}", None),
    ]
    lines = [head, *map_lines(shown), *sums, [], *requests]
    return [clip(line, width) for line in lines[: max(1, height - 1)]]


def clip(line: Line, width: int) -> Line:
    """What of a line fits."""
    kept: Line = []
    for text, colour in line:
        if width <= 0:
            break
        kept.append((text[:width], colour))
        width -= len(text)
    return kept


def painted(lines: Iterable[Line], paint: Paint) -> list[str]:
    """Lines as a terminal takes them."""
    return ["".join(paint(text, colour) for text, colour in line).rstrip() for line in lines]


def numbers(look: Look) -> str:
    """Everything that adds up, in one line."""
    states = " ".join(f"{name} {number}" for name, number in look.census.items())
    figures = ("pinned", "in_file", "hit", "evicted")
    kept = " ".join(f"{name} {look.said.get(name, 0):.0f}" for name in figures)
    return f"total {len(look.kinds)} {states} {kept}"


def table(title: str, look: Look) -> list[str]:
    """All numbers, for a person who does not want a picture."""
    count = look.census
    used = sum(count[name] for name in ("leased", "open", "held"))
    lines = [
        f"{title}: {len(look.kinds):,} pages of {look.page_tokens} tokens",
        *(f"  {name:<12} {count[name]:>9,}" for name in ("free", "cached")),
        f"  {'used':<12} {used:>9,}",
        *(f"    {name:<10} {count[name]:>9,}" for name in ("leased", "open", "held")),
        f"  {'quarantined':<12} {count['quarantined']:>9,}",
        *_plain(flow(said(look), WIDTH)),
    ]
    return [*lines, *_plain(request_lines(look, len(look.shares) + 2))]


def _plain(lines: Sequence[Line]) -> list[str]:
    return ["".join(text for text, _ in line) for line in lines]
