"""The shape of a KV page: the one description that allocator, kernels and transports share."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

KVDtype = Literal["float32", "float16", "bfloat16", "float8"]
"""float8: e4m3fn codes, with a scale for each token and head; never one a page, which would depend on what
comes later."""

ITEM_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
assert set(ITEM_BYTES) == set(get_args(KVDtype))


class PageShape(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """How the keys and values of `tokens` consecutive positions lie in one page.

    A page is one contiguous run of bytes of the layout

        [layers][2][kv_heads][tokens][head_dim]     (2 = key, value)

    where float8 has the tokens' scales behind each [tokens][head_dim], float32 [tokens]:
    number = code * scale.

    It lies so, so that a page moves between hosts as one piece, and the positions of one head, which
    attention reads in order, are neighbours. A pool is `[pages]` of them, nothing between.
    """

    tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: KVDtype

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        scale = 4 if self.dtype == "float8" else 0
        return self.layers * 2 * self.kv_heads * (self.head_dim * self.item_bytes + scale)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page."""
        return self.tokens * self.token_bytes

    def pages_for(self, positions: int) -> int:
        """Pages that hold the given number of positions."""
        return -(-positions // self.tokens)


class PageRef(msgspec.Struct, frozen=True, array_like=True, gc=False, order=True):
    """The name of one life of a page: a freed page comes back under the next generation."""

    pool: int
    index: int
    generation: int
