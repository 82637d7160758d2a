"""Reading logs: records, lives and timelines from lines written by hand, and from a launch with a kill."""

from __future__ import annotations

import fcntl
import io
import json
import os
import queue
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tools import logs
from tools.logreader.choice import Filter, parse_since
from tools.logreader.records import LONGEST_LINE, LogFile, LogFolder, Record, find_requests, parse
from tools.logreader.render import Paint, duration, log_line, wants_colours
from tools.logreader.requests import Life, list_lives, timeline

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "system"))

BEGAN = datetime(2026, 3, 1, 12, tzinfo=UTC).timestamp()
A, B = "req-0400000100000001", "req-0400000100000002"


def line(at: float, who: str, event: str, request: str | None = None, **fields: Any) -> bytes:
    """A log line as an actor writes it, so many seconds after BEGAN; `who` is as in decode@2."""
    name, _, epoch = who.partition("@")
    moment = datetime.fromtimestamp(BEGAN + at, UTC).isoformat().replace("+00:00", "Z")
    bound: dict[str, Any] = {"actor": name, "epoch": int(epoch)} if epoch else {}
    if request is not None:
        bound["request_id"] = request
    values = {"event": event, "level": "info", **bound, **fields, "timestamp": moment}
    return json.dumps(values).encode() + b"\n"


def begin(request: str, at: float = 0.0, decode: str = "decode@1", owner: str = "front@1") -> list[bytes]:
    """A request that is admitted, filled, handed over and gets its first token within 0.4 s."""
    return [
        line(at, owner, "request_admitted", request, prompt_tokens=9, max_tokens=5, seed=1),
        *place(request, at + 0.1, decode, owner=owner),
        line(at + 0.4, owner, "first_token_committed", request, seconds=0.4),
    ]


def place(request: str, at: float, decode: str, term: int = 1, owner: str = "front@1") -> list[bytes]:
    """From its placement to the hand-over, 0.2 s."""
    return [
        line(at, owner, "request_placed", request, term=term, prefill="prefill@1", decode=decode),
        line(at + 0.01, "prefill@1", "prefill_started", request, term=term, tokens=9),
        line(
            at + 0.15,
            "prefill@1",
            "hand_over_offered",
            request,
            term=term + 1,
            decode=decode,
            filled=8,
            pages=1,
        ),
        line(at + 0.16, decode, "hand_over_received", request, term=term + 1, filled=8),
        line(at + 0.16, decode, "decode_started", request, term=term + 1),
        line(at + 0.20, owner, "request_handed_over", request, term=term + 1),
    ]


def end(request: str, at: float, reason: str = "length", owner: str = "front@1", **fields: Any) -> bytes:
    values = {"reason": reason, "error": None, "prompt_tokens": 9, "completion_tokens": 5, **fields}
    return line(at, owner, "request_ended", request, seconds=at, **values)


KILLED = [
    *begin(A),
    line(0.5, "launcher", "process_exited", process="decode@1", code=-9, said=""),
    line(0.51, "replicator@1", "peer_died", peer="decode@1"),
    line(0.52, "front@1", "request_taken_back", A, dead="decode@1", level="warning"),
    line(0.6, "launcher", "process_spawned", process="decode@2"),
    line(0.7, "launcher", "process_exited", process="other@1", code=-9, said=""),
    line(2.4, "decode@2", "actor_ready"),
    *place(A, 2.5, "decode@2", term=4),
    line(2.9, "front@1", "stream_resumed", A, after=2, seconds=2.45),
    end(A, 3.5),
    line(3.51, "decode@2", "cancel_received", A, term=5),
    line(9.0, "launcher", "process_exited", process="decode@2", code=0, said=""),
]
"""The decode worker dies after two tokens, another one goes on."""


def records(lines: Iterable[bytes]) -> list[Record]:
    parsed = [parse(entry, "launcher") for entry in lines]
    found = [record for record in parsed if record is not None]
    assert len(found) == len(parsed)
    return sorted(found, key=lambda record: record.at)


def write(run_dir: Path, lines: Iterable[bytes]) -> Path:
    """A run directory with each line in the file of its actor."""
    folder = run_dir / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    for entry in lines:
        with (folder / f"{json.loads(entry).get('actor', 'launcher')}.jsonl").open("ab") as stream:
            stream.write(entry)
    return run_dir


def run(*arguments: object) -> int:
    return logs.main([str(argument) for argument in arguments])


def anything(record: Record) -> bool:
    return True


ADOPTED = [
    line(0, "front@1", "request_admitted", A, prompt_tokens=9, max_tokens=5, seed=1, resumable=True),
    *begin(A)[1:],
    line(0.5, "launcher", "process_exited", process="front@1", code=-9, said=""),
    line(0.6, "launcher", "process_spawned", process="front@2"),
    line(3.0, "front@2", "request_adopted", A, committed=2),
    line(3.1, "front@2", "request_resumed", A),
    *place(A, 3.2, "decode@1", term=4, owner="front@2"),
    line(3.6, "front@2", "stream_resumed", A, after=2, seconds=3.2),
    end(A, 4.0, owner="front@2"),
]
"""The gateway dies after two tokens, the next one goes on, long after whatever was late came."""


# ── records ───────────────────────────────────────────────────────────────────────────────────


def test_a_line_becomes_a_record() -> None:
    record = parse(line(1.5, "decode@2", "decode_started", A, term=3), "decode")
    assert record is not None
    assert (record.at, record.who, record.event, record.request_id) == (
        BEGAN + 1.5, "decode@2", "decode_started", A,
    )  # fmt: skip
    assert record.fields == {"term": 3}
    assert json.loads(json.dumps(record.as_dict()))["timestamp"] == "2026-03-01T12:00:01.500000Z"
    launcher = parse(b'{"event":"x","timestamp":"2026-03-01T12:00:00Z"}', "launcher")
    assert launcher is not None
    assert (launcher.who, launcher.level, launcher.at) == ("launcher", "info", BEGAN)


@pytest.mark.parametrize(
    "garbage",
    [
        b"Segmentation fault",
        b"[]",
        b"{}",
        b'{"event":"x"}',
        b'{"event":1,"timestamp":"2026-03-01T12:00:00Z"}',
        b'{"event":"x","timestamp":"noon"}',
        b'{"event":"x","timestamp":"9999-12-31T23:59:59Z"}',
        b'{"event":"x","timestamp":7}',
        b'{"event":"\xff","timestamp":"2026-03-01T12:00:00Z"}',
    ],
)
def test_garbage_is_counted_and_passed_over(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "front.jsonl"
    path.write_bytes(garbage + b"\n\n" + line(0, "front@1", "actor_ready"))
    file = LogFile(path)
    assert [record.event for record in file.records()] == ["actor_ready"]
    assert (file.garbage, file.torn) == (1, False)
    file.close()


def test_a_torn_line_waits_for_its_end_and_does_not_take_the_next_one_along(tmp_path: Path) -> None:
    whole, path = line(0, "front@1", "actor_ready"), tmp_path / "front.jsonl"
    path.write_bytes(whole[:20])
    file = LogFile(path)
    with path.open("ab") as stream:
        assert list(file.records()) == []
        assert file.torn
        stream.write(whole[20:])
        stream.flush()
        assert [record.event for record in file.records()] == ["actor_ready"]
        # Killed in the middle of a line: the next incarnation goes on behind what there is of it.
        stream.write(whole[:30] + line(1, "front@2", "actor_started"))
        stream.flush()
        assert [record.who for record in file.records()] == ["front@2"]
    assert (file.garbage, file.torn) == (1, False)
    file.close()


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "front.jsonl"
    path.write_bytes(b"x" * (3 * LONGEST_LINE) + b"\n" + line(0, "front@1", "actor_ready"))
    file = LogFile(path)
    assert [record.event for record in file.records()] == ["actor_ready"]
    assert file.garbage == 1
    file.close()


def test_all_files_are_one_log(tmp_path: Path) -> None:
    folder = LogFolder(write(tmp_path, KILLED) / "logs")
    times = [record.at for record in folder.records()]
    assert len(times) == len(KILLED)
    assert times == sorted(times)
    folder.close()


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (A, [A]),
        ("1", [A]),
        ("00002", [B]),
        ("0400", [A, B]),
        ("req-04", [A, B]),
        ("400", []),
        ("req-", [A, B]),
    ],
)
def test_a_request_is_found_by_either_end_of_its_id(tmp_path: Path, wanted: str, found: list[str]) -> None:
    logs_of = write(tmp_path, [*begin(A), *begin(B, 1.0)]) / "logs"
    assert find_requests(logs_of, wanted) == found


# ── lives ─────────────────────────────────────────────────────────────────────────────────────


def test_the_life_of_a_request_whose_worker_dies() -> None:
    life = Life(A)
    moments = list(timeline(records(KILLED), life))
    phases = [(m.phase.name, round(m.phase.seconds, 3)) for m in moments if m.phase is not None]
    assert phases == [
        ("queued", 0.1), ("prefill", 0.15), ("hand-over", 0.05), ("first token", 0.1),
        ("queued", 1.98), ("prefill", 0.15), ("hand-over", 0.05), ("gap", 2.45), ("total", 3.5),
    ]  # fmt: skip
    others = [(m.record.who, m.record.event) for m in moments if m.record.request_id is None]
    assert others == [
        ("launcher", "process_exited"),
        ("launcher", "process_spawned"),
        ("decode@2", "actor_ready"),
    ], "not the worker that had nothing to do with it, nor what every peer says of the death"
    assert moments[-1].record.event == "cancel_received", "what comes late, but not the end of the launch"
    assert (life.state, life.replacements, life.gaps) == ("length", 1, [(2, 2.45)])
    assert (life.prompt_tokens, life.completion_tokens, life.ttft_s, life.total_s) == (9, 5, 0.4, 3.5)
    assert life.queued_s == pytest.approx(2.08)


def test_a_late_word_of_an_earlier_placement_ends_no_phase() -> None:
    lines = [
        *begin(A)[:3],
        line(0.2, "front@1", "request_taken_back", A, dead="decode@1"),
        *place(A, 0.3, "decode@2", term=4)[:2],
        line(0.32, "prefill@1", "hand_over_offered", A, term=2, decode="decode@1", filled=8, pages=1),
    ]
    moments = list(timeline(records(lines), Life(A)))
    assert moments[-1].record.event == "hand_over_offered"
    assert moments[-1].phase is None


def test_a_refused_placement_is_still_waiting() -> None:
    refused = line(0.05, "front@1", "placement_refused", A, strangers="decode@2")
    moments = list(timeline(records([begin(A)[0], refused, *place(A, 0.1, "decode@2")]), Life(A)))
    assert [(m.record.event, m.phase and m.phase.name) for m in moments[1:3]] == [
        ("placement_refused", None),
        ("request_placed", "queued"),
    ]
    assert moments[2].phase is not None
    assert moments[2].phase.seconds == pytest.approx(0.1)


def test_one_worker_for_both_hands_nothing_over() -> None:
    placed = line(0.1, "front@1", "request_placed", A, term=1, prefill="both@1", decode="both@1")
    lines = [
        begin(A)[0],
        placed,
        line(0.1, "both@1", "prefill_started", A, term=1, tokens=9),
        line(0.4, "both@1", "decode_started", A, term=2),
        line(0.41, "front@1", "request_handed_over", A, term=2),
    ]
    phases = [m.phase.name for m in timeline(records(lines), Life(A)) if m.phase is not None]
    assert phases == ["queued", "prefill", "hand-over"]


def test_gaps_are_seen_token_by_token_when_each_has_a_line() -> None:
    tokens = [
        line(0.4 + at, "front@1", "token_committed", A, number=number, level="debug")
        for number, at in enumerate((0, 0.1, 0.4, 0.5), 1)
    ]
    slow = line(0.85, "front@1", "token_gap_seen", A, after=3, seconds=0.05)
    steps = line(0.79, "decode@1", "step_computed", request_ids=[B, A], rows=2, level="debug")
    life = Life(A, gap_s=0.2)
    moments = list(timeline(records([*begin(A), *tokens, slow, steps, end(A, 1)]), life))
    assert life.gaps == [(2, pytest.approx(0.3))]
    assert life.saw_tokens
    events = [moment.record.event for moment in moments]
    assert "step_computed" in events, "a step of several requests is told of each"
    assert "token_gap_seen" not in events, "one that is shorter than asked for"


def test_other_ends_of_a_life() -> None:
    preempted = [*begin(A), line(0.5, "front@1", "request_preempted", A, term=2)]
    refused = line(0.6, "front@1", "sequence_lost", B, by="prefill@1", reason="refused", detail="full")
    dead = line(2.0, "launcher", "process_exited", process="front@1", code=-9, said="")
    lines = [*preempted, *begin(B, 0.05)[:2], refused, dead, *begin("req-3", 2.5, owner="front@2")]
    lives = {life.request_id: life for life in list_lives(records(lines), anything)}
    assert (lives[A].state, lives[A].stage, lives[A].replacements) == ("lost", "queued", 1)
    assert lives[B].state == "lost"
    assert (lives["req-3"].state, lives["req-3"].stage) == (None, "decoding")
    assert timeline_events(lines, A)[-1] == "process_exited"


def timeline_events(lines: Iterable[bytes], request: str) -> list[str]:
    return [moment.record.event for moment in timeline(records(lines), Life(request))]


def test_the_list_is_in_order_and_holds_only_what_is_open() -> None:
    """An endless log gives its first requests, though the lines of the last are never reached."""

    def endless() -> Iterable[Record]:
        number = 0
        while True:
            name, at = f"req-{number}", 10.0 * number
            yield from records([*begin(name, at), end(name, at + 1)])
            number += 1
            assert number < 10, "it does not read on for ever before it gives something"

    lives = list_lives(endless(), anything)
    assert [next(lives).request_id for _ in range(3)] == ["req-0", "req-1", "req-2"]


def test_an_earlier_request_that_ends_later_is_still_first() -> None:
    lines = [*begin(A), *begin(B, 0.05), end(B, 1), end(A, 30), *begin("req-3", 60)]
    assert [life.request_id for life in list_lives(records(lines), anything)] == [A, B, "req-3"]


def test_a_warning_after_the_end_counts() -> None:
    late = line(1.01, "front@1", "http_reply_broken", A, level="warning", reason="no")
    lines = [*begin(A), end(A, 1, reason="error", error="no"), late, *begin(B, 9)]
    warned = list_lives(records(lines), lambda record: record.severity >= 30)
    assert [life.request_id for life in warned] == [A]


# ── following ─────────────────────────────────────────────────────────────────────────────────


def test_following_sees_pieces_new_files_and_keeps_the_order(tmp_path: Path) -> None:
    """Whatever is written between two looks comes out whole and in order."""
    folder = LogFolder(write(tmp_path, [line(0, "front@1", "old")]) / "logs")
    late = line(5, "decode@1", "late")

    def append(name: str, data: bytes) -> None:
        with (tmp_path / "logs" / f"{name}.jsonl").open("ab") as stream:
            stream.write(data)

    between = iter(
        [
            lambda: append("front", line(1, "front@1", "one") + line(3, "front@1", "three")),
            # A look found 3 before 2 was there: it is held until the next one has found both.
            lambda: append("new", line(2, "new@1", "two")),
            lambda: append("decode", late[:25]),
            lambda: append("front", line(4, "front@1", "four")),
            lambda: append("decode", late[25:]),
        ]
    )

    def wait() -> bool:
        step = next(between, None)
        if step is not None:
            step()
        return step is not None

    assert [record.event for record in folder.records()] == ["old"]
    assert [record.event for record in folder.follow(wait)] == ["one", "two", "three", "four", "late"]
    folder.close()


def test_follow_begins_with_the_last_lines(tmp_path: Path) -> None:
    old = [line(at, "front@1", f"event_{at}", level="debug" if at % 2 else "info") for at in range(40)]
    folder = LogFolder(write(tmp_path, old) / "logs")
    passes = Filter("info", (), 0.0)
    assert [r.event for r in logs.follow(folder, passes, lambda: False, past=2)] == ["event_36", "event_38"]
    folder.close()


def test_the_program_follows_until_it_is_interrupted(tmp_path: Path) -> None:
    """A process as a person starts it, read through a pipe; each line arrives by itself."""
    write(tmp_path, [line(0, "front@1", "old")])
    with subprocess.Popen(
        [sys.executable, "-m", "tools.logs", str(tmp_path), "--follow", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        lines: queue.Queue[bytes] = queue.Queue()
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=lambda out: [lines.put(each) for each in out], args=[process.stdout])
        reader.start()
        try:
            assert json.loads(lines.get(timeout=20))["event"] == "old"
            for number in range(3):
                write(tmp_path, [line(number, f"actor{number}@1", "new")])
                assert json.loads(lines.get(timeout=20))["actor"] == f"actor{number}"
            process.send_signal(2)
            assert process.wait(20) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()
            reader.join(20)


def test_a_request_is_followed_to_its_end(tmp_path: Path) -> None:
    """Its timeline is printed as it grows, and the program ends with it."""
    run_dir = write(tmp_path, KILLED[:8])
    pieces = [KILLED[8:14], KILLED[14:]]
    out = io.StringIO()
    seen: list[int] = []

    def wait() -> bool:
        seen.append(len(out.getvalue().splitlines()))
        if pieces:
            write(run_dir, pieces.pop(0))
        return True

    options = logs.parser().parse_args([str(run_dir), "--request", "1", "--follow"])
    with alive(run_dir):
        assert logs.show(options, logs.Printer(out, False, Paint(False)), wait) == 0
    assert out.getvalue().splitlines()[-1].startswith("length · 9 prompt + 5 tokens")
    assert seen[0] < seen[-1], "what was known was shown before it ended"


class alive:  # noqa: N801 (used like a function)
    """While a run directory is held by its launch."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "lock"

    def __enter__(self) -> None:
        self._lock = os.open(self._path, os.O_CREAT | os.O_RDWR)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)


# ── the program ───────────────────────────────────────────────────────────────────────────────


def test_the_list_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, [*KILLED, *begin(B, 20)])
    with alive(tmp_path):
        assert run(tmp_path) == 0
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.split() == ["request", "admitted", "state", "prompt", "tokens", "queued", "TTFT", "total"]
    assert first.split()[2:5] == ["length", "9", "5"]
    assert first.endswith("2.08 s   400 ms     3.50 s  taken back once; longest gap 2.45 s")
    assert second.split()[2:5] == ["decoding", "9", "≥1"]
    assert run(tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[2].split()[2:4] == ["cut", "off"], "the launch is over"


def test_the_timeline_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, KILLED)
    assert run(tmp_path, "--request", "chatcmpl-" + A) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0].startswith(A)
    assert [" ".join(entry.split()) for entry in lines[10:14]] == [
        "+0.5000 s launcher decode@1 exited by SIGKILL",
        "+0.5200 s front@1 taken back decode@1 died",
        "+0.6000 s launcher decode@2 spawned",
        "+2.4000 s decode@2 ready",
    ]
    assert lines[-1] == (
        "length · 9 prompt + 5 tokens · queued 2.08 s · TTFT 400 ms · taken back once"
        " · longest gap 2.45 s after 2 tokens · total 3.50 s"
    )
    assert run(tmp_path, "--request", A, "--gap", "0.1") == 0
    assert "log_level=debug" in capsys.readouterr().err


def test_json_in_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, KILLED)
    assert run(tmp_path, "--json") == 0
    [life] = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert (life["request_id"], life["state"], life["ttft_s"]) == (A, "length", 0.4)
    assert life["gaps"] == [{"after": 2, "seconds": 2.45}]
    assert run(tmp_path, "--request", A, "--json") == 0
    story = json.loads(capsys.readouterr().out)
    events = story.pop("events")
    assert story == life
    assert events[1]["phase"] == "queued"
    assert events[1]["offset_s"] == 0.1
    assert run(tmp_path, "--lines", "--json") == 0
    lines = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert len(lines) == len(KILLED)
    assert lines[0]["event"] == "request_admitted"


def test_lines_are_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, KILLED)

    def chosen(*arguments: str) -> list[str]:
        assert run(tmp_path, "--lines", "--json", *arguments) == 0
        return [json.loads(each)["event"] for each in capsys.readouterr().out.splitlines()]

    assert chosen("--level", "warning") == ["request_taken_back"]
    assert chosen("--actor", "replicator") == ["peer_died"]
    assert chosen("--actor", "decode@1", "--actor", "replicator") == [
        "hand_over_received",
        "decode_started",
        "peer_died",
    ]
    assert chosen("--since", "2026-03-01T12:00:03.505Z") == ["cancel_received", "process_exited"]
    assert chosen("--since", "1s") == []
    assert run(tmp_path, "--level", "error") == 0
    assert "no request to list" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "expected"), [("30s", 970.0), ("1.5m", 910.0), ("250ms", 999.75), ("1970-01-01T00:10Z", 600.0)]
)
def test_since(text: str, expected: float) -> None:
    assert parse_since(text, 1000.0) == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{}/none"], "none: no such directory"),
        (["{}/empty"], "has no logs of a launch"),
        (["{}/odd"], "front.jsonl: Is a directory"),
        (["{}", "--request", "zz"], "no request zz"),
        (["{}", "--request", "0400"], f"may be any of {A}, {B}"),
        (["{}", "--request", ""], "needs an id"),
        (["{}", "--actor", "decoder"], "no actor decoder"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd" / "logs" / "front.jsonl").mkdir(parents=True)
    write(tmp_path, [*begin(A), *begin(B)])
    assert run(*(argument.format(tmp_path) for argument in arguments)) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


@pytest.mark.parametrize(
    "arguments", [["--since", "soon"], ["--gap", "-1"], ["--gap", "nan"], ["--lines", "--request", "1"]]
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        run(*arguments)
    assert left.value.code == 2
    assert "error: argument" in capsys.readouterr().err


def test_without_a_directory_it_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run() == 2
    assert "no logs of a launch" in capsys.readouterr().err
    for age, (name, request) in enumerate({"new": A, "old": B}.items()):
        write(tmp_path / "estafet" / name, [*begin(request), end(request, 1)])
        lock = tmp_path / "estafet" / name / "lock"
        lock.touch()
        os.utime(lock, (BEGAN - age, BEGAN - age))
    assert run() == 0
    assert A in capsys.readouterr().out
    assert run(tmp_path / "estafet" / "old" / "logs") == 0
    assert B in capsys.readouterr().out


def test_what_was_wrong_with_the_files_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, KILLED)
    with (tmp_path / "logs" / "front.jsonl").open("ab") as stream:
        stream.write(b"not a record\n\x00\x01\n" + KILLED[0][:-9])
    assert run(tmp_path) == 0
    assert capsys.readouterr().err.splitlines() == [
        "estafet: 2 lines could not be read as a record (front.jsonl: 2)",
        "estafet: the last line is incomplete in front.jsonl",
    ]


def test_head_ends_it_quietly(tmp_path: Path) -> None:
    write(tmp_path, [line(0, "front@1", "a" * 500) for _ in range(2000)])
    command = f"{sys.executable} -m tools.logs {tmp_path} --lines | head -1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.stdout.count(b"\n") == 1
    assert done.stderr == b""


def test_colours_are_for_terminals() -> None:
    assert wants_colours(True, {"TERM": "xterm"})
    assert not wants_colours(False, {"TERM": "xterm"})
    assert not wants_colours(True, {"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colours(True, {"TERM": "dumb"})
    [record] = records([line(0, "front@1", "x\x1b[2J", None, text="a\nb", level="error")])
    assert "\x1b[31m" in log_line(record, Paint(True))
    plain = log_line(record, Paint(False))
    assert plain.isprintable(), "nothing from a log reaches a terminal as an escape"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"), (0.0, "0.00 ms"), (0.00123, "1.23 ms"), (0.1234, "123 ms"), (0.9996, "1.00 s"),
        (12.34, "12.3 s"), (99.96, "1 min 40 s"), (3600, "60 min 00 s"),
    ],
)  # fmt: skip
def test_durations_have_three_digits(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_an_exception_is_one_line() -> None:
    frames = [{"filename": "a.py", "lineno": 1, "name": "f"}, {"filename": "b.py", "lineno": 2, "name": "g"}]
    exception = [{"exc_type": "ValueError", "exc_value": "no", "frames": frames}]
    [record] = records([line(0, "front@1", "http_request_failed", exception=exception)])
    assert log_line(record, Paint(False)).endswith("exception=ValueError: no (b.py:2 in g)")


# ── a real launch ─────────────────────────────────────────────────────────────────────────────


def in_order(wanted: list[Any], found: list[Any]) -> bool:
    """Whether all that is wanted was found in this order, whatever lies between."""
    rest = iter(found)
    return all(each in rest for each in wanted)


@pytest.mark.system
@pytest.mark.model
def test_the_logs_of_a_launch_tell_how_a_worker_died(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from launches import CAPITAL, Launch

    settings = ("launch.restart_most_s=0.2", "launch.log_level=debug")
    with Launch(tmp_path, "local", *settings) as launch:
        launch.wait_ready()
        launch.ask(max_tokens=2)
        with launch.stream(CAPITAL + " Tell me its history.", max_tokens=12) as stream:
            stream.read(4)
            killed = launch.kill("decode")
            stream.read()
        launch.wait_restarted(killed, "decode")
        # A busy machine may pause for a second at any time; the pause that the death made is always told.
        assert run(launch.run_dir, "--request", stream.request_id, "--gap", "60", "--json") == 0
        story = json.loads(capsys.readouterr().out)
    assert (story["state"], story["completion_tokens"]) == ("length", 12)
    assert story["replacements"] >= 1
    events = [(event["event"], event.get("process", event["actor"])) for event in story["events"]]
    died = f"decode@{killed.epoch}"
    told = [
        ("request_admitted", "front"),
        ("request_placed", "front"),
        ("prefill_started", "prefill"),
        ("hand_over_offered", "prefill"),
        ("hand_over_received", "decode"),
        ("decode_started", "decode"),
        ("request_handed_over", "front"),
        ("first_token_committed", "front"),
    ]
    again = [*told[1:-1], ("stream_resumed", "front")]
    deaths = [("process_exited", died), ("request_taken_back", "front"), ("actor_ready", "decode")]
    # While rosters spread, one actor may know the new worker before another, and refuse what it does
    # not know: such lines may come between these.
    assert in_order([*told, *deaths, *again, ("request_ended", "front")], events)
    assert in_order([deaths[0], ("process_spawned", f"decode@{killed.epoch + 1}"), deaths[2]], events)
    phases = [event["phase"] for event in story["events"] if "phase" in event]
    once = ["queued", "prefill", "hand-over"]
    assert in_order([*once, "first token", *once, "gap", "total"], phases)
    assert all(event.get("phase_s", 0) >= 0 for event in story["events"])
    assert run(launch.run_dir, "--request", stream.request_id, "--level", "debug", "--json") == 0
    detailed = json.loads(capsys.readouterr().out)["events"]
    assert sum(event["event"] == "token_committed" for event in detailed) == 12
    assert sum(event["event"] == "step_computed" and event["actor"] == "decode" for event in detailed) >= 12
    assert run(launch.run_dir) == 0
    out, err = capsys.readouterr()
    assert [each.split()[2] for each in out.splitlines()] == ["state", "length", "length"]
    assert "taken back" in out
    assert err == ""


def test_a_request_that_is_adopted_has_one_life(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [life] = list_lives(records(ADOPTED), anything)
    assert (life.state, life.owner, life.completion_tokens) == ("length", "front@2", 5)
    assert life.gaps == [(2, 3.2)]
    events = [moment.record.event for moment in timeline(records(ADOPTED), Life(A))]
    assert "request_adopted" in events
    assert events[-1] == "request_ended"
    assert run(write(tmp_path, ADOPTED), "--request", A) == 0
    said = capsys.readouterr().out
    assert "adopted" in said
    assert "client came back" in said


def test_a_request_that_nobody_adopts_goes_on_for_ever() -> None:
    [life] = list_lives(records(ADOPTED[:9]), anything)
    assert (life.state, life.stage) == (None, "orphaned")


def test_a_request_of_two_choices_ends_with_the_second() -> None:
    lines = [
        line(0, "front@1", "request_admitted", A, prompt_tokens=9, max_tokens=5, seed=1, choices=2),
        *begin(A)[1:],
        line(0.5, "front@1", "first_token_committed", A, seconds=0.5, choice="1"),
        end(A, 1.0, "stop", completion_tokens=3, choice="0"),
        end(A, 2.0, completion_tokens=5, choice="1"),
    ]
    [life] = list_lives(records(lines), anything)
    assert (life.state, life.completion_tokens, life.total_s, life.ttft_s) == ("length", 8, 2.0, 0.4)
