"""What two hosts say to each other about pages, and how a header is told from damage.

    preamble   magic, version                          both at once, before anything else
    Hello      who, which numbers, which pools         both; what does not fit is an error on both sides

    pull    Ask      pages by name and chain key ──▶
                     ◀── Run: checksums, then the bytes of the pages back to back, then Verdict
    push    Give: targets, checksums, then the bytes, then Verdict ──▶
                     ◀── Receipt: which of them are stored

A header is a prefix (length, CRC-32 of the header, CRC-32 of the prefix so far) and MessagePack. Damage to
either is seen before anything is believed: it ends the connection (TransferCut), and whoever still wants
pages connects again. A page's bytes have their own CRC-32 in the header before them.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import msgspec

from engine.shapes import PageRef
from transport.errors import ProtocolError, TransferCut
from transport.page_streams import Stalled

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transport.page_streams import ByteStream

PAGE_PROTOCOL_VERSION = 2
MAGIC = b"estafetp"
KEY_BYTES = 16

HEADER_LIMIT = 128 << 10
"""Bytes of the longest header: RUN_PAGES names, keys and checksums, each at its longest, and room."""
HELLO_LIMIT = 4 << 10

RUN_BYTES = 2 << 20
RUN_PAGES = 1024
"""The most that one Ask, Run or Give may speak of: so many bytes, or one page if that has more."""

_PREAMBLE = struct.Struct("!8sH")
_PREFIX = struct.Struct("!III")
_PREFIX_CHECKED = struct.Struct("!II")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What a host says first."""

    identity: str
    """`numerics_id`: pages of another one are other numbers."""
    host: str
    epoch: int
    """The incarnation of the pools: another one when page names given out before mean nothing any more."""
    does: Literal["fetch", "send", "serve"]
    gives: bool
    """Whether it answers an Ask."""
    takes: bool
    """Whether it answers a Give."""
    page_bytes: int
    pools: dict[int, int]
    """Pages of each pool."""
    session: int = 0
    """Names one client through all its connections; a later connection takes the place of an earlier."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Ends the connection."""

    reason: str
    temporary: bool
    """Whether coming back later may help."""


class PageName(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A page of the host that is asked, and its chain key of KEY_BYTES."""

    page: PageRef
    key: bytes


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Asks for a Run of those of these pages that are there."""

    number: int
    names: list[PageName]


class RunPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page of a Run: which of those that were asked for."""

    position: int
    key: bytes
    checksum: int
    """CRC-32 of the page's bytes (ISO 3309, as in zlib), as recorded when it was sealed."""


class Run(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Answers an Ask; the bytes of these pages follow, then a Verdict on them."""

    number: int
    pages: list[RunPage]


class GivenPage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One page of a Give: where it goes."""

    target: PageRef
    checksum: int


class Give(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Hands pages over; their bytes follow, then a Verdict on them."""

    number: int
    pages: list[GivenPage]


class Verdict(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Which of the pages that just went out were still what the header called them, after they were read."""

    number: int
    whole: list[bool]


class Receipt(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Answers a Give."""

    number: int
    stored: list[bool]


WireMessage: TypeAlias = Hello | Refused | Ask | Run | Give | Verdict | Receipt
M = TypeVar("M", Hello, Ask, Run, Give, Verdict, Receipt)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[WireMessage] = msgspec.msgpack.Decoder(WireMessage)


def run_pages(page_bytes: int, run_bytes: int = RUN_BYTES) -> int:
    """How many pages of `page_bytes` one Ask, Run or Give may have, if it may have `run_bytes`."""
    return max(1, min(RUN_PAGES, run_bytes // page_bytes))


def preamble(version: int = PAGE_PROTOCOL_VERSION) -> bytes:
    """What each side sends before anything else."""
    return _PREAMBLE.pack(MAGIC, version)


def framed(message: WireMessage) -> bytes:
    """A message with its prefix."""
    encoded = _encoder.encode(message)
    checked = _PREFIX_CHECKED.pack(len(encoded), zlib.crc32(encoded))
    return checked + zlib.crc32(checked).to_bytes(4, "big") + encoded


def must_fit(ours: Hello, theirs: Hello) -> None:
    """Raise ProtocolError, naming all that differs, when these two cannot exchange pages."""
    wrong = [
        f"{what} {there!r} there, {here!r} here"
        for what, here, there in (
            ("numerics id", ours.identity, theirs.identity),
            ("bytes a page", ours.page_bytes, theirs.page_bytes),
        )
        if here != there
    ]
    client, server = (ours, theirs) if theirs.does == "serve" else (theirs, ours)
    if client.does == "serve" or server.does != "serve":
        wrong.append(f"both sides {ours.does}")
    elif client.does == "fetch" and not server.gives:
        wrong.append(f"{server.host} gives no pages")
    elif client.does == "send" and not server.takes:
        wrong.append(f"{server.host} takes no pages")
    if wrong:
        raise ProtocolError(f"{theirs.host} does not fit {ours.host}: {'; '.join(wrong)}")


class Wire:
    """Headers and the bytes of pages on one connection; one task at a time sends, one receives."""

    def __init__(self, stream: ByteStream, page_bytes: int, stall_s: float) -> None:
        """`stall_s`: how long the peer may send nothing while it owes something."""
        self.stall_s = stall_s
        self._stream = stream
        self._scratch: memoryview | None = None
        self._page_bytes = page_bytes

    async def send_preamble(self) -> None:
        """Say that this is a page transfer, and in which version."""
        await self._stream.send([preamble()])

    async def receive_preamble(self) -> None:
        """Raise ProtocolError unless the peer speaks this protocol in this version."""
        magic, version = _PREAMBLE.unpack(await self._exactly(_PREAMBLE.size, self.stall_s))
        if magic != MAGIC:
            raise ProtocolError(f"the peer does not transfer pages: it begins with {magic!r}")
        if version != PAGE_PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer transfers pages in version {version}, this is {PAGE_PROTOCOL_VERSION}"
            )

    async def send(self, message: WireMessage, bodies: Sequence[memoryview] = ()) -> None:
        """Send a header and the bytes of pages behind it, from where they lie. Raises TransferCut."""
        await self._stream.send([framed(message), *bodies])

    async def receive(self, kind: type[M], limit: int = HEADER_LIMIT) -> M:
        """The header that is due.

        Raises ProtocolError when the peer sends another one or refuses, TransferCut when the connection
        ends or stalls, was damaged, or the peer has no room now.
        """
        first = await self._some(_PREFIX.size, self.stall_s)
        if not first:
            raise TransferCut(f"the connection ended before a {kind.__name__}")
        return await self._rest(first, kind, limit)

    async def receive_if_any(self, kind: type[M], idle_s: float, limit: int = HEADER_LIMIT) -> M | None:
        """As `receive`, but None when the stream ends here or nothing begins to come for `idle_s`."""
        try:
            first = await self._some(_PREFIX.size, idle_s)
        except Stalled:
            return None
        return await self._rest(first, kind, limit) if first else None

    async def take_page(self, slot: memoryview, wanted: Callable[[], bool]) -> int | None:
        """Receive the bytes of a page into its slot; returns their CRC-32, None when nobody wants them.

        `wanted` is asked before every piece that is put there, with no waiting in between: once it says
        no, the slot is left alone and the rest goes nowhere.
        """
        taken, checksum, still_wanted = 0, 0, True
        target = slot

        def room() -> memoryview:
            nonlocal target, still_wanted
            if still_wanted and not wanted():
                still_wanted, target = False, self._nowhere()
            return target[taken:]

        while taken < self._page_bytes:
            received = await self._stream.receive_into(room, self.stall_s)
            if not received:
                raise TransferCut(
                    f"the connection ended with {self._page_bytes - taken} bytes of a page to come"
                )
            if still_wanted:
                # Piece by piece, while it is in the cache.
                checksum = zlib.crc32(target[taken : taken + received], checksum)
            taken += received
        return checksum if still_wanted else None

    async def aclose(self) -> None:
        """Close the connection at once. Idempotent."""
        await self._stream.aclose()

    async def _rest(self, first: bytes, kind: type[M], limit: int) -> M:
        prefix = first + await self._exactly(_PREFIX.size - len(first), self.stall_s)
        size, checksum, prefix_checksum = _PREFIX.unpack(prefix)
        if zlib.crc32(prefix[: _PREFIX_CHECKED.size]) != prefix_checksum:
            raise TransferCut("a header was damaged on its way")
        if size > limit:
            raise ProtocolError(f"a header of {size} bytes, where {limit} are allowed")
        encoded = await self._exactly(size, self.stall_s)
        if zlib.crc32(encoded) != checksum:
            raise TransferCut("a header was damaged on its way")
        try:
            message = _decoder.decode(encoded)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"not a header of a page transfer: {error}") from None
        if isinstance(message, Refused):
            if message.temporary:
                raise TransferCut(f"the peer refused: {message.reason}")
            raise ProtocolError(f"the peer refused: {message.reason}")
        if not isinstance(message, kind):
            raise ProtocolError(f"a {type(message).__name__} where a {kind.__name__} was due")
        return message

    def _nowhere(self) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(self._page_bytes))
        return self._scratch

    async def _some(self, limit: int, patience_s: float) -> bytes:
        buffer = bytearray(limit)
        received = await self._stream.receive_into(lambda: memoryview(buffer), patience_s)
        return bytes(buffer[:received])

    async def _exactly(self, size: int, patience_s: float) -> bytes:
        data = b""
        while len(data) < size:
            more = await self._some(size - len(data), patience_s)
            if not more:
                raise TransferCut(f"the connection ended with {size - len(data)} bytes of a header to come")
            data += more
        return data
