"""GET /metrics: what it shows of shared memory, what it measures, and what a real launch says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from scripted_sessions import MODEL, ScriptedSessions, served

from actors.metrics import PHASES, SOURCES, Exposition, Histogram, RequestMetrics, SystemCollector
from actors.sessions import Draining, Generation, QueueFull
from engine.launch import read_topology
from engine.layout import Vitals
from engine.messages import Cached
from engine.sampling import GREEDY
from engine.testing.system import STEP_S

if TYPE_CHECKING:
    from trio.testing import MockClock

    from engine.testing.fixtures import StartSystem
    from engine.testing.system import System

Samples = dict[tuple[str, ...], float]

MESSAGES = {"messages_out": 5, "messages_in": 6, "messages_dropped": 0, "protocol_errors": 0}
ALLOCATOR = {
    "pages_total": 64,
    "pages_free": 30,
    "pages_cached": 2,
    "pages_leased": 4,
    "pages_open": 8,
    "pages_sealed": 20,
    "pages_reclaimed": 3,
    **MESSAGES,
}
WORKER = {
    "sequences_prefill": 1,
    "sequences_offered": 0,
    "sequences_decode": 2,
    "tokens_filled": 100,
    "tokens_out": 40,
    "positions_shared": 48,
    "busy_s": 6.0,
    "busy_prefill_s": 1.0,
    "busy_decode_s": 2.0,
    "busy_mixed_s": 3.0,
    "steps_prefill": 10,
    "steps_decode": 20,
    "steps_mixed": 30,
    "hand_overs_refused": 0,
    "weight_bytes_read": 65_000,
    "kv_bytes_read": 8_000,
    "backend_ffn_s": 1.5,
    "backend_head_s": 0.5,
    **MESSAGES,
}
OWN = {
    "requests_waiting": 3,
    "requests_prefilling": 1,
    "requests_decoding": 2,
    "tokens_committed": 99,
    "replacements": 1,
    "requests_kept": 5,
    "prefixes": 2,
    "prefix_tokens": 48,
}


def samples_of(text: str) -> Samples:
    """Every sample by its name without the prefix and the values of its labels."""
    return {
        (sample.name.removeprefix("estafet:"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(system: System, gateway: int = 0) -> Samples:
    return samples_of(system.gateways()[gateway].render_metrics().decode())


class Shown:
    """A collector over the memory of a topology whose actors the test plays."""

    def __init__(self, topology: str = "local") -> None:
        self.actors = {actor.name: actor for actor in read_topology(topology, []).actors()}
        self.vitals = Vitals(memoryview(bytearray(len(self.actors) * Vitals.BYTES)), len(self.actors))
        self.requests = RequestMetrics()
        collector = SystemCollector(
            self.requests, lambda: OWN, list(self.actors.values()), self.vitals, MODEL
        )
        self.exposition = Exposition(collector)

    def start(self, name: str) -> int:
        return self.vitals.next_epoch(self.actors[name].ordinal)

    def publish(self, name: str, epoch: int, figures: dict[str, int | float]) -> None:
        self.vitals.publish(self.actors[name].ordinal, {"epoch": epoch, **figures})

    def scrape(self) -> Samples:
        return samples_of(self.exposition.render().decode())


# ── the parts ─────────────────────────────────────────────────────────────────────────────────


def test_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for seconds in (0.5, 1.0, 1.5, 7.0):
        histogram.observe(seconds)
    values = {(s.name, s.labels.get("le")): s.value for s in histogram.family("x", "").samples}
    assert values == {
        ("estafet:x_bucket", "1.0"): 2,
        ("estafet:x_bucket", "2.0"): 3,
        ("estafet:x_bucket", "+Inf"): 4,
        ("estafet:x_count", None): 4,
        ("estafet:x_sum", None): 10.0,
    }


def test_published_figures_are_shown_by_actor() -> None:
    shown = Shown()
    shown.publish("allocator", shown.start("allocator"), ALLOCATOR)
    shown.publish("decode", shown.start("decode"), WORKER)
    found = shown.scrape()
    assert found["kv_cache_usage_perc", "allocator"] == 0.5
    pages = {state: found["kv_pages", "allocator", state] for state in ("free", "cached", "leased", "open")}
    assert pages == {"free": 30, "cached": 2, "leased": 4, "open": 8}
    assert found["worker_sequences", "decode", "decode"] == 2
    assert found["backend_busy_seconds_total", "decode"] == 6
    assert found["choice_tokens_shared_total", "decode"] == 48
    assert [found["step_time_seconds_sum", "decode", phase] for phase in PHASES] == [1, 2, 3]
    assert [found["step_time_seconds_count", "decode", phase] for phase in PHASES] == [10, 20, 30]
    assert found["weight_bytes_read_total", "decode"] == 65_000
    assert found["kv_bytes_read_total", "decode"] == 8_000
    assert found["backend_phase_seconds_total", "decode", "ffn"] == 1.5
    assert found["backend_phase_seconds_total", "decode", "head"] == 0.5
    assert found["messages_in_total", "allocator"] == 6
    assert found["num_requests_running",] == 3
    assert found["num_requests_waiting",] == 3
    assert found["num_requests_kept",] == 5
    assert (found["num_prefixes_kept",], found["prefix_tokens_kept",]) == (2, 48)
    assert found["generation_tokens_total",] == 99
    assert ("kv_cache_usage_perc", "prefill") not in found


def test_what_a_dead_incarnation_said_is_not_shown() -> None:
    shown = Shown()
    shown.publish("decode", shown.start("decode"), WORKER)
    shown.start("decode")
    found = shown.scrape()
    assert ("backend_busy_seconds_total", "decode") not in found
    assert found["actor_epoch", "decode"] == 2
    assert found["actor_restarts_total", "decode"] == 1
    assert found["actor_restarts_total", "prefill"] == 0


def test_ends_and_refusals_are_told_apart() -> None:
    shown = Shown()
    for reason in ("stop", "length", "length", "cancelled", "error"):
        shown.requests.ended(reason, 1.0)
    shown.requests.refused("queue_full")
    found = shown.scrape()
    assert found["request_success_total", "stop"] == 1
    assert found["request_success_total", "length"] == 2
    assert found["request_cancelled_total",] == found["request_failed_total",] == 1
    assert found["request_refused_total", "queue_full"] == 1
    assert found["request_refused_total", "draining"] == 0
    assert found["e2e_request_latency_seconds_count",] == 3, "only answers that are complete"


def test_prompt_tokens_are_told_apart_by_where_they_came_from() -> None:
    shown = Shown()
    shown.requests.first_token(0.1, 10, Cached(memory=2, worker=3, host=1, file=0))
    shown.requests.first_token(0.1, 0, Cached(memory=2))
    shown.requests.first_token(0.1, 7, None)
    shown.requests.first_token(0.1, 5, Cached())
    found = shown.scrape()
    sources = {source: found["prompt_tokens_by_source_total", source] for source in SOURCES}
    assert sources == {"computed": 9, "memory": 2, "worker": 3, "host": 1, "file": 0, "unknown": 7}
    assert sum(sources.values()) == found["prompt_tokens_total",]
    assert (found["prefix_cache_hits_total",], found["prefix_cache_queries_total",]) == (6, 15)


async def test_the_door_shows_metrics_as_plain_text_whatever_is_asked_for() -> None:
    async with served(ScriptedSessions()) as door:
        accept = "application/openmetrics-text; version=1.0.0"
        response = await door.client.get("/metrics", headers={"accept": accept})
        assert (response.status_code, response.text) == (200, "# nothing\n")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert (await door.client.post("/metrics")).status_code == 405


# ── a system in virtual time ──────────────────────────────────────────────────────────────────


async def test_durations_are_those_of_the_steps(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        await system.complete("a relay", max_tokens=11)
        found = scrape(system)
    # One step fills the prompt, one gives the first token, and nothing else takes any time.
    assert found["time_to_first_token_seconds_count",] == 1
    assert found["time_to_first_token_seconds_sum",] == pytest.approx(2 * STEP_S)
    assert found["inter_token_latency_seconds_count",] == 10
    assert found["inter_token_latency_seconds_sum",] == pytest.approx(10 * STEP_S)
    assert found["e2e_request_latency_seconds_sum",] == pytest.approx(12 * STEP_S)
    assert found["request_queue_time_seconds_count",] == 1
    assert found["request_queue_time_seconds_sum",] == pytest.approx(0, abs=1e-6)
    assert found["prompt_tokens_total",] == len("a relay")
    assert found["generation_tokens_total",] == 11
    assert found["request_success_total", "length"] == 1
    assert found["num_requests_running",] == found["num_requests_waiting",] == 0


async def test_workers_count_their_steps_by_phase(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        await system.complete("a relay", max_tokens=3)
        await system.settle()
        await trio.sleep(1)  # statistics are published every 250 ms
        found = scrape(system)
    assert found["step_time_seconds_count", "prefill", "prefill"] == 1
    assert found["step_time_seconds_count", "decode", "decode"] == 3
    assert found["step_time_seconds_sum", "decode", "decode"] == pytest.approx(3 * STEP_S)
    assert found["step_time_seconds_count", "decode", "prefill"] == 0
    assert found["backend_busy_seconds_total", "decode"] == pytest.approx(3 * STEP_S)
    # float16 keys and values of two layers with one head of eight; 6 positions filled, then 7, 8 and 9
    position = 2 * 2 * 8 * 2
    assert found["kv_bytes_read_total", "prefill"] == 6 * position
    assert found["kv_bytes_read_total", "decode"] == (7 + 8 + 9) * position
    assert found["weight_bytes_read_total", "decode"] > 3 * found["weight_bytes_read_total", "prefill"] > 0


async def test_waiting_is_measured_up_to_the_first_place(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system(
        "unified", settings=["worker.both.decode_slots=1", "worker.both.prefill_slots=1"]
    )
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(lambda: system.complete("x", max_tokens=20))
            await system.until(lambda: scrape(system)["num_requests_running",] == 1)
            assert scrape(system)["num_requests_waiting",] == 1
        found = scrape(system)
    assert found["request_queue_time_seconds_count",] == 2
    assert found["request_queue_time_seconds_sum",] >= 19 * STEP_S


async def test_a_death_is_one_long_gap_and_one_restart(
    start_system: StartSystem, autojump_clock: MockClock
) -> None:
    system = await start_system("local")
    with trio.fail_after(600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: system.complete("a relay", max_tokens=20))
            await system.until(lambda: scrape(system)["generation_tokens_total",] > 4)
            system.kill_actor("decode")
        await system.settle()
        found = scrape(system)
    assert found["actor_restarts_total", "decode"] == 1
    assert found["request_replacements_total",] == 1
    assert found["inter_token_latency_seconds_count",] == 19
    assert found["inter_token_latency_seconds_sum",] > 19 * STEP_S
    assert found["request_queue_time_seconds_count",] == 1, "waiting again is no second queueing"


async def test_cancels_and_refusals_are_counted(start_system: StartSystem, autojump_clock: MockClock) -> None:
    system = await start_system("local", settings=["gateway.front.max_open=1"])
    gateway = system.gateways()[0]
    generation = Generation((5, 6, 7), 50, GREEDY)
    with trio.fail_after(600):
        session = gateway.open(generation)
        with pytest.raises(QueueFull):
            gateway.open(generation)
        session.cancel("test")
        await system.settle()
        gateway.draining.set()
        with pytest.raises(Draining):
            gateway.open(generation)
        found = scrape(system)
    assert found["request_cancelled_total",] == 1
    assert found["request_refused_total", "queue_full"] == found["request_refused_total", "draining"] == 1
    assert found["e2e_request_latency_seconds_count",] == 0
