"""The serving benchmark: its arithmetic, its traces and prompts, its client, and its table in a document."""

from __future__ import annotations

import gzip
import json
import math
import os
import random
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio

from tools import bench, figures, observe
from tools.bench_client import Client, Outcome, read_stream
from tools.bench_load import (
    LEAD,
    Arrival,
    BenchFailed,
    Prompts,
    Request,
    Scale,
    read_trace,
    scale_of,
    single_token_words,
)
from tools.bench_serve import busy_shares, closed_loop, open_loop, summary
from tools.bench_system import milliseconds, percentile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trio.testing import MockClock

ROOT = Path(__file__).parents[2]

# ── arithmetic ────────────────────────────────────────────────────────────────────────────────


def test_percentiles_lie_between_values_by_distance() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.95) == pytest.approx(1.95)
    assert percentile([7.0], 0.99) == 7.0
    assert math.isnan(percentile([], 0.5))
    assert milliseconds([0.1, 0.2]) == {"p50": 150.0, "p95": 195.0, "p99": 199.0}
    assert milliseconds([]) == {"p50": None, "p95": None, "p99": None}


def test_utilisation_begins_again_with_a_new_incarnation() -> None:
    before = {"a": {"epoch": 1, "busy_s": 5.0}, "b": {"epoch": 1, "busy_s": 9.0}, "gateway": {"epoch": 1}}
    after = {"a": {"epoch": 1, "busy_s": 7.0}, "b": {"epoch": 2, "busy_s": 1.0}, "gateway": {"epoch": 1}}
    assert busy_shares(before, after, 4.0) == {"a": 0.5, "b": 0.25}


def test_summary_counts_complete_answers_only() -> None:
    outcomes = [
        Outcome(10.0, [10.5, 10.6, 10.8], ended=11.0, prompt_tokens=8, output_tokens=3),
        Outcome(11.0, [11.1], ended=12.0, prompt_tokens=8, output_tokens=1),
        Outcome(10.0, [10.1], ended=15.0, output_tokens=9, error="broken"),
    ]
    found = summary(2, outcomes, {"prefill": 0.1, "decode": 0.8})
    assert found == {
        "concurrency": 2,
        "ttft_ms": {"p50": 300.0, "p95": 480.0, "p99": 496.0},
        "itl_ms": {"p50": 150.0, "p95": 195.0, "p99": 199.0},
        "output_tokens_per_s": 0.8,
        "total_tokens_per_s": 4.0,
        "utilisation": 0.8,
        "utilisation_by_worker": {"prefill": 0.1, "decode": 0.8},
        "output_tokens_mean": 2.0,
        "requests": 3,
        "errors": 1,
        "seconds": 5.0,
    }


# ── traces ────────────────────────────────────────────────────────────────────────────────────

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 640, "output_length": 64, "hash_ids": [0, 1]}\n'
    '{"timestamp": 2000, "input_length": 6758, "output_length": 500, "hash_ids": [0]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:16:46,396,109\n"
)


def test_traces_of_both_formats_are_read_in_order(tmp_path: Path) -> None:
    mooncake = tmp_path / "m.jsonl.gz"
    mooncake.write_bytes(gzip.compress(MOONCAKE.encode()))
    assert read_trace(mooncake) == [Arrival(0.0, 6758, 500), Arrival(1.0, 640, 64)]
    azure = tmp_path / "a.csv"
    azure.write_text(AZURE)
    first, second = read_trace(azure)
    assert first == Arrival(0.0, 374, 44)
    assert second[1:] == (396, 109)
    assert second.at_s == pytest.approx(60 - 0.68059, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"time,tokens\n1,2\n"),
        ("a.csv", AZURE.encode() + b"now,1,2\n"),
        ("m.jsonl", b'{"timestamp": 1}\n'),
        ("m.jsonl", b"[1]\n"),
        ("m.jsonl", b""),
        ("m.jsonl", b"\xff"),
        ("m.jsonl.gz", b"not gzipped"),
        ("m.jsonl.gz", gzip.compress(MOONCAKE.encode())[:-12]),
    ],
    ids=["columns", "time", "keys", "list", "empty", "bytes", "plain", "cut"],
)
def test_what_is_no_trace_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BenchFailed, match=name):
        read_trace(path)
    with pytest.raises(BenchFailed, match="absent"):
        read_trace(tmp_path / "absent.jsonl")


def test_scale_divides_lengths_and_stretches_times() -> None:
    assert scale_of("32:20") == Scale(32, 20)
    assert scale_of("8") == Scale(8, 1)
    assert Scale(32, 20)(Arrival(1.5, 6758, 500), 40) == Arrival(30.0, 211, 16)
    assert Scale(32, 1)(Arrival(0.0, 64, 3), 40) == Arrival(0.0, 40, 1), "no shorter than it can be"
    for wrong in ("", "0", "-1:2", "1:2:3", "x", "inf"):
        with pytest.raises(ArgumentTypeError):
            scale_of(wrong)


# ── prompts ───────────────────────────────────────────────────────────────────────────────────


async def test_words_of_several_tokens_are_found_and_left_out() -> None:
    async def count(words: Sequence[str]) -> int:
        return sum(2 if word in ("mountain", "late") else 1 for word in words)

    words = ["water", "mountain", "river", "late", "bird"]
    assert await single_token_words(words, count) == ["water", "river", "bird"]
    assert await single_token_words(["late"], count) == []


def test_prompts_have_exactly_the_tokens_asked_for() -> None:
    prompts = Prompts(["water", "river"], overhead=20)
    prompt = prompts.make(32, random.Random(1))
    assert prompt.startswith(LEAD)
    assert len(prompt.removeprefix(LEAD).split()) == 12
    assert prompt == prompts.make(32, random.Random(1))
    assert prompt != prompts.make(32, random.Random(2))
    assert prompts.make(20, random.Random(1)) == LEAD
    with pytest.raises(ValueError, match="at least 20 tokens"):
        prompts.make(19, random.Random(1))


# ── the client ────────────────────────────────────────────────────────────────────────────────


def chunk(content: str | None) -> bytes:
    delta = {} if content is None else {"content": content}
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}'


def test_a_stream_gives_times_of_pieces_and_the_doors_own_counts() -> None:
    lines = [b"HTTP/1.1 200 ", chunk(""), chunk("He"), chunk("llo"), chunk(None), USAGE, b"data: [DONE]"]
    outcome = Outcome(0.0)
    read_stream([(float(at), line) for at, line in enumerate(lines)], outcome)
    assert outcome == Outcome(0.0, [2.0, 3.0], prompt_tokens=5, output_tokens=2)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        ([b""], "HTTP nothing: "),
        ([b"HTTP/1.1 429 ", b"", b'{"error": {"message": "full"}}'], "HTTP 429: full"),
        ([b"HTTP/1.1 500 ", b"", b"oh"], "HTTP 500: oh"),
        ([b"HTTP/1.1 200 ", chunk("He")], "the stream broke off before its end"),
        ([b"HTTP/1.1 200 ", chunk("He"), b'data: {"error": {"message": "lost"}}'], "lost"),
    ],
)
def test_what_went_wrong_is_told(lines: list[bytes], error: str) -> None:
    outcome = Outcome(0.0)
    read_stream([(0.0, line) for line in lines], outcome)
    assert outcome.error == error


class ScriptedClient(Client):
    """Every answer takes a second of virtual time, and has the tokens that it was asked for."""

    def __init__(self) -> None:
        super().__init__("http://localhost:1")
        self.open = self.most = 0
        self.sent: list[float] = []

    async def ask(self, prompt: str, output: int) -> Outcome:
        self.sent.append(trio.current_time())
        self.open += 1
        self.most = max(self.most, self.open)
        await trio.sleep(1)
        self.open -= 1
        return Outcome(0.0, prompt_tokens=len(prompt), output_tokens=output)


async def test_a_closed_loop_keeps_so_many_requests_open(autojump_clock: MockClock) -> None:
    client = ScriptedClient()
    took: list[None] = []
    requests = [Request(0.0, "abc", 3, 1)] * 9 + [Request(0.0, "abc", 4, 1)]
    outcomes = await closed_loop(client, requests, 3, 100, lambda: took.append(None))
    assert (len(outcomes), len(took), client.most) == (10, 10, 3)
    assert [outcome.error for outcome in outcomes if outcome.error] == ["the prompt has 3 tokens, not 4"]


async def test_an_open_loop_waits_for_nobody_and_ends_in_time(autojump_clock: MockClock) -> None:
    client = ScriptedClient()
    began = trio.current_time()
    requests = [Request(at, "abc", 3, 1) for at in (0.0, 0.5, 0.6, 4.0, 11.0)]
    outcomes, most = await open_loop(client, requests, 10, lambda: None)
    assert (len(outcomes), most) == (4, 3)
    assert [round(at - began, 3) for at in client.sent] == [0.0, 0.5, 0.6, 4.0]


# ── the command and its table ─────────────────────────────────────────────────────────────────


def test_the_command_that_is_written_down_is_one_for_a_reader() -> None:
    given = ["serve", "--topology", "local", "--json", "/somewhere/f.json", "--seed", "1", "--json=x"]
    assert bench.command_line(given) == "python -m tools.bench serve --topology local --seed 1"


@pytest.mark.parametrize(
    "wrong",
    [
        ["serve"],
        ["serve", "--topology", "local", "--concurrency", "0"],
        ["serve", "--topology", "local", "--scale", "x"],
        ["serve", "--url", "http://127.0.0.1:1", "--", "--set", "kv.pages=3"],
    ],
)
def test_bad_usage_is_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(wrong)
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_files_are_looked_at_before_anything_is_started(tmp_path: Path) -> None:
    assert bench.main(["serve", "--topology", "local", "--trace", str(tmp_path / "absent.csv")]) == 2
    assert (
        bench.main(["serve", "--url", "http://127.0.0.1:9", "--json", str(tmp_path / "no" / "f.json")]) == 2
    )


def test_nobody_at_the_address_is_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["serve", "--url", "http://127.0.0.1:9"]) == 3
    assert "http://127.0.0.1:9/v1/models" in capsys.readouterr().err


REPORT = {
    "bench": "serve",
    "machine": {"cpu": "A Processor", "cores": 2, "memory": "8 GiB"},
    "load_before": 0.1,
    "date": "2026-01-02",
    "commit": "abc",
    "seed": 0,
    "command": "python -m tools.bench serve --topology local",
    "model": "Model",
    "runs": [summary(1, [Outcome(0.0, [1.0, 1.5], ended=2.0, prompt_tokens=6, output_tokens=2)], {"w": 0.5})],
}


BEGIN, END = figures.marks("serve")


def test_figures_stand_between_the_marks_and_do_not_pile_up(tmp_path: Path) -> None:
    report, document = tmp_path / "f.json", tmp_path / "README.md"
    report.write_text(json.dumps(REPORT))
    document.write_text(f"above\n\n{BEGIN}\nold\n{END}\n\nbelow\n")
    assert figures.main([str(report), str(document)]) == 0
    text = document.read_text()
    assert text.startswith(f"above\n\n{BEGIN}\n`python -m tools.bench serve --topology local`\n")
    assert text.endswith(f"\n{END}\n\nbelow\n")
    assert "old" not in text
    assert "2 cores of A Processor, 8 GiB, 2026-01-02, commit abc" in text
    assert "load average before: 0.1.\n" in text
    assert "load average before: 2.0, so other programs" in figures.table({**REPORT, "load_before": 2.0})
    assert "| 1 | 1,000 / 1,000 / 1,000 | 500 / 500 / 500 | 1.0 | 4.0 | 50 % | 1 | 0 |" in text
    assert figures.main([str(report), str(document)]) == 0
    assert document.read_text() == text


def test_figures_that_cannot_be_placed_change_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report, document = tmp_path / "f.json", tmp_path / "README.md"
    report.write_text(json.dumps(REPORT))
    document.write_text(f"{END}\n{BEGIN}\n")
    assert figures.main([str(report), str(document)]) == 2
    assert document.read_text() == f"{END}\n{BEGIN}\n"
    report.write_text("{}")
    assert figures.main([str(report), str(document)]) == 2
    assert "no figures of tools.bench" in capsys.readouterr().err


# ── a real system ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.system
@pytest.mark.model
def test_a_system_is_started_measured_and_stopped(tmp_path: Path, model_folder: Path) -> None:
    report = tmp_path / "figures.json"
    sizes = ["--concurrency", "1,2", "--requests", "2", "--input", "48", "--output", "4", "--seed", "5"]
    where = ["--topology", "unified", "--json", str(report), "--", "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", "serve", *sizes, *where],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(report.read_text())
    assert {"machine", "commit", "seed", "command", "model", "runs"} <= value.keys()
    assert [run["concurrency"] for run in value["runs"]] == [1, 2]
    for run in value["runs"]:
        assert (run["requests"], run["errors"]) == (2, 0)
        assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99"]
        assert 0 < run["output_tokens_per_s"] < run["total_tokens_per_s"]
        assert 0 < run["utilisation"] <= 1
    assert figures.table(value).count("\n|") == 2 + 2
    assert len(done.stdout.splitlines()) == 3
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]


@pytest.mark.system
@pytest.mark.model
def test_an_interrupted_measurement_leaves_nothing_behind(tmp_path: Path, model_folder: Path) -> None:
    name, value = "ESTAFET_TEST_BENCH", tmp_path.name
    where = ["--topology", "local", "--", "--run-dir", str(tmp_path / "run")]
    with subprocess.Popen(
        [sys.executable, "-m", "tools.bench", "serve", "--concurrency", "4", "--output", "500", *where],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            assert running.stdout is not None
            assert "TTFT" in running.stdout.readline(), "it measures"
            running.send_signal(signal.SIGINT)
            _, words = running.communicate(timeout=40)
        finally:
            running.kill()
    assert running.returncode == 130, words
    assert words.endswith("estafet: stopped\nestafet: interrupted\n")
    assert not observe.tagged(f"{name}={value}")
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_socket()]
