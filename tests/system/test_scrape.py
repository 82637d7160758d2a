"""A real launch, scraped as Prometheus does it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from launches import Launch, wait_until
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]


def scrape(launch: Launch) -> dict[tuple[str, ...], float]:
    """Every sample by its name and the values of its labels; what a metric is said to be must be true."""
    response = launch.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(response.text))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "a family is there twice"
    assert all(family.documentation and family.name.startswith("estafet:") for family in families)
    return {
        (sample.name.removeprefix("estafet:"), *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_a_launch_can_be_scraped(tmp_path: Path, model_folder: Path) -> None:
    with Launch(tmp_path) as launch:
        launch.wait_ready()
        launch.ask(max_tokens=5)
        with launch.stream() as stream:
            stream.read(2)
        launch.wait_quiet()
        wait_until(lambda: scrape(launch)["request_cancelled_total",] == 1, 5, "the cancel is counted")
        found = scrape(launch)
        assert found["request_success_total", "length"] == 1
        assert found["generation_tokens_total",] >= 7
        assert found["time_to_first_token_seconds_count",] == 2
        assert 0 < found["time_to_first_token_seconds_sum",] < 60
        assert found["kv_cache_usage_perc", "allocator"] == 0
        assert found["step_time_seconds_count", "decode", "decode"] >= 7
        assert found["backend_busy_seconds_total", "prefill"] > 0
        assert found["weight_bytes_read_total", "decode"] > 5 * 160e6, "106 M weights in FP8, 28 M in bf16"
        assert found["messages_out_total", "scheduler"] > 0
        before = launch.kill("decode")
        launch.wait_restarted(before, "decode")
        again = scrape(launch)
        assert (again["actor_epoch", "decode"], again["actor_restarts_total", "decode"]) == (2, 1)
