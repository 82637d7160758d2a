"""How a file of KV pages is laid out, byte for byte; version 1, all numbers little endian.

    header  4 KiB   magic, version, tokens a page, bytes a page, bytes a slot, identity … CRC-32 of the rest
    slot 0          slot header, a multiple of 4 KiB; then the page, filled up to one
    slot 1          …

    slot header     magic, slot, sequence, key, parent, checksum of the page, epoch, sizes; then the tokens
                    and the name of the worker that computed the page … CRC-32 of the rest, the last 4 bytes

Everything begins at a multiple of 4 KiB, so that files opened with O_DIRECT can be read and written in
place (open(2): offsets, lengths and memory must be aligned to the device's block, which is not larger).
A slot header is good only in its own slot: one that was written to the wrong place, or copied, is none.
"""

from __future__ import annotations

import struct
import zlib

import msgspec

from engine.chain import KEY_BYTES
from engine.ids import Incarnation
from engine.tier import TierPage

VERSION = 1
BLOCK = 4096
FILE_MAGIC = b"estafetF"
SLOT_MAGIC = b"estafetS"
NAME_LIMIT = 255
"""Bytes of the longest name of a worker."""

#          magic, version, tokens a page, bytes a page, bytes a slot, bytes of the identity
_FILE = struct.Struct("<8sIIQQI")
#          magic, slot, sequence, key, parent, checksum, epoch, bytes of the tokens, bytes of the name
_SLOT = struct.Struct(f"<8sQQ{KEY_BYTES}s{KEY_BYTES}sIIII")
_CRC = struct.Struct("<I")

IDENTITY_LIMIT = BLOCK - _FILE.size - _CRC.size


def _padded(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


def _closed(data: bytes, size: int) -> bytes:
    """Fill up to `size` bytes, of which the last four are the CRC-32 of the others."""
    body = data.ljust(size - _CRC.size, b"\0")
    return body + _CRC.pack(zlib.crc32(body))


def _is_closed(data: bytes | memoryview) -> bool:
    return bytes(data[-_CRC.size :]) == _CRC.pack(zlib.crc32(data[: -_CRC.size]))


class FoundPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot whose header is good."""

    slot: int
    sequence: int
    """Goes up by one a page written to the file, so that an order of age survives a restart."""
    page: TierPage


class PageFormat(msgspec.Struct, frozen=True, gc=False):
    """What kind of pages a file holds. Files of another kind hold nothing of use."""

    page_bytes: int
    page_tokens: int
    identity: str
    """All that the bits of a page depend on besides its tokens: model, weight format, KV dtype, numerics id;
    what the roots of the chain keys are made of. At most `IDENTITY_LIMIT` bytes of UTF-8."""

    def __post_init__(self) -> None:
        if self.page_bytes < 1 or self.page_tokens < 1:
            raise ValueError(f"a page of {self.page_bytes} bytes and {self.page_tokens} tokens is none")
        if len(self.identity.encode()) > IDENTITY_LIMIT:
            raise ValueError(f"an identity has at most {IDENTITY_LIMIT} bytes")

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot's header."""
        return _padded(_SLOT.size + 4 * self.page_tokens + NAME_LIMIT + _CRC.size)

    @property
    def body_bytes(self) -> int:
        """Bytes of a page filled up to whole blocks."""
        return _padded(self.page_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot."""
        return self.header_bytes + self.body_bytes

    def slots(self, budget: int) -> int:
        """Slots of a file of at most `budget` bytes."""
        return max(0, budget - BLOCK) // self.slot_bytes

    def offset(self, slot: int) -> int:
        """Where a slot begins in the file; slot `slots` is where a file of so many ends."""
        return BLOCK + slot * self.slot_bytes

    def encode_header(self) -> bytes:
        """The first block of a file."""
        identity = self.identity.encode()
        fixed = _FILE.pack(
            FILE_MAGIC, VERSION, self.page_tokens, self.page_bytes, self.slot_bytes, len(identity)
        )
        return _closed(fixed + identity, BLOCK)

    def mismatch(self, block: bytes) -> str:
        """Why a file that begins with this block holds nothing for us; empty when it does."""
        if len(block) < BLOCK or not _is_closed(block):
            return "its header is damaged"
        _, version, tokens, page_bytes, slot_bytes, length = _FILE.unpack_from(block)
        if version != VERSION:
            return f"it is of version {version}, this is version {VERSION}"
        identity = block[_FILE.size : _FILE.size + length].decode(errors="replace")
        if identity != self.identity:
            return f"its pages are of {identity!r}, ours of {self.identity!r}"
        if (tokens, page_bytes, slot_bytes) != (self.page_tokens, self.page_bytes, self.slot_bytes):
            return (
                f"its pages have {page_bytes} bytes and {tokens} tokens, "
                f"ours {self.page_bytes} and {self.page_tokens}"
            )
        return ""

    def encode_slot(self, slot: int, sequence: int, page: TierPage) -> bytes:
        """The header of a slot that holds a page, whose checksum must be known.

        Raises ValueError when a key or the tokens are not of their size, or a name or number is too large.
        """
        name = page.origin.name.encode()
        if len(page.key) != KEY_BYTES or len(page.parent) != KEY_BYTES:
            raise ValueError(f"keys have {KEY_BYTES} bytes, not {len(page.key)} and {len(page.parent)}")
        if len(page.tokens) != 4 * self.page_tokens:
            raise ValueError(f"{self.page_tokens} tokens have 4 bytes each, not {len(page.tokens)} together")
        if len(name) > NAME_LIMIT:
            raise ValueError(f"the name of a worker has at most {NAME_LIMIT} bytes, not {len(name)}")
        if page.checksum is None:
            raise ValueError("a page without its checksum cannot be written")
        sizes = len(page.tokens), len(name)
        try:
            fixed = _SLOT.pack(
                SLOT_MAGIC, slot, sequence, page.key, page.parent, page.checksum, page.origin.epoch, *sizes
            )
        except struct.error as error:
            raise ValueError(f"a number of the page is too large: {error}") from None
        return _closed(fixed + page.tokens + name, self.header_bytes)

    def decode_slot(self, slot: int, header: bytes | memoryview) -> FoundPage | None:
        """What a slot's header says; None when it is not a good header of this slot."""
        if len(header) != self.header_bytes or header[: len(SLOT_MAGIC)] != SLOT_MAGIC:
            return None
        if not _is_closed(header):
            return None
        _, place, sequence, key, parent, checksum, epoch, tokens, name = _SLOT.unpack_from(header)
        if place != slot or tokens != 4 * self.page_tokens:
            return None
        rest = bytes(header[_SLOT.size : _SLOT.size + tokens + name])
        origin = Incarnation(rest[tokens:].decode(errors="replace"), epoch)
        return FoundPage(slot, sequence, TierPage(key, parent, rest[:tokens], origin, checksum))
