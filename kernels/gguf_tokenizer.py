"""Build a fast tokeniser from a GGUF file's vocabulary.

Two kinds: "gpt2", byte-level BPE with explicit merges, and "llama", SentencePiece's BPE whose
merges follow from the pieces' scores and whose unknown characters fall back to byte tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import ModelError
from kernels.facts import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernels.gguf_file import GGUFHeader

    PreTokenizer = pre_tokenizers.PreTokenizer

SPACE = "▁"
"""What SentencePiece writes for a space."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Token types of the GGUF specification."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


def build_tokenizer(header: GGUFHeader, vocab_size: int) -> Tokenizer:
    """The tokeniser of the model; `vocab_size` is the number of rows of its embedding.

    Control tokens are special added tokens, user-defined ones plain added tokens, all matched
    verbatim. With `add_special_tokens` the BOS token comes first where the model wants it.
    ModelError when the vocabulary is incomplete, contradictory or of an unknown kind.
    """
    vocabulary = _Vocabulary(header, vocab_size)
    kind = vocabulary.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif kind == "llama":
        tokenizer = _sentence_piece(vocabulary)
    else:
        raise vocabulary.wrong(f"the tokeniser model {shown(kind)} is not supported (only gpt2 and llama)")
    for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if token_type in (UNKNOWN, CONTROL):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == USER_DEFINED and SPACE not in token:
            # One with "▁" is only ever met after normalisation: there it is an ordinary piece.
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    if vocabulary.flag("tokenizer.ggml.add_bos_token", kind == "llama" or vocabulary.pre == "llama-bpe"):
        bos = vocabulary.bos()
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[vocabulary.tokens[bos], "$A"], special_tokens=[(vocabulary.tokens[bos], bos)]
        )
    return tokenizer


def read_chat_template(header: GGUFHeader) -> str | None:
    """The model's chat template, if it has one."""
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(
            f"{header.path}: metadata tokenizer.chat_template is not a text; fetch the file again"
        )
    return template


class _Vocabulary:
    """The tokeniser's metadata, checked to be complete and without contradictions."""

    def __init__(self, header: GGUFHeader, vocab_size: int) -> None:
        self._header = header
        self.tokens: list[str] = self._strings("tokenizer.ggml.tokens")
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for number, token in enumerate(self.tokens) if self.ids[token] != number)
            raise self.wrong(f"the token {shown(twice)} occurs twice in the vocabulary")
        if not 0 < len(self.tokens) <= vocab_size:
            raise self.wrong(f"{len(self.tokens)} tokens for {vocab_size} rows of embedding")
        self.types = self._numbers("tokenizer.ggml.token_type", [NORMAL] * len(self.tokens))
        self.pre = self.text("tokenizer.ggml.pre", "default")

    def scores(self) -> list[float]:
        return self._numbers("tokenizer.ggml.scores", None)

    def merges(self) -> list[tuple[str, str]]:
        pairs = []
        for merge in self._strings("tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not (left in self.ids and right in self.ids and left + right in self.ids):
                raise self.wrong(f"the merge {shown(merge)} names tokens outside the vocabulary")
            pairs.append((left, right))
        return pairs

    def bos(self) -> int:
        bos = self._header.metadata.get("tokenizer.ggml.bos_token_id")
        if type(bos) is not int or not 0 <= bos < len(self.tokens):
            raise self.wrong(f"prompts shall begin with BOS, but tokenizer.ggml.bos_token_id is {bos!r}")
        return bos

    def flag(self, key: str, default: bool) -> bool:
        value = self._header.metadata.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(f"metadata {key} is not a truth value")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._header.metadata.get(key, default)
        if not isinstance(value, str):
            raise self.wrong(f"metadata {key} is missing or not a text")
        return value

    def wrong(self, reason: str) -> ModelError:
        return ModelError(f"{self._header.path}: {reason}; take another model")

    def _strings(self, key: str) -> list[str]:
        value = self._header.metadata.get(key)
        if not isinstance(value, list):
            raise self.wrong(f"metadata {key} is missing or not a list of texts")
        return value

    def _numbers(self, key: str, default: list[Any] | None) -> list[Any]:
        value = self._header.metadata.get(key, default)
        if (
            value is None
            or isinstance(value, str)
            or not hasattr(value, "__len__")
            or len(value) != len(self.tokens)
        ):
            raise self.wrong(f"metadata {key} does not have one number a token")
        return value if isinstance(value, list) else list(value.tolist())


def _byte_level(vocabulary: _Vocabulary) -> Tokenizer:
    if vocabulary.pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise vocabulary.wrong(f"the pre-tokeniser {shown(vocabulary.pre)} is not supported (only {known})")
    model = BPE(vocabulary.ids, vocabulary.merges(), ignore_merges=vocabulary.pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    if vocabulary.pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_PRE_TOKENIZERS[vocabulary.pre]())
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(*patterns: str) -> list[PreTokenizer]:
    """Cut the text at the matches of each pattern in turn, then map its bytes to printable characters."""
    steps: list[PreTokenizer] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _gpt2() -> PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


_PRE_TOKENIZERS: dict[str, Callable[[], list[PreTokenizer]]] = {
    "gpt-2": lambda: [_gpt2()],
    "smollm": lambda: [pre_tokenizers.Digits(individual_digits=True), _gpt2()],
    "llama-bpe": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
    "default": lambda: _split(*_DEFAULT),
}


def _sentence_piece(vocabulary: _Vocabulary) -> Tokenizer:
    unknown = next(
        (token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN),
        None,
    )
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids]
    if missing:
        raise vocabulary.wrong(f"the byte token <0x{missing[0]:02X}> is missing from the vocabulary")
    tokenizer = Tokenizer(
        BPE(
            vocabulary.ids, _merges_by_score(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if vocabulary.flag("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    cleanup: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if len(steps) > 1:
        cleanup.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(cleanup)
    return tokenizer


def _merges_by_score(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """SentencePiece merges the neighbours whose union scores best: rank every split of every piece so."""
    ranked: list[tuple[float, int, int, str, str]] = []
    mergeable = (NORMAL, USER_DEFINED, UNUSED)
    for token, score, kind in zip(vocabulary.tokens, vocabulary.scores(), vocabulary.types, strict=True):
        if kind not in mergeable:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.ids.get(token[:cut]), vocabulary.ids.get(token[cut:])
            if left is None or right is None:
                continue
            if vocabulary.types[left] in mergeable and vocabulary.types[right] in mergeable:
                ranked.append((-score, left, right, token[:cut], token[cut:]))
    return [(left, right) for *_, left, right in sorted(ranked)]
