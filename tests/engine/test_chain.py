"""The chain: one key a whole page, the same whichever way it is computed, never the same for two prefixes."""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import chain
from engine.chain import CHUNK_PAGES, KEY_BYTES, Chain, chain_root, page_keys, token_bytes

ROOT = chain_root("m")
texts = st.text(st.sampled_from("ab\0\ud800é"), max_size=3)
page_sizes = st.sampled_from([1, 2, 8, 16])


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, bytes]:
    """The size of a page, and tokens of up to three chunks of such pages, the last page perhaps not full."""
    page_tokens = draw(page_sizes)
    pages = draw(st.integers(0, 3 * CHUNK_PAGES + 1))
    rest = draw(st.integers(0, page_tokens - 1))
    count = pages * page_tokens + rest
    few = draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5))
    return page_tokens, token_bytes([few[place % len(few)] for place in range(count)])


def definition(root: bytes, tokens: bytes, page_tokens: int, page: int) -> bytes:
    """The key of a page as the module's docstring says it, from nothing but the tokens."""
    size = page_tokens * 4
    chunk = page // CHUNK_PAGES
    above = root if chunk == 0 else definition(root, tokens, page_tokens, chunk * CHUNK_PAGES - 1)
    return blake2b(
        tokens[chunk * CHUNK_PAGES * size : (page + 1) * size], digest_size=KEY_BYTES, key=above
    ).digest()


# ── roots and tokens ──────────────────────────────────────────────────────────────────────────


@given(st.tuples(texts, texts), st.tuples(texts, texts))
def test_roots_are_equal_only_for_equal_identities_and_salts(
    one: tuple[str, str], two: tuple[str, str]
) -> None:
    assert (chain_root(*one) == chain_root(*two)) == (one == two)
    assert len(chain_root(*one)) == KEY_BYTES


def test_where_the_identity_ends_and_the_salt_begins_is_told_apart() -> None:
    assert len({chain_root("ab", ""), chain_root("a", "b"), chain_root("", "ab"), chain_root("ab")}) == 3


@given(st.lists(st.integers(0, 2**32 - 1), max_size=20))
def test_tokens_are_32_bits_each_little_endian(tokens: list[int]) -> None:
    expected = b"".join(token.to_bytes(4, "little") for token in tokens)
    assert token_bytes(tokens) == token_bytes(tuple(tokens)) == expected


@pytest.mark.parametrize("token", [-1, 2**32, 1.5])
def test_what_is_no_token_is_said(token: float) -> None:
    with pytest.raises(ValueError, match="not an unsigned number of 32 bits"):
        token_bytes([1, token])  # type: ignore[list-item]


# ── keys ──────────────────────────────────────────────────────────────────────────────────────


@given(sequences())
def test_keys_are_as_defined_and_only_whole_pages_have_one(sequence: tuple[int, bytes]) -> None:
    page_tokens, tokens = sequence
    pages = len(tokens) // 4 // page_tokens
    assert page_keys(ROOT, tokens, page_tokens) == [
        definition(ROOT, tokens, page_tokens, page) for page in range(pages)
    ]


@given(sequences(), st.data())
def test_a_chain_is_the_same_appended_to_and_resumed(
    sequence: tuple[int, bytes], data: st.DataObject
) -> None:
    page_tokens, tokens = sequence
    keys = page_keys(ROOT, tokens, page_tokens)
    size = 4 * page_tokens
    at = data.draw(st.integers(0, len(keys)), label="resumed at")
    resumed = Chain.resume(ROOT, page_tokens, memoryview(tokens)[: at * size])
    assert resumed.pages == at
    assert resumed.parent == (keys[at - 1] if at else ROOT)
    for page in range(at, len(keys)):
        assert resumed.append(tokens[page * size : (page + 1) * size]) == keys[page]
        assert resumed.parent == keys[page]
        assert resumed.pages == page + 1


@given(sequences(), sequences(), st.sampled_from(["", "s"]), st.sampled_from(["", "s"]))
def test_pages_share_a_key_exactly_when_all_before_them_is_equal(
    one: tuple[int, bytes], two: tuple[int, bytes], salt: str, other_salt: str
) -> None:
    """The size of a page is part of the identity, as its caller has it."""
    known: dict[bytes, tuple[int, str, bytes]] = {}
    for (page_tokens, tokens), its_salt in ((one, salt), (two, other_salt)):
        root = chain_root(f"m/{page_tokens}", its_salt)
        for page, key in enumerate(page_keys(root, tokens, page_tokens)):
            prefix = (page_tokens, its_salt, tokens[: (page + 1) * page_tokens * 4])
            assert known.setdefault(key, prefix) == prefix
    assert len(set(known.values())) == len(known), "one prefix has two keys"


@given(sequences(), st.data())
def test_one_other_token_changes_the_keys_from_its_page_on(
    sequence: tuple[int, bytes], data: st.DataObject
) -> None:
    page_tokens, tokens = sequence
    keys = page_keys(ROOT, tokens, page_tokens)
    if not keys:
        return
    place = data.draw(st.integers(0, len(keys) * page_tokens * 4 - 1), label="byte")
    changed = bytearray(tokens)
    changed[place] ^= 1
    page = place // (page_tokens * 4)
    others = page_keys(ROOT, bytes(changed), page_tokens)
    assert others[:page] == keys[:page]
    assert not set(others[page:]) & set(keys)


def test_views_of_words_are_read_as_bytes_are() -> None:
    tokens = array("I", range(40))
    assert page_keys(ROOT, memoryview(tokens), 8) == page_keys(ROOT, token_bytes(tokens), 8)
    assert Chain(ROOT, 8).append(memoryview(tokens)[:8]) == page_keys(ROOT, token_bytes(range(8)), 8)[0]


def test_to_resume_costs_one_hash_a_whole_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counted(tokens: bytes = b"", **how: Any) -> object:
        hashed.append(len(tokens))
        return blake2b(tokens, **how)

    monkeypatch.setattr(chain, "blake2b", counted)
    Chain.resume(ROOT, 8, token_bytes(range((3 * CHUNK_PAGES + 5) * 8)))
    assert [size for size in hashed if size] == [CHUNK_PAGES * 8 * 4] * 3
    assert len(hashed) <= 3 + 2, "and what is begun but holds no whole chunk"


# ── what is no page ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tokens", [0, 7, 9, 16])
def test_a_page_that_is_not_full_has_no_key(tokens: int) -> None:
    """Field report 13: the hash of a half-filled page cannot come back to life, since there is none."""
    grown = Chain(ROOT, 8)
    first = grown.append(token_bytes(range(8)))
    with pytest.raises(ValueError, match="not one page"):
        grown.append(token_bytes(range(tokens)))
    assert (grown.pages, grown.parent) == (1, first), "and nothing came of it"
    assert grown.append(token_bytes(range(8, 16))) == page_keys(ROOT, token_bytes(range(16)), 8)[1]


def test_bad_beginnings_are_said() -> None:
    with pytest.raises(ValueError, match="not whole pages"):
        Chain.resume(ROOT, 8, token_bytes(range(9)))
    with pytest.raises(ValueError, match="a root has 16 bytes"):
        Chain(b"", 8)
    with pytest.raises(ValueError, match="at least one token"):
        Chain(ROOT, 0)
