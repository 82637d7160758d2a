"""The private run directory of a launch, and who cleans up when nobody is left to do it.

    <base>/<name>-<pid>-<random>/      mode 0700
        lock          held (flock) while the launch is alive: how others tell a stale one
        s/            unix sockets of the actors; gone when the launch is
        ready.json    where the doors are; gone when the launch is
        logs/         JSON lines and stderr of each actor; kept for the last KEEP launches

When the launcher ends cleanly it removes what must not stay. When it is killed, its janitor does: a
tiny process that waits for the end of a pipe which only the launcher holds. When the machine loses
both, the next launch sweeps.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Mapping

KEEP = 10
JANITOR_S = 2.0
SOCKETS = "s"
READY = "ready.json"
LOCK = "lock"
LOGS = "logs"
PASSING = (SOCKETS, READY)
"""What may not outlive the launch."""

JANITOR = """
import os, shutil, sys
sys.stdin.buffer.read()
for path in sys.argv[1:]:
    shutil.rmtree(path, ignore_errors=True)
    try:
        os.unlink(path)
    except OSError:
        pass
"""


def default_base(environment: Mapping[str, str] = os.environ) -> Path:
    """Where run directories live: a folder of this user's own."""
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.access(runtime, os.W_OK):
        return Path(runtime) / "estafet"
    return Path(tempfile.gettempdir()) / f"estafet-{os.getuid()}"


class RunDir:
    """A run directory that is alive."""

    def __init__(self, path: Path, lock: int, janitor: subprocess.Popen[bytes]) -> None:
        self.path = path
        self._lock = lock
        self._janitor = janitor

    @classmethod
    def create(cls, base: Path, name: str) -> RunDir:
        """Sweep what stale launches left, then make a fresh directory."""
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = base.stat()
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise StartError(f"{base}: is open to others; `chmod 700 {base}` or choose another --run-dir")
            sweep(base)
            path = base / f"{name}-{os.getpid()}-{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            for folder in (SOCKETS, LOGS):
                (path / folder).mkdir(mode=0o700)
            lock = os.open(path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise StartError(f"cannot make a run directory in {base}: {error.strerror}") from None
        janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", JANITOR, *(str(path / name) for name in PASSING)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
        return cls(path, lock, janitor)

    def close(self) -> None:
        """The launch is over: leave the logs only."""
        assert self._janitor.stdin is not None
        for name in PASSING:
            remove(self.path / name)
        self._janitor.stdin.close()
        try:
            self._janitor.wait(JANITOR_S)
        except subprocess.TimeoutExpired:
            self._janitor.kill()
            self._janitor.wait()
        with suppress(OSError):
            if not any((self.path / LOGS).iterdir()):
                # It ended before it had begun: there is nothing to read.
                shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove(path: Path) -> None:
    """Remove a file or a folder with all in it, if it is there and can be removed."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def sweep(base: Path) -> int:
    """Remove what stale launches left, but for the logs of the newest KEEP; returns how many were stale."""
    stale = []
    for path in base.iterdir():
        if not (path / LOCK).exists() or not _is_stale(path / LOCK):
            continue
        stale.append(path)
        for name in PASSING:
            remove(path / name)
    stale.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in stale[KEEP:]:
        shutil.rmtree(path, ignore_errors=True)
    return len(stale)


def is_alive(run_dir: Path) -> bool:
    """Whether a launch still holds its run directory."""
    try:
        descriptor = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared, so that two who look at once do not see each other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _is_stale(lock: Path) -> bool:
    descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(descriptor)
