"""The OpenAI wire format: what responses look like.

Source of the format: OpenAI's API reference, "Chat completions" and "Completions"; of /tokenize and
/detokenize: vLLM's server.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.stream_protocol import CacheUse

_FINISHED = Annotated[str, Meta(extra_json_schema={"enum": ["stop", "length"]})]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What the tokens of a prompt cost."""

    cached_tokens: int
    """Those that were found in the prefix cache instead of being computed."""


class Usage(msgspec.Struct, frozen=True):
    """How many tokens went in and came out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    """Absent when nobody knows."""


class EstafetDetails(msgspec.Struct, frozen=True):
    """What is told beside an answer, as `x_estafet` asked."""

    cache: CacheUse | None
    """Null when nobody knows."""


class AnswerMessage(msgspec.Struct, frozen=True):
    """The generated turn."""

    content: str
    role: str = "assistant"
    refusal: None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the likeliest tokens at a place."""

    token: str
    """Its text, where bytes that are no UTF-8 are U+FFFD."""
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the answer, and what else the model found likely there."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class Logprobs(msgspec.Struct, frozen=True):
    """Of the tokens of an answer, or of a chunk of it."""

    content: list[TokenLogprob]
    refusal: None = None


class Choice(msgspec.Struct, frozen=True):
    """One answer."""

    message: AnswerMessage
    finish_reason: _FINISHED
    index: int = 0
    logprobs: Logprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, tag="chat.completion", tag_field="object"):
    """The response to a request that does not stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    x_estafet: EstafetDetails | UnsetType = UNSET


class ChunkDelta(msgspec.Struct, frozen=True):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """The choice that a chunk begins, continues or finishes."""

    delta: ChunkDelta
    finish_reason: _FINISHED | None = None
    index: int = 0
    logprobs: Logprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class Chunk(msgspec.Struct, frozen=True, tag="chat.completion.chunk", tag_field="object"):
    """One event of a streamed response."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """Absent unless usage was asked for; then null but in the last chunk."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first chunk, when tokens were asked for."""
    x_estafet: EstafetDetails | UnsetType = UNSET
    """In a chunk of its own, or with the usage, behind the last of all choices."""


class TextLogprobs(msgspec.Struct, frozen=True):
    """Of the tokens of a text, or of a piece of it, in the older form: four lists of equal length.

    A token that is no UTF-8 by itself is written `bytes:\\xe2\\x82`.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    """The likeliest, and always the token itself."""
    text_offset: list[int]
    """The character of the choice's text with which the token begins."""


class TextChoice(msgspec.Struct, frozen=True):
    """One text of a completion, or a piece of it."""

    text: str
    finish_reason: _FINISHED | None = None
    index: int = 0
    logprobs: TextLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, tag="text_completion", tag_field="object"):
    """The response to a completion request, or one event of it when it streams."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[TextChoice]
    usage: Usage | UnsetType | None = UNSET
    x_estafet: EstafetDetails | UnsetType = UNSET
    """When asked for; in a stream in an event of its own, or with the usage, behind all choices."""


class Tokens(msgspec.Struct, frozen=True):
    """What a prompt is to the model."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """The text of tokens."""

    prompt: str


class PrefixObject(msgspec.Struct, frozen=True, tag="prefix", tag_field="object"):
    """A prefix that is kept in the cache."""

    id: str
    created: int
    expires_at: int
    tokens: int
    cached_tokens: int
    """Those that were in the cache already when it was asked for."""
    pinned_tokens: int
    """Those that are in memory now, and stay: whole pages of them."""
    pinned_pages: int


class PrefixList(msgspec.Struct, frozen=True, tag="list", tag_field="object"):
    """Every prefix that is kept for this API key, the oldest first."""

    data: list[PrefixObject]


class DeletedPrefix(msgspec.Struct, frozen=True, tag="prefix", tag_field="object"):
    """A prefix that is kept no longer."""

    id: str
    deleted: bool = True


class Model(msgspec.Struct, frozen=True, tag="model", tag_field="object"):
    """A model that can be asked for."""

    id: str
    created: int
    owned_by: str = "estafet"


class ModelList(msgspec.Struct, frozen=True, tag="list", tag_field="object"):
    """Every model that can be asked for."""

    data: list[Model]
