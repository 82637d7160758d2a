"""How log lines, lists of requests and timelines look: one line of text each, with or without colours."""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tools.logreader.records import BOUND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tools.logreader.records import Record
    from tools.logreader.requests import Life, Moment

COLOURS = {"grey": "2", "bold": "1", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
OF_LEVEL = {"debug": "grey", "warning": "yellow", "error": "red", "critical": "red"}

TELLS: dict[str, tuple[str, str]] = {
    "request_admitted": ("admitted", "{prompt_tokens} prompt tokens, at most {max_tokens} more, seed {seed}"),
    "request_placed": ("placed", "{prefill} fills, {decode} decodes"),
    "placement_refused": ("placement refused", "{strangers} not known to the gateway yet, or any more"),
    "prefill_started": ("prefill started", "{tokens} tokens, term {term}"),
    "hand_over_offered": ("hand-over offered", "{filled} positions in {pages} pages, to {decode}"),
    "hand_over_received": ("hand-over received", "{filled} positions"),
    "hand_over_refused": ("hand-over refused", "{reason}"),
    "decode_started": ("decode started", "term {term}"),
    "request_handed_over": ("handed over", "term {term}"),
    "first_token_committed": ("first token", "TTFT {seconds}"),
    "token_gap_seen": ("next token", "after {after} tokens"),
    "stream_resumed": ("stream resumed", "after {after} tokens"),
    "token_committed": ("token", "number {number}"),
    "step_computed": ("step computed", "{rows} rows, {sampled} sampled, {seconds}"),
    "request_taken_back": ("taken back", "{dead} died"),
    "request_preempted": ("preempted", "pages ran out"),
    "sequence_lost": ("sequence lost", "{by}: {detail}"),
    "request_cancelled": ("cancelled", "by {by}"),
    "cancel_received": ("told to drop it", "up to term {term}"),
    "http_client_disconnected": ("client disconnected", ""),
    "http_reply_broken": ("answer broken off", "{reason}"),
    "request_left": ("client left", "by {by}, kept for {grace_s} s"),
    "request_resumed": ("client came back", ""),
    "request_adopted": ("adopted", "by the next gateway, with {committed} tokens"),
    "request_ended": ("ended", "{reason}, {completion_tokens} tokens"),
    "process_exited": ("{process} exited", "{code}"),
    "process_killed": ("{process} killed", "{reason}"),
    "process_spawned": ("{process} spawned", ""),
    "worker_suspected": ("{peer} suspected", "{reason}"),
    "actor_ready": ("ready", ""),
}
"""What a timeline says of the events that belong to one; others are shown as they are."""

STATE_COLOURS = {"stop": "green", "length": "green", "error": "red", "lost": "red", "cut off": "red"}
DEATHS = frozenset({"process_exited", "process_killed", "request_taken_back", "worker_suspected"})


class Paint:
    """Colours, when there is a terminal to show them."""

    def __init__(self, coloured: bool) -> None:
        self._coloured = coloured

    def __call__(self, text: str, colour: str | None) -> str:
        if not self._coloured or not colour or not text.strip():
            return text
        return f"\x1b[{COLOURS[colour]}m{text}\x1b[0m"


def wants_colours(is_terminal: bool, environment: Mapping[str, str]) -> bool:
    """Whether to use colours: on a terminal that can, unless NO_COLOR is set (https://no-color.org)."""
    return is_terminal and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


# ── words ─────────────────────────────────────────────────────────────────────────────────────


def duration(seconds: float | None) -> str:
    """Three digits that matter, with their unit."""
    if seconds is None:
        return "–"
    if seconds >= 99.95:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest:02d} s"
    value, unit = (seconds, "s") if seconds >= 0.9995 else (seconds * 1e3, "ms")
    return f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def clock(at: float, day: bool = False) -> str:
    """A time of day where the reader lives, to the millisecond."""
    moment = datetime.fromtimestamp(at).astimezone()
    return moment.isoformat(" " if day else "T", "milliseconds")[0 if day else 11 : 23]


def plain(value: object) -> str:
    """A value of a log line as text that cannot do anything to a terminal."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        text = ",".join(value)
    else:
        text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(text)


def _exit(code: object) -> str:
    """How a process ended, in words."""
    if not isinstance(code, int) or code >= 0:
        return "" if code is None else f"exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _failure(value: object) -> str:
    """A logged exception in one line: what, and where it was raised."""
    try:
        last = value[-1] if isinstance(value, list) else {}
        frame = last["frames"][-1]
        said = f"{last['exc_type']}: {last['exc_value']}"
        return plain(f"{said} ({frame['filename']}:{frame['lineno']} in {frame['name']})")
    except (LookupError, TypeError):
        return plain(value)


def _extras(fields: Mapping[str, Any]) -> Iterator[str]:
    for key, value in fields.items():
        if key not in BOUND:
            yield f"{plain(key)}={_failure(value) if key == 'exception' else plain(value)}"


# ── lines ─────────────────────────────────────────────────────────────────────────────────────


def log_line(record: Record, paint: Paint) -> str:
    """A record as one line, its names as they stand in the log, so that one can search for them."""
    colour = OF_LEVEL.get(record.level)
    request = () if record.request_id is None else (plain(record.request_id),)
    return " ".join(
        (
            paint(clock(record.at), "grey"),
            paint(f"{plain(record.who):<13}", "cyan"),
            paint(f"{plain(record.level):<7}", colour),
            paint(plain(record.event), colour or "bold"),
            *request,
            *_extras(record.fields),
        )
    )


LIST_HEAD = (
    f"{'request':<20} {'admitted':<12} {'state':<10} {'prompt':>6} {'tokens':>6}"
    f" {'queued':>8} {'TTFT':>8} {'total':>10}"
)


def list_line(life: Life, paint: Paint) -> str:
    """A request as one line of a table under LIST_HEAD."""
    state = life.state or life.stage
    notes = []
    if life.replacements:
        notes.append(f"taken back {_times(life.replacements)}")
    if life.adoptions:
        notes.append(f"adopted {_times(life.adoptions)}")
    if life.gaps:
        notes.append(f"longest gap {duration(max(seconds for _, seconds in life.gaps))}")
    if life.error:
        notes.append(plain(life.error))
    line = (
        f"{plain(life.request_id):<20} {paint(clock(life.began), 'grey')}"
        f" {paint(f'{plain(state):<10}', STATE_COLOURS.get(state, 'yellow'))}"
        f" {_prompt(life):>6} {_tokens(life):>6}"
        f" {duration(life.queued_s):>8} {duration(life.ttft_s):>8} {duration(life.total_s):>10}"
    )
    return f"{line}  {paint('; '.join(notes), 'yellow')}" if notes else line


def _prompt(life: Life) -> str:
    return "–" if life.prompt_tokens is None else str(life.prompt_tokens)


def _tokens(life: Life) -> str:
    if life.completion_tokens is not None or life.saw_tokens or not life.tokens_seen:
        return str(life.completion_tokens or life.tokens_seen)
    return f"≥{life.tokens_seen}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def timeline_line(moment: Moment, began: float, paint: Paint) -> str:
    """A moment of a timeline: when it was, who says so, what happened, and what it ended."""
    record, phase = moment
    title, details = _told(record)
    colour = OF_LEVEL.get(record.level)
    if record.event in DEATHS and not (record.event == "process_exited" and record.fields.get("code") == 0):
        colour = "red"
    line = (
        f"{paint(f'{record.at - began:+10.4f} s', 'grey')}  {paint(f'{plain(record.who):<12}', 'cyan')} "
        f"{paint(f'{title:<20}', colour or 'bold')} "
    )
    if phase is None:
        return f"{line}{details}".rstrip()
    length = f"{phase.name} {duration(phase.seconds)}"
    return f"{line}{details:<44} {paint(length, 'yellow' if phase.name == 'gap' else 'green')}"


def _told(record: Record) -> tuple[str, str]:
    """What happened and its details, in words where there are some."""
    values = {key: plain(value) for key, value in record.fields.items()}
    if isinstance(seconds := record.fields.get("seconds"), int | float):
        values["seconds"] = duration(seconds)
    if record.event == "process_exited":
        values["code"] = _exit(record.fields.get("code"))
    known = TELLS.get(record.event)
    if known is None:
        return plain(record.event).replace("_", " "), " ".join(_extras(record.fields))
    named = defaultdict(lambda: "?", values)
    title, details = (template.format_map(named) for template in known)
    if record.event == "request_ended" and record.fields.get("error"):
        details += f": {values['error']}"
    if record.event == "process_exited" and values.get("said"):
        details += f": {values['said']}"
    return title, details


def timeline_head(life: Life, paint: Paint) -> str:
    """The first line of a timeline."""
    return f"{paint(plain(life.request_id), 'bold')}, {clock(life.began, day=True)}"


def timeline_foot(life: Life, paint: Paint) -> str:
    """The last line of a timeline: the whole life in one sentence."""
    still = "what its gateway says is not here" if life.prompt_tokens is None else f"still {life.stage}"
    state = life.state or still
    said = [
        paint(state, STATE_COLOURS.get(state, "yellow")),
        f"{_prompt(life)} prompt + {_tokens(life)} tokens",
        f"queued {duration(life.queued_s)}",
        f"TTFT {duration(life.ttft_s)}",
    ]
    if life.replacements:
        said.append(f"taken back {_times(life.replacements)}")
    if life.adoptions:
        said.append(f"adopted {_times(life.adoptions)}")
    if life.gaps:
        after, seconds = max(life.gaps, key=lambda gap: gap[1])
        said.append(f"longest gap {duration(seconds)} after {after} tokens")
    said.append(f"total {duration(life.total_s)}")
    return " · ".join(said)
