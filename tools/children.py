"""Programs that we run: they end with us, and Ctrl-C is for us alone, who then stop them in order."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATIENCE_S = 10.0
"""How long a child that was told to stop may tidy up."""
_PR_SET_PDEATHSIG = 1


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a process group of its own that gets SIGTERM when we die; options are Popen's."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        preexec_fn=_die_with_parent(),  # noqa: PLW1509 (we start programs before threads)
        **options,
    )


@contextlib.contextmanager
def running(
    command: Sequence[str], *, stop: signal.Signals, **options: Any
) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is told to `stop` when the block is left by an exception, and is gone afterwards."""
    child = start(command, **options)
    try:
        with child:
            try:
                yield child
            except BaseException:
                child.send_signal(stop)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(PATIENCE_S)
                raise
    finally:
        child.kill()  # does nothing to one that has ended
        child.wait()


def _die_with_parent() -> Callable[[], None] | None:
    """What makes a child get SIGTERM when we are killed and cannot stop it (Linux only)."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # we died before the call
            os._exit(1)

    return in_child
