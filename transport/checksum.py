"""The checksum of a page's bytes, recorded when it is sealed and compared wherever it arrives."""

from __future__ import annotations

import zlib


def page_checksum(data: memoryview | bytes | bytearray) -> int:
    """CRC-32 of some bytes (ISO 3309, as in zlib). Releases the interpreter lock for more than 5 KiB."""
    return zlib.crc32(data)
