"""What is asked: the parameters of a request, and the body that goes over the wire."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WINDOW = 64
"""Pieces of a stream that may wait for their reader, unless told otherwise."""


class Parameters(TypedDict, total=False):
    """What may be said beside a prompt: those of /v1/completions, and the client's own.

    What they mean and which values they take, actors/README.md has. None is the same as leaving one out.
    """

    deadline_s: float | None
    """After so many seconds the request is cancelled and reading raises DeadlineExceeded."""
    window: int
    """Pieces that may wait for their reader; 64. A reader that stops costs no more than these."""
    model: str | None
    """Default: the served one."""
    max_tokens: int | None
    min_tokens: int | None
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[str, float] | None
    return_token_ids: bool | None
    """Pieces have their tokens."""
    request_id: str | None
    priority: int | None
    cache_salt: str | None
    """Cached prompts are shared with requests of equal salt only."""
    x_estafet: Mapping[str, bool] | None
    """`{"cache": True}`: the finish says where the tokens of the prompt came from."""
    user: str | None
    metadata: Mapping[str, Any] | None


class ChatParameters(Parameters, total=False):
    """Those of /v1/chat/completions."""

    max_completion_tokens: int | None
    logprobs: bool | None
    """Pieces have their tokens, with log probabilities."""
    top_logprobs: int | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None


class CompletionParameters(Parameters, total=False):
    """Those of /v1/completions."""

    add_special_tokens: bool | None


class Request(msgspec.Struct, frozen=True):
    """One request, ready to be sent any number of times."""

    endpoint: Literal["chat", "completion"]
    body: msgspec.Raw
    """As /v1/chat/completions or /v1/completions take it, with a seed: asked anew, it is answered alike."""
    key: str
    """The client's own unguessable name for it."""
    window: int = WINDOW
    """Pieces that may wait for their reader."""
    deadline: float | None = None
    """Time at which it is given up."""


def chat(
    messages: str | Sequence[Mapping[str, Any]],
    parameters: Mapping[str, Any],
    *,
    key: str,
    seed: int,
    now: float,
) -> Request:
    """A conversation to go on with; a mere string is what the user says.

    `seed`: for a request that brings none. A request that is asked anew must be answered the same.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    return _request("chat", {"messages": messages}, parameters, key, seed, now)


def completion(
    prompt: str | Sequence[int], parameters: Mapping[str, Any], *, key: str, seed: int, now: float
) -> Request:
    """A text or token ids to go on with; all else as `chat` has it."""
    return _request("completion", {"prompt": prompt}, parameters, key, seed, now)


def _request(
    endpoint: Literal["chat", "completion"],
    what: dict[str, Any],
    parameters: Mapping[str, Any],
    key: str,
    seed: int,
    now: float,
) -> Request:
    body = {name: value for name, value in parameters.items() if value is not None}
    window = body.pop("window", WINDOW)
    deadline_s = body.pop("deadline_s", None)
    if not (isinstance(window, int) and 1 <= window <= 1 << 20):
        raise ValueError(f"window = {window!r}: expected 1 to {1 << 20} pieces")
    raw = msgspec.Raw(msgspec.json.encode({"seed": seed} | body | what))
    return Request(endpoint, raw, key, window, None if deadline_s is None else now + deadline_s)
