"""Draws hit rates by the size of a cache, as SVG: no library, and the same figures give the same bytes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 60, 130, 40, 50
COLOURS = ("#d55e00", "#0072b2", "#009e73", "#555555", "#cc79a7", "#e69f00")
"""Told apart by people who see fewer colours (Okabe and Ito 2008)."""


def draw(figures: dict[str, Any], title: str) -> str:
    """The curves of `tools.cache_trace.curves`: a logarithmic axis of room, one of hits / all blocks."""
    fractions: list[float] = figures["fractions"]
    rates: dict[str, list[float]] = figures["hit_rate"]
    top = max(0.1, math.ceil(max(map(max, rates.values())) * 10) / 10)
    low = math.log(min(fractions))
    span = (math.log(max(fractions)) - low) or 1.0

    def across(fraction: float) -> float:
        return LEFT + (math.log(fraction) - low) / span * (WIDTH - LEFT - RIGHT)

    def up(rate: float) -> float:
        return HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM)

    parts = [text(LEFT, TOP - 18, title, "start")]
    for step in range(round(top * 10) + 1):
        y = up(step / 10)
        parts += [
            line([(LEFT, y), (WIDTH - RIGHT, y)], "#dddddd"),
            text(LEFT - 8, y + 4, f"{step * 10} %", "end"),
        ]
    for fraction in fractions:
        x = across(fraction)
        parts += [
            line([(x, HEIGHT - BOTTOM), (x, HEIGHT - BOTTOM + 5)], "#555555"),
            text(x, HEIGHT - BOTTOM + 20, f"{fraction * 100:g} %", "middle"),
        ]
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 8, "room, of the distinct blocks", "middle"))
    for index, (name, rate) in enumerate(rates.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = [(across(fraction), up(value)) for fraction, value in zip(fractions, rate, strict=True)]
        parts.append(line(points, colour, 2, dashed=name == "infinite"))
        y = TOP + 10 + 20 * index
        parts.append(
            line([(WIDTH - RIGHT + 12, y), (WIDTH - RIGHT + 36, y)], colour, 2, dashed=name == "infinite")
        )
        parts.append(text(WIDTH - RIGHT + 42, y + 4, name, "start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str) -> str:
    """Words at a place."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def line(points: Sequence[tuple[float, float]], colour: str, width: int = 1, *, dashed: bool = False) -> str:
    """A line through points."""
    dash = ' stroke-dasharray="4 4"' if dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>'
