"""The measurements of the page system: the world without kernels, questions, rows and bars, the command."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EstafetError
from engine.launch import read_topology
from kernels.cpu import native
from tools import (
    bench,
    bench_page_times,
    bench_pages,
    bench_prefixes,
    bench_two_hosts,
    figures,
    machine,
    namespaces,
)
from tools.bench_client import Client, Outcome, read_stream
from tools.bench_load import Arrival, BenchFailed
from tools.bench_page_rows import ROWS, bars, figure, markdown
from tools.bench_ratios import missing, ratios
from tools.bench_rounds import Findings
from tools.page_world import Length, Mean, Moment, PageWorld, Setup, room, waste

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from hypothesis.strategies import SearchStrategy


# ── the world without kernels ─────────────────────────────────────────────────────────────────


def lengths(most: int) -> SearchStrategy[list[Length]]:
    return st.lists(st.builds(Length, st.integers(1, most), st.integers(1, 12)), min_size=1, max_size=30)


@settings(max_examples=40, deadline=None)
@given(lengths(60), st.sampled_from((8, 16)), st.integers(1, 6), st.integers(0, 5), st.integers(0, 20))
def test_every_request_is_answered_and_every_moment_adds_up(
    asked: list[Length], page_tokens: int, decode_slots: int, ahead: int, spare: int
) -> None:
    """In pools of any size that hold the longest, with few slots, no request is lost and no page leaks."""
    least = -(-max(length.input + length.output for length in asked) // page_tokens) + 1
    setup = Setup(page_tokens, max(2, least + spare), decode_slots, 2, 8, lease_ahead=1 + ahead)
    world = PageWorld(setup, asked)
    seen: list[Moment] = []
    ended: list[int] = []

    def looked(moment: Moment) -> None:
        world.check()
        seen.append(moment)

    world.run(looked, ended.append)
    world.check()
    assert sum(ended) == len(asked)
    computed = sum(moment.rows for moment in seen)
    # What gave way is computed again, and nothing less.
    assert computed >= sum(length.positions for length in asked)
    if not world.scheduler.preemptions:
        assert computed == sum(length.positions for length in asked)
    for moment in seen:
        assert moment.used + moment.rows <= moment.allocated <= setup.pages * page_tokens
        assert moment.with_pages <= moment.sequences <= decode_slots
        assert moment.decoding == 0 or moment.rows <= moment.decoding <= moment.with_pages


def test_waste_is_known_where_it_is_known_by_hand() -> None:
    """One request that fills 4 pages of 8 and decodes to their end, with one page leased ahead."""
    setup = Setup(8, 64, decode_slots=1, prefill_slots=1, step_tokens=8, lease_ahead=1)
    asked = [Length(25, 8)] * 40
    found = waste(setup, asked)
    moments: list[Moment] = []
    world = PageWorld(setup, asked)
    world.run(moments.append, lambda number: None)
    first = moments[: len(moments) // 40]
    # A step that fills a page: it is open and not valid, and the next one is leased.
    assert [(moment.rows, moment.used, moment.allocated) for moment in first[:3]] == [
        (8, 0, 16),
        (8, 8, 24),
        (8, 16, 32),
    ]
    # Then 8 tokens, one at a time, in the fourth page; each worker has a page ahead while it works.
    assert [moment.used for moment in first[3:]] == [24, 25, 26, 27, 28, 29, 30, 31]
    assert all(moment.allocated == 40 for moment in first[4:])
    counted = Mean()
    for moment in moments[: found.steps]:
        counted.add(moment.rows, 1 - moment.used / moment.allocated)
    assert found.mean.value == pytest.approx(counted.value)
    assert found.static.value == pytest.approx(
        sum(m.rows * (1 - m.used / 33) for m in moments[: found.steps])
        / sum(m.rows for m in moments[: found.steps])
    )


def test_a_full_pool_holds_as_many_as_its_slots_hold() -> None:
    """Requests of one length: a pool's size by theirs, but for what the scheduler keeps free."""
    asked = [Length(64, 16)] * 200
    found = room(Setup(16, 100, 64), asked)
    assert found.static == 100 * 16 // 80
    assert 14 <= found.sequences.value <= 20
    assert 64 <= found.length.value <= 79


def test_longest_and_mean_make_the_difference() -> None:
    asked = [Length(20, 10)] * 300 + [Length(600, 10)] + [Length(20, 10)] * 300
    found = room(Setup(16, 160, 128), asked)
    assert found.static == 160 * 16 // 610
    assert found.sequences.value > 8 * found.static


@pytest.mark.parametrize(
    ("setup", "asked", "said"),
    [
        (Setup(16, 4, 4), [Length(60, 10)], "4 pages do not hold a request of 70 tokens"),
        (Setup(16, 64, 64), [Length(60, 10)], "too few requests for a steady state"),
    ],
)
def test_what_cannot_be_measured_says_so(setup: Setup, asked: list[Length], said: str) -> None:
    with pytest.raises(BenchFailed, match=said):
        _ = waste(setup, asked).mean.value


def test_a_pool_that_has_more_room_than_slots_is_no_measure() -> None:
    with pytest.raises(BenchFailed, match="more sequences than there are slots, 3"):
        room(Setup(16, 8, 3), [Length(30, 4)] * 40)


# ── times ─────────────────────────────────────────────────────────────────────────────────────


def test_inner_work_is_timed_a_round_at_a_time() -> None:
    lives = bench_page_times.page_lives(5)
    assert len(lives) == 5
    assert min(lives) > 0
    found = bench_page_times.look_ups(20, tokens=1024)
    assert len(found.again) == 20
    assert len(found.first) == bench_page_times.PREFIXES
    assert bench_page_times.microseconds([3e-6, 1e-6, 2e-6]) == pytest.approx(2)


# ── questions ─────────────────────────────────────────────────────────────────────────────────

WORDS = ["water", "house", "river"]
OVERHEAD = 20


class Door(Client):
    """Answers as a system would: a token a word, and where it came from as a test says."""

    def __init__(self, cache: Sequence[dict[str, int] | None], error: str = "") -> None:
        super().__init__("http://127.0.0.1:1")
        self.left = list(cache)
        self.error = error
        self.bodies: list[dict[str, Any]] = []

    async def ask(self, prompt: str | list[int], output: int) -> Outcome:
        self.bodies.append(dict(self.options))
        system, user = (message["content"] for message in self.options["messages"])  # type: ignore[index]
        assert len(user.split()) == 3
        outcome = Outcome(1.0, [1.25], 1.5, OVERHEAD + len(system.split()) - 1, output, error=self.error)
        outcome.cache = self.left.pop(0)
        return outcome


def questions(*cache: dict[str, int] | None, error: str = "") -> tuple[bench_prefixes.Questions, Door]:
    door = Door([{"memory": 0, "computed": 20}, *cache], error)
    return bench_prefixes.Questions(door, WORDS, seed=3), door


async def test_prompts_have_the_length_that_is_told_and_other_words_each() -> None:
    nothing = {"memory": 0, "worker": 0, "host": 0, "file": 0, "computed": 2064}
    asking, door = questions(*[nothing] * 4)
    await asking.prepare()
    first, second = asking.system(), asking.system()
    assert first != second
    for system in (first, first, second):
        outcome = await asking.ask(system)
        assert outcome.prompt_tokens == bench_prefixes.CACHED + bench_prefixes.NEW
        assert bench_prefixes.ttft(outcome) == 0.25
    users = [body["messages"][1]["content"] for body in door.bodies]
    assert len(set(users)) == len(users)
    assert all(body["x_estafet"] == {"cache": True} and body["temperature"] == 0 for body in door.bodies)
    assert await bench_prefixes.cold(asking) == 0.25


@pytest.mark.parametrize(
    ("cache", "error", "said"),
    [
        (None, "", "nobody knows"),
        ({"memory": 48, "computed": 2016}, "", "48 tokens of a prompt were found that nobody had sent"),
        ({"memory": 0}, "HTTP 500: no", "HTTP 500"),
    ],
)
async def test_answers_that_prove_nothing_are_refused(
    cache: dict[str, int] | None, error: str, said: str
) -> None:
    asking, door = questions(cache)
    await asking.prepare()
    door.error = error
    with pytest.raises(BenchFailed, match=said):
        await bench_prefixes.cold(asking)


def test_streams_tell_where_a_prompt_came_from() -> None:
    cache = {"memory": 0, "worker": 2048, "host": 0, "file": 0, "computed": 16}
    usage = {"prompt_tokens": 2064, "completion_tokens": 1, "total_tokens": 2065}
    events = [
        {"choices": [{"delta": {"content": "a"}}]},
        {"choices": [], "usage": usage, "x_estafet": {"cache": cache}},
    ]
    lines = [
        b"HTTP/1.0 200 OK",
        *(b"data: " + json.dumps(event).encode() for event in events),
        b"data: [DONE]",
    ]
    outcome = Outcome(0.0)
    read_stream([(float(at), line) for at, line in enumerate(lines)], outcome)
    assert (outcome.error, outcome.cache, outcome.pieces) == ("", cache, [1.0])


def test_systems_are_started_with_every_core_for_each_worker() -> None:
    plan = bench_prefixes.Plan(["kv.dtype=float32"], threads=3, seed=0, asks=5)
    options = plan.options(topology="two-workers")
    settings = options.for_launcher[1::2]
    assert set(options.for_launcher[::2]) == {"--set"}
    topology = read_topology("two-workers", settings)
    assert sorted(topology.worker) == [bench_prefixes.FIRST, bench_prefixes.SECOND]
    assert all((w.role, w.threads, w.backend) == ("both", 3, "native") for w in topology.worker.values())
    assert (topology.kv.pages, topology.kv.dtype) == (bench_prefixes.PAGES, "float32")
    hosts = read_topology(bench_two_hosts.TOPOLOGY, plan.launcher()[1::2])
    assert {name: worker.on for name, worker in hosts.worker.items()} == {
        name: host for host, name in bench_two_hosts.WORKERS.items()
    }


async def test_a_hit_of_the_wrong_worker_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = {"memory": 2048, "worker": 0, "host": 0, "file": 0, "computed": 16}
    new = {"memory": 0, "worker": 0, "host": 0, "file": 0, "computed": 2064}
    theirs = {**mine, "memory": 0, "worker": 2048}

    async def measured(*cache: dict[str, int]) -> dict[str, Any]:
        asking, _ = questions(*cache)
        await asking.prepare()

        async def made(system: object, seed: int) -> bench_prefixes.Questions:
            return asking

        async def filled(system: object, questions: object, seed: int) -> str:
            return asking.system()

        monkeypatch.setattr(bench_prefixes, "questions_for", made)
        monkeypatch.setattr(bench_prefixes, "filled_by_the_second", filled)
        monkeypatch.setattr(bench_prefixes, "PAUSE_S", (0.0, 0.0))
        with trio.fail_after(30):
            return await bench_prefixes.measure_workers(
                None,
                bench_prefixes.Plan([], 1, 0, asks=3),
                lambda: None,  # type: ignore[arg-type]
            )

    found = await measured(*[new] * 3, *[theirs] * 3, *[new] * 3)
    assert found["cached_ttft_p50_ms"] == found["cold_ttft_p50_ms"] == 250
    assert (len(found["cached_ttfts_s"]), len(found["cold_ttfts_s"])) == (3, 6)
    with pytest.raises(BenchFailed, match="should come from the other worker"):
        await measured(*[new] * 3, mine)


# ── rows, bars and the table ──────────────────────────────────────────────────────────────────

FIGURES = {
    "waste_page16_share": 0.0224,
    "waste_static_share": 0.88,
    "running_sequences": 290.0,
    "static_sequences": 32.0,
    "concurrency_times": 290 / 32,
    "longest_over_mean_times": 10.2,
    "cached_ttft_p50_ms": 50.0,
    "cached_ttft_p99_ms": 101.0,
    "cold_ttft_p50_ms": 2000.0,
    "page_life_us": 1.5,
    "others_allocator": 0.4,
}


def report_of_figures() -> dict[str, Any]:
    findings = Findings(reasons={"remote_ttft_p50_ms": "only root can"})
    for name, value in FIGURES.items():
        findings.values[name].append(value)
    found = ratios(findings.medians(), ROWS)
    parts = [part for part in bench_pages.PARTS if part != "trace"]
    return {
        "bench": "pages",
        "machine": {"cpu": "A Processor", "cores": 2, "memory": "8 GiB"},
        "load_before": 0.1,
        "date": "2026-01-02",
        "commit": "abc",
        "seed": 0,
        "command": "python -m tools.bench pages",
        "model": "The default model",
        "ratios": found,
        "figures": findings.medians(),
        "bars": bars(),
        "missing": missing(found, findings, parts, ROWS),
        "facts": {"Waste": "64 requests"},
    }


def test_the_issue_asks_for_these_bars() -> None:
    wanted = {
        "waste_page16": (0.04, False),
        "concurrency_vs_static": (4.0, True),
        "concurrency_vs_lengths": (0.9, True),
        "cached_ttft_p50_ms": (60.0, False),
        "cached_ttft_p99_ms": (100.0, False),
        "cached_over_cold_ttft": (0.03, False),
        "trace_hits_5_vs_lru": (1.25, True),
        "trace_hits_20_vs_infinite": (0.97, True),
        "page_life_us": (2.0, False),
        "lookup_4096_us": (150.0, False),
        "remote_over_computed_ttft": (0.15, False),
    }
    assert {name: (one["bar"], one["at_least"]) for name, one in bars().items()} == wanted
    assert {row.part for row in ROWS} == set(bench_pages.PARTS)


def test_every_figure_has_a_unit() -> None:
    for row in ROWS:
        for name in (row.top, row.bottom):
            if name is not None:
                assert figure(name, 1.0)
    assert figure("waste_page16_share", 0.0224) == "2.2 %"
    assert figure("page_life_us", 1.234) == "1.23 µs"
    assert figure("page_life_us", None) == "–"


def test_the_table_has_bars_and_says_what_is_met(tmp_path: Path) -> None:
    report = report_of_figures()
    lines = markdown(report)
    rows = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines]
    by_name = {
        row.name: cells for row, cells in zip([r for r in ROWS if r.part != "trace"], rows[2:], strict=False)
    }
    assert by_name["waste_page16"][1:] == ["2.2 %", "", "", "≤ 4.0 %", "met"]
    assert by_name["concurrency_vs_static"][1:] == ["290.0", "32.0", "9.062", "≥ 4", "met"]
    assert by_name["concurrency_vs_lengths"][1:] == ["9.06 ×", "10.20 ×", "0.888", "≥ 0.9", "missed"]
    assert by_name["cached_ttft_p50_ms"][1:] == ["50.0 ms", "", "", "≤ 60.0 ms", "met"]
    assert by_name["cached_ttft_p99_ms"][-1] == "missed"
    assert by_name["cached_over_cold_ttft"][1:] == ["50.0 ms", "2,000.0 ms", "0.025", "≤ 0.03", "met"]
    assert by_name["page_life_us"][-1] == "met (others took 40 % of the cores)"
    assert by_name["remote_over_computed_ttft"][-1] == "not measured: only root can"
    assert not any("hits" in line for line in lines), "they were not asked for"
    assert lines[-1] == "Waste: 64 requests."
    file, document = tmp_path / "f.json", tmp_path / "README.md"
    file.write_text(json.dumps(report))
    begin, end = figures.marks("pages")
    document.write_text(f"{begin}\n{end}\n")
    assert figures.main([str(file), str(document)]) == 0
    assert "\n".join(lines) in document.read_text()


# ── the command ───────────────────────────────────────────────────────────────────────────────


def write_trace(path: Path, requests: int = 250) -> Path:
    """Requests of two lengths, each behind one of three prompts, in Mooncake's format."""
    lines = []
    for number in range(requests):
        blocks = [number % 3, 1000 + number]
        row = {"timestamp": 10 * number, "input_length": 900, "output_length": 400, "hash_ids": blocks}
        if number % 50 == 0:
            row["input_length"] = 9000
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_lengths_are_divided_and_stay_prompts_with_answers() -> None:
    found = bench_pages.lengths_of([Arrival(0.0, 6758, 500), Arrival(1.0, 1, 1)])
    assert found == [Length(211, 16), Length(1, 1)]
    assert found[0].positions == 226


def test_what_is_counted_is_measured_from_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_pages, "LONGEST_IN_POOL", 10)
    monkeypatch.setattr(bench_pages, "SLOTS", 128)
    trace, report, plot = write_trace(tmp_path / "t.jsonl"), tmp_path / "f.json", tmp_path / "p.svg"
    words = ["--trace", str(trace), "--only", "waste,concurrency,trace,allocator"]
    monkeypatch.setattr(bench_pages, "LIVES", 3)
    monkeypatch.setattr(bench_pages, "LOOK_UPS", 3)
    assert bench.main(["pages", *words, "--json", str(report), "--plot", str(plot)]) == 0
    found = json.loads(report.read_text())
    assert (
        0 < found["ratios"]["waste_page8"] < found["ratios"]["waste_page32"] < found["ratios"]["waste_static"]
    )
    assert found["ratios"]["concurrency_vs_static"] > 3
    assert found["ratios"]["trace_hits_20_vs_infinite"] == pytest.approx(1.0, abs=0.05)
    assert found["ratios"]["page_life_us"] > 0
    assert set(found["ratios"]) == {row.name for row in ROWS}
    assert found["missing"].keys() == {row.name for row in ROWS if row.part in ("ttft", "hosts")}
    assert "others_waste" not in found["figures"]
    assert "others_allocator" in found["figures"]
    assert found["command"] == f"python -m tools.bench pages {' '.join(words)} --plot {plot}"
    assert plot.read_text().startswith("<svg")
    assert figures.table(found)
    out = capsys.readouterr().out
    assert re.search(r"pages of 16, leases included \| \d+\.\d % \|", out)


def test_without_a_trace_the_rest_is_measured_and_why_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(bench_pages.TRACES, raising=False)
    assert bench.main(["pages", "--only", "waste,trace"]) == 3
    assert "not measured: no trace: name" in capsys.readouterr().out
    monkeypatch.setenv(bench_pages.TRACES, str(tmp_path))
    assert bench.main(["pages", "--only", "trace"]) == 3
    assert bench_pages.TRACE in capsys.readouterr().out


def test_hosts_that_cannot_be_say_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_two_hosts, "cannot", lambda: "only root makes namespaces")
    assert bench.main(["pages", "--only", "hosts"]) == 3
    assert "not measured: only root makes namespaces" in capsys.readouterr().out
    assert [bench_two_hosts.prompts_of(asks) for asks in (1, 5, 50)] == [3, 5, 8]


@pytest.mark.parametrize("wrong", [["--only", "waste,nothing"], ["--asks", "0"], ["--limit", "x"]])
def test_bad_usage_is_2(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(["pages", *wrong])
    assert ended.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_files_are_looked_at_before_anything_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = str(tmp_path / "absent" / "f")
    for option in ("--json", "--plot", "--trace"):
        assert bench.main(["pages", option, absent]) == 2
        said = capsys.readouterr().err.splitlines()
        assert len(said) == 1
        assert absent in said[0]


def test_the_parts_are_told_by_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["pages", "--help"])
    said = capsys.readouterr().out
    assert all(re.search(rf"^  {part} ", said, re.MULTILINE) for part in bench_pages.PARTS)


# ── systems ───────────────────────────────────────────────────────────────────────────────────


def is_built() -> bool:
    """Whether there is a native extension."""
    try:
        native()
    except EstafetError:
        return False
    return True


needs_kernels = pytest.mark.skipif(not is_built(), reason="the native kernels are not built")


@pytest.fixture
def shorter(monkeypatch: pytest.MonkeyPatch) -> int:
    """Prompts that take a second, not three."""
    for module in (bench_prefixes, bench_two_hosts):
        monkeypatch.setattr(module, "CACHED", 1024)
    monkeypatch.setattr(bench_prefixes, "COLD", 2)
    return 1024


@pytest.mark.system
@pytest.mark.model
@needs_kernels
@pytest.mark.usefixtures("model_folder", "shorter")
def test_a_real_system_finds_what_the_other_worker_filled() -> None:
    plan = bench_prefixes.Plan([], threads=machine.cores(), seed=1, asks=3)
    found = bench_prefixes.between_workers(plan, lambda: None)
    assert 0 < found["cached_ttft_p50_ms"] < found["cold_ttft_p50_ms"] / 2
    assert (len(found["cached_ttfts_s"]), len(found["cold_ttfts_s"])) == (3, 2)


@pytest.mark.system
@pytest.mark.model
@needs_kernels
@pytest.mark.skipif(namespaces.cannot() is not None, reason="no network namespaces can be made here")
@pytest.mark.usefixtures("model_folder", "shorter")
def test_two_real_hosts_fetch_what_the_other_filled() -> None:
    plan = bench_prefixes.Plan([], threads=machine.cores(), seed=1, asks=1)
    found = bench_two_hosts.between_hosts(plan, lambda: None)
    assert 0 < found["remote_ttft_p50_ms"] < found["computed_ttft_p50_ms"] / 2
    assert len(found["remote_ttfts_s"]) == len(found["computed_ttfts_s"]) == bench_two_hosts.FEW
    assert not namespaces.TwoHosts("estafet-bench").is_up
