"""The benches of fairness and of many streams: their figures, their complaints, and a small real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools import bench, bench_fairness, bench_streams, figures
from tools.bench_client import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]


def outcome(first: float, error: str = "") -> Outcome:
    return Outcome(0.0, [] if error else [first, first + 0.5], ended=9.0, output_tokens=2, error=error)


def test_a_ratio_is_of_the_95th_percentiles(capsys: pytest.CaptureFixture[str]) -> None:
    alone = bench_fairness.shown("quiet, alone", [outcome(1.0)] * 20, None)
    assert (alone["ttft_ms"]["p95"], alone["p95_ratio"]) == (1000.0, None)
    beside = bench_fairness.shown("beside", [outcome(1.5), outcome(1.5), outcome(0, "HTTP 500: no")], 1000.0)
    assert (beside["requests"], beside["errors"], beside["p95_ratio"]) == (3, 1, 1.5)
    said = capsys.readouterr()
    assert "HTTP 500: no" in said.err
    assert said.out.splitlines()[1].split()[-1] == "1.50"


def test_their_tables() -> None:
    report: dict[str, Any] = {
        "machine": {"cpu": "A Processor", "cores": 2, "memory": "8 GiB"},
        "load_before": 0.1,
        "date": "2026-01-02",
        "commit": "abc",
        "seed": 0,
        "command": "python -m tools.bench …",
        "model": "Model",
    }
    run = {"who": "quiet", "ttft_ms": {"p50": 1, "p95": 2000, "p99": None}, "requests": 3, "errors": 1}
    fairness = figures.table({**report, "bench": "fairness", "runs": [{**run, "p95_ratio": 1.5}]})
    assert fairness.splitlines()[-1] == "| quiet | 1 / 2,000 / – | 2 | 1 | 1.50 |"
    streams = figures.table({**report, "bench": "streams", **dict.fromkeys(bench_streams.WHAT, 1234)})
    assert streams.splitlines()[-1].count("1,234") == len(bench_streams.WHAT)


def test_what_runs_already_has_no_processes_to_look_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["streams", "--url", "http://127.0.0.1:9"]) == 2
    assert "has to be started here" in capsys.readouterr().err


def run(tmp_path: Path, *arguments: str, launcher: Sequence[str] = ()) -> dict[str, Any]:
    report = tmp_path / "figures.json"
    where = ["--json", str(report), "--", "--run-dir", str(tmp_path), *launcher]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", *arguments, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(report.read_text())
    assert figures.table(value)
    return value


@pytest.mark.system
@pytest.mark.model
def test_real_streams(tmp_path: Path, model_folder: Path) -> None:
    value = run(tmp_path, "streams", "--topology", "two-gateways", "--streams", "6", "--output", "200")
    assert (value["gateways"], value["tokens"], value["errors"]) == (2, 1200, 0)
    assert value["open_at_once"] > 1


@pytest.mark.system
@pytest.mark.model
def test_real_fairness(tmp_path: Path, model_folder: Path) -> None:
    sizes = ["--flood", "14", "--asks", "2", "--input", "48", "--output", "8", "--quiet-output", "2"]
    slots = ["--set", "worker.decode.decode_slots=4", "--set", "worker.prefill.prefill_slots=2"]
    value = run(tmp_path, "fairness", "--topology", "local", *sizes, launcher=slots)
    assert [entry["errors"] for entry in value["runs"]] == [0, 0, 0, 0]
    assert value["p95_ratio"] == value["runs"][1]["p95_ratio"] > 0
