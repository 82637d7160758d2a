"""Drives the eviction policies of the prefix cache with a trace of requests, and counts what they keep.

    python -m tools.cache_trace --trace TRACE.jsonl.gz [--json FILE] [--plot FILE.svg]

A trace has a JSON object a line, whose `hash_ids` name the blocks of a prompt in order; equal ids are equal
prefixes (the format of Mooncake, FAST'25; a block is 512 tokens). A hit is a block of a request's longest
cached prefix; the others are added when the request is done, and pages are evicted until the cache has room
for the stated share of the trace's distinct blocks. Nothing is random: the same trace has the same figures.

*clairvoyant* is Belady's rule: the block whose next use is furthest away goes. A block is used no later than
the blocks behind it, so with ties broken towards the end of a prompt it goes leaf first by itself, and it is
the best that any cache can do that is filled on demand (Mattson et al. 1970).
Exit codes: 0 done, 2 the trace or the arguments are not what they should be.
"""

from __future__ import annotations

import argparse
import gzip
import heapq
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from engine.eviction import LRU, CostAware, RecomputeCost
from tools.cache_plot import draw
from tools.install import say

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from engine.eviction import EvictionPolicy

Trace = list[tuple[int, ...]]
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
BLOCK_TOKENS = 512


class BadTrace(Exception):
    """A file that is not a trace, and the line that shows it."""


class _Line(msgspec.Struct):
    hash_ids: tuple[int, ...]


class Kept(NamedTuple):
    """What a cache did with a trace."""

    hits: int
    cost_saved: float
    """What the hits would have cost to compute again, of what all blocks cost."""


def read_trace(path: Path) -> Trace:
    """The requests of a trace, in the order of the file; BadTrace when it is none."""
    decode = msgspec.json.Decoder(_Line).decode
    trace: Trace = []
    parents: dict[int, int | None] = {}
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                blocks = decode(line).hash_ids
                parent = None
                for block in blocks:
                    if parents.setdefault(block, parent) != parent:
                        raise BadTrace(f"{path}:{number}: block {block} follows another block than before")
                    parent = block
                trace.append(blocks)
    except (msgspec.MsgspecError, OSError, EOFError) as error:
        raise BadTrace(f"{path}: {error}") from error
    if not parents:
        raise BadTrace(f"{path}: there is no block in it")
    return trace


def blocks_of(trace: Trace) -> tuple[int, int]:
    """All blocks of all requests, and the distinct ones."""
    return sum(map(len, trace)), len({block for request in trace for block in request})


def simulate(trace: Trace, capacity: int, policy: EvictionPolicy, cost: RecomputeCost) -> Kept:
    """What a cache of so many blocks keeps under a policy; its pages have the numbers of the blocks."""
    cached: set[int] = set()
    hits, saved, total = 0, 0.0, 0.0
    for now, request in enumerate(trace):
        found = prefix(request, cached)
        hits += found
        saved += sum(map(cost.relative, range(found)))
        total += sum(map(cost.relative, range(len(request))))
        if found:
            policy.hit(request[:found], now)
        for index in range(found, len(request)):
            block = request[index]
            policy.added(
                block, request[index - 1] if index else None, index, block.to_bytes(16, "little"), now
            )
            cached.add(block)
        for block in request[found:]:
            policy.unheld(block)
        for block in policy.victims(max(0, len(cached) - capacity)):
            policy.removed(block)
            cached.remove(block)
    return Kept(hits, saved / total)


def clairvoyant(trace: Trace, capacity: int, cost: RecomputeCost) -> Kept:
    """What a cache of so many blocks keeps that knows the rest of the trace."""
    never = len(trace)
    following: list[list[int]] = []
    ahead: dict[int, int] = {}
    for now in range(len(trace) - 1, -1, -1):
        following.append([ahead.get(block, never) for block in trace[now]])
        ahead.update(dict.fromkeys(trace[now], now))
    following.reverse()
    cached: dict[int, int] = {}
    heap: list[tuple[int, int, int]] = []
    hits, saved, total = 0, 0.0, 0.0
    for request, uses in zip(trace, following, strict=True):
        found = prefix(request, cached)
        hits += found
        saved += sum(map(cost.relative, range(found)))
        total += sum(map(cost.relative, range(len(request))))
        for index, (block, use) in enumerate(zip(request, uses, strict=True)):
            cached[block] = use
            heapq.heappush(heap, (-use, -index, block))
        while len(cached) > capacity:
            use, _, block = heapq.heappop(heap)
            if cached.get(block) == -use:
                del cached[block]
    return Kept(hits, saved / total)


def prefix(request: Sequence[int], cached: Mapping[int, Any] | set[int]) -> int:
    """How many blocks of a request are found from its start."""
    return next((index for index, block in enumerate(request) if block not in cached), len(request))


# One block of 512 tokens is 32 pages of 16.
COST = RecomputeCost(slope=RecomputeCost().slope * BLOCK_TOKENS / 16)
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    "LRU": lambda capacity: LRU(),
    "cost-aware": lambda capacity: CostAware(capacity, COST),
}


def curves(
    trace: Trace,
    fractions: Sequence[float] = FRACTIONS,
    policies: Mapping[str, Callable[[int], EvictionPolicy]] = POLICIES,
) -> dict[str, Any]:
    """Hits by the share of the distinct blocks that there is room for, and by policy.

    `policies` make a policy for a number of blocks. The result is ready for JSON: `blocks`,
    `distinct_blocks`, `fractions`, and under `hit_rate` (hits / all blocks) and `cost_saved` (the same,
    each block weighted with its recompute cost) a list for each policy, for `clairvoyant` and `infinite`.
    """
    if not fractions or not all(0 < fraction <= 1 for fraction in fractions):
        raise ValueError(f"{list(fractions)} are not shares of the distinct blocks")
    total, distinct = blocks_of(trace)
    runs: dict[str, list[Kept]] = {name: [] for name in (*policies, "clairvoyant")}
    for fraction in fractions:
        capacity = max(1, int(distinct * fraction))
        for name, make in policies.items():
            runs[name].append(simulate(trace, capacity, make(capacity), COST))
        runs["clairvoyant"].append(clairvoyant(trace, capacity, COST))
    runs["infinite"] = [clairvoyant(trace, distinct, COST)] * len(fractions)
    return {
        "requests": len(trace),
        "blocks": total,
        "distinct_blocks": distinct,
        "fractions": list(fractions),
        "hit_rate": {name: [kept.hits / total for kept in run] for name, run in runs.items()},
        "cost_saved": {name: [kept.cost_saved for kept in run] for name, run in runs.items()},
    }


def table(figures: dict[str, Any]) -> list[str]:
    """The hit rates as lines of Markdown."""
    names = list(figures["hit_rate"])
    lines = ["| room for | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for row, fraction in enumerate(figures["fractions"]):
        rates = " | ".join(f"{figures['hit_rate'][name][row]:.4f}" for name in names)
        lines.append(f"| {fraction:.0%} | {rates} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.cache_trace", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, perhaps gzipped")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the curves there, as SVG")
    arguments = parser.parse_args(argv)
    started = time.perf_counter()
    try:
        figures = curves(read_trace(arguments.trace))
        if arguments.json:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        if arguments.plot:
            arguments.plot.write_text(draw(figures, f"Hit rate, {arguments.trace.name}"))
    except (BadTrace, OSError) as error:
        say(str(error))
        return 2
    print(
        f"{figures['requests']} requests, {figures['blocks']} blocks, {figures['distinct_blocks']} distinct"
    )
    print("\n".join(table(figures)))
    say(f"{time.perf_counter() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
