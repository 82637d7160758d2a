"""How far one choice got, and what is new in what is told of it.

A choice is told from where it stood (a resumed stream) or from its beginning (a request that had to be
asked again: the same parameters and seed give the same text, to the bit). Told again, what the reader
has already is left out, and its digest must be that of what the reader has: never a guess.

    told:   |──────────── left out, hashed ────────────|── new ──▶
    reader: |──────────── text, tokens, digest ────────|
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from engine.client.errors import Diverged
from engine.transcript import TAIL_BYTES, Position, tail_hash

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.client.events import Finish
    from engine.stream_protocol import ScoredToken

Tokens = tuple["ScoredToken", ...]


class Progress:
    """One choice, as its reader has it."""

    def __init__(self) -> None:
        self.finish: Finish | None = None
        self._sequence = 0
        self._tail = ""
        self._digest = hashlib.sha256()
        self._chars = 0
        self._tokens = 0
        self._left_out = hashlib.sha256()
        self._chars_over = 0
        self._tokens_over = 0
        self._end_over = False

    @property
    def behind(self) -> bool:
        """It is told again and has not come to what is new: it cannot say a place."""
        return bool(self._chars_over or self._tokens_over or self._end_over)

    def position(self) -> Position:
        """The place to go on from."""
        return Position(self._sequence, tail_hash(self._tail))

    def rewind(self) -> None:
        """It will be told from its beginning."""
        self._left_out = hashlib.sha256()
        self._chars_over, self._tokens_over = self._chars, self._tokens
        self._end_over = self.finish is not None
        self._sequence = 0

    def push(self, text: str, tokens: Sequence[ScoredToken], sequence: int) -> tuple[str, Tokens]:
        """Take what was told; what of it is new. Diverged when it is not what was told before."""
        if not self.behind and sequence < self._sequence:
            raise Diverged(f"the gateway went back from place {self._sequence} to {sequence}")
        again = text[: self._chars_over]
        self._left_out.update(again.encode())
        self._chars_over -= len(again)
        if again and not self._chars_over and self._left_out.digest() != self._digest.digest():
            raise Diverged("asked again, the request has another answer than before")
        text = text[len(again) :]
        news = tuple(tokens[self._tokens_over :])
        self._tokens_over -= len(tokens) - len(news)
        if text and self.finish is not None:
            raise Diverged("the answer goes on behind its end")
        self._digest.update(text.encode())
        # A tail of so many characters has at least so many bytes.
        self._tail = (self._tail + text)[-TAIL_BYTES:]
        self._chars += len(text)
        self._tokens += len(news)
        if not (self._chars_over or self._tokens_over):
            self._sequence = sequence
        return text, news

    def end(self, finish: Finish) -> bool:
        """It is complete; whether that is new. Diverged when it ended before what was told before."""
        if self._chars_over and finish.reason != "cancelled":
            raise Diverged("asked again, the request has a shorter answer than before")
        self._chars_over = self._tokens_over = 0
        self._end_over = False
        if self.finish is not None:
            return False
        self.finish = finish
        return True
