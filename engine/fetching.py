"""Pages on their way from below or beside, and down to the file: what is asked of the replicator, and when.

    seconds to fetch n pages = start + n × page_s        measured for each kind of source
    seconds to fill them     = n × page_s of a worker    measured when workers fill what nobody has

Fetching pays when it takes less. The shape is the usual one of a latency and a rate (Hockney 1994); what
stands here at first are figures for a small model on two cores, and each measurement moves them by an
eighth, as TCP smooths its round-trip times (RFC 6298).

A fetch is a filling of its own (`engine.filling`): others wait for it as for a worker that computes. Its
targets are leased to the replicator and pinned until it has ended, since what has arrived is nobody's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from engine.core import Send
from engine.filling import Filling
from engine.ids import SequenceKey
from engine.lifecycle import PageState
from engine.messages import FetchWanted, PageSource, PageWanted, SpillWanted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core import Statistics
    from engine.filling import Ahead, FillingName, Fillings
    from engine.ids import Incarnation
    from engine.layout import Owner
    from engine.messages import FetchEnded, FileKeys, SpillEnded
    from engine.pages import Pages
    from engine.shapes import PageRef

Kind = Literal["file", "host"]

SMOOTHING = 1 / 8

SPILL_BELOW = 1 / 8
"""Of the pool: when fewer pages are free, those that go next are kept in the file."""

SPILLS_MOST = 16
"""Pages that are being written to the file at once: they cannot be leased meanwhile."""

FILE = PageSource("file")


@dataclass(slots=True)
class Rate:
    """A latency and the seconds a page, the latter smoothed."""

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

    def told(self) -> tuple[float, float]:
        """Seconds to fill a page, and to fetch one from another host."""
        return self.fill.page_s, self.fetch["host"].page_s

    def statistics(self) -> Statistics:
        return {
            "page_fill_ms": round(1e3 * self.fill.page_s, 3),
            **{f"page_{kind}_ms": round(1e3 * rate.page_s, 3) for kind, rate in self.fetch.items()},
        }


class Fetch(NamedTuple):
    """A run of pages that the replicator brings."""

    name: FillingName
    source: PageSource
    pages: tuple[Ahead, ...]
    targets: tuple[PageRef, ...]


class Fetches:
    """What the replicator of a host was asked for."""

    def __init__(self, pages: Pages) -> None:
        self.costs = FetchCosts()
        self.replicator: tuple[Incarnation, Owner] | None = None
        """The living one."""
        self.ordinal: int | None = None
        """Of all incarnations of the replicator, the dead ones too."""
        self.landed: dict[int, Kind] = {}
        """Pages that came by the fetch that ends right now."""
        self._pages = pages
        self._under_way: dict[int, Fetch] = {}
        self._in_file: set[bytes] | None = None
        """Keys of the pages that the file holds; None: there is no file, or nobody has said yet."""
        self._spilling: set[PageRef] = set()
        self._offered: set[PageRef] = set()
        """Pages that the file was offered; what it did not keep, it is not offered again."""
        self._seen = (0, 0)
        """Pages that had become idle, and been evicted, when it was last looked at what to offer."""
        self.fetched: dict[Kind, int] = {"file": 0, "host": 0}
        self.spilled = 0

    @property
    def busy(self) -> bool:
        """Whether pages will come back of themselves."""
        return bool(self._under_way or self._spilling)

    def targets(self) -> Iterator[PageRef]:
        """The pages that are on their way."""
        return (ref for fetch in self._under_way.values() for ref in fetch.targets)

    # ── up ────────────────────────────────────────────────────────────────────────────────────

    def start(self, filling: Filling, fillings: Fillings) -> list[Send]:
        """Have the next pages brought, if somebody has them and that is faster than to fill them."""
        if self.replicator is None:
            return []
        for source in (FILE, PageSource("host", filling.elsewhere)):
            pages = self._there(filling, source.kind)[: self._pages.available]
            if self.costs.pays(source.kind, len(pages)):
                return self._ask(filling, fillings, source, pages)
        return []

    def _there(self, filling: Filling, kind: Kind) -> list[Ahead]:
        """The pages from where a filling stands that a source has, one behind the other."""
        if kind == "file" and not self._in_file:
            return []
        pages: list[Ahead] = []
        for page in filling.ahead():
            known = self._has_file(page.key) if kind == "file" else page.block < len(filling.elsewhere_pages)
            if not known:
                break
            pages.append(page)
        return pages

    def _has_file(self, key: bytes) -> bool:
        return self._in_file is not None and key in self._in_file

    def _ask(
        self, filling: Filling, fillings: Fillings, source: PageSource, pages: list[Ahead]
    ) -> list[Send]:
        assert self.replicator is not None
        replicator, owner = self.replicator
        targets = tuple(self._pages.take(len(pages), owner))
        # Fewer, where somebody who is thought dead has taken what seemed to be idle.
        pages = pages[: len(targets)]
        if not pages:
            return []
        self._pages.cache.pin(ref.index for ref in targets)
        # The name of a page in one life: the ticket of no other fetch, also of those of a predecessor.
        ticket = targets[0].generation << 32 | targets[0].index
        name = (replicator, SequenceKey(ticket, 0), 0)
        end = (pages[-1].block + 1) * filling.chain.page_bytes
        fillings.put(Filling(name, filling.tokens[:end], filling.chain.copy()))
        self._under_way[ticket] = Fetch(name, source, tuple(pages), targets)
        there = filling.elsewhere_pages if source.kind == "host" else ()
        wanted = tuple(
            PageWanted(*page, ref, there[page.block] if there else None)
            for page, ref in zip(pages, targets, strict=True)
        )
        return [Send(replicator, FetchWanted(ticket, source, wanted))]

    def ended(self, message: FetchEnded, fillings: Fillings, now: float) -> Fetch | None:
        """Take what has landed into the cache; the caller wakes who waited, then `settle`s the fetch."""
        fetch = self._under_way.pop(message.ticket, None)
        if fetch is None:
            return None
        kind = fetch.source.kind
        landed = min(message.landed, len(fetch.targets))
        for ref in fetch.targets[:landed]:
            self._pages.cache.add(ref.index, now)
            self.landed[ref.index] = kind
        self.costs.fetch[kind].saw(landed, message.seconds)
        self.fetched[kind] += landed
        if landed < len(fetch.pages):
            self._not_there(fetch, landed, fillings)
        return fetch

    def _not_there(self, fetch: Fetch, landed: int, fillings: Fillings) -> None:
        """A source has less than was thought: whoever asks it again would wait for nothing."""
        if fetch.source.kind == "file" and self._in_file is not None:
            # What lies behind it in the file is of use again when this one is filled.
            self._in_file.discard(fetch.pages[landed].key)
            return
        for filling in fillings:
            if filling.elsewhere == fetch.source.host:
                filling.elsewhere_pages = filling.elsewhere_pages[: fetch.pages[landed].block]

    def settle(self, fetch: Fetch) -> None:
        """Let go of the targets; those that did not land are free."""
        self.landed.clear()
        self._pages.unpin(ref.index for ref in fetch.targets)
        table = self._pages.table
        for ref in fetch.targets:
            if table.is_current(ref) and table.state(ref.index) in (PageState.LEASED, PageState.OPEN):
                self._pages.put_back(ref.index)

    # ── down ──────────────────────────────────────────────────────────────────────────────────

    def spill(self) -> list[Send]:
        """When pages become scarce, have those that go next written to the file before they go."""
        pages, room = self._pages, SPILLS_MOST - len(self._spilling)
        if self.replicator is None or self._in_file is None or room <= 0:
            return []
        if pages.free >= SPILL_BELOW * pages.table.pages:
            return []
        # Asked with every message: what goes next is others only when pages have come or gone.
        seen = pages.cache.idled, pages.cache.evicted
        if seen == self._seen:
            return []
        self._seen = seen
        key_of = pages.cache.index.key_of
        coming = [page for page in pages.cache.coming(SPILLS_MOST) if not self._has_file(key_of(page))]
        refs = [ref for ref in map(pages.table.ref, coming) if ref not in self._offered][:room]
        if not refs:
            return []
        going = [ref.index for ref in refs]
        self._offered = {ref for ref in self._offered if pages.table.is_current(ref)} | set(refs)
        pages.cache.pin(going)
        self._spilling.update(refs)
        return [Send(self.replicator[0], SpillWanted(tuple(refs)))]

    def spill_ended(self, message: SpillEnded) -> None:
        """These were written, or not: they may go."""
        ended = self._spilling & set(message.pages)
        self._spilling -= ended
        self._pages.unpin(page.index for page in ended)
        self.spilled += len(ended)

    def in_file(self, message: FileKeys) -> None:
        """What the file holds."""
        known = set() if message.whole or self._in_file is None else self._in_file
        self._in_file = (known - set(message.removed)) | set(message.added)

    def lose(self, replicator: Incarnation) -> None:
        """The replicator is dead: nothing that it was asked for will come."""
        if self.replicator is None or self.replicator[0] != replicator:
            return
        self.replicator, self._in_file = None, None
        self._pages.unpin(page.index for page in self._spilling)
        self._spilling.clear()
        self._offered.clear()
        self._seen = (0, 0)
        # These are in quarantine: it may still write them.
        self._pages.unpin(ref.index for ref in self.targets())
        self._under_way.clear()

    def statistics(self) -> Statistics:
        return {
            "pages_fetching": sum(1 for _ in self.targets()),
            **{f"pages_from_{kind}": count for kind, count in self.fetched.items()},
            "pages_in_file": len(self._in_file or ()),
            "pages_spilling": len(self._spilling),
            "pages_spilled": self.spilled,
            **self.costs.statistics(),
        }
