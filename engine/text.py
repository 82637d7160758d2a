"""Text at the edges: tokeniser, chat template, incremental detokenisation, stop strings.

Everything here is a fold over the token log, so a restarted gateway rebuilds it by replay.

What a user writes never becomes a control token. A template puts role markers (control tokens) and
contents into one text, so before rendering, `encode_chat` puts a *guard*, a letter that is in none
of the messages, behind the first character of whatever in them spells a control token, or ends in
the beginning of one that the neighbouring text might complete. In the rendered text control tokens
are recognised first, the guards are removed second, and the texts between are encoded without
control tokens. A text that spells none meets the template, and the tokeniser, exactly as it is.
(Not guarded against: a template that deletes something from the middle of a content and thereby
joins a control token, or itself writes a part of one; nor are user-defined tokens, such as marks of
reasoning, which a caller may well write.)

A final message that is to be continued gets a *mark* at its end, another such letter, and the rendered
text ends where the mark stands: whatever the template puts behind a content is gone, and
contents that occur twice are no riddle.
"""

from __future__ import annotations

import re
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, pre_tokenizers

from engine.chat_template import ChatTemplate, TemplateError
from engine.detokenizer import Detokenizer, StopFilter
from engine.errors import ModelError
from engine.model import TEMPLATE, TOKENIZER, read_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["Detokenizer", "StopFilter", "TemplateError", "TextCodec"]

LETTERS = (range(0xFDD0, 0xFDF0), range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Of guards and marks: noncharacters, which no text has a reason to hold, then those of private use."""
SENTENCE_PIECE_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_NOTHING = re.compile(r"(?!)")
_RUN = re.compile(r"(.)\1*", re.DOTALL)


class TextCodec:
    """A model's tokeniser and chat template. Without state but for a cache: share it freely in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """`tokenizer`: byte-level or SentencePiece BPE, its control tokens being special added tokens."""
        # From now on the tokeniser takes no text for a control token: only `_with_controls` does.
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._template = template
        self._start: list[int] = tokenizer.encode("").ids
        self._added = {
            number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        self._control = {
            token.content: number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special and token.content
        }
        longest_first = sorted(self._control, key=len, reverse=True)
        spelled = "|".join(map(re.escape, longest_first))
        self._control_text = re.compile(spelled) if spelled else _NOTHING
        self._control_start = re.compile(f"(?={spelled})") if spelled else _NOTHING
        self._beginnings = {text[:end] for text in self._control for end in range(1, len(text))}
        self._longest = max(map(len, self._control), default=0)
        self._byte_level = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._inner = _without_prefix(tokenizer)
        letter = tokenizer.encode("x", add_special_tokens=False).tokens
        self._drop_first_space = not self._byte_level and "".join(letter).startswith(SENTENCE_PIECE_SPACE)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Of a prepared model folder; ModelError when a file of it is missing or unreadable."""
        config = read_config(folder)
        path = folder / TOKENIZER
        try:
            tokenizer = Tokenizer.from_buffer(path.read_bytes())
        except Exception as error:  # the package raises bare Exceptions
            raise ModelError(f"{path}: {error}; delete the folder and prepare it again") from None
        path = folder / TEMPLATE
        if not path.is_file():
            return cls(tokenizer, None)
        names = {"bos_token": config.bos_token, "eos_token": next(iter(config.eos_tokens), None)}
        variables: dict[str, object] = {
            name: tokenizer.id_to_token(token) for name, token in names.items() if token is not None
        }
        try:
            return cls(tokenizer, ChatTemplate(path.read_text(encoding="utf-8"), variables))
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {error}; delete it to serve completions without chat") from None

    def encode(self, text: str, *, special: bool, bos: bool = True) -> list[int]:
        """The text's tokens, behind BOS where the model wants one (`bos=False`: never).

        Only with `special` does text that spells a control token become it.
        """
        start = self._start if bos else []
        return start + (self._with_controls(text, guard="") if special else self._plain(text))

    def apply_template(
        self, messages: list[dict[str, object]], *, now: str | None = None, **kwargs: object
    ) -> str:
        """The prompt's text, for people; to get tokens, use `encode_chat`, which knows who wrote what.

        `now`: an ISO 8601 time for templates that mention the date; `kwargs`: the template's
        further variables. TemplateError when the template refuses, or when the model has none: a
        made-up format would look like an answer and be a bad one.
        """
        if self._template is None:
            raise TemplateError("this model has no chat template: ask it for a completion instead")
        return self._template.render(messages, now=now, **kwargs)

    def encode_chat(
        self,
        messages: list[dict[str, object]],
        *,
        now: str | None = None,
        continue_final_message: bool = False,
        **kwargs: object,
    ) -> list[int]:
        """The prompt's tokens; as `apply_template`, but no text of the caller becomes a control token.

        `continue_final_message`: the prompt ends with the last message's content instead of a new turn;
        where the template trims contents, white space at its end goes too.
        """
        texts = list(_texts([messages, kwargs]))
        guard = _unused(texts)
        guarded_messages: list[dict[str, object]] = self._guarded(messages, guard)
        guarded_kwargs: dict[str, object] = self._guarded(kwargs, guard)
        if continue_final_message:
            mark = _unused([*texts, guard])
            text = self._render_unfinished(guarded_messages, mark, now, guarded_kwargs)
        else:
            text = self.apply_template(guarded_messages, now=now, **guarded_kwargs)
        return self._with_controls(text, guard)

    def _render_unfinished(
        self, messages: list[dict[str, object]], mark: str, now: str | None, kwargs: dict[str, object]
    ) -> str:
        """The prompt's text up to the end of the last message's content."""
        *before, last = messages
        content = str(last["content"])
        kwargs = kwargs | {"add_generation_prompt": False}
        # A template that trims contents takes the space behind the mark, and is shown a trimmed one.
        for marked, trimmed in ((f"{content}{mark} ", False), (f"{content.rstrip()}{mark}", True)):
            text = self.apply_template([*before, last | {"content": marked}], now=now, **kwargs)
            end = text.rfind(mark)
            if end < 0:
                raise TemplateError("chat template: it does not show the end of the last message")
            if trimmed or text.startswith(" ", end + len(mark)):
                break
        return text[:end]

    def detokenizer(self) -> Detokenizer:
        """A fresh fold from tokens to text; control tokens and ids beyond the vocabulary show nothing."""
        return Detokenizer(self._bytes_of, drop_first_space=self._drop_first_space)

    def token_bytes(self, token: int) -> bytes:
        """What one token stands for by itself: its bytes, or the name of a control token."""
        name = self._tokenizer.id_to_token(token)
        return name.encode() if name in self._control else self._bytes_of(token)

    def decode(self, tokens: Iterable[int], *, controls: bool = False) -> str:
        """The text of the tokens: what `detokenizer` gives in all; with `controls`, control tokens too."""
        fold = self.detokenizer()
        if controls:
            fold = Detokenizer(self.token_bytes, drop_first_space=self._drop_first_space)
        return "".join([*map(fold.push, tokens), fold.finish()])

    def _plain(self, text: str, *, first: bool = True) -> list[int]:
        """Without control tokens; `first`: nothing stands before it, not even a control token."""
        # The batch call releases the GIL; the single one holds it for 1.3 s on 2 MB of text.
        tokenizer = self._tokenizer if first else self._inner
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids if text else []

    def _with_controls(self, text: str, guard: str) -> list[int]:
        """Tokens of a text whose control tokens count, except where a guard divides them."""
        tokens: list[int] = []
        position = 0
        for match in self._control_text.finditer(text):
            tokens += self._plain(text[position : match.start()].replace(guard, ""), first=position == 0)
            tokens.append(self._control[match[0]])
            position = match.end()
        return tokens + self._plain(text[position:].replace(guard, ""), first=position == 0)

    def _guarded(self, value: Any, guard: str) -> Any:
        """The same value with all texts in it guarded."""
        match value:
            case str():
                return self._guarded_text(value, guard)
            case dict():
                return {self._guarded(key, guard): self._guarded(item, guard) for key, item in value.items()}
            case list() | tuple():
                return [self._guarded(item, guard) for item in value]
        return value

    def _guarded_text(self, text: str, guard: str) -> str:
        starts = {match.start() for match in self._control_start.finditer(text)}
        for end in {len(text), len(text.rstrip())}:  # templates trim contents
            nearest = range(max(0, end - self._longest + 1), end)
            starts.update(start for start in nearest if text[start:end] in self._beginnings)
        cuts = [0, *(start + 1 for start in sorted(starts)), len(text)]
        return guard.join(text[begin:end] for begin, end in pairwise(cuts))

    def _bytes_of(self, token: int) -> bytes:
        data = self._bytes.get(token)
        if data is None:
            data = self._bytes[token] = self._look_up(token)
        return data

    def _look_up(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None or text in self._control:
            return b""
        if token in self._added:
            return text.encode()
        if self._byte_level:
            # A piece with a character that stands for no byte stands for itself.
            known = all(character in _BYTE_OF for character in text)
            return bytes(_BYTE_OF[character] for character in text) if known else text.encode()
        if byte := _BYTE_TOKEN.fullmatch(text):
            return bytes([int(byte[1], 16)])
        return text.replace(SENTENCE_PIECE_SPACE, " ").encode()


def _without_prefix(tokenizer: Tokenizer) -> Tokenizer:
    """The tokeniser for text behind a control token: SentencePiece's newer form gives it no leading space."""
    pre = tokenizer.pre_tokenizer
    if not (isinstance(pre, pre_tokenizers.Metaspace) and pre.prepend_scheme == "first"):
        return tokenizer
    inner = Tokenizer.from_str(tokenizer.to_str())
    inner.encode_special_tokens = True
    inner.pre_tokenizer = pre_tokenizers.Metaspace(pre.replacement, prepend_scheme="never", split=pre.split)
    return inner


def _unused(texts: Sequence[str]) -> str:
    """A letter that is in none of the texts; where all are in some, the shortest run of one that is in none.

    Of one letter, and short: it stands at every control token that somebody spells, and a text of 1 MiB that
    repeats one, and one of 40,000 guards, are no 10⁹ letters.
    """
    used = set().union(*texts)
    for letter in _letters():
        if letter not in used:
            return letter
    longest: dict[str, int] = {}
    for run in chain.from_iterable(map(_RUN.finditer, texts)):
        longest[run[1]] = max(longest.get(run[1], 0), len(run[0]))
    letter = min(_letters(), key=longest.__getitem__)
    return letter * (longest[letter] + 1)


def _letters() -> Iterator[str]:
    return map(chr, chain.from_iterable(LETTERS))


def _texts(value: object) -> Iterator[str]:
    """All texts inside a JSON-like value, the keys too."""
    match value:
        case str():
            yield value
        case dict():
            yield from _texts([*value.keys(), *value.values()])
        case list() | tuple():
            for item in value:
                yield from _texts(item)


def _byte_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 bytes are themselves, the others follow from U+0100 on.

    Source: the GPT-2 release, whose vocabulary must be printable text.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
