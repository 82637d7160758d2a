"""Actors as operating-system processes: spawning, watching through pidfds, killing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import trio

from engine.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.boot import Boot
    from engine.ids import Incarnation
    from engine.topology import Actor

SAID_BYTES = 2000


class Processes:
    """The nest of a real launch: one child process an incarnation."""

    def __init__(
        self,
        nursery: trio.Nursery,
        run_dir: Path,
        make_boot: Callable[[Actor, Incarnation], Boot],
        exited: Callable[[Incarnation, int, str], None],
    ) -> None:
        self._nursery = nursery
        self._run_dir = run_dir
        self._make_boot = make_boot
        self._exited = exited
        self._running: dict[Incarnation, subprocess.Popen[bytes]] = {}

    def spawn(self, actor: Actor, incarnation: Incarnation) -> None:
        """Start `python -m actors.run NAME@EPOCH` with its boot record and descriptors.

        The name is for whoever looks at the process list.

        This must run in the launcher's main thread: the kernel's parent-death signal follows the
        thread that forked, and a worker thread would end long before the launcher does.
        """
        boot = self._make_boot(actor, incarnation)
        errors = self._run_dir / "logs" / f"{actor.name}.stderr"
        record = os.memfd_create(f"boot-{actor.name}")
        try:
            os.write(record, msgspec.json.encode(boot))
            inherited = [record, *boot.segments.values(), *boot.clients.values()]
            if boot.listener is not None:
                inherited.append(boot.listener)
            with _open_errors(errors) as stderr:
                start = stderr.tell()
                process = subprocess.Popen(
                    [sys.executable, "-m", "actors.run", str(incarnation)],
                    stdin=subprocess.DEVNULL,
                    stdout=stderr,
                    stderr=stderr,
                    pass_fds=inherited,
                    env={**os.environ, "ESTAFET_BOOT": str(record)},
                    # Ctrl-C at the terminal is for the launcher, which drains.
                    start_new_session=True,
                )
        except OSError as error:
            raise StartError(f"cannot start {incarnation}: {error}") from None
        finally:
            os.close(record)
        self._running[incarnation] = process
        self._nursery.start_soon(self._watch, incarnation, process, errors, start)

    async def _watch(
        self, incarnation: Incarnation, process: subprocess.Popen[bytes], errors: Path, start: int
    ) -> None:
        descriptor = os.pidfd_open(process.pid)
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            trio.lowlevel.notify_closing(descriptor)
            os.close(descriptor)
        code = process.wait()
        del self._running[incarnation]
        self._exited(incarnation, code, _last_line(errors, start))

    def kill(self, incarnation: Incarnation) -> None:
        """SIGKILL, which also ends a stopped process."""
        process = self._running.get(incarnation)
        if process is not None:
            process.send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """End whatever still runs, and reap it."""
        for process in self._running.values():
            process.send_signal(signal.SIGKILL)
        for process in self._running.values():
            process.wait()


def _last_line(path: Path, start: int) -> str:
    """The last line that was written to a file from an offset on; none when the file is gone."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(start, size - SAID_BYTES))
            lines = stream.read().decode(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def _open_errors(path: Path) -> BinaryIO:
    """Where a child's stderr goes; nowhere when the folder is gone: that is no reason not to start it."""
    try:
        return path.open("ab")
    except OSError:
        return Path(os.devnull).open("ab")
