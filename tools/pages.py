"""Draws the pages of a running launch in the terminal, live: `python -m tools.pages [RUNDIR]`."""

from __future__ import annotations

from tools import interrupts

if __name__ == "__main__":
    interrupts.at_once()

import argparse
import json
import math
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from actors.rundir import is_alive
from tools.install import say
from tools.logreader.choice import CannotRead, find_logs
from tools.logreader.render import Paint, wants_colours
from tools.page_map import frame, numbers, painted, table
from tools.page_pool import NoPool, open_pool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from tools.page_pool import Pool

EVERY_S = 0.5
PLAIN_SIZE = (80, 24)
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Another screen without a cursor, and back to what was there before."""
HOME, END_OF_LINE, END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

HELP = """\
every page is one of
  · free          holds nothing of use
  ░ cached        full, found by its tokens, held by nobody: goes when pages run out
  ▒ leased        a worker took it ahead of its tokens
  ▓ open          a worker writes it
  █ held          full, and in the block table of somebody
  ! quarantined   its writer is dead and not yet proven gone
used = leased + open + held. Pages that only a pin or a reader keeps look cached: pins are counted below
the map, where the allocator's own figures are. A request's pages are those that it filled itself; what it
found in the cache is counted for the request that filled it.

examples:
  python -m tools.pages
      the newest launch, twice a second until it ends, or Ctrl-C
  python -m tools.pages --once
      the numbers, and the requests that hold pages
  python -m tools.pages RUNDIR --every 5 | tee pages.log
      a line every five seconds: what is no terminal gets no picture
  python -m tools.pages --once --json | jq .pages.used
      for programs; without --once a JSON object a line

A launch says where its RUNDIR is when it starts. Nothing is asked of the system: its shared memory is read
where the launcher holds it, so this must be the same machine and user. Of several hosts it shows the one
whose launcher has this RUNDIR. With more pages than cells a cell stands for several.
Exit codes: 0 done, or the launch ended while it was looked at; 2 bad usage or no such directory; 3 the
launch is not ready, has ended, or cannot be read; 130 interrupted.
"""


def size_of(out: TextIO) -> tuple[int, int]:
    """Columns and lines of a terminal."""
    try:
        columns, lines = os.get_terminal_size(out.fileno())
    except (OSError, ValueError):
        return PLAIN_SIZE
    return columns or PLAIN_SIZE[0], lines or PLAIN_SIZE[1]


class Screen:
    """Shows one look after the other: as pictures on a terminal, else as lines."""

    def __init__(self, out: TextIO, title: str, *, as_json: bool, paint: Paint) -> None:
        self._out = out
        self._title = title
        self._json = as_json
        self._paint = paint
        self.draws = out.isatty() and not as_json

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Take the terminal, and give it back as it was."""
        if self.draws:
            self._out.write(ENTER)
        try:
            yield
        finally:
            if self.draws:
                self._out.write(LEAVE)
                self._out.flush()

    def show(self, pool: Pool) -> None:
        """One look at the pool."""
        look = pool.look()
        if self.draws:
            lines = painted(frame(self._title, look, *size_of(self._out)), self._paint)
            body = "".join(f"{line}{END_OF_LINE}\n" for line in lines)
            self._out.write(f"{HOME}{body}{END_OF_SCREEN}")
        elif self._json:
            self._out.write(json.dumps({"at": round(time.time(), 3), **look.as_dict()}) + "\n")
        else:
            self._out.write(f"{time.strftime('%H:%M:%S')} {numbers(look)}\n")
        self._out.flush()

    def once(self, pool: Pool) -> None:
        """The numbers alone."""
        look = pool.look()
        text = json.dumps(look.as_dict()) if self._json else "\n".join(table(self._title, look))
        self._out.write(text + "\n")
        self._out.flush()


def watch(pool: Pool, screen: Screen, run_dir: Path, every_s: float) -> None:
    """Show the pool until its launch has ended."""
    resized = threading.Event()

    def resize(_number: int, _frame: FrameType | None) -> None:
        resized.set()

    before = signal.signal(signal.SIGWINCH, resize)
    try:
        with screen.shown():
            while is_alive(run_dir):
                screen.show(pool)
                resized.wait(every_s)
                resized.clear()
    finally:
        signal.signal(signal.SIGWINCH, before)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.05 to 3600")
    return value


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = argparse.ArgumentParser(
        prog="python -m tools.pages",
        description="Draw the pages of a running launch in the terminal, live, or print their numbers.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "rundir", metavar="RUNDIR", nargs="?", type=Path, help="a run directory (default: the newest)"
    )
    command.add_argument("--once", action="store_true", help="print the numbers and end")
    command.add_argument(
        "--every", type=_seconds, default=EVERY_S, metavar="S", help="seconds between looks (%(default)g)"
    )
    command.add_argument("--json", action="store_true", help="for programs: one JSON object a look")
    return command


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    options = parser().parse_args(arguments)
    if sys.stdout is None:
        say("there is nowhere to draw: standard output is closed")
        return 2
    paint = Paint(wants_colours(sys.stdout.isatty(), os.environ))
    try:
        run_dir, _ = find_logs(options.rundir)
    except CannotRead as error:
        say(str(error))
        return 2
    try:
        pool = open_pool(run_dir)
    except NoPool as error:
        say(str(error))
        return 3
    screen = Screen(sys.stdout, run_dir.name, as_json=options.json, paint=paint)
    try:
        if options.once:
            screen.once(pool)
        else:
            watch(pool, screen, run_dir, options.every)
            say(f"{run_dir}: the launch has ended")
    except BrokenPipeError:
        # Whoever read has had enough. What is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        say(f"cannot write: {error.strerror or error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(interrupts.guarded(main))
