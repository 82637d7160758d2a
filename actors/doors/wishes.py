"""What a request asks for, once its body has been read and checked; an ApiError names what is wrong."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import msgspec

from actors.doors.decoding import decode_body
from actors.doors.openai_error import ApiError
from actors.doors.openai_request import (
    DEFAULT_TTL_S,
    MAX_NAME,
    NEUTRAL,
    NEUTRAL_TEXT,
    Chat,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Name,
    PrefixRequest,
    Text,
    TokenizeRequest,
)
from engine.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from actors.doors.openai_request import Generating, Message, Only

DEFAULT_MAX_TOKENS = 16
"""Of a completion that does not say."""
MAX_CLIENT = 64
"""Characters of a user's name that tell users apart."""
MESSAGE_CHARS = 200
"""What a message costs beside its text, in characters to tokenise: 0.2 ms in the template and around it."""


class Conversation(msgspec.Struct, frozen=True):
    """A prompt that a chat template makes."""

    messages: list[dict[str, object]]
    """Each with a role, a content and perhaps a name, all strings."""
    variables: dict[str, Any]
    """Of the client, for the template, and how the prompt ends where that is not as usual."""
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
    user: str
    """Who asks, by their own word: visible characters, or none."""
    n: int
    priority: int
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
    cache_salt: str
    tells_cache: bool
    echo: bool = False


class PrefixWishes(msgspec.Struct, frozen=True):
    """What a request says of a prefix that is to be kept, beside its tokens."""

    salt: str
    ttl_s: int
    user: str


_decode_chat = cast("Callable[[bytes], Chat]", msgspec.json.Decoder(ChatRequest).decode)
_decode_text = cast("Callable[[bytes], Text]", msgspec.json.Decoder(CompletionRequest).decode)
_decode_prefix = msgspec.json.Decoder(PrefixRequest).decode
_decode_tokenize = msgspec.json.Decoder(TokenizeRequest).decode
_decode_detokenize = msgspec.json.Decoder(DetokenizeRequest).decode
_TEMPLATE_OWN = frozenset(
    {
        "self",
        "messages",
        "now",
        "bos_token",
        "eos_token",
        "strftime_now",
        "raise_exception",
        "add_generation_prompt",
        "continue_final_message",
    }
)
"""Variables of a chat template that are not the client's, or have a parameter of their own."""


def parse_chat(body: bytes, *, model: str, vocab_size: int) -> tuple[Conversation, Wishes]:
    """Decode and check a chat request for the one served model."""
    chat = decode_body(_decode_chat, body)
    _check_model(chat.model or model, model)
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
    return _conversation(chat, chat.messages, len(body)), wishes


def parse_text(body: bytes, *, model: str, vocab_size: int) -> tuple[RawPrompt, Wishes]:
    """Decode and check a completion request."""
    text = decode_body(_decode_text, body)
    _check_model(text.model or model, model)
    _check_neutral(text, NEUTRAL_TEXT)
    if not isinstance(text.prompt, str):
        _check_ids("prompt", text.prompt, vocab_size)
    if text.best_of is not None and text.best_of != (text.n or 1):
        raise ApiError(
            400,
            f"'best_of' ({text.best_of}) must be 'n' ({text.n or 1}): all choices are answered.",
            param="best_of",
        )
    if text.echo and text.logprobs is not None:
        raise ApiError(
            400,
            "'logprobs' with 'echo' would need those of the prompt, which are not computed.",
            param="logprobs",
        )
    wishes = _wishes(
        text,
        vocab_size,
        max_tokens=text.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=text.logprobs,
        echo=bool(text.echo),
    )
    prompt = text.prompt if isinstance(text.prompt, str) else tuple(text.prompt)
    return RawPrompt(prompt, bos=text.add_special_tokens is not False), wishes


def parse_prefix(
    body: bytes, *, model: str, vocab_size: int
) -> tuple[Conversation | RawPrompt, PrefixWishes]:
    """Decode and check a body of /v1/prefixes; of a conversation no turn is opened behind the messages."""
    asked = decode_body(_decode_prefix, body)
    _check_model(asked.model or model, model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "Either 'prompt' or 'messages' is to be kept.", param="prompt")
    wishes = PrefixWishes(asked.cache_salt or "", asked.ttl_s or DEFAULT_TTL_S, _visible(asked.user or ""))
    if asked.messages is not None:
        if asked.add_special_tokens is not None:
            raise ApiError(400, "'add_special_tokens' needs a 'prompt'.", param="add_special_tokens")
        begun = TokenizeRequest(
            messages=asked.messages,
            chat_template_kwargs=asked.chat_template_kwargs,
            add_generation_prompt=False,
        )
        return _conversation(begun, asked.messages, len(body)), wishes
    if asked.chat_template_kwargs is not None:
        raise ApiError(400, "'chat_template_kwargs' needs 'messages'.", param="chat_template_kwargs")
    assert asked.prompt is not None
    if not isinstance(asked.prompt, str):
        _check_ids("prompt", asked.prompt, vocab_size)
    prompt = asked.prompt if isinstance(asked.prompt, str) else tuple(asked.prompt)
    return RawPrompt(prompt, bos=asked.add_special_tokens is not False), wishes


def parse_tokenize(body: bytes, *, model: str) -> Conversation | RawPrompt:
    """Decode and check a /tokenize request."""
    asked = decode_body(_decode_tokenize, body)
    _check_model(asked.model or model, model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "Either 'prompt' or 'messages' is to be tokenised.", param="prompt")
    if asked.messages is not None:
        if asked.add_special_tokens is not None:
            raise ApiError(400, "'add_special_tokens' needs a 'prompt'.", param="add_special_tokens")
        return _conversation(asked, asked.messages, len(body))
    for name in ("chat_template_kwargs", "add_generation_prompt", "continue_final_message"):
        if getattr(asked, name) is not None:
            raise ApiError(400, f"{name!r} needs 'messages'.", param=name)
    return RawPrompt(asked.prompt or "", bos=asked.add_special_tokens is not False)


def parse_detokenize(body: bytes, *, model: str, vocab_size: int) -> list[int]:
    """The tokens of a /detokenize request."""
    asked = decode_body(_decode_detokenize, body)
    _check_model(asked.model or model, model)
    _check_ids("tokens", asked.tokens, vocab_size)
    return asked.tokens


def check_name(name: str) -> str:
    """The client's own id of a request from its header, where it can be one."""
    try:
        return msgspec.convert(name, Name)
    except msgspec.ValidationError:
        raise ApiError(
            400,
            f"The header 'X-Request-Id' must be up to {MAX_NAME} visible ASCII characters.",
            param="X-Request-Id",
        ) from None


def _check_model(asked: str, served: str) -> None:
    if asked != served:
        raise ApiError(
            404,
            f"The model {asked[:200]!r} does not exist; {served!r} is served here.",
            param="model",
            code="model_not_found",
        )


def _conversation(asked: Chat | TokenizeRequest, messages: list[Message], size: int) -> Conversation:
    variables: dict[str, Any] = asked.chat_template_kwargs or {}
    if own := _TEMPLATE_OWN & variables.keys():
        name = min(own)
        raise ApiError(
            400,
            f"'chat_template_kwargs.{name}' is not the client's to set.",
            param=f"chat_template_kwargs.{name}",
        )
    ending: dict[str, bool] = {}
    if asked.continue_final_message:
        if asked.add_generation_prompt:
            raise ApiError(
                400,
                "'continue_final_message' and 'add_generation_prompt' cannot both be true: a turn is "
                "continued, or a new one opened.",
                param="continue_final_message",
            )
        if messages[-1].role != "assistant":
            raise ApiError(
                400,
                "'continue_final_message' needs the last message to be the assistant's.",
                param="continue_final_message",
            )
        ending["continue_final_message"] = True
    elif asked.add_generation_prompt is False:
        ending["add_generation_prompt"] = False
    # Variables are shorter than what brought them; a message has its price also when it is empty.
    chars = sum(len(message.text()) + MESSAGE_CHARS for message in messages) + (size if variables else 0)
    return Conversation([message.for_template() for message in messages], variables | ending, chars)


def _wishes(
    body: Generating,
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
        user=_visible(body.user or "") or _visible(body.safety_identifier or ""),
        n=body.n or 1,
        priority=body.priority or 0,
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
        cache_salt=body.cache_salt or "",
        tells_cache=body.x_estafet is not None and body.x_estafet.cache,
        echo=echo,
    )


def _visible(name: str) -> str:
    """The first characters of a name that can be seen, so that no log line or screen is disturbed by it."""
    visible = (letter for letter in name if letter.isprintable() and letter != " ")
    return "".join(islice(visible, MAX_CLIENT))


def _sampling(body: Generating, vocab_size: int) -> SamplingParams:
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


def _stop_tokens(body: Generating, vocab_size: int) -> tuple[int, ...]:
    _check_ids("stop_token_ids", body.stop_token_ids or (), vocab_size)
    return tuple(body.stop_token_ids or ())


def _check_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    for token in tokens:
        if token >= vocab_size:
            raise ApiError(
                400, f"{name!r} names token {token}, and the vocabulary ends at {vocab_size - 1}.", param=name
            )


def _check_neutral(body: Generating, neutral: dict[str, Only]) -> None:
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
