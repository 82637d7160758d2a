"""GET /metrics: what a gateway measures of its requests, and what the other actors publish of themselves.

Two sources, and what that means for whoever sums over several gateways:

    without `actor`   the gateway's own requests: queue, TTFT, tokens … Different at each gateway: sum them.
    with `actor`      what an actor last published in shared memory (at most 250 ms old). The same at each
                      gateway: take any. What a dead incarnation said is not shown; counters begin again
                      with each incarnation, as Prometheus expects of a process.

The names are vLLM's with another prefix wherever the thing is the same. Shares are 0 … 1, also where
the name says `perc`, as there.

Nothing but a few additions to plain integers happens when a token is committed; everything that
belongs to Prometheus happens when somebody scrapes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from engine.ids import LIFE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from prometheus_client import Metric

    from engine.core import Statistics
    from engine.layout import Vitals
    from engine.messages import ActorKind, Cached
    from engine.model import ModelConfig
    from engine.topology import Actor

PREFIX = "estafet:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# vLLM's bounds, so that its dashboards show the same columns.
TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
          40.0, 80.0, 160.0, 640.0)  # fmt: skip
ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
         40.0, 80.0)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
             480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
# A place that is free is found within a millisecond here, which vLLM's bounds cannot tell from 0.3 s.
QUEUE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, *REQUEST_S)


SOURCES = ("computed", "memory", "worker", "host", "file", "unknown")
"""Where the tokens of prompts come from: the fields of `engine.messages.Cached`, and what is none of them."""


class Histogram:
    """Counts of durations between fixed bounds.

    prometheus-client's own takes a lock and walks the bounds: 1.0 µs an observation where this takes
    0.2, and there is one a token. One thread observes and scrapes, so there is nothing to lock.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def family(self, name: str, documentation: str) -> HistogramMetricFamily:
        """As Prometheus wants it: each bucket counts everything up to its bound."""
        total = 0
        buckets: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(PREFIX + name, documentation, buckets=buckets, sum_value=self._sum)


class RequestMetrics:
    """What a gateway observes of its own requests, as it happens."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(TTFT_S)
        self.inter_token = Histogram(ITL_S)
        self.end_to_end = Histogram(REQUEST_S)
        self.queue_time = Histogram(QUEUE_S)
        self._prompt_tokens = 0
        self._prompt_sources: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._resumed = 0

    def first_token(self, seconds: float, prompt_tokens: int, cached: Cached | None = None) -> None:
        """The first token was committed so long after the admission: the prompt has been processed.

        `cached`: what of the prompt was found instead of being computed; None when nobody knows.
        """
        self.time_to_first_token.observe(seconds)
        self._prompt_tokens += prompt_tokens
        if not prompt_tokens:
            return
        if cached is None:
            self._prompt_sources["unknown"] += prompt_tokens
            return
        for source, tokens in msgspec.structs.asdict(cached).items():
            self._prompt_sources[source] += tokens
        self._prompt_sources["computed"] += prompt_tokens - cached.tokens

    def ended(self, reason: str, seconds: float) -> None:
        """A request ended; durations are those of answers that are complete."""
        self._ends[reason] += 1
        if reason in ("stop", "length"):
            self.end_to_end.observe(seconds)

    def refused(self, reason: str) -> None:
        """A request was not admitted."""
        self._refused[reason] += 1

    def resumed(self) -> None:
        """A client came back for a request."""
        self._resumed += 1

    def families(self) -> Iterator[Metric]:
        """Everything observed so far."""
        yield self.time_to_first_token.family(
            "time_to_first_token_seconds", "From the admission to the first committed token."
        )
        yield self.inter_token.family(
            "inter_token_latency_seconds", "Between committed tokens of a request, pauses by deaths included."
        )
        yield self.end_to_end.family(
            "e2e_request_latency_seconds", "From the admission to the end of answers that are complete."
        )
        yield self.queue_time.family(
            "request_queue_time_seconds", "From the admission to the first placement on workers."
        )
        yield _counter("prompt_tokens", "Prompt tokens of requests that got a token.", self._prompt_tokens)
        sources = CounterMetricFamily(
            f"{PREFIX}prompt_tokens_by_source",
            "The same by where their keys and values came from: computed, or found in the prefix cache; "
            "unknown where a request lost its worker, or its gateway, meanwhile.",
            labels=("source",),
        )
        for source in SOURCES:
            sources.add_metric((source,), self._prompt_sources[source])
        yield sources
        known = self._prompt_sources.total() - self._prompt_sources["unknown"]
        yield _counter("prefix_cache_queries", "Those of which it is known where they came from.", known)
        found = known - self._prompt_sources["computed"]
        yield _counter("prefix_cache_hits", "Of these, those that were found in the prefix cache.", found)
        success = CounterMetricFamily(
            f"{PREFIX}request_success", "Complete answers.", labels=("finished_reason",)
        )
        for reason in ("stop", "length"):
            success.add_metric((reason,), self._ends[reason])
        yield success
        yield _counter("request_cancelled", "Requests that their client gave up.", self._ends["cancelled"])
        yield _counter("request_resumed", "Requests that a client came back for.", self._resumed)
        yield _counter("request_failed", "Requests that ended with an error.", self._ends["error"])
        refused = CounterMetricFamily(
            f"{PREFIX}request_refused", "Requests not admitted.", labels=("reason",)
        )
        for reason in ("queue_full", "draining"):
            refused.add_metric((reason,), self._refused[reason])
        yield refused


class Family(NamedTuple):
    """How figures that actors of a kind publish are shown."""

    kind: ActorKind
    type: Literal["gauge", "counter"]
    name: str
    documentation: str
    keys: dict[str, str]
    """From a key of `statistics()` to the value of the label, "" for a family without one."""
    label: str = ""


PUBLISHED = (
    Family("allocator", "gauge", "kv_pages", "KV pages by state.",
           {f"pages_{state}": state for state in ("free", "cached", "leased", "open", "sealed")}, "state"),
    Family("allocator", "counter", "kv_pages_reclaimed", "Pages taken back from the dead.",
           {"pages_reclaimed": ""}),
    Family("scheduler", "counter", "num_preemptions", "Requests taken back for want of pages.",
           {"preemptions": ""}),
    Family("scheduler", "counter", "placements", "Requests given a place.", {"placements": ""}),
    Family("scheduler", "gauge", "num_clients", "Clients with requests, by whether one of them waits.",
           {"clients": "present", "clients_waiting": "waiting"}, "state"),
    Family("worker", "counter", "choice_tokens_shared",
           "Prompt tokens that were not computed, since another choice of the request has them.",
           {"positions_shared": ""}),
    Family("worker", "gauge", "worker_sequences", "Sequences on a worker, by state.",
           {f"sequences_{state}": state for state in ("prefill", "offered", "decode")}, "state"),
    Family("worker", "counter", "worker_positions_computed", "Rows of all steps.", {"tokens_filled": ""}),
    Family("worker", "counter", "worker_tokens_sampled", "Tokens sampled.", {"tokens_out": ""}),
    Family("worker", "counter", "backend_busy_seconds",
           "Seconds inside the backend: its rate is the utilisation, a share of wall time.", {"busy_s": ""}),
    Family("worker", "counter", "weight_bytes_read",
           "Bytes of weights that the steps had to read at the least, once a step: counted, not measured.",
           {"weight_bytes_read": ""}),
    Family("worker", "counter", "kv_bytes_read",
           "Bytes of attended positions, once a sequence and step: counted, not measured.",
           {"kv_bytes_read": ""}),
    Family("worker", "counter", "hand_overs_refused", "Hand-overs not taken.", {"hand_overs_refused": ""}),
    Family("replicator", "gauge", "replication_lag_pages", "Sealed pages that wait for their copy.",
           {"pages_waiting": ""}),
    Family("replicator", "gauge", "replicated_pages", "Pages whose copy is safe.", {"pages_safe": ""}),
    Family("replicator", "counter", "replication_pages_copied", "Pages copied.", {"pages_copied": ""}),
    Family("health", "counter", "actor_deaths", "Incarnations declared dead.", {"deaths": ""}),
    Family("health", "counter", "actor_kills", "Incarnations killed for their silence.", {"kills": ""}),
)  # fmt: skip

PHASES = ("prefill", "decode", "mixed")

MESSAGES = {
    "messages_out": "Messages sent.",
    "messages_in": "Messages taken.",
    "messages_dropped": "Messages to somebody who was dead or took nothing.",
    "protocol_errors": "Frames that nobody could read.",
}


class SystemCollector(Collector):
    """Reads everything at the moment of a scrape."""

    def __init__(
        self,
        requests: RequestMetrics,
        own: Callable[[], Statistics],
        actors: Sequence[Actor],
        vitals: Vitals,
        model: ModelConfig,
    ) -> None:
        """`own` gives the statistics of the gateway that is scraped."""
        self._requests = requests
        self._own = own
        self._actors = tuple(actors)
        self._vitals = vitals
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All families, in an order that does not change."""
        yield InfoMetricFamily(
            f"{PREFIX}model", "What is served.",
            {"model_name": self._model.name, "weights_id": self._model.weights_id},
        )  # fmt: skip
        yield from self._own_requests()
        yield from self._requests.families()
        yield from self._lives()
        published: list[tuple[Actor, Statistics]] = []
        for actor in self._actors:
            figures = self._vitals.statistics(actor.ordinal)
            if figures.get("epoch") == self._vitals.epoch(actor.ordinal):
                published.append((actor, figures))
        yield self._usage(published)
        for family in PUBLISHED:
            yield _published(family, published)
        yield from self._steps([(actor, figures) for actor, figures in published if actor.kind == "worker"])
        yield from _messages(published)

    def _own_requests(self) -> Iterator[Metric]:
        own = self._own()
        running = own["requests_prefilling"] + own["requests_decoding"]
        yield GaugeMetricFamily(f"{PREFIX}num_requests_running", "Requests on workers.", running)
        yield GaugeMetricFamily(
            f"{PREFIX}num_requests_waiting", "Requests that wait for a place.", own["requests_waiting"]
        )
        yield GaugeMetricFamily(
            f"{PREFIX}num_requests_kept",
            "Requests that nobody reads, kept for their grace.",
            own["requests_kept"],
        )
        yield GaugeMetricFamily(
            f"{PREFIX}num_prefixes_kept", "Prefixes that clients keep in the cache.", own["prefixes"]
        )
        yield GaugeMetricFamily(
            f"{PREFIX}prefix_tokens_kept", "Their tokens that are in memory and stay.", own["prefix_tokens"]
        )
        yield _counter("generation_tokens", "Tokens committed.", own["tokens_committed"])
        yield _counter("request_replacements", "Times that a request lost its worker.", own["replacements"])

    def _lives(self) -> Iterator[Metric]:
        epochs = GaugeMetricFamily(
            f"{PREFIX}actor_epoch", "The newest incarnation; 0 before the first.", labels=("actor",)
        )
        restarts = CounterMetricFamily(
            f"{PREFIX}actor_restarts", "Starts of an actor after the first.", labels=("actor",)
        )
        for actor in self._actors:
            epoch = self._vitals.epoch(actor.ordinal)
            epochs.add_metric((actor.name,), epoch)
            # Of this life of the host's launcher: of another host the first epoch may be a later one.
            restarts.add_metric((actor.name,), max(epoch % (1 << LIFE_BITS) - 1, 0))
        yield epochs
        yield restarts

    def _usage(self, published: Iterable[tuple[Actor, Statistics]]) -> Metric:
        family = GaugeMetricFamily(
            f"{PREFIX}kv_cache_usage_perc",
            "Share of the pool's pages that are neither free nor cached; 1 is full.",
            labels=("actor",),
        )
        for actor, figures in published:
            if actor.kind == "allocator":
                free = figures["pages_free"] + figures["pages_cached"]
                family.add_metric((actor.name,), 1 - free / figures["pages_total"])
        return family

    def _steps(self, workers: Sequence[tuple[Actor, Statistics]]) -> Iterator[Metric]:
        times = SummaryMetricFamily(
            f"{PREFIX}step_time_seconds",
            "Steps of the backend: prefill samples nothing, decode with every sequence, mixed with some.",
            labels=("actor", "phase"),
        )
        inside = CounterMetricFamily(
            f"{PREFIX}backend_phase_seconds",
            "Seconds inside the native backend by phase of a step, as its first thread saw them.",
            labels=("actor", "phase"),
        )
        for actor, figures in workers:
            for phase in PHASES:
                count, seconds = figures[f"steps_{phase}"], figures[f"busy_{phase}_s"]
                times.add_metric((actor.name, phase), int(count), seconds)
            for key, seconds in figures.items():
                if key.startswith("backend_"):
                    inside.add_metric((actor.name, key.removeprefix("backend_").removesuffix("_s")), seconds)
        yield times
        yield inside


def _published(family: Family, published: Iterable[tuple[Actor, Statistics]]) -> Metric:
    labels = ("actor", family.label) if family.label else ("actor",)
    make = CounterMetricFamily if family.type == "counter" else GaugeMetricFamily
    metric = make(PREFIX + family.name, family.documentation, labels=labels)
    for actor, figures in published:
        if actor.kind == family.kind:
            for key, value in family.keys.items():
                metric.add_metric((actor.name, value) if family.label else (actor.name,), figures[key])
    return metric


def _messages(published: Iterable[tuple[Actor, Statistics]]) -> Iterator[Metric]:
    """What every post office counts, one family a count."""
    for key, documentation in MESSAGES.items():
        metric = CounterMetricFamily(PREFIX + key, documentation, labels=("actor",))
        for actor, figures in published:
            metric.add_metric((actor.name,), figures[key])
        yield metric


def _counter(name: str, documentation: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, documentation, value)


class Exposition:
    """Turns a collector into the body of a response.

    Always the plain text format, which every scraper takes: as OpenMetrics, prometheus-client turns
    the colon of a sample's name into an underscore unless the scraper asks for UTF-8, so that the
    names would depend on who scrapes.
    """

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(collector)

    def render(self) -> bytes:
        """The body, of CONTENT_TYPE."""
        return generate_latest(self._registry)
