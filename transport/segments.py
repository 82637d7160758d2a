"""Shared memory that outlives every process but the last that holds it: sealed memfds.

The launcher creates segments and hands their descriptors to the actors it starts (`pass_fds`); an
actor maps what it is given. A segment has no name in any file system: nothing has to be cleaned up,
whoever is killed, and when the last descriptor and mapping are gone, so is the memory.

Segments are sealed against shrinking and growing. Without that seal any holder of the descriptor
could truncate the file under the others, and touching the lost part is SIGBUS; so an unsealed one
is refused.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

from engine.errors import StartError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

MADV_POPULATE_WRITE = 23
"""Linux 5.14, madvise(2); the mmap module of Python 3.11 does not name it."""


def create_segment(name: str, size: int) -> int:
    """Create `size` bytes of zeroed shared memory; returns its descriptor, which the caller owns.

    `name` is for people, in /proc/PID/maps. The descriptor is closed on exec unless it is passed on.
    Raises StartError when the system refuses.
    """
    if size <= 0:
        raise ValueError(f"segment {name!r}: size must be positive, not {size}")
    try:
        fd = os.memfd_create(f"estafet:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise StartError(f"cannot create the segment {name!r}: {error.strerror}") from None
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as error:
        os.close(fd)
        raise StartError(f"cannot make the segment {name!r} {size} bytes: {error.strerror}") from None
    return fd


class Segment:
    """A segment mapped into this process.

    `view` is all of its bytes. Arrays made from it must be dropped before `close`, and must hold
    it: `numpy.frombuffer` does, `torch.frombuffer` does not (use torch.from_numpy over it).
    """

    def __init__(self, name: str, memory: mmap.mmap) -> None:
        self.name = name
        self.size = len(memory)
        self.view = memoryview(memory)
        self._memory = memory

    def close(self) -> None:
        """Unmap; the memory stays for its other holders. Idempotent.

        Raises BufferError, and leaves the mapping as it was, while an array still looks at it.
        """
        self.view.release()
        try:
            self._memory.close()
        except BufferError:
            self.view = memoryview(self._memory)
            raise


def map_segment(fd: int, size: int | None = None, *, writable: bool = True) -> Segment:
    """Map a segment that this process created or was handed; `fd` may be closed afterwards.

    `size` is what the caller expects in bytes, None for whatever there is. Raises StartError when
    the descriptor is not a sealed segment of at least that size.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        name = os.readlink(f"/proc/self/fd/{fd}").removeprefix("/memfd:").removesuffix(" (deleted)")
    except OSError as error:
        raise StartError(f"descriptor {fd} is not a shared memory segment: {error.strerror}") from None
    if seals & SEALS != SEALS:
        raise StartError(f"segment {name} is not sealed: it could be cut off under its readers")
    actual = os.fstat(fd).st_size
    if size is not None and size > actual:
        raise StartError(f"segment {name} has {actual} bytes, {size} are needed")
    protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    memory = mmap.mmap(fd, actual if size is None else size, mmap.MAP_SHARED, protection)
    return Segment(name, memory)


def populate(segment: Segment, offset: int = 0, length: int | None = None) -> None:
    """Have the memory of a writable range present, so that the first store to it costs no fault.

    `offset` and `length` in bytes; contents do not change. It takes 1–3 µs a 4 KiB page, with the
    interpreter lock released where the kernel does it: run long ranges in a thread.
    """
    end = segment.size if length is None else offset + length
    if not 0 <= offset <= end <= segment.size:
        raise ValueError(f"{segment.name}: {offset}…{end} is outside its {segment.size} bytes")
    start = offset - offset % mmap.PAGESIZE
    if start == end:
        return
    try:
        segment._memory.madvise(MADV_POPULATE_WRITE, start, end - start)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        touch(segment, start, end)


def touch(segment: Segment, start: int, end: int) -> None:
    """Read one byte of each page of the range: what `populate` can do on an older kernel.

    A store would do more, but could undo one by another process at the same moment.
    """
    sum(segment.view[start : end : mmap.PAGESIZE])
