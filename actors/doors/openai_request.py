"""The OpenAI wire format: what request bodies may say.

Bodies are decoded with exact types and closed fields, so that a parameter which would have no effect
is refused by name instead of being ignored; standard ones that many clients always send pass at the
values that mean nothing (`NEUTRAL`). The structs are also what our OpenAPI document is made of.
Source of the format: OpenAI's API reference, "Chat completions" and "Completions"; of /tokenize and
/detokenize, and of the parameters beyond OpenAI's: vLLM's server.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, cast

import msgspec
from msgspec import Meta

MAX_STOPS = 4
MAX_STOP_CHARS = 1024
"""A stop string lies in the request's record in shared memory."""
MAX_STOP_TOKENS = 64
MAX_BIASES = 300
MAX_LOGPROBS = 20
MAX_TEXT_LOGPROBS = 5
MAX_CHOICES = 16
MAX_PRIORITY = 100
MAX_NAME = 128
MAX_SALT = 256
MAX_TTL_S = 86_400
DEFAULT_TTL_S = 3600

Name = Annotated[str, Meta(max_length=MAX_NAME, pattern=r"^[\x21-\x7e]+$")]
Role = Literal["system", "developer", "user", "assistant"]
_TOKENS = Annotated[int, Meta(ge=1, le=2**31 - 1)]
_ID = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_BIAS = Annotated[float, Meta(ge=-100, le=100)]
_PENALTY = Annotated[float, Meta(ge=-2, le=2)]
_SEED = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_STOP = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
_CHOICES = Annotated[int, Meta(ge=1, le=MAX_CHOICES)]
_NOTHING = Annotated[list[Any], Meta(max_length=0)] | None
_BIASES = Annotated[
    dict[_ID, _BIAS],
    Meta(max_length=MAX_BIASES, extra_json_schema={"propertyNames": {"pattern": "^(0|[1-9][0-9]*)$"}}),
]


class Only(NamedTuple):
    """The values of a parameter that change nothing here; null is always one of them."""

    values: tuple[object, ...]
    because: str


NEUTRAL = {
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
    "suffix": Only(("",), "nothing can be inserted before a text"),
    "store": NEUTRAL["store"],
    "service_tier": NEUTRAL["service_tier"],
    "response_format": NEUTRAL["response_format"],
}
"""The same for /v1/completions."""


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One piece of a message whose content is given as a list."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of the conversation; an answer of ours can be sent back as it came."""

    role: Role
    content: str | Annotated[list[TextPart], Meta(min_length=1)]
    name: Annotated[str | None, Meta(description="The speaker's, for templates that tell speakers apart")] = (
        None
    )
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
_ADD_GENERATION_PROMPT = Annotated[
    bool | None, Meta(description="Open the assistant's turn behind the messages; default true")
]
_CONTINUE = Annotated[
    bool | None,
    Meta(description="The last message is the assistant's, and is continued instead of answered"),
]
_VARIABLES = Annotated[
    dict[str, Any] | None, Meta(description="Variables of the chat template, but for its own")
]
_SALT = Annotated[
    Annotated[str, Meta(max_length=MAX_SALT)],
    Meta(description="Cached pages of prompts are shared with requests of equal salt only"),
]
_BOS = Annotated[
    bool | None,
    Meta(description="Put a string behind the model's first token, where it has one; default true"),
]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to stream."""

    include_usage: Annotated[bool, Meta(description="One more event before [DONE], with the usage")] = False


class Extensions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What to tell beside an answer, in its own `x_estafet`."""

    cache: Annotated[bool, Meta(description="Where the tokens of the prompt came from")] = False


class Generating(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all bodies may say that ask for text, without the parameters that may only be neutral."""

    model: Annotated[
        str | None, Meta(description="The served one, as when it is left out; another is a 404")
    ] = None
    n: Annotated[_CHOICES | None, Meta(description="Answers to the one prompt; default 1")] = None
    max_tokens: Annotated[
        _TOKENS | None, Meta(description="Tokens to generate a choice, as far as the context has room")
    ] = None
    min_tokens: Annotated[
        _ID | None,
        Meta(description="Tokens before which no stop token is sampled and no stop string counts"),
    ] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None, Meta(description="0 is greedy; default 1")
    ] = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None, Meta(description="-1 and 0 are all")
    ] = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[_PENALTY | None, Meta(description="Over generated tokens")] = None
    frequency_penalty: Annotated[_PENALTY | None, Meta(description="Over generated tokens")] = None
    repetition_penalty: Annotated[
        Annotated[float, Meta(ge=0.01, le=100)] | None,
        Meta(description="1 is none; over prompt and generated tokens"),
    ] = None
    logit_bias: Annotated[_BIASES | None, Meta(description="By token id")] = None
    seed: Annotated[
        _SEED | None,
        Meta(description="Equal requests with equal seeds get equal answers; drawn and logged if absent"),
    ] = None
    stop: Annotated[
        _STOP | Annotated[list[_STOP], Meta(max_length=MAX_STOPS)] | None,
        Meta(description="Strings that end the text"),
    ] = None
    stop_token_ids: Annotated[
        Annotated[list[_ID], Meta(max_length=MAX_STOP_TOKENS)] | None,
        Meta(description="Tokens that end it, beside the model's own"),
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, Meta(description="Show the stop string or stop token; default false")
    ] = None
    ignore_eos: Annotated[bool | None, Meta(description="The model's own end does not end the answer")] = None
    return_token_ids: Annotated[
        bool | None, Meta(description="Tell the prompt's token ids, and those of each choice")
    ] = None
    stream: Annotated[bool | None, Meta(description="Answer by server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, Meta(description="Only with stream")] = None
    priority: Annotated[
        Annotated[int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None,
        Meta(description="Of a client's own waiting requests, the lowest number goes first; default 0"),
    ] = None
    user: Annotated[
        str | None, Meta(description="Whose fair share this counts against, together with the API key")
    ] = None
    safety_identifier: Annotated[str | None, Meta(description="OpenAI's newer name of user")] = None
    request_id: Annotated[
        Name | None, Meta(description="The client's own: comes back in id; or the header X-Request-Id")
    ] = None
    cache_salt: _SALT | None = None
    x_estafet: Annotated[
        Extensions | None, Meta(description="What to tell beside the answer, in its `x_estafet`")
    ] = None
    prompt_cache_key: Annotated[str | None, Meta(description="Changes nothing")] = None
    metadata: Annotated[dict[str, Any] | None, Meta(description="Changes nothing")] = None


class Chat(Generating, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for the next turn of a conversation."""

    messages: _MESSAGES
    max_completion_tokens: Annotated[
        _TOKENS | None,
        Meta(description="OpenAI's newer name of max_tokens; default: what the context has left"),
    ] = None
    logprobs: Annotated[bool | None, Meta(description="Tell the log probability of every token")] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Meta(description="And of so many of the likeliest there; only with logprobs"),
    ] = None
    add_generation_prompt: _ADD_GENERATION_PROMPT = None
    continue_final_message: _CONTINUE = None
    chat_template_kwargs: _VARIABLES = None


class Text(Generating, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for what follows a prompt."""

    prompt: Annotated[
        str | Annotated[list[_ID], Meta(min_length=1)],
        Meta(description="Taken as it is: a string that spells control tokens means them"),
    ]
    best_of: Annotated[_CHOICES | None, Meta(description="The same as n")] = None
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TEXT_LOGPROBS)] | None,
        Meta(description="Tell the log probability of every token, and of so many of the likeliest"),
    ] = None
    echo: Annotated[bool | None, Meta(description="The prompt's text comes first; not with logprobs")] = None
    add_special_tokens: _BOS = None


class PrefixRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for a prefix to be kept in the cache: a prompt, or the messages that a conversation begins with."""

    model: str | None = None
    prompt: Annotated[
        str | Annotated[list[_ID], Meta(min_length=1)] | None,
        Meta(description="Taken as it is: a string that spells control tokens means them"),
    ] = None
    messages: _MESSAGES | None = None
    add_special_tokens: _BOS = None
    chat_template_kwargs: _VARIABLES = None
    cache_salt: _SALT | None = None
    ttl_s: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_TTL_S)] | None,
        Meta(description=f"Seconds that it is kept; default {DEFAULT_TTL_S}"),
    ] = None
    user: Annotated[str | None, Meta(description="Whose fair share filling it counts against")] = None


class TokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask what a prompt, or a conversation, is to the model."""

    model: str | None = None
    prompt: str | None = None
    messages: _MESSAGES | None = None
    add_special_tokens: _BOS = None
    add_generation_prompt: _ADD_GENERATION_PROMPT = None
    continue_final_message: _CONTINUE = None
    chat_template_kwargs: _VARIABLES = None


class DetokenizeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Ask for the text of tokens."""

    model: str | None = None
    tokens: list[_ID]


def with_neutral(name: str, body: type[Generating], neutral: dict[str, Only]) -> type[Generating]:
    """A body that may have the neutral parameters too: decoded at any value, documented at theirs."""
    whole = msgspec.defstruct(
        name,
        [(field, _documented(only), None) for field, only in neutral.items()],
        bases=(body,),
        namespace={"__doc__": body.__doc__},
        frozen=True,
        forbid_unknown_fields=True,
        kw_only=True,
    )
    return cast("type[Generating]", whole)


def _documented(only: Only) -> Any:
    meta = Meta(description=only.because.capitalize(), extra_json_schema={"enum": [*only.values, None]})
    return Annotated[Any, meta]


ChatRequest = with_neutral("ChatRequest", Chat, NEUTRAL)
CompletionRequest = with_neutral("CompletionRequest", Text, NEUTRAL_TEXT)
