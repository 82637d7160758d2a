"""The tokeniser and the chat template of a Hugging Face folder, checked to mean here what they mean there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from tokenizers import Tokenizer
from tokenizers.models import BPE

from engine.chat_template import ChatTemplate, TemplateError
from engine.errors import ModelError
from engine.model import TEMPLATE, TOKENIZER
from engine.text import TextCodec
from kernels.facts import Facts, read_small_file, shown

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE_JSON = "chat_template.json"
CHAT_TEMPLATE = "chat_template"
PANIC = "PanicException"
"""Of the package's Rust code; no Exception, and it cannot be imported."""
PROBE = " Hello wörld,  two  spaces\n\n\tdon't 1234567 ١٢ 日本語 🙂 é x"


def read_tokenizer(folder: Path, vocab_size: int) -> Tokenizer:
    """The folder's tokeniser; `vocab_size` is the number of rows of the model's embedding.

    ModelError when it is absent, broken or not BPE, when it has ids that the model lacks, or when
    engine.text would cut or show a text in another way than it does itself.
    """
    path = folder / TOKENIZER
    if not path.exists():
        raise ModelError(
            f"{folder}: no {TOKENIZER}; save the model's tokeniser in the fast format (transformers' "
            "AutoTokenizer, save_pretrained) beside it"
        )
    data = read_small_file(path)
    try:
        return _checked(path, data, vocab_size)
    except ModelError:
        raise
    except BaseException as error:
        # The package raises bare Exceptions, and panics where its file contradicts itself.
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise ModelError(f"{path}: broken: {' '.join(str(error).split())}; fetch it again") from None


def read_special_token(folder: Path, name: str, tokenizer: Tokenizer) -> int | None:
    """The id of the token that tokenizer_config.json calls `name` ("bos_token"), None where it does not."""
    path = folder / TOKENIZER_CONFIG
    token = Facts.read_json(path).get(name) if path.exists() else None
    if isinstance(token, dict):
        token = token.get("content")
    if token is None:
        return None
    number: int | None = tokenizer.token_to_id(token) if isinstance(token, str) else None
    if number is None:
        raise ModelError(
            f"{path}: {name} is {shown(token)}, which {TOKENIZER} does not have; fetch both again"
        )
    return number


def read_template(folder: Path) -> str | None:
    """The chat template, where there is one: of its own file first, as transformers has it.

    Of several named ones it is the one called "default". ModelError when it is none or does not compile.
    """
    path = folder / TEMPLATE
    if path.exists():
        try:
            return _compiled(path, read_small_file(path).decode())
        except UnicodeDecodeError as error:
            raise ModelError(f"{path}: {error}; fetch it again") from None
    for path in (folder / TEMPLATE_JSON, folder / TOKENIZER_CONFIG):
        template = Facts.read_json(path).get(CHAT_TEMPLATE) if path.exists() else None
        if isinstance(template, list):
            named = [each for each in template if isinstance(each, dict) and each.get("name") == "default"]
            template = named[0].get("template") if named else template
        if template is not None:
            return _compiled(path, template)
    return None


def _compiled(path: Path, template: object) -> str:
    if not isinstance(template, str):
        raise ModelError(f"{path}: {CHAT_TEMPLATE} is {shown(template)}, not a text; fetch it again")
    try:
        ChatTemplate(template, {})
    except TemplateError as error:
        raise ModelError(f"{path}: {error}; delete it to serve completions without chat") from None
    return template


def _checked(path: Path, data: bytes, vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer.from_buffer(data)
    if not isinstance(tokenizer.model, BPE):
        raise ModelError(
            f"{path}: a tokeniser of the kind {type(tokenizer.model).__name__}, only BPE is served yet; take "
            "another model"
        )
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if not 0 <= largest < vocab_size:
        raise ModelError(
            f"{path}: its largest token id is {largest}, the embedding has {vocab_size} rows; fetch both"
        )
    _check_frame(path, data)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_codec(path, tokenizer)
    return tokenizer


def _check_frame(path: Path, data: bytes) -> None:
    """ModelError when the frame of a text has a token that it does not define: on that the package panics."""
    post = json.loads(data)["post_processor"] or {}
    for part in post.get("processors", [post]):
        used = {piece["SpecialToken"]["id"] for piece in part.get("single", ()) if "SpecialToken" in piece}
        if undefined := used - part.get("special_tokens", {}).keys():
            raise ModelError(
                f"{path}: broken: post_processor does not define {shown(min(undefined))}; fetch it again"
            )


def _check_codec(path: Path, tokenizer: Tokenizer) -> None:
    """Compare what engine.text makes of a text with what the tokeniser itself does."""
    controls = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    marked = "x".join(f"{token} y {token}" for token in ["", *controls])
    expected = {
        "the beginning of a prompt": tokenizer.encode(PROBE).ids,
        "control tokens": tokenizer.encode(marked, add_special_tokens=False).ids,
        "text": tokenizer.decode(tokenizer.encode(PROBE, add_special_tokens=False).ids),
    }
    codec = TextCodec(tokenizer, None)
    found = {
        "the beginning of a prompt": codec.encode(PROBE, special=False),
        "control tokens": codec.encode(marked, special=True, bos=False),
        "text": codec.decode(codec.encode(PROBE, special=False, bos=False)),
    }
    for what in expected:
        if found[what] != expected[what]:
            raise ModelError(f"{path}: its way with {what} is not served yet; take another model")
