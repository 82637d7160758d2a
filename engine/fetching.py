"""Pages on their way from below or beside: when fetching pays, and what was asked for.

    seconds to fetch n pages = start + n × page_s        measured for each kind of source
    seconds to fill them     = n × page_s of a worker    measured when workers fill what nobody has

Fetching pays when it takes less. The shape is the usual one of a latency and a rate (Hockney 1994); what
stands here at first are figures for a small model on two cores, and each measurement moves them by an
eighth, as TCP smooths its round-trip times (RFC 6298).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from engine.core import Statistics
    from engine.filling import FillingName
    from engine.messages import PageSource

Kind = Literal["file", "host"]
SMOOTHING = 1 / 8


@dataclass(slots=True)
class Rate:
    """A latency and the seconds a page, both smoothed."""

    start_s: float
    page_s: float

    def seconds(self, pages: int) -> float:
        """What so many pages will take."""
        return self.start_s + pages * self.page_s

    def saw(self, pages: int, seconds: float) -> None:
        """So many pages took so long."""
        if pages > 0:
            self.page_s += SMOOTHING * (max(0.0, seconds - self.start_s) / pages - self.page_s)


@dataclass(slots=True)
class FetchCosts:
    """What it takes to fill a page, and to fetch one."""

    fill: Rate = field(default_factory=lambda: Rate(0.0, 0.02))
    fetch: dict[Kind, Rate] = field(
        default_factory=lambda: {"file": Rate(0.0005, 0.001), "host": Rate(0.002, 0.002)}
    )

    def pays(self, kind: Kind, pages: int) -> bool:
        """Whether to fetch so many pages is faster than to fill them."""
        return pages > 0 and self.fetch[kind].seconds(pages) < self.fill.seconds(pages)

    def statistics(self) -> Statistics:
        return {
            "page_fill_ms": round(1e3 * self.fill.page_s, 3),
            **{f"page_{kind}_ms": round(1e3 * rate.page_s, 3) for kind, rate in self.fetch.items()},
        }


class Missing(NamedTuple):
    """A page of a chain that is not in memory."""

    key: bytes
    parent: bytes
    tokens: bytes
    block: int


class Fetch(NamedTuple):
    """A run of pages that the replicator brings."""

    name: FillingName
    source: PageSource
    pages: tuple[Missing, ...]
    targets: tuple[int, ...]
