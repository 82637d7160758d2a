"""What the person who started the launcher sees: a bar while actors start, then one line an event."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import trio
from tqdm import tqdm

if TYPE_CHECKING:
    from actors.launcher import Launcher

LOOK_S = 0.1


def say(text: str) -> None:
    """One line for the person at the terminal."""
    with suppress(OSError):  # the system does not end because nobody listens any more
        print(f"estafet: {text}", file=sys.stderr, flush=True)


class Terminal:
    """One bar, then lines; never both on one line."""

    def __init__(self) -> None:
        self._bar: tqdm | None = None
        self._done = False

    def say(self, text: str) -> None:
        """A line, after the bar has been taken away."""
        self.close()
        if sys.stderr.isatty():
            # The terminal may just have echoed ^C: begin a line of our own.
            with suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        say(text)

    def close(self) -> None:
        """Take the bar away; it does not come back."""
        self._done = True
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    async def show_start(self, launcher: Launcher) -> None:
        """A bar of the actors that are ready, until something is said or the nursery ends."""
        if self._done or not sys.stderr.isatty():
            return
        actors = len(launcher.core.children)
        self._bar = tqdm(total=actors, desc="starting actors", unit="actor", leave=False, mininterval=0)
        try:
            while self._bar is not None:
                ready = int(launcher.core.statistics()["ready"])
                if ready != self._bar.n:
                    self._bar.n = ready
                    self._bar.refresh()
                await trio.sleep(LOOK_S)
        finally:
            self.close()
