"""The keys of cached pages: a keyed hash chain over the tokens of a sequence.

    chunk 0                       chunk 1
    [page 0][page 1] … [page 15]  [page 16][page 17] …
     │       │          │          │        │
     K₀      K₁         K₁₅        K₁₆      K₁₇           the key of each whole page

    K of page j in chunk c = BLAKE2b-128(tokens of chunk c up to the end of page j, key = A)
    A = K of the last page of chunk c − 1; for c = 0 the root

So a key stands for all the tokens up to the end of its page and for everything else that K and V depend on,
which is in the root; the last key of a whole chunk costs one call of the hash; and inputs under one A
differ in length or in tokens. A page that is not full has no key.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

KEY_BYTES = 16
CHUNK_PAGES = 16
TOKEN_BYTES = 4


def chain_root(identity: str, salt: str = "") -> bytes:
    """What the keys of all sequences begin with that may share pages: 16 bytes.

    `identity` names everything beside the tokens that K and V depend on (model, weight format, KV dtype, page
    size, numerics id); `salt` is a request's `cache_salt`, which keeps tenants apart. Different pairs have
    different roots: each string's length goes before it.
    """
    root = blake2b(digest_size=KEY_BYTES, person=b"estafet prefix")
    for text in (identity, salt):
        # A salt comes from JSON, which can spell half of a surrogate pair.
        encoded = text.encode("utf-8", "surrogatepass")
        root.update(len(encoded).to_bytes(8, "little"))
        root.update(encoded)
    return root.digest()


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as the chain reads them: unsigned, 32 bits each, little endian. ValueError for other numbers."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError(f"a token is not an unsigned number of 32 bits: {error}") from None


def page_key(above: bytes, tokens: bytes | memoryview) -> bytes:
    """The key of the page that ends a chunk's first `tokens`; `above` is the root or the last chunk's key."""
    return blake2b(tokens, digest_size=KEY_BYTES, key=above).digest()


def page_keys(root: bytes, tokens: bytes | memoryview, page_tokens: int) -> list[bytes]:
    """The keys of all whole pages of a sequence; tokens behind the last whole page do not count."""
    chain = Chain(root, page_tokens)
    data = bytes(tokens)
    size = page_tokens * TOKEN_BYTES
    return [chain.append(data[end - size : end]) for end in range(size, len(data) + 1, size)]


class Chain:
    """The chain of one sequence as it grows, page by page.

    `pages` counts the pages so far, `parent` is the key of the last one, or the root: what the next page's
    entry in the index is linked to. A page has `page_bytes` of tokens.
    """

    __slots__ = ("_hash", "page_bytes", "pages", "parent")

    def __init__(self, root: bytes, page_tokens: int) -> None:
        if len(root) != KEY_BYTES:
            raise ValueError(f"a root has {KEY_BYTES} bytes, not {len(root)}")
        if page_tokens < 1:
            raise ValueError(f"a page holds at least one token, not {page_tokens}")
        self.page_bytes = page_tokens * TOKEN_BYTES
        self.pages = 0
        self.parent = root
        self._hash = _begin(root)

    @classmethod
    def resume(cls, root: bytes, page_tokens: int, tokens: bytes | memoryview) -> Chain:
        """The chain behind all the whole pages so far, from their tokens: one call of the hash a chunk.

        Raises ValueError when the tokens are not whole pages.
        """
        chain = cls(root, page_tokens)
        data = bytes(tokens)
        chain.pages, half = divmod(len(data), chain.page_bytes)
        if half:
            raise ValueError(f"{len(data)} bytes are not whole pages of {chain.page_bytes}")
        size = CHUNK_PAGES * chain.page_bytes
        whole = len(data) - len(data) % size
        for start in range(0, whole, size):
            chain.parent = page_key(chain.parent, data[start : start + size])
        chain._hash = _begin(chain.parent)
        if whole < len(data):
            chain._hash.update(data[whole:])
            chain.parent = chain._hash.digest()
        return chain

    def copy(self) -> Chain:
        """Another one that has come as far."""
        other = Chain.__new__(Chain)
        other.page_bytes, other.pages, other.parent = self.page_bytes, self.pages, self.parent
        other._hash = self._hash.copy()
        return other

    def append(self, tokens: bytes | memoryview) -> bytes:
        """The key of the next page, which holds these tokens. Raises ValueError unless it is a full page."""
        data = bytes(tokens)
        if len(data) != self.page_bytes:
            raise ValueError(f"{len(data)} bytes are not one page of {self.page_bytes}")
        self._hash.update(data)
        self.parent = self._hash.digest()
        self.pages += 1
        if self.pages % CHUNK_PAGES == 0:
            self._hash = _begin(self.parent)
        return self.parent


def _begin(above: bytes) -> blake2b:
    """The hash of a chunk before its first page; its digest after each page is that page's key."""
    return blake2b(digest_size=KEY_BYTES, key=above)
