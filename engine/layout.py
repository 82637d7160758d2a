"""The layout of the shared segments: page metadata, token-log arena, vitals.

The launcher creates each segment as a sealed memfd, filled with zeros, and passes it to every
actor. These classes are views over a buffer; they hold no state of their own, so that whatever
they show survives the death of any actor. Words are 64 bits, little endian, aligned; one word is
stored at once, and the word that makes a record valid is always stored last.
"""

from __future__ import annotations

from typing import NamedTuple, NoReturn

import msgspec

from engine.lifecycle import PAGE, IllegalTransition, PageEvent, PageState
from engine.shapes import PageRef

WORD = 8
MASK32 = 0xFFFF_FFFF


class Owner(NamedTuple):
    """The incarnation that may write a page, by the ordinal of its actor in the topology."""

    ordinal: int
    epoch: int


class PageRecord(NamedTuple):
    """What the metadata says of one page."""

    generation: int
    state: PageState
    owner: Owner
    request: int
    choice: int
    term: int
    block: int
    valid: int


class Seal(NamedTuple):
    """What is published with a page that is full: what it holds, and how to tell that it still does."""

    key: bytes
    """The chain key of the tokens up to its end (`engine.chain`); zeros: it is never found by its tokens."""
    parent: bytes
    """The key of the page before it, or the root of the chain."""
    tokens: bytes
    """Its tokens, little-endian u32."""
    checksum: int | None
    """CRC-32 of its bytes; None when nobody computed one."""


NO_KEY = bytes(16)


class PageTable:
    """Metadata of every page of a pool: records, the tokens of full pages, and who holds which page.

        word 0   generation (32) | state (8)            stored last
        word 1   request
        word 2   choice (16) | term (32)
        word 3   block index in its sequence (32) | valid slots (32)
        word 4   owner ordinal (16) | owner epoch (32)
        word 5,6 chain key of the tokens up to the end of the page, once sealed
        word 7   origin: ordinal (16) | epoch (32) of the actor that first filled it
        word 8   checksum of the page's bytes (32) | 1 << 32 when there is one, once sealed
        word 9,10  chain key of the page before it, once sealed
        then     [pages][page_tokens] u32: the tokens of a page, once sealed
        then     [actors][2] words: the epoch whose row of holders follows, of an even and an odd one
        then     [actors][2][pages] bytes: 1 where that incarnation of the actor holds the page

    Single writer of a record: the allocator while the page is FREE and when it leases or frees it,
    else the owner, who may write the page's bytes too until it is SEALED. A hand-over stores the new
    owner, by the new owner. A row of holders is written by its own incarnation only, and cleared by the
    allocator when that incarnation is proven gone; the next one has the other row. A page that has a
    holder is not freed, so whoever takes a page over holds it before the one it comes from lets go.
    """

    WORDS = 16
    RECORD_BYTES = WORDS * WORD

    def __init__(self, buffer: memoryview, pages: int, page_tokens: int, actors: int, pool: int = 0) -> None:
        records = pages * self.RECORD_BYTES
        epochs = records + pages * page_tokens * 4
        rows = epochs + 2 * actors * WORD
        self._bytes = buffer[:records].cast("B")
        self.words = self._bytes.cast("Q")
        self._tokens = buffer[records:epochs].cast("B")
        self._epochs = buffer[epochs:rows].cast("B").cast("Q")
        self._rows = buffer[rows : self.size(pages, page_tokens, actors)].cast("B")
        self.pages = pages
        self.page_tokens = page_tokens
        self.actors = actors
        self.pool = pool

    @classmethod
    def size(cls, pages: int, page_tokens: int, actors: int) -> int:
        """Bytes of a table."""
        return pages * (cls.RECORD_BYTES + 4 * page_tokens) + 2 * actors * (WORD + pages)

    def record(self, page: int) -> PageRecord:
        """Everything the metadata says of a page."""
        words = self.words
        at = page * self.WORDS
        head, place, fill, owner = words[at], words[at + 2], words[at + 3], words[at + 4]
        return PageRecord(
            generation=head >> 32,
            state=PageState(head & 0xFF),
            owner=Owner(owner >> 32, owner & MASK32),
            request=words[at + 1],
            choice=place >> 32,
            term=place & MASK32,
            block=fill >> 32,
            valid=fill & MASK32,
        )

    def state(self, page: int) -> PageState:
        """The state alone."""
        return STATES[self.words[page * self.WORDS] & 0xFF]

    def states(self) -> bytes:
        """The states of all pages, a byte each: hundreds of times as fast as one after the other."""
        return self._bytes[:: self.RECORD_BYTES].tobytes()

    def owner(self, page: int) -> Owner:
        """The owner alone."""
        word = self.words[page * self.WORDS + 4]
        return Owner(word >> 32, word & MASK32)

    def origin(self, page: int) -> Owner:
        """Who first filled it."""
        word = self.words[page * self.WORDS + 7]
        return Owner(word >> 32, word & MASK32)

    def block(self, page: int) -> int:
        """The block index alone."""
        return self.words[page * self.WORDS + 3] >> 32

    def ref(self, page: int) -> PageRef:
        """The page's name in its present generation."""
        return PageRef(self.pool, page, self.words[page * self.WORDS] >> 32)

    def is_current(self, ref: PageRef) -> bool:
        """Whether the name still means the same life of the page."""
        return (
            ref.pool == self.pool
            and 0 <= ref.index < self.pages
            and self.words[ref.index * self.WORDS] >> 32 == ref.generation
        )

    def lease(self, page: int, owner: Owner) -> PageRef:
        """FREE → LEASED, by the allocator."""
        at = page * self.WORDS
        words = self.words
        head = words[at]
        if (state := LEASE[head & 0xFF]) < 0:
            _refuse(head, PageEvent.LEASE)
        leased = head & ~0xFF | state
        words[at + 1 : at + 11] = NOTHING
        words[at + 4] = words[at + 7] = owner.ordinal << 32 | owner.epoch
        words[at] = leased
        return PageRef(self.pool, page, leased >> 32)

    def open(self, page: int, request: int, choice: int, term: int, block: int) -> None:
        """LEASED → OPEN, by the owner: the page becomes block `block` of a sequence."""
        at = page * self.WORDS
        words = self.words
        head = words[at]
        if (state := OPEN[head & 0xFF]) < 0:
            _refuse(head, PageEvent.OPEN)
        words[at + 1] = request
        words[at + 2] = choice << 32 | term
        words[at + 3] = block << 32
        words[at] = head & ~0xFF | state

    def fill(self, page: int, valid: int) -> None:
        """Publish how many slots of an OPEN page are valid, before any token that depends on it."""
        at = page * self.WORDS + 3
        self.words[at] = self.words[at] & ~MASK32 | valid

    def seal(self, page: int, seal: Seal | None = None) -> None:
        """OPEN → SEALED, by the owner: all slots are valid, nobody writes it again.

        `seal` says what it holds; a page without one is nobody's but its holders'.
        """
        if seal is not None:
            at, words = page * self.WORDS, self.words
            words[at + 5 : at + 7] = memoryview(seal.key).cast("Q")
            words[at + 9 : at + 11] = memoryview(seal.parent).cast("Q")
            words[at + 8] = 0 if seal.checksum is None else seal.checksum | 1 << 32
            size = 4 * self.page_tokens
            self._tokens[page * size : (page + 1) * size] = seal.tokens
        at = page * self.WORDS
        head = self.words[at]
        if (state := SEAL[head & 0xFF]) < 0:
            _refuse(head, PageEvent.SEAL)
        self.words[at] = head & ~0xFF | state

    def sealed(self, page: int) -> Seal:
        """What a SEALED page was published with."""
        at, size = page * self.WORDS, 4 * self.page_tokens
        checksum = self.words[at + 8]
        return Seal(
            bytes(self.words[at + 5 : at + 7]),
            bytes(self.words[at + 9 : at + 11]),
            bytes(self._tokens[page * size : (page + 1) * size]),
            checksum & MASK32 if checksum >> 32 else None,
        )

    def is_sealed_as(self, page: int, key: bytes, parent: bytes, tokens: bytes) -> bool:
        """Whether a SEALED page was published with these."""
        at, size = page * self.RECORD_BYTES, 4 * self.page_tokens
        return (
            self._bytes[at + 5 * WORD : at + 7 * WORD] == key
            and self._bytes[at + 9 * WORD : at + 11 * WORD] == parent
            and self._tokens[page * size : (page + 1) * size] == tokens
        )

    def adopt(self, page: int, owner: Owner, term: int) -> None:
        """Take a page over in a hand-over: term first, the owner (which makes it ours) last."""
        at = page * self.WORDS
        self.words[at + 2] = self.words[at + 2] & ~MASK32 | term
        self.words[at + 4] = owner.ordinal << 32 | owner.epoch

    def free(self, page: int) -> None:
        """→ FREE with the next generation, by the allocator."""
        at = page * self.WORDS
        words = self.words
        head = words[at]
        if (state := FREE[head & 0xFF]) < 0:
            _refuse(head, PageEvent.FREE)
        words[at] = ((head >> 32) + 1 & MASK32) << 32 | state

    def claim(self, owner: Owner) -> memoryview:
        """A new incarnation takes a row of holders, empty: a byte a page, 1 where it holds the page."""
        row = self._row(owner)
        row[:] = bytes(self.pages)
        self._epochs[self._row_number(owner)] = owner.epoch
        return row

    def holders(self, owner: Owner) -> memoryview | None:
        """The row of an incarnation; None when it has none, or a later one has it."""
        return self._row(owner) if self._epochs[self._row_number(owner)] == owner.epoch else None

    def held(self, page: int) -> bool:
        """Whether any incarnation holds the page, a dead one too as long as its row was not cleared."""
        return any(self._rows[page :: self.pages])

    def holding(self) -> list[Owner]:
        """The incarnations that hold any page."""
        rows = [Owner(number // 2, epoch) for number, epoch in enumerate(self._epochs) if epoch]
        return [owner for owner in rows if any(self._row(owner))]

    def _row_number(self, owner: Owner) -> int:
        return owner.ordinal * 2 + owner.epoch % 2

    def _row(self, owner: Owner) -> memoryview:
        start = self._row_number(owner) * self.pages
        return self._rows[start : start + self.pages]


# The transition table by numbers: an enumeration as a key of a dictionary costs ten times the rest.

STATES = tuple(PageState)
LEASE, OPEN, SEAL, FREE = (
    tuple(PAGE.get((state, event), -1) for state in PageState)
    for event in (PageEvent.LEASE, PageEvent.OPEN, PageEvent.SEAL, PageEvent.FREE)
)
NOTHING = memoryview(bytes(10 * WORD)).cast("Q")


def _refuse(head: int, event: PageEvent) -> NoReturn:
    """A page with this first word is in a state that has no such event."""
    raise IllegalTransition(f"PageState.{STATES[head & 0xFF].name} has no {event.name}")


class LogRecord(NamedTuple):
    """One request of the arena, as a reader finds it."""

    request: int
    choice: int
    term: int
    prompt_length: int
    tokens: tuple[int, ...]
    parameters: bytes


class TokenLogArena:
    """The token logs of all open requests, in slots of a constant size.

        word 0   request (0 = the slot is free)         stored last at open
        word 1   choice (32) | term (32)
        word 2   prompt length
        word 3   length: prompt + committed tokens      stored after the token it counts
        word 4   bytes of the parameters
        then     PARAMETER_BYTES of encoded parameters (the admission record)
        then     capacity × u32 tokens

    A token is committed when word 3 counts it. Slots belong to the gateways, `slots_each` a
    gateway in order of their ordinals; only the owner writes.
    """

    HEADER_WORDS = 8
    PARAMETER_BYTES = 32768
    """300 biases and 64 stop tokens take 5 KiB at most, four stop strings 16, a ticket and a key 1.

    Memory that nobody writes costs nothing.
    """

    def __init__(self, buffer: memoryview, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.stride = self.slot_bytes(capacity)
        self._bytes = buffer[: slots * self.stride].cast("B")
        self._words = self._bytes.cast("Q")
        self._tokens = self._bytes.cast("I")

    @classmethod
    def slot_bytes(cls, capacity: int) -> int:
        """Bytes of one slot, a multiple of 64."""
        return -(-(cls.HEADER_WORDS * WORD + cls.PARAMETER_BYTES + 4 * capacity) // 64) * 64

    def open(self, slot: int, request: int, choice: int, prompt: tuple[int, ...], parameters: bytes) -> None:
        """Write the admission record of a request into a free slot."""
        if len(prompt) > self.capacity or len(parameters) > self.PARAMETER_BYTES:
            raise ValueError(f"admission record too large: {len(prompt)} tokens, {len(parameters)} bytes")
        at = slot * self.stride // WORD
        if self._words[at]:
            raise ValueError(f"log slot {slot} is in use")
        start = slot * self.stride + self.HEADER_WORDS * WORD
        self._bytes[start : start + len(parameters)] = parameters
        first = (start + self.PARAMETER_BYTES) // 4
        for i, token in enumerate(prompt):
            self._tokens[first + i] = token
        self._words[at + 1] = choice << 32
        self._words[at + 2] = len(prompt)
        self._words[at + 4] = len(parameters)
        self._words[at + 3] = len(prompt)
        self._words[at] = request

    def append(self, slot: int, token: int) -> None:
        """Commit one token."""
        at = slot * self.stride // WORD
        length = self._words[at + 3]
        if length >= self.capacity:
            raise ValueError(f"log slot {slot} is full")
        first = (slot * self.stride + self.HEADER_WORDS * WORD + self.PARAMETER_BYTES) // 4
        self._tokens[first + length] = token
        self._words[at + 3] = length + 1

    def set_term(self, slot: int, term: int) -> None:
        """Record the request's current term."""
        at = slot * self.stride // WORD + 1
        self._words[at] = self._words[at] & ~MASK32 | term

    def close(self, slot: int) -> None:
        """Free the slot."""
        self._words[slot * self.stride // WORD] = 0

    def read(self, slot: int) -> LogRecord | None:
        """What a slot holds, or None when it is free."""
        at = slot * self.stride // WORD
        request = self._words[at]
        if not request:
            return None
        start = slot * self.stride + self.HEADER_WORDS * WORD
        first = (start + self.PARAMETER_BYTES) // 4
        length, place = self._words[at + 3], self._words[at + 1]
        return LogRecord(
            request=request,
            choice=place >> 32,
            term=place & MASK32,
            prompt_length=self._words[at + 2],
            tokens=tuple(self._tokens[first : first + length]),
            parameters=bytes(self._bytes[start : start + self._words[at + 4]]),
        )


class Vitals:
    """Epoch counters, heartbeats and statistics of every actor, one 4 KiB record an actor.

    word 0   epoch: how often the actor was started; the launcher writes it
    word 1   heartbeat: goes up while the actor's event loop turns; the actor writes it
    word 2   sequence lock of the statistics: odd while they are being written
    word 3   bytes of the statistics
    from 64  statistics(), msgpack, for whoever looks (status page, metrics, tests)
    """

    BYTES = 4096
    STATISTICS_AT = 64

    def __init__(self, buffer: memoryview, actors: int) -> None:
        self.actors = actors
        self._bytes = buffer[: actors * self.BYTES].cast("B")
        self._words = self._bytes.cast("Q")

    def epoch(self, ordinal: int) -> int:
        """The epoch of the newest incarnation; 0 before the first."""
        return self._words[ordinal * self.BYTES // WORD]

    def next_epoch(self, ordinal: int, after: int = 0) -> int:
        """Count one more start and return its epoch, which is later than `after`."""
        at = ordinal * self.BYTES // WORD
        self._words[at] = max(self._words[at], after) + 1
        return self._words[at]

    def beat(self, ordinal: int) -> None:
        """The event loop turned."""
        self._words[ordinal * self.BYTES // WORD + 1] += 1

    def heartbeat(self, ordinal: int) -> int:
        """How often the event loop turned."""
        return self._words[ordinal * self.BYTES // WORD + 1]

    def publish(self, ordinal: int, statistics: dict[str, int | float]) -> None:
        """Show the actor's statistics; what does not fit is left out, key by key from the end."""
        body = msgspec.msgpack.encode(statistics)
        while len(body) > self.BYTES - self.STATISTICS_AT:
            statistics = dict(list(statistics.items())[:-1])
            body = msgspec.msgpack.encode(statistics)
        at = ordinal * self.BYTES // WORD
        lock = self._words[at + 2] | 1
        self._words[at + 2] = lock
        start = ordinal * self.BYTES + self.STATISTICS_AT
        self._bytes[start : start + len(body)] = body
        self._words[at + 3] = len(body)
        self._words[at + 2] = lock + 1

    def statistics(self, ordinal: int) -> dict[str, int | float]:
        """The statistics last published; empty before the first, or if the writer died writing."""
        at = ordinal * self.BYTES // WORD
        start = ordinal * self.BYTES + self.STATISTICS_AT
        for _ in range(100):
            lock = self._words[at + 2]
            body = bytes(self._bytes[start : start + self._words[at + 3]])
            if lock & 1 == 0 and self._words[at + 2] == lock:
                return msgspec.msgpack.decode(body, type=dict[str, int | float]) if body else {}
        return {}
