"""Makes Ctrl-C one line and exit code 130, from a program's first import to its last moment.

It imports next to nothing, because a program calls `at_once` before its own imports begin.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
SAID = "\restafet: interrupted\n"
"""From the start of the line, where the terminal has shown ^C."""


def at_once() -> None:
    """From here on Ctrl-C ends the process: there is nothing yet that would have to be undone."""
    signal.signal(signal.SIGINT, _leave)


def _leave(_number: int, _frame: FrameType | None) -> NoReturn:
    tell()
    os._exit(INTERRUPTED)


def tell() -> None:
    """Say it, as far as anybody still listens."""
    text = SAID if os.isatty(2) else SAID.lstrip("\r")
    try:
        os.write(2, text.encode())
    except OSError:
        return


def guarded(main: Callable[[], int]) -> int:
    """Run `main`, which may undo what it has begun when it is interrupted; the exit code.

    Ctrl-C is a KeyboardInterrupt in there, SIGTERM and SIGHUP are a SystemExit.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave_in_order)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        tell()
        return INTERRUPTED
    finally:
        # What follows is the interpreter's own end: the default would print a traceback from there.
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def leave_in_order(number: int, _frame: FrameType | None) -> NoReturn:
    """A signal handler that lets every `finally` run."""
    raise SystemExit(128 + number)
