"""Runs a whole system for as long as a `with` block: starts the launcher, waits until it is ready."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tools.install import ROOT, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

STOP_S = 20.0
"""How long the launcher may take to stop everything after SIGTERM."""
_PR_SET_PDEATHSIG = 1


class SystemFailed(Exception):
    """The system could not be started, or did not stop cleanly; `code` is the exit code to give."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Running:
    """Where a system that is ready can be reached."""

    url: str
    run_dir: str
    pid: int
    """The launcher's."""


def launch_command(topology: str, arguments: Sequence[str]) -> list[str]:
    """The launcher on free ports, with further arguments that may say otherwise."""
    command = [sys.executable, "-m", "engine.launch", topology]
    for name in _gateways(topology):
        command += ["--set", f"gateway.{name}.port=0"]
    return [*command, *arguments]


def _gateways(topology: str) -> list[str]:
    """The gateways' names in a topology file; what is wrong with the file the launcher will say."""
    shipped = ROOT / "engine" / "topologies" / f"{topology.removesuffix('.toml')}.toml"
    for path in (Path(topology), shipped):
        with contextlib.suppress(OSError, ValueError):
            tables = tomllib.loads(path.read_text(encoding="utf-8")).get("gateway", {})
            return [name for name, table in tables.items() if isinstance(table, dict)]
    return []


@contextlib.contextmanager
def running_system(command: Sequence[str]) -> Iterator[Running]:
    """A system that is ready, and is gone at the end, whatever happens; its own words go to stderr.

    The command is given `--ready-fd N` and writes {"url": …, "run_dir": …} to it when it is ready.
    SystemFailed when it ends before that, or does not stop cleanly.
    """
    reading, writing = os.pipe()
    try:
        launcher = subprocess.Popen(
            [*command, "--ready-fd", str(writing)],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(writing,),
            process_group=0,  # Ctrl-C is for us, who then stop it in order
            preexec_fn=_die_with_parent(),  # noqa: PLW1509 (this process has one thread)
        )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        with os.fdopen(reading) as ready:
            line = ready.readline()
        if not line:
            code = launcher.wait()
            raise SystemFailed(
                f"the system could not be started (exit code {code})", code if code == 2 else 3
            )
        facts = json.loads(line)
        yield Running(facts["url"], facts["run_dir"], launcher.pid)
    except BaseException:
        _stop(launcher)
        raise
    code = _stop(launcher)
    if code:
        raise SystemFailed(f"the system did not stop cleanly (exit code {code})", 70)


def _stop(launcher: subprocess.Popen[bytes]) -> int:
    """Have the launcher stop everything; by force when it takes too long or we are interrupted again."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGTERM)
    try:
        return launcher.wait(STOP_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        say("the launcher does not stop: killing it, and its actors with it")
        launcher.kill()
        return launcher.wait()


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
