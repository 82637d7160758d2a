"""The tokeniser built from a GGUF vocabulary, against independent tellings of the same rules."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from gguf_files import write_raw_gguf, write_tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from engine.errors import ModelError
from engine.text import TextCodec
from kernels.gguf_file import GGUFHeader, read_header
from kernels.gguf_tokenizer import build_tokenizer, read_chat_template

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

VOCAB = 320


def built(path: Path, vocab_size: int = VOCAB, **metadata: Any) -> Tokenizer:
    write_tiny_gguf(path, metadata=metadata)
    return build_tokenizer(read_header(path), vocab_size)


def test_merges_and_control_tokens_parse_as_single_ids(tmp_path: Path) -> None:
    tokenizer = built(tmp_path / "x.gguf")
    encoded = tokenizer.encode("<|im_start|>user\nthe capital of France<|im_end|>")
    assert encoded.tokens == [
        *("<|im_start|>", "user", "Ċ", "t", "h", "e", "Ġcapital", "Ġof", "Ġ", "France", "<|im_end|>"),
    ]
    assert (encoded.ids[0], encoded.ids[-1]) == (1, 2)
    assert read_chat_template(read_header(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "I'll pay  1234 now!\n\n x", ["I", "'ll", "Ġpay", "Ġ", "Ġ1234", "Ġnow", "!", "ĊĊ", "Ġx"]),
        ("smollm", "in 1999", ["in", "Ġ", "1", "9", "9", "9"]),
        ("llama-bpe", "I'LL 12345 (x)\n\n y", ["I", "'LL", "Ġ", "123", "45", "Ġ(", "x", ")ĊĊ", "Ġy"]),
        ("qwen2", "I'LL 12345\r\ny", ["I", "'LL", "Ġ", "1", "2", "3", "4", "5", "čĊ", "y"]),
        ("default", "a+b 12345", ["a", "+", "b", "Ġ", "123", "45"]),
    ],
)
def test_text_is_cut_as_the_pre_tokeniser_says(
    tmp_path: Path, pre: str, text: str, pieces: list[str]
) -> None:
    cutter = built(tmp_path / "x.gguf", **{"tokenizer.ggml.pre": pre}).pre_tokenizer
    assert isinstance(cutter, pre_tokenizers.PreTokenizer)
    assert [piece for piece, _ in cutter.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"tokenizer.ggml.pre": "kimi"}, "pre-tokeniser 'kimi'"),
        ({"tokenizer.ggml.model": "bert"}, "tokeniser model 'bert'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' occurs twice"),
        ({"tokenizer.ggml.tokens": [str(n) for n in range(321)]}, "321 tokens for 320 rows"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer.ggml.merges": ["a b", "q z"]}, "names tokens outside"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "one number a token"),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, "begin with BOS"),
        ({"tokenizer.ggml.add_bos_token": "yes"}, "not a truth value"),
    ],
)
def test_a_bad_vocabulary_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        built(tmp_path / "x.gguf", **metadata)


def test_bos_comes_first_where_the_model_wants_it(tmp_path: Path) -> None:
    for wanted, pre, ids in (
        ({"tokenizer.ggml.add_bos_token": True}, "smollm", [1]),
        ({"tokenizer.ggml.add_bos_token": False}, "llama-bpe", []),
        ({"tokenizer.ggml.add_bos_token": None}, "llama-bpe", [1]),
        ({"tokenizer.ggml.add_bos_token": None}, "gpt-2", []),
    ):
        tokenizer = built(tmp_path / "x.gguf", **{"tokenizer.ggml.pre": pre, **wanted})
        assert tokenizer.encode("").ids == ids
        codec = TextCodec(tokenizer, None)
        assert codec.encode("end", special=False)[: len(ids)] == ids
        assert codec.encode("end", special=False, bos=False) == codec.encode("end", special=False)[len(ids) :]


# A hand-made SentencePiece vocabulary: (piece, score, type).
PIECES = [
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)),
    *((f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)),
    *(("▁a", -1.0, 1), ("ab", -2.0, 1), ("abc", -3.0, 1), ("▁ab", -4.0, 1), ("bc", -5.0, 1), ("▁▁", -6.0, 1)),
    *(("ca", -7.0, 1), ("▁bca", -8.0, 1), ("b▁", -9.0, 1), ("▁b", -10.0, 1), ("aa", -11.0, 1)),
    *((piece, -100.0 - n, 1) for n, piece in enumerate("▁abcé")),
]
IDS = {piece: number for number, (piece, _, _) in enumerate(PIECES)}


def sentence_piece_codec(path: Path, **changes: Any) -> TextCodec:
    tokens, scores, types = zip(*PIECES, strict=True)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.scores": list(scores),
        "tokenizer.ggml.token_type": list(types),
        "tokenizer.ggml.bos_token_id": 1,
    } | changes
    write_raw_gguf(path, {}, **metadata)
    header: GGUFHeader = read_header(path)
    return TextCodec(build_tokenizer(header, len(PIECES)), None)


def merged_by_score(text: str) -> list[int]:
    """SentencePiece's BPE as its paper tells it: always join the best-scored neighbours, leftmost first."""
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-PIECES[IDS[left + right]][1], place)
            for place, (left, right) in enumerate(pairwise(pieces))
            if left + right in IDS
        ]
        if not joins:
            break
        place = min(joins)[1]
        pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]
    ids = []
    for piece in pieces:
        ids += [IDS[piece]] if piece in IDS else [IDS[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    return sentence_piece_codec(tmp_path_factory.mktemp("spm") / "spm.gguf")


@given(text=st.text(st.sampled_from(" abcéZ€😀\n"), max_size=30))
@settings(max_examples=300)
def test_sentence_piece_merges_by_score(sentence_piece: TextCodec, text: str) -> None:
    assert sentence_piece.encode(text, special=False) == [1, *merged_by_score(text)]
    assert sentence_piece.decode(sentence_piece.encode(text, special=False)) == text


def test_sentence_piece_control_tokens_and_prefix(sentence_piece: TextCodec, tmp_path: Path) -> None:
    assert sentence_piece.encode("</s>", special=True) == [1, 2]
    assert 2 not in sentence_piece.encode("</s>", special=False)
    bare = sentence_piece_codec(tmp_path / "x.gguf", **{"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("ab", special=False) == [1, IDS["ab"]]
    assert bare.decode([IDS["▁ab"]]) == " ab"
    assert sentence_piece.decode([IDS["▁ab"], IDS["▁ab"]]) == "ab ab"


def test_sentence_piece_needs_its_byte_tokens(tmp_path: Path) -> None:
    tokens = [piece for piece, _, _ in PIECES]
    tokens[IDS["<0x41>"]] = "other"
    with pytest.raises(ModelError, match="<0x41> is missing"):
        sentence_piece_codec(tmp_path / "x.gguf", **{"tokenizer.ggml.tokens": tokens})
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.scores"):
        sentence_piece_codec(tmp_path / "x.gguf", **{"tokenizer.ggml.scores": None})


@pytest.fixture(scope="module")
def codec(model_folder: Path) -> TextCodec:
    return TextCodec.load(model_folder)


@pytest.fixture(scope="module")
def peer(model_file: Path) -> PreTrainedTokenizerBase:
    """The same file's tokeniser as transformers builds it."""
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_file.parent, gguf_file=model_file.name)
    # transformers does not know the pre-tokeniser "smollm": SmolLM's own tokenizer.json splits digits first.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


SAMPLES = [
    *(
        "",
        " ",
        "\n",
        "a",
        "Hello, world!",
        "  leading",
        "trailing  ",
        "tabs\tand\r\nlines\n\n\n  end",
        "I'll we've",
    ),
    *(
        "1 22 333 4444 3.14159 1,000,000",
        "½ ² Ⅷ ٣ 一二三",
        "naïve café Ångström",
        "¿Qué? ¡Sí!",
        "日本語のテキスト",
        "한국어",
    ),
    *(
        "Здравствуй, мир",
        "שלום עולם",
        "🙂🙃 👩‍👩‍👧 🇫🇷 👍🏽",
        "e\u0301 vs é",
        "\u200bzero\u200dwidth",
        "\x00\x01\x7f",
    ),
    *(
        "def f(x):\n    return x ** 2  # square\n",
        "{'a': [1, 2], \"b\": null}",
        "http://x.y/?q=1&r=%20#z",
        "a_b-c.d",
    ),
    *(
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|><|im_end|>",
        "x<|endoftext|>y",
        "<|im_start",
        "<jupyter_code>1",
    ),
]


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_ids_equal_those_of_transformers(codec: TextCodec, peer: PreTrainedTokenizerBase) -> None:
    texts = SAMPLES + [left + right for left in SAMPLES for right in SAMPLES]
    for text in texts:
        expected = peer.encode(text, add_special_tokens=False)
        assert codec.encode(text, special=True) == expected, text
        if "<" not in text:
            assert codec.encode(text, special=False) == expected, text
            assert codec.decode(expected) == text


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_ids_equal_those_of_transformers_on_any_text(
    codec: TextCodec, peer: PreTrainedTokenizerBase, text: str
) -> None:
    assert codec.encode(text, special=True) == peer.encode(text, add_special_tokens=False)


@pytest.mark.model
@pytest.mark.filterwarnings("ignore")
def test_chats_equal_those_of_transformers(codec: TextCodec, peer: PreTrainedTokenizerBase) -> None:
    for text in ["What is the capital of France?", *(sample for sample in SAMPLES if "<" not in sample)]:
        messages: list[dict[str, object]] = [
            {"role": "system", "content": text},
            {"role": "user", "content": f"{text} {text}"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": text},
        ]
        for chat in (messages, messages[1:], messages[3:]):
            for prompt in (True, False):
                options: dict[str, Any] = {"add_generation_prompt": prompt}
                assert codec.apply_template(chat, **options) == peer.apply_chat_template(
                    chat, tokenize=False, **options
                )
                assert codec.encode_chat(chat, **options) == peer.apply_chat_template(
                    chat, return_dict=False, **options
                )
