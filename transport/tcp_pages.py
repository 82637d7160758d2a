"""Pages over a byte stream to another host: checked whole before they count.

    sender                                             receiver
    Page header (length, MessagePack), page bytes ──▶  staged, checksum verified, then stored
    … once a page …
    Batch end ──────────────────────────────────────▶
              ◀──────────────────────────────────────  Receipt: which pages of the batch are stored

The receiver stages a page outside the pool until it is complete and its checksum is right, so a cut
stream leaves no half page, and the sender counts as safe only what a receipt names. The receiver
answers only after a whole batch, so the two never wait for each other with both buffers full.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from engine.shapes import PageRef
from transport.errors import ProtocolError, TransferCut

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transport.pages import PageCopy, PagePool, StillValid

PAGE_PROTOCOL_VERSION = 1
HEADER_LIMIT = 1 << 20
"""Bytes of the longest header; a receipt has a byte or so a page, so a batch may have many."""
RECEIVE_BYTES = 1 << 20

_LENGTH = struct.Struct("!I")

T = TypeVar("T")


class Page(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Goes before the bytes of one page."""

    version: int
    target: PageRef
    size: int
    checksum: int
    """CRC-32 of the page's bytes (ISO 3309, as in zlib)."""


class BatchEnd(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Ends a batch and asks for its receipt."""

    number: int
    pages: int


class Receipt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Answers a batch: one answer a page, in the order in which they were sent."""

    number: int
    stored: list[bool]


_encoder = msgspec.msgpack.Encoder()
_header_decoder: msgspec.msgpack.Decoder[Page | BatchEnd] = msgspec.msgpack.Decoder(Page | BatchEnd)
_receipt_decoder = msgspec.msgpack.Decoder(Receipt)


class _Reader:
    """Reads exact numbers of bytes off a stream, and never further."""

    def __init__(self, stream: trio.abc.ReceiveStream) -> None:
        self._stream = stream
        self._looked_at = b""

    async def exactly(self, size: int) -> bytearray:
        """The next `size` bytes; raises TransferCut when the stream ends before."""
        data, self._looked_at = bytearray(self._looked_at), b""
        while len(data) < size:
            more = await self._receive(size - len(data))
            if not more:
                raise TransferCut(f"the stream ended with {size - len(data)} bytes to come")
            data += more
        return data

    async def ended(self) -> bool:
        """Whether the stream ends here."""
        self._looked_at = await self._receive(1)
        return not self._looked_at

    async def header(self, decoder: msgspec.msgpack.Decoder[T]) -> T:
        """The next length-prefixed header; raises ProtocolError when it is not one."""
        (size,) = _LENGTH.unpack(await self.exactly(_LENGTH.size))
        if size > HEADER_LIMIT:
            raise ProtocolError(f"a header of {size} bytes is not one of a page transfer")
        try:
            return decoder.decode(await self.exactly(size))
        except msgspec.DecodeError as error:
            raise ProtocolError(f"not a header of a page transfer: {error}") from None

    async def _receive(self, limit: int) -> bytes:
        try:
            return bytes(await self._stream.receive_some(min(limit, RECEIVE_BYTES)))
        except trio.BrokenResourceError:
            raise TransferCut("the stream broke") from None


async def _send(stream: trio.abc.SendStream, header: msgspec.Struct, body: bytes = b"") -> None:
    encoded = _encoder.encode(header)
    try:
        await stream.send_all(_LENGTH.pack(len(encoded)) + encoded)
        if body:
            await stream.send_all(body)
    except trio.BrokenResourceError:
        raise TransferCut("the stream broke") from None


class TcpPages:
    """PageTransport over a stream with a `PageReceiver` at its other end; one task at a time.

    After an error or a cancellation the stream is in the middle of something: every later copy
    raises TransferCut, and the caller opens another stream.
    """

    def __init__(self, stream: trio.abc.Stream, source: PagePool, still_valid: StillValid) -> None:
        """Use a stream that the caller opened and will close."""
        self._stream = stream
        self._reader = _Reader(stream)
        self._source = source
        self._still_valid = still_valid
        self._batch = 0
        self._unusable = False

    async def copy(self, copies: Sequence[PageCopy]) -> list[bool]:
        """Copy pages; see `PageTransport.copy`. Raises IndexError for a slot outside the source pool."""
        if self._unusable:
            raise TransferCut("an earlier transfer on this stream was not finished")
        self._unusable = True
        sent = [await self._send_page(copy) for copy in copies]
        self._batch += 1
        await _send(self._stream, BatchEnd(self._batch, sum(sent)))
        receipt = await self._reader.header(_receipt_decoder)
        if receipt.number != self._batch or len(receipt.stored) != sum(sent):
            raise ProtocolError(
                f"a receipt for {len(receipt.stored)} pages of batch {receipt.number} answers "
                f"{sum(sent)} pages of batch {self._batch}"
            )
        self._unusable = False
        stored = iter(receipt.stored)
        return [was_sent and next(stored) for was_sent in sent]

    async def _send_page(self, copy: PageCopy) -> bool:
        if not self._still_valid(copy.source):
            return False
        # Copied before it is checked: what goes out is what the check spoke of.
        data = bytes(self._source.slot(copy.source))
        if not self._still_valid(copy.source):
            return False
        header = Page(PAGE_PROTOCOL_VERSION, copy.target, len(data), zlib.crc32(data))
        await _send(self._stream, header, data)
        return True


class PageReceiver:
    """The other end of `TcpPages`: stores what arrives whole."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        target: PagePool,
        accepts: Callable[[PageRef], bool],
        stored: Callable[[PageRef], None],
    ) -> None:
        """Use a stream that the caller opened and will close.

        `accepts(target)`: whether that slot is still meant for this page; asked once all of it is
        here, right before it is stored. `stored(target)`: told right after, before the receipt.
        """
        self._stream = stream
        self._reader = _Reader(stream)
        self._target = target
        self._accepts = accepts
        self._stored = stored

    async def serve(self) -> None:
        """Receive batches until the sender closes the stream.

        Raises TransferCut when it ends within a batch and ProtocolError when the sender is at fault;
        pages stored before remain good.
        """
        answers: list[bool] = []
        while True:
            if not answers and await self._reader.ended():
                return
            match await self._reader.header(_header_decoder):
                case Page() as page:
                    answers.append(await self._receive_page(page))
                case BatchEnd(number=number, pages=pages):
                    if pages != len(answers):
                        raise ProtocolError(f"batch {number} ends after {len(answers)} of {pages} pages")
                    await _send(self._stream, Receipt(number, answers))
                    answers = []

    async def _receive_page(self, page: Page) -> bool:
        if page.version != PAGE_PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer sends pages in version {page.version}, this is {PAGE_PROTOCOL_VERSION}"
            )
        if page.size != self._target.page_bytes:
            raise ProtocolError(f"a page of {page.size} bytes, those here have {self._target.page_bytes}")
        try:
            slot = self._target.slot(page.target)
        except IndexError as error:
            raise ProtocolError(str(error)) from None
        data = await self._reader.exactly(page.size)
        if zlib.crc32(data) != page.checksum:
            raise ProtocolError(f"the bytes of {page.target} do not match their checksum")
        if not self._accepts(page.target):
            return False
        slot[:] = data
        self._stored(page.target)
        return True
