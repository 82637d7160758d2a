"""Reads the logs of a launch: `python -m tools.logs` lists its requests, `--request` tells one's life."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import msgspec

from actors.rundir import is_alive
from tools.install import say
from tools.logreader.choice import (
    CannotRead,
    Filter,
    check_actors,
    choose_request,
    find_logs,
    neighbours,
    parse_since,
)
from tools.logreader.records import LogFolder, Record
from tools.logreader.render import (
    LIST_HEAD,
    Paint,
    list_line,
    log_line,
    timeline_foot,
    timeline_head,
    timeline_line,
    wants_colours,
)
from tools.logreader.requests import GAP_S, Life, Moment, list_lives, timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

LOOK_S = 0.1
"""How often --follow looks for new lines."""
TAIL = 10
"""Lines of the past that --follow shows when --since does not say how many."""

HELP = """\
examples:
  python -m tools.logs
      the requests of the newest launch: state, tokens, how long they waited, TTFT, total
  python -m tools.logs --request 3
      the life of the request whose id ends (or begins) with 3, across all actors
  python -m tools.logs --request req-0400000100000003 --gap 0.2 --level debug
      the same with its steps and tokens and all gaps from 0.2 s on; they are there when the launch
      had --set launch.log_level=debug
  python -m tools.logs RUNDIR --level warning --since 5m
      the requests that had trouble in the last five minutes
  python -m tools.logs --lines --actor decode --actor launcher
      the log lines of two actors as one log
  python -m tools.logs --follow
      the last ten lines of all actors, and those to come (Ctrl-C to stop)
  python -m tools.logs --json | jq 'select(.ttft_s > 1) | .request_id'
      for programs: one JSON object a request, or a line; one alone for --request

A launch says where its RUNDIR is when it starts. --level, --actor and --since choose lines; the list
has the requests of which one such line tells. Times are those of your time zone.
Exit codes: 0 done, 2 bad usage, no such directory or request, 130 interrupted.
"""


# ── what to print ─────────────────────────────────────────────────────────────────────────────


class Printer:
    """Prints lists, lines and timelines, for people or for programs."""

    def __init__(self, out: TextIO, as_json: bool, paint: Paint) -> None:
        self._out = out
        self._json = as_json
        self._paint = paint

    def _print(self, text: str) -> None:
        self._out.write(text + "\n")

    def _print_json(self, value: object) -> None:
        self._print(msgspec.json.encode(value).decode())

    def lives(self, lives: Iterable[Life]) -> int:
        """A table of requests; how many there were."""
        count = 0
        for count, life in enumerate(lives, 1):
            if self._json:
                self._print_json(life.summary())
                continue
            if count == 1:
                self._print(self._paint(LIST_HEAD, "bold"))
            self._print(list_line(life, self._paint))
        return count

    def lines(self, records: Iterable[Record], at_once: bool) -> None:
        """Log lines as they are."""
        for record in records:
            if self._json:
                self._print_json(record.as_dict())
            else:
                self._print(log_line(record, self._paint))
            if at_once:
                self._out.flush()

    def timeline(self, moments: Iterable[Moment], life: Life, passes: Filter, at_once: bool) -> None:
        """The life of one request."""
        events = []
        headed = self._json
        for moment in moments:
            if not (passes(moment.record) or (moment.phase and moment.phase.name == "gap")):
                continue
            if self._json:
                events.append(_event(moment, life.began))
                continue
            if not headed:
                self._print(timeline_head(life, self._paint) + "\n")
                headed = True
            self._print(timeline_line(moment, life.began, self._paint))
            if at_once:
                self._out.flush()
        if self._json:
            self._print_json({**life.summary(), "events": events})
        else:
            self._print(("\n" if headed else "") + timeline_foot(life, self._paint))


def _event(moment: Moment, began: float) -> dict[str, Any]:
    phase = {} if moment.phase is None else {"phase": moment.phase.name, "phase_s": moment.phase.seconds}
    return {"offset_s": round(moment.record.at - began, 6), **phase, **moment.record.as_dict()}


def follow(
    folder: LogFolder, passes: Filter, wait: Callable[[], bool], past: int | None = TAIL
) -> Iterator[Record]:
    """The last `past` lines that pass (None: all of them), then those to come."""
    old = filter(passes, folder.records())
    yield from old if past is None else deque(old, maxlen=past)
    yield from filter(passes, folder.follow(wait))


def _wait() -> bool:
    time.sleep(LOOK_S)
    return True


# ── the program ───────────────────────────────────────────────────────────────────────────────


def show(options: argparse.Namespace, printer: Printer, wait: Callable[[], bool] = _wait) -> int:
    """Do what the command line says; the exit code. CannotRead when it cannot be done."""
    run_dir, logs = find_logs(options.rundir)
    request = None if options.request is None else choose_request(logs, options.request.partition(".")[0])
    folder = LogFolder(logs)
    code = 0
    try:
        if not options.follow:
            check_actors(folder, options.actor)
        if request is not None:
            show_request(options, printer, folder, run_dir, Life(request, options.gap), wait)
        else:
            show_all(options, printer, folder, run_dir, wait)
    except KeyboardInterrupt:
        code = 130
    finally:
        folder.close()
    for complaint in folder.complaints():
        say(complaint)
    return code


def show_all(
    options: argparse.Namespace, printer: Printer, folder: LogFolder, run_dir: Path, wait: Callable[[], bool]
) -> None:
    """The list of requests, or all log lines."""
    since = 0.0 if options.since is None else options.since
    passes = Filter(options.level or "debug", options.actor, since)
    if options.follow:
        past = TAIL if options.since is None else None
        printer.lines(follow(folder, passes, wait, past), at_once=True)
    elif options.lines:
        printer.lines(filter(passes, folder.records()), at_once=False)
    elif not printer.lives(_cut_off(list_lives(folder.records(), passes), run_dir)):
        say(f"no request to list in {folder.path}; its lines: --lines")
        for other in neighbours(run_dir):
            say(f"{other} runs too")


def _cut_off(lives: Iterable[Life], run_dir: Path) -> Iterator[Life]:
    """The same, but what did not end when the launch did never will."""
    for life in lives:
        if life.state is None and not is_alive(run_dir):
            life.state = "cut off"
        yield life


def show_request(
    options: argparse.Namespace,
    printer: Printer,
    folder: LogFolder,
    run_dir: Path,
    life: Life,
    wait: Callable[[], bool],
) -> None:
    """The timeline of one request; when followed, until it has ended or cannot any more."""
    since = 0.0 if options.since is None else options.since
    passes = Filter(options.level or "info", options.actor, since)

    def wait_for_end() -> bool:
        return life.ended is None and is_alive(run_dir) and wait()

    def records() -> Iterator[Record]:
        yield from folder.records()
        if options.follow:
            yield from folder.follow(wait_for_end)

    def moments() -> Iterator[Moment]:
        yield from timeline(records(), life)
        next(_cut_off([life], run_dir))

    printer.timeline(moments(), life, passes, at_once=options.follow)
    if options.gap < GAP_S and life.tokens_seen and not life.saw_tokens:
        say(f"gaps of less than {GAP_S:g} s are logged only when the launch has --set launch.log_level=debug")


def _since(text: str) -> float:
    try:
        return parse_since(text, time.time())
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither like 30s, 5m, 2h nor a time like 2026-01-31T12:00"
        ) from None


def _gap(text: str) -> float:
    try:
        gap = float(text)
    except ValueError:
        gap = math.nan
    if not gap >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return gap


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m tools.logs",
        description="Read the logs of a launch: list its requests, or tell the life of one.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "rundir", metavar="RUNDIR", nargs="?", type=Path, help="a run directory (default: the newest)"
    )
    what = command.add_mutually_exclusive_group()
    what.add_argument("--request", metavar="ID", help="tell the life of one request across all actors")
    what.add_argument("--lines", action="store_true", help="print log lines, all actors' as one log")
    command.add_argument("--follow", action="store_true", help="print lines as they come; with --request its")
    command.add_argument(
        "--gap",
        type=_gap,
        default=GAP_S,
        metavar="SECONDS",
        help="with --request: show pauses between tokens from this on (default: %(default)g)",
    )
    command.add_argument(
        "--level",
        choices=("debug", "info", "warning", "error"),
        help="lines of this level and above (default: debug; with --request info)",
    )
    command.add_argument(
        "--actor",
        action="append",
        default=[],
        metavar="NAME",
        help="lines of this actor, or of one incarnation as in decode@2 (may be repeated)",
    )
    command.add_argument(
        "--since", type=_since, metavar="TIME", help="lines since then: 30s, 5m, 2h ago, or an ISO time"
    )
    command.add_argument("--json", action="store_true", help="one JSON object a line, for programs")
    return command


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = parser().parse_args(arguments)
    paint = Paint(wants_colours(sys.stdout.isatty(), os.environ))
    try:
        code = show(options, Printer(sys.stdout, options.json, paint))
        sys.stdout.flush()
    except CannotRead as error:
        say(str(error))
        return 2
    except BrokenPipeError:
        # Whoever read has had enough. What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        say(f"{error.filename or 'the logs'}: {error.strerror}")
        return 2
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
