"""One terminal for two voices: an answer on stdout and a launcher's words on stderr.

Neither knows where the other has left the cursor, so both go through a `Screen`, which begins a new
line when somebody else is in the middle of one.
"""

from __future__ import annotations

import contextlib
import os
import pty
import sys
import termios
import threading
from typing import TYPE_CHECKING, TextIO

from tools.install import say

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

JOIN_S = 2.0
"""A relay waits so long for the rest; whoever holds its terminal after that is not ours any more."""


class Screen:
    """Where the answer, the launcher and we write; every method may be called from any thread."""

    def __init__(self, answer: TextIO, words: TextIO) -> None:
        self._answer = answer
        self._words = words
        self.is_shared = answer.isatty() and words.isatty()
        self._lock = threading.Lock()
        self._open: str | None = None
        """Who is in the middle of a line."""
        self._was_interrupted = False

    def write(self, text: str) -> None:
        """Write more of the answer."""
        with self._turn("answer", text):
            self._answer.write(text)
            self._answer.flush()

    def relay(self, data: bytes) -> None:
        """Write more of what the launcher says."""
        text = data.decode(errors="replace")
        with self._turn("launcher", text):
            self._words.write(text)
            self._words.flush()

    def say(self, text: str) -> None:
        """Write a line of our own."""
        with self._turn("we", "\n"):
            say(text)

    def interrupted(self) -> None:
        """Say so, once; where nobody is in the middle of a line, the terminal's own ^C is written over."""
        if self._was_interrupted:
            return
        self._was_interrupted = True
        with self._turn("we", "\n"):
            if self._words.isatty():
                self._words.write("\r")
            say("interrupted")

    @contextlib.contextmanager
    def _turn(self, who: str, text: str) -> Iterator[None]:
        with self._lock:
            if self.is_shared and text:
                if self._open not in (None, who):
                    self._words.write("\n")
                # A progress bar wipes itself and returns to the start of its line.
                self._open = None if text.endswith(("\n", "\r")) else who
            yield


class Relay:
    """Passes on what is written to a terminal of its own, which is entered as a descriptor.

    The launcher shows its progress bars only on a terminal. Left, everything has been passed on.
    """

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._thread = threading.Thread(target=self._pump, name="relay", daemon=True)

    def __enter__(self) -> int:
        self._reading, self._writing = pty.openpty()
        modes = termios.tcgetattr(self._writing)
        modes[1] &= ~termios.OPOST  # the terminal that it goes to does that
        termios.tcsetattr(self._writing, termios.TCSANOW, modes)
        with contextlib.suppress(termios.error):  # the words go to no terminal: any size will do
            termios.tcsetwinsize(self._writing, termios.tcgetwinsize(sys.stderr.fileno()))
        return self._writing

    def begin(self) -> None:
        """Begin to read; only now that the program runs, because a thread forbids to start one safely."""
        os.close(self._writing)
        self._thread.start()

    def _pump(self) -> None:
        with contextlib.suppress(OSError):  # its end
            while data := os.read(self._reading, 1 << 16):
                self._screen.relay(data)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._thread.ident is None:
            os.close(self._writing)
        else:
            self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            os.close(self._reading)
