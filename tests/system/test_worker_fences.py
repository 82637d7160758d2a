"""What the writers' locks of a real launch say of its workers: living, stopped, killed, started again."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from launches import CAPITAL, Launch, wait_until

from actors.boot import WRITERS
from kernels import backends
from transport.segments import map_segment
from transport.writers import WriterLocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.system, pytest.mark.model]

PATIENCE_S = 20.0


@contextmanager
def locks_of(launch: Launch, actors: int) -> Iterator[WriterLocks]:
    """The locks as the launcher has them, to look at."""
    folder = f"/proc/{launch.process.pid}/fd"
    name = next(
        number for number in os.listdir(folder) if f"estafet:{WRITERS} " in os.readlink(f"{folder}/{number}")
    )
    descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
    segment = map_segment(descriptor, writable=False)
    os.close(descriptor)
    locks = WriterLocks(segment.view, actors)
    yield locks
    locks.close()
    segment.close()


@pytest.mark.skipif(backends.resolve("auto") != "native", reason="torch's threads hold nothing")
def test_a_worker_is_there_until_all_its_threads_are_gone(tmp_path: Path) -> None:
    with Launch(tmp_path, "unified", "worker.both.threads=2") as launch:
        launch.wait_ready()
        names = sorted(
            log.stem for log in (launch.run_dir / "logs").glob("*.jsonl") if log.stem != "launcher"
        )
        with locks_of(launch, len(names)) as locks:

            def living(epoch: int) -> list[int]:
                return [ordinal for ordinal in range(len(names)) if locks.gone(ordinal, epoch) is False]

            first = launch.life("both")
            (worker,) = living(first.epoch)
            assert "Paris" in launch.ask(CAPITAL, max_tokens=10)
            assert locks.gone(worker, first.epoch) is False
            os.kill(first.pid, signal.SIGSTOP)
            wait_until(lambda: "stopped" in _state(first.pid), PATIENCE_S, "it is stopped")
            assert all(locks.gone(worker, first.epoch) is False for _ in range(1000))
            os.kill(first.pid, signal.SIGKILL)
            wait_until(lambda: locks.gone(worker, first.epoch), PATIENCE_S, "its threads are gone")
            launch.wait_restarted(first, "both")
            second = launch.life("both")
            assert locks.gone(worker, first.epoch) is True
            assert locks.gone(worker, second.epoch) is False
            assert locks.gone(worker, second.epoch + 1) is None


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as stream:
        return next(line for line in stream if line.startswith("State:"))
