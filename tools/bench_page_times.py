"""What the allocator's inner work costs: the life of a page, and a look-up of a cached prefix."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, NamedTuple

from engine.batching import Lease
from engine.chain import chain_root, page_keys, token_bytes
from engine.eviction import LRU
from engine.layout import Owner, PageTable
from engine.pages import Pages
from engine.prefix_index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

POOL, BATCH = 4096, 64
PAGE_TOKENS = 16
LOOKED_UP = 4096
"""Tokens of the prefix."""
PREFIXES = 8
"""Different ones, looked up in turn, so that none is always in the processor's caches."""
OWNER = Owner(3, 1)


def page_lives(rounds: int) -> list[float]:
    """Seconds a page, of batches: leased by the allocator, taken and opened by a worker, freed again.

    The allocator's `Pages`, the worker's `Lease` and row of holders, and the page table between them, in one
    process; no messages.
    """
    table = PageTable(memoryview(bytearray(PageTable.size(POOL, PAGE_TOKENS, 8))), POOL, PAGE_TOKENS, 8)
    pages, lease = Pages(table, LRU()), Lease()
    holds = table.claim(OWNER)
    found = []
    for number in range(rounds):
        began = time.perf_counter()
        lease.add(pages.take(BATCH, OWNER))
        opened = []
        for block in range(BATCH):
            page = lease.take()
            holds[page.index] = 1
            table.open(page.index, number + 1, 0, 1, block)
            opened.append(page)
        for page in opened:
            holds[page.index] = 0
            pages.put_back(page.index)
        found.append((time.perf_counter() - began) / BATCH)
    assert pages.free == POOL, "all pages came back"
    return found


class LookUps(NamedTuple):
    """Seconds of look-ups of a whole cached prefix."""

    again: list[float]
    first: list[float]
    """The first of each prefix, which puts its chunks together."""


def look_ups(rounds: int, tokens: int = LOOKED_UP, seed: int = 0) -> LookUps:
    """How long it takes to find all pages of a prefix of so many tokens, hashes and comparisons included."""
    draw = random.Random(seed)
    index = PrefixIndex(PAGE_TOKENS)
    root = chain_root("bench")
    prefixes = [token_bytes([draw.randrange(1 << 16) for _ in range(tokens)]) for _ in range(PREFIXES)]
    size = 4 * PAGE_TOKENS
    for number, prefix in enumerate(prefixes):
        parent = root
        for block, key in enumerate(page_keys(root, prefix, PAGE_TOKENS)):
            page = number * len(prefix) // size + block
            index.insert(page, key, parent, prefix[block * size : (block + 1) * size])
            parent = key
    times = []
    for turn in range(PREFIXES + rounds):
        prefix = prefixes[turn % PREFIXES]
        began = time.perf_counter()
        pages = index.lookup(root, prefix)
        times.append(time.perf_counter() - began)
        assert len(pages) == tokens // PAGE_TOKENS, "the prefix is cached as a whole"
    return LookUps(times[PREFIXES:], times[:PREFIXES])


def microseconds(seconds: Sequence[float]) -> float:
    """The median."""
    ordered = sorted(seconds)
    return 1e6 * ordered[len(ordered) // 2]
