"""What an answer looks like on the wire: events of a session as bodies and chunks in OpenAI's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import UNSET

from actors.doors.openai_response import (
    AnswerMessage,
    Choice,
    Chunk,
    ChunkChoice,
    ChunkDelta,
    Completion,
    EstafetDetails,
    Logprobs,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from actors.doors.ticket import ticket_of
from engine.stream_protocol import CacheUse

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from msgspec import UnsetType

    from actors.doors.ticket import Ticket
    from actors.sessions import Delta, DeltaToken, End, Generation
    from engine.model import ModelConfig
    from engine.text import TextCodec

_encode = msgspec.json.Encoder().encode


class Answer(Protocol):
    """What a reply needs: the body of a whole response, or the events of a streamed one."""

    def whole(self, deltas: Sequence[Delta], ends: Sequence[End]) -> msgspec.Struct:
        """The body of a response that does not stream; one End a choice."""
        ...

    def head(self) -> bytes:
        """The events before the first delta, if any."""
        ...

    def delta(self, delta: Delta) -> bytes:
        """The event of one delta."""
        ...

    def end(self, end: End) -> bytes:
        """The event that finishes one choice."""
        ...

    def tail(self, ends: Sequence[End]) -> bytes:
        """The events behind the last End, if any."""
        ...


def answer_for(generation: Generation, request_id: str, model: ModelConfig, text: TextCodec) -> Answer:
    """The answer to a request by the ticket that it carries: the one way in which answers are made.

    Made again for the same generation, also by another gateway, it says the same.
    """
    ticket = ticket_of(generation)
    if ticket.kind == "chat":
        return ChatAnswer(ticket, generation, request_id, model, text)
    return TextAnswer(ticket, generation, request_id, model, text)


class ChatAnswer:
    """The answer to one chat request."""

    def __init__(
        self, ticket: Ticket, generation: Generation, request_id: str, model: ModelConfig, text: TextCodec
    ) -> None:
        self._id = f"chatcmpl-{ticket.name or request_id}"
        self._created = ticket.created
        self._model = model.name
        self._fingerprint = _fingerprint(model)
        self._text = text
        self._generation = generation
        self._include_usage = ticket.include_usage
        self._no_usage = None if ticket.include_usage else UNSET
        self._tells_cache = ticket.cache

    def whole(self, deltas: Sequence[Delta], ends: Sequence[End]) -> Completion:
        """The body of a response that does not stream."""
        choices = []
        for end in _in_order(ends):
            text, tokens = _gathered(deltas, end.choice)
            choices.append(
                Choice(
                    AnswerMessage(text),
                    end.reason,
                    end.choice,
                    self._logprobs(tokens),
                    _token_ids(self._generation, tokens),
                )
            )
        return Completion(
            self._id,
            self._created,
            self._model,
            self._fingerprint,
            choices,
            _usage(ends),
            _prompt_ids(self._generation),
            self._details(ends),
        )

    def head(self) -> bytes:
        """One event a choice before the first delta."""
        begun = ChunkDelta(role="assistant", content="")
        first = self._event([ChunkChoice(begun)], self._no_usage, _prompt_ids(self._generation))
        others = range(1, self._generation.n)
        return first + b"".join(self._event([ChunkChoice(begun, index=i)], self._no_usage) for i in others)

    def delta(self, delta: Delta) -> bytes:
        """The event of one delta."""
        choice = ChunkChoice(ChunkDelta(content=delta.text), index=delta.choice)
        if delta.tokens:
            choice = ChunkChoice(
                choice.delta,
                index=delta.choice,
                logprobs=self._logprobs(delta.tokens),
                token_ids=_token_ids(self._generation, delta.tokens),
            )
        return self._event([choice], self._no_usage)

    def end(self, end: End) -> bytes:
        """The event that finishes one choice."""
        return self._event([ChunkChoice(ChunkDelta(), end.reason, end.choice)], self._no_usage)

    def tail(self, ends: Sequence[End]) -> bytes:
        """The usage and where the prompt came from, when they were asked for."""
        if not (self._include_usage or self._tells_cache):
            return b""
        usage = _usage(ends) if self._include_usage else UNSET
        return self._event([], usage, details=self._details(ends))

    def _event(
        self,
        choices: list[ChunkChoice],
        usage: Usage | UnsetType | None,
        prompt_ids: list[int] | UnsetType = UNSET,
        details: EstafetDetails | UnsetType = UNSET,
    ) -> bytes:
        value = Chunk(
            self._id, self._created, self._model, self._fingerprint, choices, usage, prompt_ids, details
        )
        return b"data: %b\n\n" % _encode(value)

    def _details(self, ends: Sequence[End]) -> EstafetDetails | UnsetType:
        return EstafetDetails(cache_use(_first(ends))) if self._tells_cache else UNSET

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
        self, ticket: Ticket, generation: Generation, request_id: str, model: ModelConfig, text: TextCodec
    ) -> None:
        self._id = f"cmpl-{ticket.name or request_id}"
        self._created = ticket.created
        self._model = model.name
        self._fingerprint = _fingerprint(model)
        self._generation = generation
        self._echo = (
            "" if ticket.echo is None else text.decode(generation.prompt[ticket.echo :], controls=True)
        )
        self._include_usage = ticket.include_usage
        self._tells_cache = ticket.cache
        wanted = 0 if generation.logprobs is None else generation.n
        self._scores = [_Scores(text) for _ in range(wanted)]

    def whole(self, deltas: Sequence[Delta], ends: Sequence[End]) -> TextCompletion:
        """The body of a response that does not stream."""
        choices = []
        for end in _in_order(ends):
            text, tokens = _gathered(deltas, end.choice)
            choices.append(
                TextChoice(
                    self._echo + text,
                    end.reason,
                    end.choice,
                    self._logprobs(tokens, end.choice),
                    _token_ids(self._generation, tokens),
                    _prompt_ids(self._generation),
                )
            )
        return self._completion(choices, _usage(ends), self._details(ends))

    def head(self) -> bytes:
        """The prompt's event a choice, when it is to be repeated or its tokens are asked for."""
        if not (self._echo or self._generation.token_ids):
            return b""
        ids = _prompt_ids(self._generation)
        choices = range(self._generation.n)
        return b"".join(self._event([TextChoice(self._echo, index=i, prompt_token_ids=ids)]) for i in choices)

    def delta(self, delta: Delta) -> bytes:
        """The event of one delta."""
        logprobs = self._logprobs(delta.tokens, delta.choice)
        ids = _token_ids(self._generation, delta.tokens)
        return self._event([TextChoice(delta.text, None, delta.choice, logprobs, ids)])

    def end(self, end: End) -> bytes:
        """The event that finishes one choice."""
        return self._event([TextChoice("", end.reason, end.choice)])

    def tail(self, ends: Sequence[End]) -> bytes:
        """The usage and where the prompt came from, when they were asked for."""
        if not (self._include_usage or self._tells_cache):
            return b""
        return self._event([], _usage(ends), self._details(ends))

    def _event(
        self,
        choices: list[TextChoice],
        usage: Usage | None = None,
        details: EstafetDetails | UnsetType = UNSET,
    ) -> bytes:
        value = self._completion(choices, usage if self._include_usage else UNSET, details)
        return b"data: %b\n\n" % _encode(value)

    def _completion(
        self,
        choices: list[TextChoice],
        usage: Usage | UnsetType | None,
        details: EstafetDetails | UnsetType,
    ) -> TextCompletion:
        return TextCompletion(
            self._id, self._created, self._model, self._fingerprint, choices, usage, details
        )

    def _details(self, ends: Sequence[End]) -> EstafetDetails | UnsetType:
        return EstafetDetails(cache_use(_first(ends))) if self._tells_cache else UNSET

    def _logprobs(self, tokens: Iterable[DeltaToken], choice: int) -> TextLogprobs | None:
        return self._scores[choice].take(tokens) if self._scores else None


class _Scores:
    """Where the tokens of one choice begin in its text, from the first on, with their log probabilities."""

    def __init__(self, text: TextCodec) -> None:
        self._text = text
        self._fold = text.detokenizer()
        self._offset = 0

    def take(self, tokens: Iterable[DeltaToken]) -> TextLogprobs:
        """The next tokens."""
        result = TextLogprobs([], [], [], [])
        for token, logprobs in tokens:
            if logprobs is not None:
                name = self._name(token)
                top: dict[str, float] = {}
                for other, logprob in logprobs.top:
                    # Two tokens of equal text: the likelier one counts.
                    top.setdefault(self._name(other), logprob)
                result.tokens.append(name)
                result.token_logprobs.append(logprobs.logprob)
                result.top_logprobs.append({**top, name: logprobs.logprob})
                result.text_offset.append(self._offset)
            self._offset += len(self._fold.push(token))
        return result

    def _name(self, token: int) -> str:
        data = self._text.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _fingerprint(model: ModelConfig) -> str:
    return f"fp_{model.weights_id[:16]}"


def _in_order(ends: Iterable[End]) -> list[End]:
    return sorted(ends, key=lambda end: end.choice)


def _gathered(deltas: Iterable[Delta], choice: int) -> tuple[str, list[DeltaToken]]:
    """The text and tokens of one choice."""
    own = [delta for delta in deltas if delta.choice == choice]
    return "".join(delta.text for delta in own), [token for delta in own for token in delta.tokens]


def _prompt_ids(generation: Generation) -> list[int] | UnsetType:
    return list(generation.prompt) if generation.token_ids else UNSET


def _token_ids(generation: Generation, tokens: Iterable[DeltaToken]) -> list[int] | UnsetType:
    return [token.token for token in tokens] if generation.token_ids else UNSET


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _first(ends: Iterable[End]) -> End:
    """The End that speaks of the prompt."""
    return min(ends, key=lambda end: end.choice)


def cache_use(end: End) -> CacheUse | None:
    """Where the tokens of the prompt came from, by the End of choice 0; None when nobody knows."""
    cached = end.cached
    if cached is None:
        return None
    computed = end.prompt_tokens - cached.tokens
    return CacheUse(cached.memory, cached.worker, cached.host, cached.file, computed)


def _usage(ends: Sequence[End]) -> Usage:
    """The prompt once, the tokens of all choices."""
    first, generated = _first(ends), sum(end.completion_tokens for end in ends)
    prompt, cached = first.prompt_tokens, first.cached
    details = UNSET if cached is None else PromptTokensDetails(cached.tokens)
    return Usage(prompt, generated, prompt + generated, details)
