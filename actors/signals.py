"""SIGINT and SIGTERM from the first moment of a launch to the last."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """What a request to stop does depends on what it meets, and it never cuts the cleaning up short.

    inside `interrupting()`    KeyboardInterrupt: preparations may take long and undo themselves
    inside `calling(…)`        the function is called, once a signal
    anywhere else              it is remembered for the next of these two, or has nothing to end
    """

    def __init__(self) -> None:
        self._waiting = 0
        self._interrupts = False
        self._call: Callable[[], None] | None = None

    def install(self) -> None:
        """Take the signals over."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def ignore(self) -> None:
        """There is nothing left to stop; the interpreter would put the deadly default back as it ends."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _handle(self, number: int, frame: object) -> None:
        if self._interrupts:
            self._interrupts = False
            raise KeyboardInterrupt
        if self._call is not None:
            self._call()
        else:
            self._waiting += 1

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal in here, or one that came before, raises KeyboardInterrupt."""
        if self._waiting:
            raise KeyboardInterrupt
        self._interrupts = True
        try:
            yield
        finally:
            self._interrupts = False

    @contextmanager
    def calling(self, function: Callable[[], None]) -> Iterator[None]:
        """Every signal in here, and every one that came before, calls `function`.

        It is called between any two instructions of the main thread, so it should only leave word.
        """
        self._call = function
        waiting, self._waiting = self._waiting, 0
        try:
            for _ in range(waiting):
                function()
            yield
        finally:
            self._call = None
