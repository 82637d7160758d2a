"""Runs a whole system for as long as a `with` block: starts the launcher, waits until it is ready."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tools import children
from tools.install import ROOT, say
from tools.terminal import Relay, Screen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

STOP_S = 20.0
"""How long the launcher may take to stop everything after SIGTERM."""
HURRY_S = 10.0
"""How long it may take once it was told so twice."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SystemFailed(Exception):
    """The system could not be started, or did not stop cleanly; `code` is the exit code to give."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Running:
    """Where a system that is ready can be reached."""

    url: str
    """Of the first gateway."""
    run_dir: str
    pid: int
    """The launcher's."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """Of all gateways, by their names."""


def launch_command(topology: str, arguments: Sequence[str], **of_gateways: int) -> list[str]:
    """The launcher on free ports, with further arguments that may say otherwise.

    `of_gateways` are keys of every gateway's table.
    """
    command = [sys.executable, "-m", "engine.launch", topology]
    for name in _gateways(topology):
        for key, value in {"port": 0, **of_gateways}.items():
            command += ["--set", f"gateway.{name}.{key}={value}"]
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
def running_system(command: Sequence[str], screen: Screen | None = None) -> Iterator[Running]:
    """A system that is ready, and is gone at the end, whatever happens; its own words go to stderr.

    The command is given `--ready-fd N` and writes {"url": …, "run_dir": …} to it when it is ready.
    With a screen that is shared its words go through that. SystemFailed when it ends before it is
    ready, or does not stop cleanly.
    """
    relay = Relay(screen) if screen is not None and screen.is_shared else None
    reading, writing = os.pipe()
    with os.fdopen(reading) as ready, contextlib.ExitStack() as outlives:
        try:
            words = outlives.enter_context(relay) if relay is not None else 2
            launcher = children.start(
                [*command, "--ready-fd", str(writing)], stdout=words, stderr=words, pass_fds=(writing,)
            )
        finally:
            os.close(writing)
        try:
            if relay is not None:
                relay.begin()
            line = ready.readline()
            if not line:
                code = launcher.wait()
                raise SystemFailed(
                    f"the system could not be started (exit code {code})", code if code == 2 else 3
                )
            facts = json.loads(line)
            yield Running(facts["url"], facts["run_dir"], launcher.pid, facts.get("urls", {}))
        except BaseException as error:
            if screen is not None and isinstance(error, KeyboardInterrupt):
                screen.interrupted()  # before the launcher says that it stops
            _stop(launcher)
            raise
        code = _stop(launcher)
    if code:
        raise SystemFailed(f"the system did not stop cleanly (exit code {code})", 70)


def _stop(launcher: subprocess.Popen[bytes]) -> int:
    """Have the launcher stop everything; at once if we are asked again, by force if it takes too long."""
    deadline = time.monotonic() + STOP_S

    def hurry(number: int, _frame: FrameType | None) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + HURRY_S)
        if number == signal.SIGINT and os.isatty(2):
            os.write(2, b"\r")  # what is said next covers the terminal's ^C
        launcher.send_signal(signal.SIGTERM)  # the second one ends its patience

    with _handling(hurry):
        launcher.send_signal(signal.SIGTERM)
        while (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return launcher.wait(min(left, 1.0))
        say("the launcher does not stop: killing it, and its actors with it")
        launcher.kill()
        return launcher.wait()


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
