"""The OpenAI wire format, chat and completions: what a request may say, and what responses look like.

Requests are decoded with exact types and closed fields, so that a parameter which would have no
effect is refused by name instead of being ignored; standard ones that many clients always send pass
at the values that mean nothing (`NEUTRAL`). Source of the format: OpenAI's API reference,
"Chat completions" and "Completions"; of /tokenize and /detokenize: vLLM's server.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, cast, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_STOPS = 4
MAX_STOP_TOKENS = 64
MAX_BIASES = 300
MAX_LOGPROBS = 20
DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say."""
_TOKENS = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_ID = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_BIAS = Annotated[float, Meta(ge=-100, le=100)]
_PENALTY = Annotated[float, Meta(ge=-2, le=2)]
_SEED = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_STOP = Annotated[str, Meta(min_length=1)]
MAX_NAME = 128
_NAME = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"^[\x21-\x7e]+$")]
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


_MESSAGES = Annotated[list[Message], Meta(min_length=1)]


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

NEUTRAL_TEXT = {
    "n": NEUTRAL["n"],
    "best_of": Only((1,), "a request has one choice"),
    "suffix": Only(("",), "nothing can be inserted before a text"),
    "logprobs": Only((), "ask /v1/chat/completions for log probabilities"),
    "store": NEUTRAL["store"],
    "service_tier": NEUTRAL["service_tier"],
    "response_format": NEUTRAL["response_format"],
}
"""The same for /v1/completions."""


class _Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all request bodies may say, without the parameters that may only be neutral."""

    model: str
    max_tokens: _TOKENS | None = None
    min_tokens: _ID | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _PENALTY | None = None
    frequency_penalty: _PENALTY | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[_ID, _BIAS], Meta(max_length=MAX_BIASES)] | None = None
    return_token_ids: bool | None = None
    request_id: _NAME | None = None
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


class _Chat(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a chat request as sent."""

    messages: _MESSAGES
    max_completion_tokens: _TOKENS | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Text(_Body, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a completion request as sent."""

    prompt: str | Annotated[list[_ID], Meta(min_length=1)]
    echo: bool | None = None
    add_special_tokens: bool | None = None


class _Tokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a /tokenize request: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: _MESSAGES | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Detokenize(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of a /detokenize request."""

    model: str | None = None
    tokens: list[_ID]


MESSAGE_CHARS = 200
"""What a message costs beside its text, in characters to tokenise: 0.2 ms in the template and around it."""


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that a chat template makes."""

    messages: list[dict[str, object]]
    """Each with a role, a content and perhaps a name, all strings."""
    variables: dict[str, object]
    """Of the client, for the template."""
    chars: int
    """What it costs to tokenise, in characters of text."""


class RawPrompt(msgspec.Struct, frozen=True):
    """A prompt that is taken as it is."""

    text: str | tuple[int, ...]
    bos: bool
    """Whether a text gets the model's first token, where the model wants one."""

    @property
    def chars(self) -> int:
        """How long it is."""
        return len(self.text)


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What a request says beside its prompt: right as far as it can be known without the tokeniser."""

    name: str | None
    """The client's own id of the request."""
    max_tokens: int | None
    """None: as many as the context has left, up to `default_max_tokens`."""
    default_max_tokens: int | None
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
    echo: bool = False


_Sent = TypeVar("_Sent")


def _decoder(body: type[_Sent], neutral: dict[str, Only]) -> Callable[[bytes], _Sent]:
    """A decoder of request bodies that may have the neutral parameters too, at any value."""
    whole = msgspec.defstruct(
        f"{body.__name__}Body",
        [(name, Any, None) for name in neutral],
        bases=(body,),
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return cast("Callable[[bytes], _Sent]", msgspec.json.Decoder(whole).decode)


_decode_chat = _decoder(_Chat, NEUTRAL)
_decode_text = _decoder(_Text, NEUTRAL_TEXT)
_decode_tokenize = msgspec.json.Decoder(_Tokenize).decode
_decode_detokenize = msgspec.json.Decoder(_Detokenize).decode
_TEMPLATE_OWN = frozenset(
    {"self", "messages", "now", "bos_token", "eos_token", "strftime_now", "raise_exception"}
)
"""Variables of a chat template that are not the client's."""
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<field>.*)`$", re.DOTALL)


def parse_chat(body: bytes, *, model: str, vocab_size: int) -> tuple[Conversation, Wishes]:
    """Decode and check a chat request for the one served model; an ApiError names what is wrong."""
    chat = _decode(_decode_chat, body)
    _check_model(chat.model, model)
    _check_neutral(chat, NEUTRAL)
    old, new = chat.max_tokens, chat.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(
            400,
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) mean the same here and differ.",
            param="max_tokens",
        )
    if chat.top_logprobs is not None and not chat.logprobs:
        raise ApiError(400, "'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
    logprobs = (chat.top_logprobs or 0) if chat.logprobs else None
    wishes = _wishes(chat, vocab_size, max_tokens=new if old is None else old, logprobs=logprobs)
    return _conversation(chat.messages, chat.chat_template_kwargs, len(body)), wishes


def parse_text(body: bytes, *, model: str, vocab_size: int) -> tuple[RawPrompt, Wishes]:
    """Decode and check a completion request; an ApiError names what is wrong."""
    text = _decode(_decode_text, body)
    _check_model(text.model, model)
    _check_neutral(text, NEUTRAL_TEXT)
    if not isinstance(text.prompt, str):
        _check_ids("prompt", text.prompt, vocab_size)
    wishes = _wishes(
        text,
        vocab_size,
        max_tokens=text.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        echo=bool(text.echo),
    )
    prompt = text.prompt if isinstance(text.prompt, str) else tuple(text.prompt)
    return RawPrompt(prompt, bos=text.add_special_tokens is not False), wishes


def parse_tokenize(body: bytes, *, model: str) -> Conversation | RawPrompt:
    """Decode and check a /tokenize request; an ApiError names what is wrong."""
    asked = _decode(_decode_tokenize, body)
    _check_model(asked.model or model, model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "Either 'prompt' or 'messages' is to be tokenised.", param="prompt")
    if asked.messages is not None:
        if asked.add_special_tokens is not None:
            raise ApiError(400, "'add_special_tokens' needs a 'prompt'.", param="add_special_tokens")
        return _conversation(asked.messages, asked.chat_template_kwargs, len(body))
    if asked.chat_template_kwargs:
        raise ApiError(400, "'chat_template_kwargs' needs 'messages'.", param="chat_template_kwargs")
    return RawPrompt(asked.prompt or "", bos=asked.add_special_tokens is not False)


def parse_detokenize(body: bytes, *, model: str, vocab_size: int) -> list[int]:
    """The tokens of a /detokenize request; an ApiError names what is wrong."""
    asked = _decode(_decode_detokenize, body)
    _check_model(asked.model or model, model)
    _check_ids("tokens", asked.tokens, vocab_size)
    return asked.tokens


def check_name(name: str) -> str:
    """The client's own id of a request from its header, where it can be one; an ApiError otherwise."""
    try:
        return msgspec.convert(name, _NAME)
    except msgspec.ValidationError:
        raise ApiError(
            400,
            f"The header 'X-Request-Id' must be up to {MAX_NAME} visible ASCII characters.",
            param="X-Request-Id",
        ) from None


def _decode(decode: Callable[[bytes], _Sent], body: bytes) -> _Sent:
    try:
        return decode(body)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except (msgspec.DecodeError, RecursionError) as error:
        what = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"The body is not a JSON object that could be read: {what}.") from None


def _check_model(asked: str, served: str) -> None:
    if asked != served:
        raise ApiError(
            404,
            f"The model {asked[:200]!r} does not exist; {served!r} is served here.",
            param="model",
            code="model_not_found",
        )


def _conversation(messages: list[Message], variables: dict[str, Any] | None, size: int) -> Conversation:
    variables = variables or {}
    if own := _TEMPLATE_OWN & variables.keys():
        name = min(own)
        raise ApiError(
            400,
            f"'chat_template_kwargs.{name}' is not the client's to set.",
            param=f"chat_template_kwargs.{name}",
        )
    # Variables are shorter than what brought them; a message has its price also when it is empty.
    chars = sum(len(message.text()) + MESSAGE_CHARS for message in messages) + (size if variables else 0)
    return Conversation([message.for_template() for message in messages], variables, chars)


def _wishes(
    body: _Body,
    vocab_size: int,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None = None,
    logprobs: int | None = None,
    echo: bool = False,
) -> Wishes:
    """What is the same in all requests that generate."""
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "'stream_options' needs 'stream' to be true.", param="stream_options")
    return Wishes(
        name=body.request_id,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
        sampling=_sampling(body, vocab_size),
        seed=None if body.seed is None else body.seed & (2**64 - 1),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        stop_tokens=_stop_tokens(body, vocab_size),
        show_stop=bool(body.include_stop_str_in_output),
        min_tokens=body.min_tokens or 0,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        token_ids=bool(body.return_token_ids),
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        echo=echo,
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


def _check_neutral(body: _Body, neutral: dict[str, Only]) -> None:
    """Refuse a standard parameter at a value that asks for what there is not."""
    for name, only in neutral.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, other) for other in only.values):
            allowed = " or ".join(msgspec.json.encode(other).decode() for other in (*only.values, None))
            raise ApiError(
                400,
                f"{name!r} can only be {allowed}: {only.because}.",
                param=name,
                code="unsupported_value",
            )


def _same(value: object, neutral: object) -> bool:
    """Equal as JSON, where true is not 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


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
        return ApiError(400, f"The body is not such a request: {what}.")
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


class TextChoice(msgspec.Struct, frozen=True):
    """The one text of a completion, or a piece of it."""

    text: str
    finish_reason: str | None = None
    index: int = 0
    logprobs: None = None
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


class Tokens(msgspec.Struct, frozen=True):
    """What a prompt is to the model."""

    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(msgspec.Struct, frozen=True):
    """The text of tokens."""

    prompt: str


class Model(msgspec.Struct, frozen=True, tag="model", tag_field="object"):
    """A model that can be asked for."""

    id: str
    created: int
    owned_by: str = "estafet"


class ModelList(msgspec.Struct, frozen=True, tag="list", tag_field="object"):
    """Every model that can be asked for."""

    data: list[Model]
