"""The threads of a native step hold their slots: others see when the last that could write is gone."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kernels import kernels
from row_steps import Chunk, Pages

from engine.errors import StartError
from kernels.backend import WriterSlots
from kernels.cpu.backend import SLOT_BYTES, NativeBackend
from kernels.random_model import write_random_model
from transport.segments import create_segment, map_segment
from transport.writers import MAIN, RECORD, WriterLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine.model import ModelConfig

VARIANTS = kernels().variants()
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfds are Linux's")

CALLER = 1
PATIENCE_S = 60.0
"""Far more than it takes: the machine may be busy, and so are sanitizers."""

WORKER = """
# A worker: its main thread and another obey words, one a line, and answer each with a line.
import ctypes, hashlib, os, platform, queue, signal, sys, threading
from pathlib import Path
import numpy as np
from row_steps import Chunk, Pages
from engine.model import read_config
from kernels.backend import WriterSlots
from kernels.cpu.backend import NativeBackend
from transport.segments import map_segment
from transport.writers import WriterLocks

folder, fd, epoch, threads = Path(sys.argv[1]), *map(int, sys.argv[2:])
locks = WriterLocks(map_segment(fd).view, 1)
locks.hold(0, 0, epoch)
pages = Pages("native", folder, read_config(folder), kind="fp8", variant="portable")
pages.backend = NativeBackend(
    folder, pages.pool, pages.shape, threads, pages.backend.format, variant="portable",
    writers=WriterSlots(np.frombuffer(locks.slots(0), np.uint8), epoch),
)
locks.declare(0, epoch, pages.backend.writer_slots)
short = [Chunk(0, 0, [1, 2, 3, 4], "all")]
long = pages.rows([Chunk(1, 0, [i % 200 for i in range(2000)], "none")])
work = queue.SimpleQueue()

def other():
    while True:
        word = work.get()
        try:
            answer = "done"
            if word == "step":
                answer = hashlib.blake2b(pages.step(short).logits.tobytes()).hexdigest()
            elif word == "steps":
                print("done", flush=True)
                while True:
                    pages.backend.step(long)
            elif word == "close":
                del pages.backend
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(answer, flush=True)

thread = threading.Thread(target=other, daemon=True)
thread.start()
print(pages.backend.writer_slots, flush=True)
for line in sys.stdin:
    word = line.strip()
    if word == "leave":
        threading.Thread(target=lambda: [work.put(line.strip()) for line in sys.stdin], daemon=True).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
    elif word == "stop in a step":
        while not locks._holder(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        work.put(word)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("writers")
    return folder, write_random_model(
        folder, seed=3, hidden_size=163, ffn_size=261, vocab_size=213, context_length=4096
    )


class Host:
    """The locks of one worker, and the processes that were it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fd = create_segment("writers", WriterLocks.BYTES)
        self.locks = WriterLocks(map_segment(self.fd).view, 1)
        self.locks.initialise()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, threads: int, epoch: int = 1) -> subprocess.Popen[str]:
        """A worker with its backend open."""
        path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(self.folder), str(self.fd), str(epoch), str(threads)],
            pass_fds=[self.fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        self.started.append(worker)
        assert answer(worker) == str(threads + 1)
        return worker

    def gone(self, epoch: int = 1) -> bool | None:
        return self.locks.gone(0, epoch)

    def wait_gone(self, epoch: int = 1) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not self.gone(epoch):
            assert time.monotonic() < deadline, "no proof came"

    def close(self) -> None:
        for worker in self.started:
            worker.kill()
            worker.communicate()
        os.close(self.fd)


@pytest.fixture
def host(model: tuple[Path, ModelConfig]) -> Iterator[Host]:
    made = Host(model[0])
    yield made
    made.close()


def order(worker: subprocess.Popen[str], word: str) -> None:
    assert worker.stdin is not None
    worker.stdin.write(word + "\n")
    worker.stdin.flush()


def answer(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().rstrip("\n")


def wait_stopped(worker: subprocess.Popen[str]) -> None:
    """Wait until SIGSTOP has stopped all its threads."""
    deadline = time.monotonic() + PATIENCE_S
    while os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT | os.WNOHANG) is None:
        assert time.monotonic() < deadline, "it did not stop"


def lose_main_thread(worker: subprocess.Popen[str]) -> None:
    """End the main thread alone; returns when the kernel has done so."""
    order(worker, "leave")
    deadline = time.monotonic() + PATIENCE_S
    status = Path(f"/proc/{worker.pid}/task/{worker.pid}/stat")
    while status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the main thread did not end"


@pytest.mark.parametrize("threads", [1, 3])
def test_an_idle_worker_is_there_until_it_is_killed(host: Host, threads: int) -> None:
    worker = host.start(threads)
    assert all(host.gone() is False for _ in range(1000))
    worker.kill()
    host.wait_gone()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_worker_stopped_in_a_step_is_there_until_it_is_killed(host: Host, threads: int) -> None:
    worker = host.start(threads)
    order(worker, "steps")
    assert answer(worker) == "done"
    order(worker, "stop in a step")
    wait_stopped(worker)
    assert host.locks._holder(0, CALLER) not in (0, worker.pid)
    assert all(host.gone() is False for _ in range(1000))
    worker.kill()
    host.wait_gone()


def test_helpers_hold_for_life_and_the_caller_during_a_step(
    host: Host, model: tuple[Path, ModelConfig]
) -> None:
    """With slots a step has the bits that it has without; without a main thread there is no step."""
    worker = host.start(3)
    pages = Pages("native", *model, kind="fp8")
    logits = pages.step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits
    assert logits is not None
    order(worker, "step")
    assert answer(worker) == hashlib.blake2b(logits.tobytes()).hexdigest()
    assert [host.locks._holder(0, slot) != 0 for slot in range(5)] == [True, False, True, True, False]
    lose_main_thread(worker)
    assert host.gone() is False
    order(worker, "step")
    assert answer(worker) == (
        "RuntimeError: the main thread does not hold its writer's slot: no other thread may write pages"
    )
    assert host.gone() is False
    order(worker, "close")
    assert answer(worker) == "done"
    assert host.gone() is True
    assert worker.poll() is None


def test_the_next_incarnation_takes_over_what_a_killed_one_held(host: Host) -> None:
    worker = host.start(3)
    order(worker, "steps")
    assert answer(worker) == "done"
    worker.kill()
    worker.communicate()
    assert host.gone(1) is True
    later = host.start(2, epoch=2)
    assert (host.gone(1), host.gone(2), host.gone(3)) == (True, False, None)
    later.kill()
    host.wait_gone(2)


# ── what is refused ───────────────────────────────────────────────────────────────────────────


def in_child(call: Callable[[], object]) -> None:
    """Run in a forked process: what it holds it leaves behind, and a crash is its own."""
    child = os.fork()
    if not child:
        code = 1
        try:
            call()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "see stderr"


def opened(
    host: Host, model: tuple[Path, ModelConfig], threads: int, slots: int, epoch: int = 1
) -> NativeBackend:
    pages = Pages("native", *model, kind="fp8", pages=2)
    records = np.frombuffer(host.locks.slots(0), np.uint8)[: slots * RECORD]
    return NativeBackend(model[0], pages.pool, pages.shape, threads, writers=WriterSlots(records, epoch))


def test_too_few_slots_are_not_held(host: Host, model: tuple[Path, ModelConfig]) -> None:
    assert SLOT_BYTES == RECORD

    def use() -> None:
        host.locks.hold(0, MAIN, 1)
        assert opened(host, model, 2, 2).writer_slots == 0
        assert opened(host, model, 1, 0).writer_slots == 0
        backend = opened(host, model, 2, 3)
        assert backend.writer_slots == 3
        assert [host.locks._holder(0, slot) != 0 for slot in range(4)] == [True, False, True, False]

    in_child(use)


def test_without_the_main_thread_nobody_holds(host: Host, model: tuple[Path, ModelConfig]) -> None:
    def use() -> None:
        with pytest.raises(RuntimeError, match="the main thread does not hold its writer's slot"):
            opened(host, model, 2, 3)
        backend = opened(host, model, 1, 2)  # nobody to hold yet
        pages = Pages("native", *model, kind="fp8", pages=2)
        with pytest.raises(RuntimeError, match="the main thread does not hold its writer's slot"):
            backend.step(pages.rows([Chunk(0, 0, [1])]))
        host.locks.hold(0, MAIN, 1)
        backend.step(pages.rows([Chunk(0, 0, [1])]))

    in_child(use)


def test_slots_of_living_threads_are_not_taken(host: Host, model: tuple[Path, ModelConfig]) -> None:
    def use() -> None:
        host.locks.hold(0, MAIN, 1)
        first = opened(host, model, 2, 3)
        with pytest.raises(RuntimeError, match="slot 2 cannot be held: Device or resource busy"):
            opened(host, model, 2, 3)
        native: Any = first._model
        with pytest.raises(ValueError, match="hold their slots already"):
            native.hold(np.frombuffer(host.locks.slots(0), np.uint8), 1)
        del native, first
        assert opened(host, model, 2, 3).writer_slots == 3

    in_child(use)
    worker = host.start(2, epoch=2)
    with pytest.raises(StartError, match=f"thread {worker.pid} still holds it"):
        host.locks.hold(0, MAIN, 3)


@pytest.mark.parametrize("change", [slice(0, 2 * RECORD), slice(0, 0), slice(4, None), slice(None, None, 2)])
def test_records_that_do_not_fit_are_refused(
    host: Host, model: tuple[Path, ModelConfig], change: slice
) -> None:
    def use() -> None:
        host.locks.hold(0, MAIN, 1)
        native: Any = Pages("native", *model, kind="fp8", threads=2, pages=2).backend
        records = np.frombuffer(host.locks.slots(0), np.uint8)
        for other in (records[change], records.view(np.uint64), records.tobytes(), None):
            with pytest.raises((ValueError, TypeError)):
                native._model.hold(other, 1)
        native._model.hold(records, 1)

    in_child(use)
