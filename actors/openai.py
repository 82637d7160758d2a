"""The OpenAI chat wire format: what a request may say, and what responses look like.

Requests are decoded with exact types and closed fields, so that a parameter which would have no
effect is refused by name instead of being ignored; standard ones that many clients always send pass
at the values that mean nothing (`NEUTRAL`). Source of the format: OpenAI's API reference,
"Chat completions".
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, cast, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_STOPS = 4
MAX_STOP_TOKENS = 64
MAX_BIASES = 300
MAX_LOGPROBS = 20
_TOKENS = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_ID = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_BIAS = Annotated[float, Meta(ge=-100, le=100)]
_PENALTY = Annotated[float, Meta(ge=-2, le=2)]
_SEED = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_STOP = Annotated[str, Meta(min_length=1)]
_NOTHING = Annotated[list[Any], Meta(max_length=0)] | None


class ApiError(Exception):
    """A request that is answered with an OpenAI error body instead of what it asked for."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(Error(message, kind, param, code))
        self.headers = headers


class Error(msgspec.Struct, frozen=True):
    """What is wrong, for a person (message) and for a program (type, param, code)."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every response that is not a success, and of an error inside a stream."""

    error: Error


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="text", tag_field="type"):
    """One piece of a message whose content is given as a list."""

    text: str


Role = Literal["system", "developer", "user", "assistant"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of the conversation; an answer of ours can be sent back as it came."""

    role: Role
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    name: str | None = None
    """Of the speaker, for templates that tell speakers apart."""
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: _NOTHING = None
    annotations: _NOTHING = None

    def for_template(self) -> dict[str, object]:
        """What a chat template is given; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        named = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.text(), **named}

    def text(self) -> str:
        """The content in one string; parts are joined with nothing between them."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: bool = False


class Only(NamedTuple):
    """The values of a parameter that change nothing here; null is always one of them."""

    values: tuple[object, ...]
    because: str


NEUTRAL = {
    "n": Only((1,), "a request has one choice"),
    "response_format": Only(({"type": "text"},), "answers are plain text"),
    "tools": Only(([],), "tools are not supported"),
    "tool_choice": Only(("none",), "tools are not supported"),
    "parallel_tool_calls": Only((True, False), "it is a switch, and tools are not supported"),
    "functions": Only(([],), "tools are not supported"),
    "function_call": Only(("none",), "tools are not supported"),
    "store": Only((False,), "nothing is stored"),
    "service_tier": Only(("auto", "default"), "there is one tier"),
    "modalities": Only((["text"],), "answers are text"),
    "audio": Only((), "answers are text"),
    "prediction": Only((), "predicted outputs are not supported"),
    "web_search_options": Only((), "there is no search"),
}
"""Standard parameters that many clients always send: accepted at these values, refused at all others."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A request body as sent, without the parameters that may only be neutral."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: _TOKENS | None = None
    max_completion_tokens: _TOKENS | None = None
    min_tokens: _ID | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _PENALTY | None = None
    frequency_penalty: _PENALTY | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[_ID, _BIAS], Meta(max_length=MAX_BIASES)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool | None = None
    seed: _SEED | None = None
    stop: _STOP | Annotated[list[_STOP], Meta(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[_ID], Meta(max_length=MAX_STOP_TOKENS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, Any] | None = None


class ChatRequest(msgspec.Struct, frozen=True):
    """A chat request that is right as far as it can be known without the tokeniser."""

    messages: list[dict[str, object]]
    """Each with a role, a content and perhaps a name, all strings."""
    chars: int
    """In all the contents together."""
    max_tokens: int | None
    sampling: SamplingParams
    """But for the seed."""
    seed: int | None
    """Unsigned 64 bit; negative seeds have been mapped to it modulo 2**64."""
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    show_stop: bool
    min_tokens: int
    ignore_eos: bool
    logprobs: int | None
    token_ids: bool
    stream: bool
    include_usage: bool


_ChatBody = msgspec.defstruct(
    "_ChatBody",
    [(name, Any, None) for name in NEUTRAL],
    bases=(_Body,),
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
)
_decode_body = cast("Callable[[bytes], _Body]", msgspec.json.Decoder(_ChatBody).decode)
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)


def parse_chat(body: bytes, *, model: str, vocab_size: int) -> ChatRequest:
    """Decode and check a chat request for the one served model; an ApiError names what is wrong."""
    try:
        chat = _decode_body(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"The body is not a JSON object that could be read: {what}.") from None
    if chat.model != model:
        raise ApiError(
            404,
            f"The model {chat.model[:200]!r} does not exist; {model!r} is served here.",
            param="model",
            code="model_not_found",
        )
    _check_neutral(chat)
    if chat.stream_options is not None and not chat.stream:
        raise ApiError(400, "'stream_options' needs 'stream' to be true.", param="stream_options")
    if chat.top_logprobs is not None and not chat.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    stop = (chat.stop,) if isinstance(chat.stop, str) else tuple(chat.stop or ())
    return ChatRequest(
        messages=[message.for_template() for message in chat.messages],
        chars=sum(len(message.text()) for message in chat.messages),
        max_tokens=_max_tokens(chat),
        sampling=_sampling(chat, vocab_size),
        seed=None if chat.seed is None else chat.seed & (2**64 - 1),
        stop=stop,
        stop_tokens=_stop_tokens(chat, vocab_size),
        show_stop=bool(chat.include_stop_str_in_output),
        min_tokens=chat.min_tokens or 0,
        ignore_eos=bool(chat.ignore_eos),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        token_ids=bool(chat.return_token_ids),
        stream=bool(chat.stream),
        include_usage=chat.stream_options is not None and chat.stream_options.include_usage,
    )


def _sampling(body: _Body, vocab_size: int) -> SamplingParams:
    """The sampling parameters, but for the seed; null is the value that changes nothing."""
    biases = body.logit_bias or {}
    _check_ids("logit_bias", biases, vocab_size)
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=tuple(sorted(biases.items())),
    )


def _stop_tokens(body: _Body, vocab_size: int) -> tuple[int, ...]:
    _check_ids("stop_token_ids", body.stop_token_ids or (), vocab_size)
    return tuple(body.stop_token_ids or ())


def _check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if token >= vocab_size:
            raise ApiError(
                400, f"{name!r} names token {token}, and the vocabulary ends at {vocab_size - 1}.", param=name
            )


def _check_neutral(body: _Body) -> None:
    """Refuse a standard parameter at a value that asks for what there is not."""
    for name, only in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, neutral) for neutral in only.values):
            allowed = " or ".join(msgspec.json.encode(neutral).decode() for neutral in (*only.values, None))
            raise ApiError(
                400,
                f"{name!r} can only be {allowed}: {only.because}.",
                param=name,
                code="unsupported_value",
            )


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _max_tokens(chat: _Body) -> int | None:
    old, new = chat.max_tokens, chat.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            400,
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) mean the same here and differ.",
            param="max_tokens",
        )
    return new if old is None else old


def _invalid(error: msgspec.ValidationError) -> ApiError:
    """Turn msgspec's message, which ends in a JSON path, into an error that names the parameter."""
    found = _WHERE.match(str(error))
    what, path = (found["what"], found["path"] or "") if found else (str(error), "")
    code = None
    if field := _FIELD.match(what):
        path = f"{path}.{field['field']}" if path else field["field"]
        if "unknown" in what:
            code, what = "unknown_parameter", "this parameter is not known here"
        else:
            code, what = "missing_required_parameter", "it is required"
    if what.startswith("Invalid enum value"):
        # The only such field.
        what = f"{what.removeprefix('Invalid enum value ')} is none of {', '.join(get_args(Role))}"
    # The values of a map have no better path than [...].
    param = path.removesuffix("[...]")[:200]
    if not param:
        return ApiError(400, f"The body is not a chat request: {what}.")
    return ApiError(400, f"{param!r} is not valid: {what}.", param=param, code=code)


class Usage(msgspec.Struct, frozen=True):
    """How many tokens went in and came out."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


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
    finish_reason: str
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


class ChunkDelta(msgspec.Struct, frozen=True):
    """What a chunk adds."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """The one choice that a chunk continues or finishes."""

    delta: ChunkDelta
    finish_reason: str | None = None
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


class Model(msgspec.Struct, frozen=True, tag="model", tag_field="object"):
    """A model that can be asked for."""

    id: str
    created: int
    owned_by: str = "estafet"


class ModelList(msgspec.Struct, frozen=True, tag="list", tag_field="object"):
    """Every model that can be asked for."""

    data: list[Model]
