"""Measures the page system: what is wasted, how much fits, what finding a prefix saves, what pages cost.

    python -m tools.bench pages --trace mooncake_conversation.jsonl.gz --json pages.json
    python -m tools.bench pages --only ttft,allocator
    python -m tools.bench pages --only trace --trace mooncake_conversation.jsonl.gz --plot hits.svg

  waste        slots that are allocated and not used while 64 requests of a trace run, lengths ÷ 32,
               leases included; for pages of 8, 16 and 32 tokens, and if each had the slots of the longest
  concurrency  how many of them run at once in a pool that holds 32 of the longest
  ttft         two workers, one of which has filled a system prompt of 2,048 tokens: the time to the first
               token when the other is asked behind it, against prompts of this length that nobody has
  trace        hits of the eviction policies on the trace's blocks
  allocator    a page's life from lease to free, and a look-up of 4,096 tokens, in one process
  hosts        two hosts as network namespaces (root): the time to the first token when the prompt's
               pages are on the other one, against computing them

waste and concurrency drive the real cores of the engine without kernels (tools/page_world.py), so they and
`trace` are the same on every machine. ttft and hosts start systems with the default model and native kernels,
and need a machine that does nothing else.

The trace is Mooncake's of conversations (kvcache-ai/Mooncake, FAST'25 release, conversation_trace.jsonl),
perhaps gzipped: --trace FILE, or mooncake_conversation.jsonl.gz in the folder $ESTAFET_TRACES.

Exit codes: 0 measured, 2 bad usage, 3 nothing could be measured, 130 interrupted.
"""

from __future__ import annotations

import functools
import os
import statistics
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from tools import bench_page_times, bench_prefixes, bench_two_hosts, cache_trace, machine
from tools.bench_load import Arrival, BenchFailed, Scale, read_trace
from tools.bench_page_rows import ROWS, bars, markdown
from tools.bench_ratios import missing, ratios, some_of, tell
from tools.bench_rounds import Contender, Findings
from tools.bench_system import count
from tools.cache_plot import draw
from tools.install import say
from tools.page_world import Length, Setup, room, waste

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Mapping

PARTS = ("waste", "concurrency", "ttft", "trace", "allocator", "hosts")
COUNTED = ("waste", "concurrency", "trace")
"""Parts that no other program can disturb: nothing is timed."""
TRACES = "ESTAFET_TRACES"
TRACE = "mooncake_conversation.jsonl.gz"
DIVIDED = 32
SEQUENCES = 64
PAGE_TOKENS = 16
POOL_TOKENS = 1 << 16
"""Of the pool in which waste is measured: more than 64 sequences take."""
LONGEST_IN_POOL = 32
"""So many of the longest fit in the pool in which sequences are counted."""
SLOTS = 2048
"""More than fit there."""
LIVES, LOOK_UPS = 2000, 2000
SHARES = (0.05, 0.2)


def lengths_of(arrivals: Iterable[Arrival]) -> list[Length]:
    """A trace's requests, scaled; at least two tokens each, of which one is the prompt."""
    scale = Scale(DIVIDED)
    return [Length(one.input, one.output) for one in (scale(arrival, 1) for arrival in arrivals)]


@dataclass(slots=True)
class Measurement:
    """One run of the command."""

    options: argparse.Namespace
    findings: Findings = field(default_factory=Findings)
    facts: dict[str, str] = field(default_factory=dict)
    """What the table says beside figures."""
    details: dict[str, Any] = field(default_factory=dict)
    """What the report says beside figures."""

    # ── what is counted ───────────────────────────────────────────────────────────────────────

    def _trace(self) -> Path:
        given: Path | None = self.options.trace
        if given is None and os.environ.get(TRACES):
            given = Path(os.environ[TRACES]) / TRACE
        if given is None:
            raise BenchFailed(f"no trace: name {TRACE} by --trace, or its folder by ${TRACES}")
        return given

    def _lengths(self) -> list[Length]:
        return lengths_of(read_trace(self._trace())[: self.options.limit])

    def waste(self) -> None:
        """Allocated and not used, for three page sizes."""

        def measure(page_tokens: int) -> Mapping[str, float | None]:
            lengths = self._lengths()
            setup = Setup(page_tokens, POOL_TOKENS // page_tokens, SEQUENCES)
            with _bar(f"pages of {page_tokens}", len(lengths), "request") as took:
                found = waste(setup, lengths, took)
            longest = max(length.input + length.output for length in lengths)
            self.facts["Waste"] = (
                f"{len(lengths):,} requests of {self._trace().name}, lengths ÷ {DIVIDED}, {SEQUENCES} at a "
                f"time, no two with a prefix in common; of allocated slots, weighted with time; the longest "
                f"has {longest:,} tokens, and a static allocation gives as many to each"
            )
            self.details[f"waste_page{page_tokens}_most"] = found.mean.most
            result: dict[str, float | None] = {f"waste_page{page_tokens}_share": found.mean.value}
            if page_tokens == PAGE_TOKENS:
                result["waste_static_share"] = found.static.value
            self.facts["At most, at one moment"] = ", ".join(
                f"{100 * self.details[f'waste_page{size}_most']:.1f} % with pages of {size}"
                for size in (8, 16, 32)
                if f"waste_page{size}_most" in self.details
            )
            return result

        self._once(
            "waste",
            *(
                Contender(
                    f"pages of {size} tokens",
                    (
                        f"waste_page{size}_share",
                        *(("waste_static_share",) if size == PAGE_TOKENS else ()),
                    ),
                    functools.partial(measure, size),
                )
                for size in (PAGE_TOKENS, 8, 32)
            ),
        )

    def concurrency(self) -> None:
        """How many sequences run at once."""

        def measure() -> Mapping[str, float | None]:
            lengths = self._lengths()
            totals = [length.input + length.output for length in lengths]
            longest, mean = max(totals), statistics.fmean(totals)
            pages = LONGEST_IN_POOL * -(-longest // PAGE_TOKENS)
            with _bar("a full pool", len(lengths), "request") as took:
                found = room(Setup(PAGE_TOKENS, pages, SLOTS), lengths, took)
            running = found.sequences.value
            self.facts["Concurrency"] = (
                f"a pool of {pages:,} pages of {PAGE_TOKENS}; lengths ÷ {DIVIDED}, the longest {longest:,} "
                f"tokens, the mean {mean:.0f}, of those that run {found.length.value:.0f}, since long "
                f"answers come behind longer prompts; {found.preemptions} gave way"
            )
            self.details["preemptions"] = found.preemptions
            return {
                "running_sequences": running,
                "static_sequences": float(found.static),
                "concurrency_times": running / found.static,
                "longest_over_mean_times": longest / mean,
                "longest_over_running_times": longest / found.length.value,
            }

        gives = (
            "running_sequences", "static_sequences", "concurrency_times", "longest_over_mean_times",
            "longest_over_running_times",
        )  # fmt: skip
        self._once("concurrency", Contender("a full pool", gives, measure))

    def trace(self) -> None:
        """Hits of the eviction policies."""

        def measure() -> Mapping[str, float | None]:
            path = self._trace()
            try:
                blocks = cache_trace.read_trace(path)[: self.options.limit]
            except cache_trace.BadTrace as error:
                raise BenchFailed(str(error)) from error
            plot: Path | None = self.options.plot
            found = cache_trace.curves(blocks, cache_trace.FRACTIONS if plot else SHARES)
            if plot:
                plot.write_text(draw(found, f"Hit rate, {path.name}"), encoding="utf-8")
            self.details["hit_rate"] = {"fractions": found["fractions"], **found["hit_rate"]}
            least, more = map(found["fractions"].index, SHARES)
            rates = found["hit_rate"]
            self.facts["Trace"] = (
                f"{found['requests']:,} requests of {path.name}, {found['blocks']:,} blocks, "
                f"{found['distinct_blocks']:,} distinct"
            )
            return {
                "hits_5_share": rates["cost-aware"][least],
                "hits_5_lru_share": rates["LRU"][least],
                "hits_20_share": rates["cost-aware"][more],
                "hits_infinite_share": rates["infinite"][more],
            }

        gives = ("hits_5_share", "hits_5_lru_share", "hits_20_share", "hits_infinite_share")
        self._once("trace", Contender("the cache's policies", gives, measure))

    # ── what is timed ─────────────────────────────────────────────────────────────────────────

    def allocator(self) -> None:
        """Microseconds of the inner work."""

        def lives() -> Mapping[str, float | None]:
            return {"page_life_us": bench_page_times.microseconds(bench_page_times.page_lives(LIVES))}

        def look_ups() -> Mapping[str, float | None]:
            found = bench_page_times.look_ups(LOOK_UPS, seed=self.options.seed)
            return {
                "lookup_4096_us": bench_page_times.microseconds(found.again),
                "lookup_4096_first_us": bench_page_times.microseconds(found.first),
            }

        self.facts["Allocator"] = (
            f"medians of {LIVES:,} batches of {bench_page_times.BATCH} pages and of {LOOK_UPS:,} look-ups of "
            f"{bench_page_times.PREFIXES} prefixes in turn"
        )
        self._once(
            "allocator",
            Contender("a page's life", ("page_life_us",), lives),
            Contender("look-ups", ("lookup_4096_us", "lookup_4096_first_us"), look_ups),
        )

    def ttft(self) -> None:
        """A prefix that another worker has filled."""
        asks = self.options.asks
        self.facts["TTFT"] = (
            f"{bench_prefixes.CACHED + bench_prefixes.NEW:,} tokens, of which {bench_prefixes.NEW} are new; "
            f"{asks} questions, {bench_prefixes.COLD} prompts that nobody has; topology two-workers, "
            f"{self.options.threads} threads each, idle; through the HTTP door, streamed"
        )
        self._system(
            "ttft",
            "another worker's prefix",
            ("cached_ttft_p50_ms", "cached_ttft_p99_ms", "cold_ttft_p50_ms"),
            asks + bench_prefixes.COLD,
            bench_prefixes.between_workers,
        )

    def hosts(self) -> None:
        """A prefix that another host has."""
        prompts = bench_two_hosts.prompts_of(self.options.asks)
        self.facts["Hosts"] = (
            f"medians of up to {prompts} prompts of "
            f"{bench_prefixes.CACHED + bench_prefixes.NEW:,} tokens each; topology two-hosts, namespaces "
            "joined by a veth pair"
        )
        self._system(
            "hosts",
            "another host's prefix",
            ("remote_ttft_p50_ms", "computed_ttft_p50_ms"),
            3 * prompts,
            bench_two_hosts.between_hosts,
        )

    def _system(
        self,
        part: str,
        name: str,
        gives: tuple[str, ...],
        steps: int,
        run: Callable[[bench_prefixes.Plan, Callable[[], object]], dict[str, Any]],
    ) -> None:
        options = self.options
        plan = bench_prefixes.Plan(options.set, options.threads, options.seed, options.asks)

        def measure() -> Mapping[str, float | None]:
            with _bar(name, steps, "answer") as took:
                found = run(plan, lambda: took(1))
            self.details[part] = {key: value for key, value in found.items() if key not in gives}
            return {key: found[key] for key in gives}

        self._once(part, Contender(name, gives, measure))

    def _once(self, part: str, *contenders: Contender) -> None:
        self.findings.rounds(part, contenders, 1)
        if part in COUNTED:
            self.findings.values.pop(f"others_{part}", None)


class _bar:  # noqa: N801 - a context manager that is used as a function
    """A progress bar; entered, what tells it how many more are done."""

    def __init__(self, name: str, total: int, unit: str) -> None:
        self._bar = tqdm(total=total, desc=name, unit=unit, leave=False, disable=None)

    def __enter__(self) -> Callable[[int], object]:
        update: Callable[[int], object] = self._bar.update
        return update

    def __exit__(self, *_: object) -> None:
        self._bar.close()


# ── the command ───────────────────────────────────────────────────────────────────────────────


def report_of(measured: Measurement, load_before: float) -> dict[str, Any]:
    """All that was found, as `--json` writes it."""
    options, findings = measured.options, measured.findings
    figures = findings.medians()
    found = ratios(figures, ROWS)
    return {
        "bench": "pages",
        "machine": {"cpu": machine.cpu(), "cores": machine.cores(), "memory": f"{machine.memory_gib()} GiB"},
        "load_before": load_before,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": machine.commit(),
        "seed": options.seed,
        "command": options.command_line,
        "model": "The default model",
        "ratios": found,
        "figures": figures,
        "bars": bars(),
        "missing": missing(found, findings, options.only, ROWS),
        "facts": measured.facts,
        "details": measured.details,
    }


def run(options: argparse.Namespace) -> int:
    """`pages`: the exit code."""
    load_before = round(os.getloadavg()[0], 2)
    for name in ("json", "plot"):
        path: Path | None = getattr(options, name)
        if path is not None and not path.absolute().parent.is_dir():
            say(f"--{name} {path}: there is no such folder")
            return 2
    if options.trace is not None and not options.trace.is_file():
        say(f"--trace {options.trace}: no such file")
        return 2
    measured = Measurement(options)
    for part in options.only:
        getattr(measured, part)()
    report = report_of(measured, load_before)
    return tell(report, markdown(report), options.json)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `pages` can be told."""
    parser.add_argument(
        "--only", type=some_of(PARTS), default=list(PARTS), metavar="PART,…", help="some parts only"
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help=f"default: {TRACE} in ${TRACES}")
    parser.add_argument("--limit", type=count, metavar="N", help="the first N requests of the trace")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the hit rates by room")
    parser.add_argument(
        "--asks",
        type=count,
        default=50,
        metavar="N",
        help="questions of ttft, and prompts of hosts up to 8 (50)",
    )
    parser.add_argument(
        "--threads",
        type=count,
        default=machine.cores(),
        help="of each worker (all cores: one at a time works)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="for the launchers of our systems"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.set_defaults(run=run)
