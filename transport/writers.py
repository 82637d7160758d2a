"""Who may still write pages: robust mutexes in shared memory, held by every thread that can.

A stopped thread goes on with its stores when it wakes, so what a dead worker could write may be used
again only on proof that all its threads are gone. That its process was reaped is such a proof, but it
comes after the kernel has torn down the process's memory. A robust mutex is released by the kernel as the
first thing that a thread does when it dies, after its last instruction, and that can be read here.

One array of records an actor, in the order of their ordinals, 64 bytes a record:

    record 0       word 0   declaration: epoch (32) | slots in use (32)
                   word 1   MAGIC, stored last by `initialise`
    record 1 + n   slot n
                   words 0 … 5   pthread_mutex_t (40 bytes on x86-64, 48 on aarch64)
                   word 6        epoch of its present holder, or of the last one

Slot 0 is the main thread's. It is held from before the first write to the end; so is that of a thread
which lives as long as it can write. A thread that is borrowed may hold its slot only while it writes
(kernels/cpu/src/writers.h does so during a step): each holder but the main thread looks, once it has its
mutex, whether its own main thread holds slot 0, and gives up when it does not. So when slot 0 was seen
free and then slot n, no thread of that process can come to hold slot n any more.

Single writers: the launcher initialises; a mutex and the epoch beside it are its holder's; the
declaration is that incarnation's which holds slot 0. Pollers only read, so any number of them may look
at once, and their deaths change nothing.

Crash points, all of the holder's:
- holds, but has not stored its epoch: reads as held by the one before, until it does or dies;
- holds, but has not declared: nothing is declared (None), and it has written nothing;
- died with the mutex: the kernel marks it, and `hold` of the next incarnation makes it consistent;
- died between those two: the kernel marks it again.

What it relies on. The kernel's robust futexes (Documentation/locking/robust-futex-ABI.rst): bits 0 … 29 of
the lock word are the holder's thread id, bit 30 says that it died. glibc's lock word is the mutex's first;
`hold` checks that. No input or output into the pages is left to the kernel beyond a system call (io_uring).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from engine.errors import StartError
from transport.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC = 0x3130_6B63_6F4C_7257
"""`WrLock01` in memory: another layout has another."""

RECORD = 64
MAIN = 0
"""The slot of a process's main thread."""
CALLER = 1
"""The slot of whichever thread writes pages just now: for a step, or to copy one."""

FUTEX_OWNER_DIED = 0x4000_0000
FUTEX_TID_MASK = 0x3FFF_FFFF
PTHREAD_PROCESS_SHARED = 1
PTHREAD_MUTEX_ROBUST = 1

_WORD = 8
_HALF = 4
_EPOCH_AT = 48
_OWNER_AT = 8
_KIND_AT = 16
"""Where a 64-bit glibc keeps the owner and the kind of a mutex."""
_NOT_RECOVERABLE = 0x7FFF_FFFE
"""As the owner: somebody found the mutex inconsistent and unlocked it so."""
_MASK32 = 0xFFFF_FFFF
_LOADS_IN_ORDER = platform.machine() in ("x86_64", "AMD64")


class WriterLocks:
    """A view over a host's shared segment; a map that a slot was held in stays until the process ends."""

    SLOTS = 255
    """One for the main thread, one for who calls a step, the others for the threads that help it."""
    BYTES = (1 + SLOTS) * RECORD
    """An actor."""

    def __init__(self, buffer: memoryview, actors: int) -> None:
        """A view of the first `actors * BYTES` bytes of a map; StartError when there are fewer.

        A read-only map will do for `gone`.
        """
        if len(buffer) < actors * self.BYTES:
            raise StartError(
                f"{len(buffer)} bytes of writers' locks; {actors} actors need {actors * self.BYTES}"
            )
        self.actors = actors
        self._bytes = buffer[: actors * self.BYTES].cast("B")
        self._words = self._bytes.cast("Q")
        self._halves = self._bytes.cast("I")
        self._anchor: ctypes.c_char | None = None

    def initialise(self) -> None:
        """Make all mutexes, once, in a new segment of zeros, before anybody else has it.

        StartError when this system has no robust mutexes, ValueError when it was done before.
        """
        if any(self._words[ordinal * self.BYTES // _WORD + 1] for ordinal in range(self.actors)):
            raise ValueError("the writers' locks are initialised already")
        anchor = ctypes.c_char.from_buffer(self._bytes)
        first = ctypes.addressof(anchor)
        attributes = _attributes()
        for ordinal in range(self.actors):
            for slot in range(self.SLOTS):
                mutex = ctypes.c_void_p(first + self._record(ordinal, slot))
                _require(_libc().pthread_mutex_init(mutex, attributes), "pthread_mutex_init")
            self._words[ordinal * self.BYTES // _WORD + 1] = MAGIC

    # ── the incarnation ───────────────────────────────────────────────────────────────────────

    def declare(self, ordinal: int, epoch: int, slots: int) -> None:
        """Say that threads which may write hold slots 0 … slots - 1, or one of them while they write.

        0: some thread may write without holding any, so that only the end of the process is a proof.
        Called by the process that holds slot 0 (ValueError), before its threads write anything.
        """
        self._declaration(ordinal)
        if not 0 <= slots <= self.SLOTS or not 0 < epoch <= _MASK32:
            raise ValueError(
                f"epoch {epoch} with {slots} slots: expected one above 0 and at most {self.SLOTS}"
            )
        if self._holder(ordinal, MAIN) != os.getpid():
            raise ValueError("only the process that holds the first slot declares")
        self._words[ordinal * self.BYTES // _WORD] = epoch << 32 | slots

    def hold(self, ordinal: int, slot: int, epoch: int) -> None:
        """Hold a slot for the calling thread until it releases it or dies; never waits.

        What a former incarnation left is taken over. StartError: another living thread holds the slot, its
        mutex cannot be recovered, or the main thread, which is the first to hold, does not hold its own.
        ProtocolError: what is there is not a mutex. ValueError: slot 0 is for the main thread.
        """
        me = threading.get_native_id()
        if slot == MAIN and me != os.getpid():
            raise ValueError("the first slot is for the main thread")
        self._check(ordinal, slot)
        mutex = self._mutex(ordinal, slot)
        code = _libc().pthread_mutex_trylock(mutex)
        if code == errno.EOWNERDEAD:
            code = _libc().pthread_mutex_consistent(mutex)
        name = f"slot {slot} of actor {ordinal}"
        if code == errno.EBUSY:
            raise StartError(f"{name}: thread {self._holder(ordinal, slot)} still holds it")
        _require(code, f"{name}: pthread_mutex_trylock")
        if self._holder(ordinal, slot) != me:
            _libc().pthread_mutex_unlock(mutex)
            raise StartError(f"{name}: this C library's mutexes do not begin with their holder")
        if slot != MAIN and self._holder(ordinal, MAIN) != os.getpid():
            _libc().pthread_mutex_unlock(mutex)
            raise StartError(f"{name}: the main thread does not hold its slot, or not any more")
        self._words[(self._record(ordinal, slot) + _EPOCH_AT) // _WORD] = epoch

    def release(self, ordinal: int, slot: int) -> None:
        """Let go of a slot, by the thread that holds it (ValueError), which writes nothing from then on."""
        self._check(ordinal, slot)
        if code := _libc().pthread_mutex_unlock(self._mutex(ordinal, slot)):
            raise ValueError(f"slot {slot} of actor {ordinal} cannot be released: {os.strerror(code)}")

    @contextmanager
    def writing(self, ordinal: int, epoch: int) -> Iterator[None]:
        """Hold the caller's slot while the calling thread, not the main one, writes pages; as `hold`."""
        self.hold(ordinal, CALLER, epoch)
        try:
            yield
        finally:
            self.release(ordinal, CALLER)

    def slots(self, ordinal: int) -> memoryview:
        """The records of an actor's slots, checked, for threads that hold them by themselves.

        Whoever has the view must keep it for as long as they hold.
        """
        for slot in range(self.SLOTS):
            self._check(ordinal, slot)
        return self._bytes[self._record(ordinal, 0) : (ordinal + 1) * self.BYTES]

    # ── everybody else ────────────────────────────────────────────────────────────────────────

    def gone(self, ordinal: int, epoch: int) -> bool | None:
        """Whether every thread of an incarnation that could write is gone for good; never waits.

        None: it has declared nothing, so that only its process's end can tell. False: some thread still
        holds its slot, running or stopped. True: of each slot that it declared the holder died or let go,
        or a newer epoch holds it. Of an incarnation before the last that declared, no slot may be held: the
        launcher starts one only when the one before was reaped.

        2 µs, and 0.1 µs a slot when the main thread is gone. ProtocolError when
        the segment is damaged.
        """
        declared, slots = self._declaration(ordinal)
        if declared < epoch or (declared == epoch and slots == 0):
            return None
        if self._some_hold(ordinal, MAIN, MAIN + 1, epoch):
            return False
        if not _LOADS_IN_ORDER:
            os.sched_yield()  # the scheduler is a full barrier: the others are looked at after slot 0
        return not self._some_hold(ordinal, MAIN + 1, slots if declared == epoch else self.SLOTS, epoch)

    def close(self) -> None:
        """Let the buffer go, of one that was only looked at: BufferError when slots were held in it."""
        for view in (self._halves, self._words, self._bytes):
            view.release()

    def _some_hold(self, ordinal: int, first: int, end: int, epoch: int) -> bool:
        """Whether a living thread of this epoch, or of one before, holds one of the slots first … end - 1."""
        at = self._record(ordinal, first)
        words = self._halves[at // _HALF : self._record(ordinal, end) // _HALF : RECORD // _HALF].tolist()
        for word in words:
            # The epoch is read after the lock: a newer one there means that the slot has changed hands since.
            if _thread(word) and self._words[(at + _EPOCH_AT) // _WORD] <= epoch:
                return True
            at += RECORD
        return False

    def _holder(self, ordinal: int, slot: int) -> int:
        """The thread that holds a slot, 0 when none does or it died."""
        return _thread(self._halves[self._record(ordinal, slot) // _HALF])

    def _declaration(self, ordinal: int) -> tuple[int, int]:
        """Epoch and number of slots that were declared last; ProtocolError when that cannot be."""
        if not 0 <= ordinal < self.actors:
            raise ValueError(f"there is no actor {ordinal} among {self.actors}")
        at = ordinal * self.BYTES // _WORD
        if self._words[at + 1] != MAGIC:
            raise ProtocolError(f"the writers' locks of actor {ordinal} are damaged, or were not initialised")
        word = self._words[at]
        epoch, slots = word >> 32, word & _MASK32
        if slots > self.SLOTS:
            raise ProtocolError(f"actor {ordinal} declares {slots} slots; there are {self.SLOTS}")
        return epoch, slots

    def _check(self, ordinal: int, slot: int) -> None:
        """Refuse what the C library would make a crash of."""
        self._declaration(ordinal)
        if not 0 <= slot < self.SLOTS:
            raise ValueError(f"there is no slot {slot} among {self.SLOTS}")
        if self._halves[(self._record(ordinal, slot) + _KIND_AT) // _HALF] != _kind():
            raise ProtocolError(f"slot {slot} of actor {ordinal} is not a robust mutex")
        if self._halves[(self._record(ordinal, slot) + _OWNER_AT) // _HALF] == _NOT_RECOVERABLE:
            # Asked before it is tried: glibc's trylock says so too, but leaves the lock taken.
            raise StartError(f"slot {slot} of actor {ordinal}: {os.strerror(errno.ENOTRECOVERABLE)}")

    def _record(self, ordinal: int, slot: int) -> int:
        return ordinal * self.BYTES + (1 + slot) * RECORD

    def _mutex(self, ordinal: int, slot: int) -> ctypes.c_void_p:
        """Where a mutex is."""
        if self._anchor is None:
            self._anchor = ctypes.c_char.from_buffer(self._bytes)
            # Never unmapped, at the interpreter's end neither: the kernel's list of what a thread holds, by
            # which it tells of its death, leads through this memory.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._anchor))
        return ctypes.c_void_p(ctypes.addressof(self._anchor) + self._record(ordinal, slot))


def _thread(lock: int) -> int:
    """The living thread that a lock word names, or 0."""
    return 0 if lock & FUTEX_OWNER_DIED else lock & FUTEX_TID_MASK


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def _attributes() -> ctypes.Array[ctypes.c_char]:
    """Of a robust mutex for several processes; StartError when there are none here."""
    attributes = ctypes.create_string_buffer(RECORD)  # pthread_mutexattr_t is of 4 or 8 bytes
    try:
        _require(_libc().pthread_mutexattr_init(attributes), "pthread_mutexattr_init")
        _require(_libc().pthread_mutexattr_setpshared(attributes, PTHREAD_PROCESS_SHARED), "pshared")
        _require(_libc().pthread_mutexattr_setrobust(attributes, PTHREAD_MUTEX_ROBUST), "robust")
    except AttributeError:
        raise StartError("this C library has no robust mutexes") from None
    return attributes


@functools.cache
def _kind() -> int:
    """How the kind of our mutexes is written in them."""
    mutex = ctypes.create_string_buffer(RECORD)
    _require(_libc().pthread_mutex_init(mutex, _attributes()), "pthread_mutex_init")
    return int.from_bytes(mutex.raw[_KIND_AT : _KIND_AT + _HALF], "little")


def _require(code: int, what: str) -> None:
    if code:
        raise StartError(f"{what}: {os.strerror(code)}")
