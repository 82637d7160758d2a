"""Writers' locks between real processes: what is said of a dead, a stopped, a living and a later one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.errors import StartError
from transport.errors import ProtocolError
from transport.segments import create_segment, map_segment
from transport.writers import MAIN, RECORD, WriterLocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memfds are Linux's")

ACTORS = 3
ORDINAL = 1
PATIENCE_S = 20.0
"""Far more than it takes: the machine may be busy."""

INCARNATION = """
# A process whose threads do as they are told: lines of "SLOT WORD [NUMBER]", one answer each.
import ctypes, os, platform, queue, sys, threading
from transport.segments import map_segment
from transport.writers import WriterLocks

fd, actors, ordinal, epoch = map(int, sys.argv[1:])
locks = WriterLocks(map_segment(fd).view, actors)
tasks = {}

def obey(slot):
    while True:
        word, *numbers = tasks[slot].get()
        try:
            if word == "hold":
                locks.hold(ordinal, slot, epoch)
            elif word == "write":
                with locks.writing(ordinal, epoch):
                    print("writing", flush=True)
                    tasks[slot].get()
            elif word == "release":
                locks.release(ordinal, slot)
            elif word == "declare":
                locks.declare(ordinal, epoch, int(numbers[0]))
            elif word == "end":
                return
            elif word == "leave":  # the main thread alone, as no signal ends it
                ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
            answer = "done"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(answer, flush=True)

def dispatch():
    threads = {}
    for line in sys.stdin:
        slot, *task = line.split()
        slot = int(slot)
        if slot and (slot not in threads or not threads[slot].is_alive()):
            tasks[slot] = queue.SimpleQueue()
            threads[slot] = threading.Thread(target=obey, args=(slot,), daemon=True)
            threads[slot].start()
        tasks[slot].put(task)
        if task[0] == "end":
            threads[slot].join()
            while os.path.exists(f"/proc/self/task/{threads[slot].native_id}"):
                os.sched_yield()  # the interpreter's end of a thread comes before the kernel's
            print("done", flush=True)

tasks[0] = queue.SimpleQueue()
threading.Thread(target=dispatch, daemon=True).start()
obey(0)
"""


class Incarnation:
    """One epoch of an actor, a process of its own."""

    def __init__(self, fd: int, epoch: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", INCARNATION, str(fd), str(ACTORS), str(ORDINAL), str(epoch)],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, slot: int, task: str) -> str:
        """Have a slot's thread do something, made when there is none; what it answers."""
        self.order(slot, task)
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def order(self, slot: int, task: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{slot} {task}\n")
        self.process.stdin.flush()

    def lose_main_thread(self) -> None:
        """End the main thread alone; returns when the kernel has done so."""
        self.order(MAIN, "leave")
        deadline = time.monotonic() + PATIENCE_S
        status = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        while status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline, "the main thread did not end"

    def kill(self) -> None:
        """End it, and reap it."""
        self.process.kill()
        with self.process:
            pass


class Segment:
    """A segment of locks and the incarnations that a test starts over it."""

    def __init__(self) -> None:
        self.fd = create_segment("writers", ACTORS * WriterLocks.BYTES)
        self.view = map_segment(self.fd).view
        self.locks = WriterLocks(self.view, ACTORS)
        self.locks.initialise()
        self.started: list[Incarnation] = []

    def start(self, epoch: int, slots: int | None = None) -> Incarnation:
        """An incarnation that holds its first slot; with `slots` all of them are held and declared."""
        incarnation = Incarnation(self.fd, epoch)
        self.started.append(incarnation)
        answer = incarnation.tell(MAIN, "hold")
        assert answer == "done", answer
        if slots is not None:
            for slot in range(1, slots):
                assert incarnation.tell(slot, "hold") == "done"
            assert incarnation.tell(MAIN, f"declare {slots}") == "done"
        return incarnation

    def gone(self, epoch: int) -> bool | None:
        return self.locks.gone(ORDINAL, epoch)

    def wait_gone(self, epoch: int) -> None:
        """Poll until the proof is there; it may never be there and then not."""
        deadline = time.monotonic() + PATIENCE_S
        while not (gone := self.gone(epoch)):
            assert gone is False
            assert time.monotonic() < deadline, "no proof came"
        assert all(self.gone(epoch) for _ in range(100))

    def close(self) -> None:
        for incarnation in self.started:
            incarnation.kill()
        os.close(self.fd)


@pytest.fixture
def segment() -> Iterator[Segment]:
    made = Segment()
    yield made
    made.close()


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


# ── deaths ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("slots", [1, 4])
def test_a_killed_process_is_gone(segment: Segment, slots: int) -> None:
    incarnation = segment.start(1, slots)
    assert all(segment.gone(1) is False for _ in range(1000))
    incarnation.process.kill()
    segment.wait_gone(1)


def test_a_stopped_process_is_not_gone_until_it_is_killed(segment: Segment) -> None:
    incarnation = segment.start(1, 3)
    incarnation.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, incarnation.process.pid, os.WSTOPPED | os.WNOWAIT)
    assert all(segment.gone(1) is False for _ in range(1000))
    incarnation.process.kill()
    segment.wait_gone(1)


def test_a_process_that_ends_by_itself_is_gone(segment: Segment) -> None:
    """Also one without other threads, whose interpreter frees all it can before the end."""
    incarnation = segment.start(1, 2)
    incarnation.order(MAIN, "end")
    segment.wait_gone(1)
    assert incarnation.process.wait() == 0
    short = INCARNATION.partition("tasks =")[0] + "locks.hold(ordinal, 0, 2); locks.declare(ordinal, 2, 1)"
    arguments = [str(segment.fd), str(ACTORS), str(ORDINAL), "2"]
    subprocess.run([sys.executable, "-c", short, *arguments], pass_fds=[segment.fd], check=True)
    assert segment.gone(2) is True


def test_a_thread_that_ends_frees_its_slot_and_nothing_else(segment: Segment) -> None:
    """With its mutex or without, the thread is gone; the incarnation is when its main thread is, too."""
    incarnation = segment.start(1, 4)
    assert incarnation.tell(1, "release") == "done"
    assert incarnation.tell(1, "end") == "done"
    assert incarnation.tell(2, "end") == "done"  # holding
    assert segment.gone(1) is False
    incarnation.lose_main_thread()
    assert segment.gone(1) is False
    assert incarnation.tell(3, "end") == "done"
    assert segment.gone(1) is True
    assert incarnation.process.poll() is None  # it has a thread yet, of which nothing was declared


def test_without_its_main_thread_no_thread_begins_to_write(segment: Segment) -> None:
    """A slot that was seen free may not be taken any more: the proof would have been wrong."""
    incarnation = segment.start(1, 3)
    assert incarnation.tell(2, "release") == "done"
    assert incarnation.tell(2, "hold") == "done"
    assert incarnation.tell(2, "release") == "done"
    incarnation.lose_main_thread()
    assert segment.gone(1) is False  # slot 1
    assert incarnation.tell(2, "hold") == (
        "StartError: slot 2 of actor 1: the main thread does not hold its slot, or not any more"
    )
    assert incarnation.tell(1, "release") == "done"
    assert segment.gone(1) is True
    assert incarnation.tell(1, "hold").startswith("StartError")
    assert segment.gone(1) is True


def test_who_writes_for_a_moment_holds_for_that_moment(segment: Segment) -> None:
    incarnation = segment.start(1, 1)
    assert incarnation.tell(MAIN, "declare 2") == "done"
    assert incarnation.tell(2, "write") == "writing"
    incarnation.lose_main_thread()
    assert segment.gone(1) is False
    assert incarnation.tell(2, "enough") == "done"
    assert segment.gone(1) is True
    assert incarnation.tell(3, "write").startswith("StartError")
    assert segment.gone(1) is True


# ── epochs ────────────────────────────────────────────────────────────────────────────────────


def test_a_later_incarnation_takes_the_slots_over(segment: Segment) -> None:
    segment.start(1, 4).kill()
    later = segment.start(2)  # holds the first slot, and has declared nothing
    assert (segment.gone(1), segment.gone(2)) == (True, None)
    assert later.tell(1, "hold") == "done"
    assert later.tell(MAIN, "declare 2") == "done"
    assert (segment.gone(1), segment.gone(2), segment.gone(3)) == (True, False, None)
    later.kill()
    assert (segment.gone(1), segment.gone(2), segment.gone(3)) == (True, True, None)


def test_a_slot_of_a_living_thread_is_not_taken(segment: Segment) -> None:
    first = segment.start(1, 2)
    with pytest.raises(StartError, match=rf"slot 0 of actor 1: thread {first.process.pid} still holds it"):
        segment.locks.hold(ORDINAL, MAIN, 2)
    with pytest.raises(AssertionError, match="StartError: slot 0 of actor 1"):
        segment.start(2)
    assert (segment.gone(1), segment.gone(2)) == (False, None)


def test_an_incarnation_that_declared_nothing_is_not_proved(segment: Segment) -> None:
    assert segment.gone(1) is None
    incarnation = segment.start(1)
    assert segment.gone(1) is None
    assert incarnation.tell(MAIN, "declare 1") == "done"
    assert segment.gone(1) is False
    assert incarnation.tell(MAIN, "declare 0") == "done"
    assert segment.gone(1) is None
    incarnation.kill()
    assert segment.gone(1) is None


def test_actors_do_not_meet(segment: Segment) -> None:
    segment.start(1, 3)
    assert [segment.locks.gone(ordinal, 1) for ordinal in range(ACTORS)] == [None, False, None]


class Lives(RuleBasedStateMachine):
    """Incarnations one after the other, their threads and deaths, against a model of a few sets."""

    SLOTS = 4

    def __init__(self) -> None:
        super().__init__()
        self.segment = Segment()
        self.living: Incarnation | None = None
        self.main = False
        self.held: set[int] = set()
        self.epoch = 0
        self.declared = (0, 0)

    @precondition(lambda self: self.living is None)
    @rule()
    def start(self) -> None:
        self.epoch += 1
        self.living = self.segment.start(self.epoch)
        self.main, self.held = True, {MAIN}

    @precondition(lambda self: self.living)
    @rule(slot=st.integers(1, SLOTS - 1))
    def hold(self, slot: int) -> None:
        assert self.living is not None
        answer = self.living.tell(slot, "hold")
        assert (answer == "done") == (self.main and slot not in self.held), answer
        if answer == "done":
            self.held.add(slot)

    @precondition(lambda self: self.living)
    @rule(slot=st.integers(1, SLOTS - 1))
    def release(self, slot: int) -> None:
        assert self.living is not None
        assert (self.living.tell(slot, "release") == "done") == (slot in self.held)
        self.held.discard(slot)

    @precondition(lambda self: self.living)
    @rule(slot=st.integers(1, SLOTS - 1))
    def end_thread(self, slot: int) -> None:
        assert self.living is not None
        assert self.living.tell(slot, "end") == "done"
        self.held.discard(slot)

    @precondition(lambda self: self.living and self.main)
    @rule(slots=st.integers(0, SLOTS))
    def declare(self, slots: int) -> None:
        assert self.living is not None
        assert self.living.tell(MAIN, f"declare {slots}") == "done"
        self.declared = (self.epoch, slots)

    @precondition(lambda self: self.living and self.main)
    @rule()
    def lose_main_thread(self) -> None:
        assert self.living is not None
        self.living.lose_main_thread()
        self.main = False
        self.held.discard(MAIN)

    @precondition(lambda self: self.living)
    @rule()
    def kill(self) -> None:
        assert self.living is not None
        self.living.kill()
        self.living, self.main, self.held = None, False, set()

    @invariant()
    def gone_is_what_the_model_says(self) -> None:
        for epoch in range(self.epoch + 2):
            assert self.segment.gone(epoch) is self.expected(epoch), epoch

    def expected(self, epoch: int) -> bool | None:
        declared, slots = self.declared
        if declared < epoch or (declared == epoch and not slots):
            return None
        counted = self.held & set(range(slots)) if declared == epoch else self.held
        return not (self.epoch <= epoch and counted)

    def teardown(self) -> None:
        self.segment.close()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


# ── pollers ───────────────────────────────────────────────────────────────────────────────────

POLLER = """
import sys
from transport.segments import map_segment
from transport.writers import WriterLocks
fd, actors, ordinal, epoch = map(int, sys.argv[1:])
locks = WriterLocks(map_segment(fd, writable=False).view, actors)
print(locks.gone(ordinal, epoch), flush=True)
while not locks.gone(ordinal, epoch):
    pass
print(all(locks.gone(ordinal, epoch) for _ in range(1000)), flush=True)
"""


def test_two_pollers_at_once_and_a_third_that_dies(segment: Segment) -> None:
    """They cannot even write."""
    incarnation = segment.start(7, 3)
    arguments = [str(segment.fd), str(ACTORS), str(ORDINAL), "7"]
    pollers = [
        subprocess.Popen(
            [sys.executable, "-c", POLLER, *arguments],
            pass_fds=[segment.fd],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    for poller in pollers:
        assert poller.stdout is not None
        assert poller.stdout.readline() == "False\n"
    pollers[2].kill()
    pollers[2].communicate()
    assert segment.gone(7) is False
    incarnation.process.kill()
    for poller in pollers[:2]:
        assert poller.communicate(timeout=PATIENCE_S)[0] == "True\n"
    later = segment.start(8, 3)
    assert (segment.gone(7), segment.gone(8)) == (True, False)
    later.kill()


# ── what is refused ───────────────────────────────────────────────────────────────────────────


def test_what_cannot_be_is_refused(segment: Segment) -> None:
    locks = segment.locks
    with pytest.raises(StartError, match=r"3 actors need \d+"):
        WriterLocks(segment.view[:-1], ACTORS)
    with pytest.raises(ValueError, match="initialised already"):
        locks.initialise()
    with pytest.raises(ValueError, match="there is no actor 3 among 3"):
        locks.gone(ACTORS, 1)
    with pytest.raises(ValueError, match="there is no actor -1"):
        locks.hold(-1, MAIN, 1)
    with pytest.raises(ValueError, match="there is no slot 255"):
        locks.hold(ORDINAL, WriterLocks.SLOTS, 1)
    with pytest.raises(ValueError, match="only the process that holds the first slot"):
        locks.declare(ORDINAL, 1, 1)
    with pytest.raises(ValueError, match="epoch 1 with 256 slots"):
        locks.declare(ORDINAL, 1, 256)
    with pytest.raises(ValueError, match="epoch 0 with 1 slots"):
        locks.declare(ORDINAL, 0, 1)
    with pytest.raises(StartError, match="the main thread does not hold its slot"):
        locks.hold(ORDINAL, 1, 1)
    with pytest.raises(ValueError, match="cannot be released: Operation not permitted"):
        locks.release(ORDINAL, MAIN)
    assert segment.start(1).tell(1, "release").startswith("ValueError: slot 1")
    assert len(locks.slots(ORDINAL)) == WriterLocks.SLOTS * RECORD


def test_the_first_slot_is_for_the_main_thread(segment: Segment) -> None:
    raised: list[BaseException] = []

    def hold() -> None:
        try:
            segment.locks.hold(ORDINAL, MAIN, 1)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert [str(error) for error in raised] == ["the first slot is for the main thread"]


def test_a_mutex_that_cannot_be_recovered(segment: Segment) -> None:
    """Whoever found it inconsistent and let it go so: nobody holds it, and nobody ever will."""
    segment.start(1, 1).kill()

    def spoil() -> None:
        library, mutex = ctypes.CDLL(None), segment.locks._mutex(ORDINAL, MAIN)
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_unlock(mutex)
        with pytest.raises(StartError, match=r"slot 0 of actor 1: .*not recoverable"):
            segment.locks.hold(ORDINAL, MAIN, 2)

    in_child(spoil)
    assert segment.gone(1) is True


def test_zeros_are_refused() -> None:
    locks = WriterLocks(memoryview(bytearray(ACTORS * WriterLocks.BYTES)), ACTORS)
    for call in (
        lambda: locks.gone(0, 1),
        lambda: locks.hold(0, MAIN, 1),
        lambda: locks.declare(0, 1, 1),
        lambda: locks.release(0, MAIN),
        lambda: locks.slots(0),
    ):
        with pytest.raises(ProtocolError, match="damaged, or were not initialised"):
            call()


@given(
    damage=st.lists(
        st.tuples(st.integers(0, 5 * RECORD - 1), st.binary(min_size=1, max_size=RECORD)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=60, deadline=None)
def test_damage_is_an_error_or_an_answer_but_never_a_crash(damage: list[tuple[int, bytes]]) -> None:
    fd = create_segment("writers", ACTORS * WriterLocks.BYTES)
    view = map_segment(fd).view
    os.close(fd)
    locks = WriterLocks(view, ACTORS)
    locks.initialise()
    for at, garbage in damage:
        view[WriterLocks.BYTES + at : WriterLocks.BYTES + at + len(garbage)] = garbage

    def use() -> None:
        for call in (
            lambda: locks.gone(ORDINAL, 1),
            lambda: locks.slots(ORDINAL),
            *(lambda slot=slot: locks.hold(ORDINAL, slot, 1) for slot in range(4)),
            lambda: locks.declare(ORDINAL, 1, 4),
            *(lambda slot=slot: locks.release(ORDINAL, slot) for slot in range(4)),
            lambda: locks.gone(ORDINAL, 1),
        ):
            with contextlib.suppress(ProtocolError, StartError, ValueError):
                call()

    in_child(use)
    assert locks.gone(0, 1) is None  # the others are as they were
