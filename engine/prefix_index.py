"""The index of cached pages: which pages hold the longest prefix of a sequence that anybody has computed.

    an entry = (page, key, parent key, tokens of the page)      keys are those of engine/chain.py
    one entry a page, one page a key                            (both tables hold the same entries)
    children of a key = entries whose parent it is              (its own page may be gone, or come later)
    a run = the whole chunk that ends with its key: the key above it, its tokens, its pages.
        all its pages are in the index, linked parent to child, the first to the key above,
        and their tokens, joined, are the run's

    root ← [page][page] … [page]  ← [page][page] … [page]  ←  …      a run each, while chunks are whole
            one hash, one look-up,   one hash, one look-up,
            one comparison           one comparison

A hit compares all tokens and every link from the root on, not the hash alone (field report 13). A look-up
ends at the first page that is not there.

Runs are only remembered: the first look-up that passes a whole chunk puts its run together, by one hash and
from child to parent, so nothing needs to know at which depth a page is, and entries may come in any order. A
page without children can only be in the run that ends with it, which goes with it. Whoever takes a page away
that has children makes all runs be put together anew, which costs less than knowing each page's runs.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from engine.chain import CHUNK_PAGES, KEY_BYTES, TOKEN_BYTES, Chain, page_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine.core import Statistics


class Refused(Enum):
    """Why a page is not in the index although no other page can stand in for it."""

    COLLISION = "the key stands for other tokens, or for another parent"


class _Entry(NamedTuple):
    page: int
    key: bytes
    parent: bytes
    tokens: bytes


class _Run(NamedTuple):
    above: bytes
    tokens: bytes
    pages: tuple[int, ...]


class PrefixIndex:
    """The pages of one pool by the keys of what they hold.

    `collisions` counts the times that a key stood for other tokens or another parent, at an insertion or a
    look-up; `duplicates` the insertions of what another page holds already.
    """

    def __init__(self, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"a page holds at least one token, not {page_tokens}")
        self.page_tokens = page_tokens
        self._page_bytes = page_tokens * TOKEN_BYTES
        self._entries: dict[int, _Entry] = {}
        self._by_key: dict[bytes, _Entry] = {}
        self._children: dict[bytes, int] = {}
        self._runs: dict[bytes, _Run] = {}
        self.collisions = 0
        self.duplicates = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: object) -> bool:
        return page in self._entries

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    # ── what is in it ─────────────────────────────────────────────────────────────────────────

    def insert(
        self, page: int, key: bytes, parent: bytes, tokens: bytes | memoryview
    ) -> int | Refused | None:
        """Take a page in: its key, the key of the page before it (or the root), and its own tokens.

        Returns
        - None when the page is in the index now (or was, just so);
        - another page's number when that one holds the same already and may be used instead;
        - `Refused.COLLISION` when the key is there with other tokens or another parent: the page is right
          for its own sequence and nobody else's. What comes behind it in that sequence must not be
          inserted either, since its keys cannot tell the two prefixes apart.

        In the last two cases nothing changes but a count. Raises ValueError for a page that is in under
        another key, and for keys and tokens of a wrong length.
        """
        entry = _Entry(page, key, parent, bytes(tokens))
        self._validate(entry)
        mine = self._entries.get(page)
        if mine is not None:
            if mine != entry:
                raise ValueError(f"page {page} is in the index as something else")
            return None
        there = self._by_key.get(key)
        if there is not None:
            if there.parent != parent or there.tokens != entry.tokens:
                self.collisions += 1
                return Refused.COLLISION
            self.duplicates += 1
            return there.page
        self._entries[page] = self._by_key[key] = entry
        self._children[parent] = self._children.get(parent, 0) + 1
        return None

    def _validate(self, entry: _Entry) -> None:
        if len(entry.key) != KEY_BYTES or len(entry.parent) != KEY_BYTES:
            raise ValueError(f"a key has {KEY_BYTES} bytes, not {len(entry.key)} and {len(entry.parent)}")
        if entry.key == entry.parent:
            raise ValueError(f"page {entry.page} cannot be its own parent")
        if len(entry.tokens) != self._page_bytes:
            raise ValueError(f"{len(entry.tokens)} bytes are not one page of {self._page_bytes}")

    def remove(self, page: int) -> None:
        """Forget a page; its children stay, out of reach until its key is back. KeyError if it is not in."""
        entry = self._entries.pop(page)
        del self._by_key[entry.key]
        others = self._children.pop(entry.parent) - 1
        if others:
            self._children[entry.parent] = others
        if entry.key in self._children:
            self._runs.clear()
        else:
            self._runs.pop(entry.key, None)

    def find(self, key: bytes) -> int | None:
        """The page of a key. Whoever reads it compares the tokens first."""
        entry = self._by_key.get(key)
        return None if entry is None else entry.page

    def key_of(self, page: int) -> bytes:
        """The key of a page; like all that ask for a page: KeyError if it is not in."""
        return self._entries[page].key

    def tokens_of(self, page: int) -> bytes:
        """The tokens of a page, as the chain reads them."""
        return self._entries[page].tokens

    def parent_of(self, page: int) -> bytes:
        """The key of the page before it, whether that one is in or not; for a first page the root."""
        return self._entries[page].parent

    def children(self, page: int) -> int:
        """How many pages in the index come right behind this one."""
        return self._children.get(self._entries[page].key, 0)

    def is_leaf(self, page: int) -> bool:
        """Whether removing it leaves no page out of reach."""
        return self.children(page) == 0

    # ── look-up ───────────────────────────────────────────────────────────────────────────────

    def lookup(self, root: bytes, tokens: bytes | memoryview, most: int | None = None) -> list[int]:
        """The pages of the longest cached prefix of the tokens, in order; at most `most` of them.

        One call of the hash a chunk, as long as whole chunks are there; then one a page of the chunk that
        is not.
        """
        data = bytes(tokens)
        count = len(data) // self._page_bytes
        if most is not None:
            if most < 0:
                raise ValueError(f"at most {most} pages cannot be looked up")
            count = min(count, most)
        data = data[: count * self._page_bytes]
        size = CHUNK_PAGES * self._page_bytes
        found: list[int] = []
        above = root
        for start in range(0, len(data), size):
            part = data[start : start + size]
            key = page_key(above, part)
            run = self._runs.get(key)
            if run is not None and run.tokens == part and run.above == above:
                found += run.pages
            else:
                pages = self._link(above, key, part)
                if pages is None:
                    return found + self._walk(above, part)
                found += pages
            above = key
        return found

    def _link(self, above: bytes, key: bytes, part: bytes) -> list[int] | None:
        """The pages of a chunk or its beginning, found from the last one back; None unless all are there."""
        pages: list[int] = []
        tokens: list[bytes] = []
        link = key
        for _ in range(len(part) // self._page_bytes):
            entry = self._by_key.get(link)
            if entry is None:
                return None
            page, _, link, own = entry
            pages.append(page)
            tokens.append(own)
        pages.reverse()
        tokens.reverse()
        if link != above or b"".join(tokens) != part:
            return None
        if len(pages) == CHUNK_PAGES:
            self._runs[key] = _Run(above, part, tuple(pages))
        return pages

    def _walk(self, above: bytes, part: bytes) -> list[int]:
        """The first pages of a chunk as far as they are there, one after the other."""
        pages: list[int] = []
        chain = Chain(above, self.page_tokens)
        for start in range(0, len(part), self._page_bytes):
            parent, tokens = chain.parent, part[start : start + self._page_bytes]
            entry = self._by_key.get(chain.append(tokens))
            if entry is None:
                break
            if entry.tokens != tokens or entry.parent != parent:
                self.collisions += 1
                break
            pages.append(entry.page)
        return pages

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        assert {entry.key: entry for entry in self._entries.values()} == self._by_key
        assert len(self._by_key) == len(self._entries), "two pages have one key"
        children: dict[bytes, int] = {}
        for page, entry in self._entries.items():
            assert entry.page == page, f"page {page} is filed as {entry.page}"
            self._validate(entry)
            children[entry.parent] = children.get(entry.parent, 0) + 1
        assert children == self._children, "children are miscounted"
        for key, run in self._runs.items():
            assert page_key(run.above, run.tokens) == key, "a run is filed under another's key"
            assert len(run.pages) == CHUNK_PAGES, f"a run has {len(run.pages)} pages"
            entries = [self._entries[page] for page in run.pages]
            links = [run.above, *(entry.key for entry in entries)]
            assert links[-1] == key, "a run ends with another page"
            assert [entry.parent for entry in entries] == links[:-1], "the pages of a run are not linked"
            assert b"".join(entry.tokens for entry in entries) == run.tokens, "a run has other tokens"

    def statistics(self) -> Statistics:
        """Pages and remembered runs in it now; duplicates and collisions so far."""
        return {
            "pages_indexed": len(self._entries),
            "runs_remembered": len(self._runs),
            "duplicates": self.duplicates,
            "collisions": self.collisions,
        }
