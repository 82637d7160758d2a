"""A pool of pages as anybody may look at it: the shared page table of a launch, mapped read only.

The launcher holds the segments open for as long as it runs, so the system that is looked at does nothing for
it and notices nothing. What is read is no one moment: each page is as it was when its word was read.

    every page is one of      free · cached · leased · open · held · quarantined
    used                      leased + open + held
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from actors.boot import PAGE_TABLE, VITALS
from actors.rundir import LOGS, READY, is_alive
from engine.errors import StartError
from engine.ids import request_name
from engine.layout import MASK32, Owner, PageTable, Vitals
from engine.lifecycle import PageState
from tools.observe import log_lines
from transport.segments import map_segment

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

KINDS = ("free", "cached", "leased", "open", "held", "quarantined")
FREE, CACHED, LEASED, OPEN, HELD, QUARANTINED = range(len(KINDS))
USED = (LEASED, OPEN, HELD)

BROUGHT = "(brought)"
"""In place of a request: pages on their way here from the file or another host."""
SAID = (
    "pages_pinned", "pages_kept", "prefixes_pinned", "pages_in_file", "pages_fetching", "pages_spilling",
    "pages_hit", "pages_evicted", "pages_reclaimed", "pages_from_file", "pages_from_host", "fences_waiting",
)  # fmt: skip
"""What is taken over of the allocator's own figures: the table does not tell it."""


class NoPool(Exception):
    """There is no pool to look at; one line for a person."""


class Share(NamedTuple):
    """The pages that one choice of a request has filled, or is filling, and that somebody holds."""

    request: str
    choice: int
    worker: str
    """Who filled, or fills, the last of them."""
    pages: int
    open: int
    """Of them, not full."""
    slots: int
    """Token slots in use."""


class Look(NamedTuple):
    """What was seen at once."""

    kinds: NDArray[np.uint8]
    """Of each page, an index into KINDS."""
    shares: list[Share]
    """By request, the most pages first."""
    said: dict[str, float]
    """What the allocator last published, of SAID."""
    page_tokens: int

    @property
    def census(self) -> dict[str, int]:
        """Pages of each kind."""
        count = np.bincount(self.kinds, minlength=len(KINDS))
        return {name: int(number) for name, number in zip(KINDS, count, strict=True)}

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        census = self.census
        return {
            "pages": {
                "total": len(self.kinds),
                **census,
                "used": sum(census[KINDS[kind]] for kind in USED),
            },
            "page_tokens": self.page_tokens,
            "allocator": self.said,
            "requests": [share._asdict() for share in self.shares],
        }


class Pool:
    """The page table of one host."""

    def __init__(
        self,
        table: memoryview,
        vitals: memoryview,
        names: Sequence[str] = (),
    ) -> None:
        """`names`: of the actors that were ever started here, in order of their ordinals; none: not known.

        NoPool until the allocator has said how many pages there are.
        """
        self.vitals = Vitals(vitals, len(vitals) // Vitals.BYTES)
        allocator = next((o for o in range(self.vitals.actors) if self._pages_said(o)), None)
        if allocator is None:
            raise NoPool("the allocator has not said yet how many pages there are; try again in a moment")
        self._allocator = allocator
        pages = self._pages_said(allocator)
        page_tokens = tokens_of_page(len(table), pages, self.vitals.actors)
        self.table = PageTable(table, pages, page_tokens, self.vitals.actors)
        self._names = names

    def _pages_said(self, ordinal: int) -> int:
        return int(self.vitals.statistics(ordinal).get("pages_total", 0))

    def look(self) -> Look:
        """How the pages are now."""
        words = np.frombuffer(self.table.words, np.uint64).reshape(-1, PageTable.WORDS)
        states = (words[:, 0] & np.uint64(0xFF)).astype(np.uint8)
        owners = words[:, 4].copy()
        held = self._held()
        kinds = np.zeros(len(states), np.uint8)
        kinds[states == PageState.LEASED] = LEASED
        kinds[states == PageState.OPEN] = OPEN
        kinds[states == PageState.SEALED] = CACHED
        kinds[(states == PageState.SEALED) & held] = HELD
        writable = (kinds == LEASED) | (kinds == OPEN)
        for owner in np.unique(owners[writable]):
            if int(owner) & MASK32 != self.vitals.epoch(int(owner) >> 32):
                # Its next life has begun: it is dead, and not proven gone.
                kinds[writable & (owners == owner)] = QUARANTINED
        said = self.vitals.statistics(self._allocator)
        kept = {name.removeprefix("pages_"): said[name] for name in SAID if name in said}
        return Look(kinds, self._shares(words, kinds), kept, self.table.page_tokens)

    def _held(self) -> NDArray[np.bool_]:
        """Pages that an incarnation holds, a dead one too as long as its row was not cleared."""
        held = np.zeros(self.table.pages, np.bool_)
        for ordinal in range(self.vitals.actors):
            newest = self.vitals.epoch(ordinal)
            for epoch in (newest, newest - 1):
                row = self.table.holders(Owner(ordinal, epoch)) if epoch > 0 else None
                if row is not None:
                    held |= np.frombuffer(row, np.uint8) != 0
        return held

    def _shares(self, words: NDArray[np.uint64], kinds: NDArray[np.uint8]) -> list[Share]:
        where = np.flatnonzero((kinds == OPEN) | (kinds == HELD))
        if not len(where):
            return []
        of = words[where]
        names = np.stack((of[:, 1], of[:, 2] >> np.uint64(32)), axis=1)
        choices, numbers = np.unique(names, axis=0, return_inverse=True)
        numbers = numbers.reshape(-1)
        is_open = kinds[where] == OPEN
        slots = np.where(is_open, of[:, 3] & np.uint64(MASK32), self.table.page_tokens)
        pages = np.bincount(numbers)
        # of each choice the page with the highest block
        last = np.lexsort((of[:, 3] >> np.uint64(32), numbers))[pages.cumsum() - 1]
        columns = (
            *choices.T.tolist(),
            of[last, 4].tolist(),
            pages.tolist(),
            np.bincount(numbers, is_open).astype(int).tolist(),
            np.bincount(numbers, slots).astype(int).tolist(),
        )
        shares = [
            Share(BROUGHT if who.startswith("replicator") else request_name(request), choice, who, *counts)
            for request, choice, by, *counts in zip(*columns, strict=True)
            for who in (self.name(Owner(by >> 32, by & MASK32)),)
        ]
        return sorted(shares, key=lambda share: (-share.pages, share.request, share.choice))

    def name(self, owner: Owner) -> str:
        """An incarnation as people write it."""
        started = [ordinal for ordinal in range(self.vitals.actors) if self.vitals.epoch(ordinal)]
        known = len(started) == len(self._names) and owner.ordinal in started
        name = self._names[started.index(owner.ordinal)] if known else f"actor-{owner.ordinal}"
        return f"{name}@{owner.epoch}"


def tokens_of_page(table_bytes: int, pages: int, actors: int) -> int:
    """How many tokens a page holds, by the size of the table; NoPool when it has no such size."""
    tokens, rest = divmod(
        table_bytes - PageTable.size(pages, 0, actors),
        PageTable.size(pages, 1, actors) - PageTable.size(pages, 0, actors),
    )
    if rest or tokens < 1:
        raise NoPool(f"a page table of {table_bytes} bytes is not one of {pages} pages of this version")
    return tokens


def open_pool(run_dir: Path) -> Pool:
    """The pool of the launch that has this run directory; NoPool says why it cannot be looked at."""
    if not is_alive(run_dir):
        raise NoPool(f"{run_dir}: this launch has ended, and its pages with it")
    try:
        pid = int(json.loads((run_dir / READY).read_bytes())["pid"])
    except (OSError, ValueError, LookupError, TypeError):
        raise NoPool(f"{run_dir}: this launch is not ready yet; try again in a moment") from None
    segments = []
    try:
        for name in (PAGE_TABLE, VITALS):
            descriptor = _descriptor(pid, name)
            try:
                segments.append(map_segment(descriptor, writable=False))
            finally:
                os.close(descriptor)
        table, vitals = segments
        return Pool(table.view, vitals.view, started_names(run_dir))
    except PermissionError:
        raise NoPool(f"{run_dir}: process {pid} is another user's") from None
    except (OSError, StartError) as error:
        raise NoPool(f"{run_dir}: the shared memory of process {pid} cannot be read: {error}") from None


def _descriptor(pid: int, segment: str) -> int:
    """Open one of a launcher's segments to read it; FileNotFoundError when the process has none."""
    folder = f"/proc/{pid}/fd"
    for number in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{number}").startswith(f"/memfd:estafet:{segment} "):
                return os.open(f"{folder}/{number}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # it was closed meanwhile
    raise FileNotFoundError(f"it has no segment {segment}")


def started_names(run_dir: Path) -> list[str]:
    """The actors that a launcher has started, in the order of the first time: that of their ordinals."""
    try:
        lines = log_lines(run_dir / LOGS / "launcher.jsonl")
        spawned = [line["process"] for line in lines if line.get("event") == "process_spawned"]
    except (OSError, ValueError):
        return []
    return list(dict.fromkeys(str(process).partition("@")[0] for process in spawned))
