"""What a client sees of a choice: a pure fold over its token log.

    token log ──▶ Detokenizer ──▶ StopFilter ──▶ text that is certain

The *sequence number* of a place counts the tokens folded so far, and one more for the flush that
shows at the end what was held back. The text at a place depends on the log and the parameters
alone, so a reader who says (sequence number, hash of its tail) can be served by whoever has the
log: the same gateway, or one that was started again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from engine.detokenizer import Detokenizer, StopFilter

TAIL_BYTES = 256
TAIL_DIGITS = 16


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How far a client got in one choice."""

    sequence: Annotated[int, Meta(ge=0)]
    tail: Annotated[str, Meta(max_length=64)]
    """`tail_hash` of the text that it has."""


def tail_hash(text: str) -> str:
    """Of the text that a client has of a choice: 16 hexadecimal digits.

    The first 8 bytes of SHA-256 over the last 256 bytes (all, where there are fewer) of the UTF-8 text.
    """
    return _digits(text.encode()[-TAIL_BYTES:])


class Transcript:
    """The fold, and where it stands."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopFilter, hidden: frozenset[int], *, min_tokens: int = 0
    ) -> None:
        """`hidden`: tokens that show no text; `min_tokens`: before so many nothing stops."""
        self._detokenizer = detokenizer
        self._stops = stops
        self._hidden = hidden
        self._min_tokens = min_tokens
        self._tail = b""
        self.tokens = 0
        """Tokens folded."""
        self.hit = False
        """A stop string was found: the text is complete."""
        self._flushed = False

    @property
    def sequence(self) -> int:
        """The sequence number of this place."""
        return self.tokens + self._flushed

    @property
    def tail(self) -> str:
        """`tail_hash` of all text up to this place."""
        return _digits(self._tail)

    def hides(self, token: int) -> bool:
        """Whether a token shows no text."""
        return token in self._hidden

    def push(self, token: int) -> str:
        """Fold one more token; the text that it made certain."""
        self.tokens += 1
        text = "" if token in self._hidden else self._detokenizer.push(token)
        if self.tokens > self._min_tokens:
            text, self.hit = self._stops.push(text)
        return self._shown(text)

    def flush(self) -> str:
        """Fold the end: what was held back in case it became a stop string. Nothing after a hit."""
        assert not self._flushed, "a text ends once"
        self._flushed = True
        if self.hit:
            return ""
        text, hit = self._stops.push(self._detokenizer.finish())
        return self._shown(text if hit else text + self._stops.finish())

    def _shown(self, text: str) -> str:
        if text:
            self._tail = (self._tail + text.encode())[-TAIL_BYTES:]
        return text


def _digits(tail: bytes) -> str:
    return hashlib.sha256(tail).hexdigest()[:TAIL_DIGITS]
