"""What an answer looks like on the wire: events of a session as bodies and chunks in OpenAI's shapes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import UNSET

from actors.openai import (
    AnswerMessage,
    Choice,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    Completion,
    Logprobs,
    TextChoice,
    TextCompletion,
    TokenLogprob,
    TopLogprob,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from msgspec import UnsetType

    from actors.sessions import Delta, DeltaToken, End, Generation
    from engine.model import ModelConfig
    from engine.text import TextCodec

_encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """What a reply needs: the body of a whole response, or the events of a streamed one."""

    def whole(self, deltas: Sequence[Delta], end: End) -> msgspec.Struct:
        """The body of a response that does not stream."""
        ...

    def head(self) -> bytes:
        """The event before the first delta, if any."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The event of one delta."""
        ...

    def tail(self, end: End) -> bytes:
        """The events behind the last delta."""
        ...


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(
        self,
        request_id: str,
        model: ModelConfig,
        text: TextCodec,
        generation: Generation,
        *,
        include_usage: bool,
    ) -> None:
        self._created = int(time.time())
        self._id = f"chatcmpl-{request_id}"
        self._model = model.name
        self._fingerprint = f"fp_{model.weights_id[:16]}"
        self._text = text
        self._generation = generation
        self._include_usage = include_usage
        self._no_usage = None if include_usage else UNSET

    def whole(self, deltas: Sequence[Delta], end: End) -> Completion:
        """The body of a response that does not stream."""
        tokens = [token for delta in deltas for token in delta.tokens]
        choice = Choice(
            AnswerMessage("".join(delta.text for delta in deltas)),
            end.reason,
            logprobs=self._logprobs(tokens),
            token_ids=_token_ids(self._generation, tokens),
        )
        return Completion(
            self._id,
            self._created,
            self._model,
            self._fingerprint,
            [choice],
            _usage(end),
            _prompt_ids(self._generation),
        )

    def head(self) -> bytes:
        """The event before the first delta."""
        choice = ChunkChoice(ChunkDelta(role="assistant", content=""))
        return self._event([choice], self._no_usage, _prompt_ids(self._generation))

    def delta(self, delta: Delta) -> bytes:
        """The event of one delta."""
        added = ChunkDelta(content=delta.text)
        if not delta.tokens:
            return self._event([ChunkChoice(added)], self._no_usage)
        logprobs, token_ids = self._logprobs(delta.tokens), _token_ids(self._generation, delta.tokens)
        return self._event([ChunkChoice(added, logprobs=logprobs, token_ids=token_ids)], self._no_usage)

    def tail(self, end: End) -> bytes:
        """The events behind the last delta."""
        last = self._event([ChunkChoice(ChunkDelta(), end.reason)], self._no_usage)
        return last + self._event([], _usage(end)) if self._include_usage else last

    def _event(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        value = Chunk(self._id, self._created, self._model, self._fingerprint, choices, usage, prompt_ids)
        return b"data: %b\n\n" % _encode(value)

    def _logprobs(self, tokens: Iterable[DeltaToken]) -> Logprobs | None:
        if self._generation.logprobs is None:
            return None
        return Logprobs([self._scored(token) for token in tokens if token.logprobs is not None])

    def _scored(self, token: DeltaToken) -> TokenLogprob:
        assert token.logprobs is not None
        data = self._text.token_bytes(token.token)
        top = []
        for other, logprob in token.logprobs.top:
            others = self._text.token_bytes(other)
            top.append(TopLogprob(_shown(others), logprob, list(others)))
        return TokenLogprob(_shown(data), token.logprobs.logprob, list(data), top)


class TextAnswer:
    """The answer to one completion request."""

    def __init__(
        self,
        request_id: str,
        model: ModelConfig,
        generation: Generation,
        *,
        echo: str,
        include_usage: bool,
    ) -> None:
        """`echo`: the prompt's text where it is to be repeated."""
        self._created = int(time.time())
        self._id = f"cmpl-{request_id}"
        self._model = model.name
        self._fingerprint = f"fp_{model.weights_id[:16]}"
        self._generation = generation
        self._echo = echo
        self._include_usage = include_usage

    def whole(self, deltas: Sequence[Delta], end: End) -> TextCompletion:
        """The body of a response that does not stream."""
        choice = TextChoice(
            self._echo + "".join(delta.text for delta in deltas),
            end.reason,
            token_ids=_token_ids(self._generation, [token for delta in deltas for token in delta.tokens]),
            prompt_token_ids=_prompt_ids(self._generation),
        )
        return self._completion([choice], _usage(end))

    def head(self) -> bytes:
        """The prompt's event, when it is to be repeated or its tokens are asked for."""
        if not (self._echo or self._generation.token_ids):
            return b""
        return self._event([TextChoice(self._echo, prompt_token_ids=_prompt_ids(self._generation))])

    def delta(self, delta: Delta) -> bytes:
        """The event of one delta."""
        return self._event([TextChoice(delta.text, token_ids=_token_ids(self._generation, delta.tokens))])

    def tail(self, end: End) -> bytes:
        """The events behind the last delta."""
        last = self._event([TextChoice("", end.reason)])
        return last + self._event([], _usage(end)) if self._include_usage else last

    def _event(self, choices: list[TextChoice], usage: Usage | None = None) -> bytes:
        value = self._completion(choices, usage if self._include_usage else UNSET)
        return b"data: %b\n\n" % _encode(value)

    def _completion(self, choices: list[TextChoice], usage: Usage | UnsetType | None) -> TextCompletion:
        return TextCompletion(self._id, self._created, self._model, self._fingerprint, choices, usage)


def _prompt_ids(generation: Generation) -> list[int] | UnsetType:
    return list(generation.prompt) if generation.token_ids else UNSET


def _token_ids(generation: Generation, tokens: Iterable[DeltaToken]) -> list[int] | UnsetType:
    return [token.token for token in tokens] if generation.token_ids else UNSET


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _usage(end: End) -> Usage:
    return Usage(end.prompt_tokens, end.completion_tokens, end.prompt_tokens + end.completion_tokens)
