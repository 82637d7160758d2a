"""What a reader of a stream sees."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from engine.stream_protocol import CacheUse, ScoredToken


class Piece(msgspec.Struct, frozen=True):
    """More text of a choice: whole characters, never a part of a stop string."""

    text: str
    choice: int = 0
    tokens: tuple[ScoredToken, ...] = ()
    """Tokens that were generated, for who asked for them; they may be ahead of the text."""


class Finish(msgspec.Struct, frozen=True):
    """A choice is complete."""

    reason: Literal["stop", "length", "cancelled"]
    prompt_tokens: int
    completion_tokens: int
    choice: int = 0
    cached_tokens: int | None = None
    """Prompt tokens that were found instead of being computed, with choice 0; None when nobody knows."""
    cache: CacheUse | None = None
    """The same by where they were, for who asked by `x_estafet`."""


Event: TypeAlias = Piece | Finish
