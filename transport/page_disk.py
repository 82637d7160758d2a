"""What a thread does with a file of KV pages: open it, write a slot, read a slot.

    write   header made invalid ─▶ page written ─▶ is it still that page? ─▶ header written
    read    header and page in one read ─▶ header of this slot and key? ─▶ checksum of the page?

So a process that is killed anywhere leaves no slot that claims what it does not hold. Pages are not
flushed: after a power cut a header may be older or newer than its page, and the checksum, which every
read verifies, says so. The file is a cache; what it loses is computed again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from engine.errors import StartError
from transport.checksum import page_checksum
from transport.page_format import BLOCK, FILE_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from engine.tier import TierPage
    from transport.page_format import FoundPage, PageFormat


class NotThePage(Exception):
    """The bytes are not those that they should be."""


class Withdrawn(Exception):
    """The page in memory has another use by now."""


class PageDisk:
    """An open, locked file of pages. Its calls block; as many threads use it at once as it has buffers.

    Two calls at once on one slot are allowed only if both read.
    """

    def __init__(self, path: Path, form: PageFormat, budget: int, parallel: int) -> None:
        """Open or make the file; see `PageFile.open`. Raises StartError."""
        self.form = form
        self.slots = form.slots(budget)
        try:
            self._fd, self.note = _open_locked(path)
            try:
                self.note = _prepare(self._fd, form, self.slots) or self.note
                self.direct = _pass_by_cache(self._fd)
            except BaseException:
                os.close(self._fd)
                raise
        except FileNotFoundError:
            raise StartError(f"cannot keep pages in {path}: make the folder {path.parent} first") from None
        except OSError as error:
            raise StartError(f"cannot keep pages in {path}: {error.strerror}") from None
        self._buffers = [mmap.mmap(-1, form.slot_bytes) for _ in range(parallel)]
        """Aligned memory, a piece a thread. What is never touched takes none."""
        self._claims = bytearray(b"\1" * self.slots)
        """Slots whose header in the file may be good."""

    def close(self) -> None:
        """Close the file and let go of its lock, while no call is under way. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return self._fd >= 0

    def scan(self, slots: Iterable[int]) -> list[FoundPage]:
        """The good headers of some slots. One that cannot be read is passed over: its slot holds nothing."""
        found = []
        with self._buffer() as buffer:
            header = buffer[: self.form.header_bytes]
            for slot in slots:
                try:
                    whole = os.preadv(self._fd, [header], self.form.offset(slot)) == len(header)
                except OSError:
                    continue
                page = self.form.decode_slot(slot, header) if whole else None
                if page is None:
                    self._claims[slot] = 0
                else:
                    found.append(page)
        return found

    def write(
        self, slot: int, sequence: int, page: TierPage, memory: memoryview, still_valid: Callable[[], bool]
    ) -> TierPage:
        """Write a page; see `PageFile.write`. Raises OSError, NotThePage or Withdrawn: it is not kept."""
        form = self.form
        checksum = page_checksum(memory)
        if page.checksum not in (None, checksum):
            raise NotThePage("the page in memory does not match its checksum")
        page = msgspec.structs.replace(page, checksum=checksum)
        at = form.offset(slot)
        with self._buffer() as buffer:
            header, body = buffer[: form.header_bytes], buffer[form.header_bytes :]
            if self._claims[slot]:
                self._invalidate(slot, header)
            if self.direct and not is_aligned(memory):
                body[: form.page_bytes] = memory
                self._put(body, at + form.header_bytes)
            else:
                self._put(memory, at + form.header_bytes)
            if not still_valid():
                raise Withdrawn("the page in memory has another use by now")
            header[:] = form.encode_slot(slot, sequence, page)
            self._claims[slot] = 1
            self._put(header, at)
        return page

    def read(self, slot: int, key: bytes, into: memoryview) -> TierPage:
        """Read a page; see `PageFile.read`. Raises OSError or NotThePage: it was not read."""
        with self._buffer() as buffer:
            header = buffer[: self.form.header_bytes]
            try:
                return self._read(slot, key, into, buffer)
            except NotThePage:
                with suppress(OSError):  # then the header is still one that may be good, as `_claims` says
                    self._invalidate(slot, header)
                raise

    def _read(self, slot: int, key: bytes, into: memoryview, buffer: memoryview) -> TierPage:
        form = self.form
        header, body = buffer[: form.header_bytes], buffer[form.header_bytes :]
        straight = not self.direct or is_aligned(into)
        size = os.preadv(self._fd, [header, into if straight else body], form.offset(slot))
        if size < form.header_bytes + form.page_bytes:
            raise NotThePage("the file was cut short")
        found = form.decode_slot(slot, header)
        if found is None:
            raise NotThePage("its header is damaged")
        if found.page.key != key:
            raise NotThePage("it holds another page")
        if not straight:
            into[:] = body[: form.page_bytes]
        if page_checksum(into) != found.page.checksum:
            raise NotThePage("its bytes do not match their checksum")
        return found.page

    def _invalidate(self, slot: int, header: memoryview) -> None:
        header[:] = bytes(len(header))
        self._put(header, self.form.offset(slot))
        self._claims[slot] = 0

    def _put(self, memory: memoryview, at: int) -> None:
        size = os.pwrite(self._fd, memory, at)
        if size != len(memory):
            raise OSError(errno.ENOSPC, f"only {size} of {len(memory)} bytes could be written")

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        buffer = self._buffers.pop()
        try:
            with memoryview(buffer) as view:
                yield view
        finally:
            self._buffers.append(buffer)


def is_aligned(memory: memoryview) -> bool:
    """Whether O_DIRECT can read into or write from this memory as it is."""
    if memory.readonly or len(memory) == 0 or len(memory) % BLOCK:
        # ctypes, which tells the address, takes only what may be written.
        return False
    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) % BLOCK == 0


def _open_locked(path: Path) -> tuple[int, str]:
    """Open the file, alone; what never was a file of pages is moved aside, with a note."""
    note = ""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StartError(f"cannot keep pages in {path}: it is not a regular file")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StartError(
                    f"another process keeps its pages in {path}: end it, or name another file"
                ) from None
            # Somebody else may have moved the file aside between our open and our lock.
            if path.exists() and os.path.samestat(status, path.stat()):
                start = os.pread(fd, len(FILE_MAGIC), 0)
                if FILE_MAGIC.startswith(start):
                    return fd, note
                aside = _free_name(path)
                path.rename(aside)
                note = f"{path} was not a file of pages and is {aside.name} now"
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _free_name(path: Path) -> Path:
    number = 1
    while (aside := path.with_name(f"{path.name}.aside-{number}")).exists():
        number += 1
    return aside


def _prepare(fd: int, form: PageFormat, slots: int) -> str:
    """Give the file its header and size; why what it held is not used, or nothing."""
    note = ""
    empty = os.fstat(fd).st_size == 0
    if not empty and (reason := form.mismatch(os.pread(fd, BLOCK, 0))):
        note = f"the pages of an earlier file are not used: {reason}"
    if empty or note:
        os.ftruncate(fd, 0)
        os.pwrite(fd, form.encode_header(), 0)
        # Flushed, so that no power cut makes a stranger of the file.
        os.fdatasync(fd)
    os.ftruncate(fd, form.offset(slots))
    return note


def _pass_by_cache(fd: int) -> bool:
    """Have the file pass by the system's page cache; whether its file system can."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, BLOCK) as block:
        os.preadv(fd, [block], 0)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(fd, block, 0)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            return False
    return True
