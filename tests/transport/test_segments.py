"""Sealed shared memory: nobody can cut it, nobody's death takes it, nothing is left behind."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import subprocess
import sys

import pytest

from engine.errors import EstafetError
from transport.segments import create_segment, map_segment, populate, touch

SIZE = 3 * mmap.PAGESIZE


def test_two_mappings_see_the_same_bytes() -> None:
    fd = create_segment("pool", SIZE)
    one, two = map_segment(fd), map_segment(fd, SIZE)
    os.close(fd)
    assert one.size == len(one.view) == SIZE
    assert one.name == "estafet:pool"
    one.view[SIZE - 3 :] = b"end"
    assert bytes(two.view[SIZE - 3 :]) == b"end"
    one.close()
    one.close()
    assert bytes(two.view[SIZE - 3 :]) == b"end"
    two.close()


def test_it_can_be_neither_cut_nor_grown_nor_unsealed() -> None:
    fd = create_segment("pool", SIZE)
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    os.close(fd)


def test_an_unsealed_segment_is_refused() -> None:
    fd = os.memfd_create("loose", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    with pytest.raises(EstafetError, match="loose is not sealed"):
        map_segment(fd)
    os.close(fd)


def test_other_files_are_refused() -> None:
    reader, writer = os.pipe()
    with pytest.raises(EstafetError, match="is not a shared memory segment"):
        map_segment(reader)
    os.close(reader)
    os.close(writer)
    with pytest.raises(EstafetError, match="is not a shared memory segment"):
        map_segment(reader)


def test_a_segment_that_is_too_small_is_refused() -> None:
    fd = create_segment("pool", SIZE)
    with pytest.raises(EstafetError, match=f"has {SIZE} bytes, {SIZE + 1} are needed"):
        map_segment(fd, SIZE + 1)
    os.close(fd)


@pytest.mark.parametrize("size", [0, -1])
def test_no_empty_segments(size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        create_segment("pool", size)


def test_what_the_system_refuses_is_an_error_of_one_line() -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(EstafetError, match=r"cannot create the segment 'n+': Invalid argument"):
        create_segment("n" * 300, SIZE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, hard))
    try:
        with pytest.raises(EstafetError, match=r"cannot make the segment 'pool' \d+ bytes: File too large"):
            create_segment("pool", SIZE + 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_reader_cannot_write() -> None:
    fd = create_segment("pool", SIZE)
    reader = map_segment(fd, writable=False)
    os.close(fd)
    assert reader.view.readonly
    reader.close()


def test_a_mapping_in_use_is_not_closed() -> None:
    fd = create_segment("pool", SIZE)
    segment = map_segment(fd)
    os.close(fd)
    user = segment.view[1:2]
    with pytest.raises(BufferError):
        segment.close()
    segment.view[1] = 7
    assert user[0] == 7
    user.release()
    segment.close()


def test_nothing_is_left_behind() -> None:
    before = sorted(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))
    for _ in range(3):
        fd = create_segment("pool", SIZE)
        segment = map_segment(fd)
        os.close(fd)
        segment.close()
    assert (sorted(os.listdir("/proc/self/fd")), sorted(os.listdir("/dev/shm"))) == before


def test_populate_makes_memory_present_and_changes_nothing() -> None:
    fd = create_segment("pool", 64 * mmap.PAGESIZE)
    segment = map_segment(fd)
    segment.view[5 * mmap.PAGESIZE] = 9
    populate(segment, mmap.PAGESIZE + 1, 10 * mmap.PAGESIZE)
    assert os.fstat(fd).st_blocks * 512 == 11 * mmap.PAGESIZE
    populate(segment)
    assert os.fstat(fd).st_blocks * 512 == 64 * mmap.PAGESIZE
    touch(segment, 0, segment.size)
    populate(segment, 0, 0)
    assert segment.view[5 * mmap.PAGESIZE] == 9
    assert sum(segment.view) == 9
    with pytest.raises(ValueError, match="outside"):
        populate(segment, mmap.PAGESIZE, 64 * mmap.PAGESIZE)
    os.close(fd)
    segment.close()


CHILD = """
import sys
from transport.segments import create_segment, map_segment
fd = int(sys.argv[1])
segment = map_segment(fd)
segment.view[:5] = b"child"
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.system
def test_the_death_of_a_mapper_takes_nothing() -> None:
    fd = create_segment("pool", SIZE)
    segment = map_segment(fd)
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(fd)], pass_fds=[fd], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        child.kill()
    assert child.returncode == -signal.SIGKILL
    assert bytes(segment.view[:5]) == b"child"
    segment.view[:5] = b"still"
    os.close(fd)
    segment.close()


OWNER = """
import os, subprocess, sys
from transport.segments import create_segment, map_segment
fd = create_segment("pool", 4096)
map_segment(fd).view[:5] = b"owner"
os.write(1, b"%d %d\\n" % (os.getpid(), fd))
sys.stdin.read()
"""


@pytest.mark.system
def test_the_death_of_the_owner_takes_nothing() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with owner:
        assert owner.stdout is not None
        pid, owners_fd = map(int, owner.stdout.readline().split())
        fd = os.open(f"/proc/{pid}/fd/{owners_fd}", os.O_RDWR)
        segment = map_segment(fd)
        owner.kill()
    assert bytes(segment.view[:5]) == b"owner"
    segment.view[:5] = b"still"
    os.close(fd)
    segment.close()
