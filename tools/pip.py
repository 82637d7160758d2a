"""Runs pip, and shows on one line of the terminal what it is at.

Standard library only, because it runs before anything is installed. What pip says on stderr, its
warnings and errors, is passed on as it is. Its log on stdout, some seventy lines for a first
installation, becomes the one line. pip itself offers only both or neither: `--quiet` takes the
progress bars away too.
"""

from __future__ import annotations

import os
import pty
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING
from urllib.parse import unquote

from tools.children import running

if TYPE_CHECKING:
    from collections.abc import Sequence

GENERAL = ("--disable-pip-version-check", "--no-input")
REFRESH_S = 1.0
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PIECE_END = re.compile(r"[\r\n]")
_FILE = re.compile(r"(Downloading|Using cached) (\S+)")
_AMOUNT = re.compile(r"([\d.]+/[\d.]+ [kMG]?B)\b.*")


def run_pip(pip: Sequence[str], arguments: Sequence[str]) -> int:
    """Run pip to the end; its exit code. `pip` is the command that starts it."""
    command = [*pip, *GENERAL, *arguments]
    line = StatusLine() if sys.stderr.isatty() and "--quiet" not in arguments else None
    if line is None and "--quiet" not in arguments:
        command.append("--quiet")
    # A terminal of its own, because only there pip tells how far a download has come.
    reading, writing = pty.openpty()
    with open(reading, "rb", buffering=0) as log, open(writing, "wb", buffering=0) as end:
        child = running(command, stop=signal.SIGINT, stdout=end, stderr=subprocess.PIPE)
        with child as process, selectors.DefaultSelector() as selector:
            end.close()  # or it would not end with pip
            assert process.stderr is not None
            errors = process.stderr.fileno()
            selector.register(errors, selectors.EVENT_READ)
            selector.register(log, selectors.EVENT_READ)
            try:
                _follow(selector, errors, line)
            finally:
                if line is not None:
                    line.clear()
            return process.wait()


def _follow(selector: selectors.BaseSelector, errors: int, line: StatusLine | None) -> None:
    """Until both are at their end: pass the errors on, show where the log is."""
    while selector.get_map():
        for key, _ in selector.select(REFRESH_S):
            data = _read(key.fd)
            if not data:
                selector.unregister(key.fileobj)
            elif key.fd != errors:
                if line is not None:
                    line.feed(data)
            elif line is not None:
                line.step_aside(data)
            else:
                os.write(2, data)
        if line is not None:
            line.show()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # how a terminal says that nobody has its other end open any more
        return b""


class StatusLine:
    """pip's log as one line that is written over and over: what it is at, how far, and for how long."""

    def __init__(self) -> None:
        self._rest = ""
        self._amount = ""
        self._doing = "starting pip"
        self._began = time.monotonic()
        self._aside = False

    def feed(self, data: bytes) -> None:
        """Take more of the log; pieces end with a line or where a progress bar starts over."""
        *pieces, self._rest = _PIECE_END.split(self._rest + data.decode(errors="replace"))
        for piece in pieces:
            self._take(_ESCAPE.sub("", piece).strip())

    def _take(self, piece: str) -> None:
        if file := _FILE.match(piece):
            self._doing = "downloading" if file[1] == "Downloading" else "taking from the cache"
            self._doing += f" {_name(file[2])}"
        elif amount := _AMOUNT.search(piece):
            self._amount = f", {amount[0]}"
            return
        elif piece.startswith("Collecting "):
            self._doing = f"looking for {piece.split()[1]}"
        elif piece.startswith("Installing collected packages:"):
            self._doing = f"unpacking {piece.count(',') + 1} packages"
        else:
            return
        self._amount = ""

    @property
    def text(self) -> str:
        """What it says at this moment."""
        return f"  {self._doing}{self._amount} ({time.monotonic() - self._began:.0f} s)"

    def show(self) -> None:
        """Write it over what was there."""
        if not self._aside:
            width = shutil.get_terminal_size().columns - 1
            _write(f"\r\x1b[K{self.text[:width]}")

    def clear(self) -> None:
        """Leave an empty line."""
        if not self._aside:
            _write("\r\x1b[K")

    def step_aside(self, message: bytes) -> None:
        """Let a message stand; until its line ends, the status is not shown."""
        self.clear()
        os.write(2, message)
        self._aside = not message.endswith(b"\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


def _name(file: str) -> str:
    """The package and version that a wheel's file name, path or URL begins with."""
    return " ".join(unquote(file.rpartition("/")[2]).split("-")[:2])
