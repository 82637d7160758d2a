"""What the gateway says and refuses, as the stream protocol says it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from actors import sessions as gateway
from actors.doors.answers import cache_use
from actors.doors.openai_error import ApiError
from engine.stream_protocol import Delta, End, ScoredToken, StreamError, StreamName


class _Switches(msgspec.Struct):
    """What a body may say to HTTP, and not here."""

    stream: Any = None
    echo: Any = None


class _Beginning(msgspec.Struct):
    """As much of a message as says which stream it would have begun."""

    type: Literal["create", "resume"]
    stream: StreamName


_decode_beginning = msgspec.json.Decoder(_Beginning).decode


def begun_by(message: bytes) -> str | None:
    """The stream that a message wanted to begin, whatever is wrong with the rest of it; None of none."""
    try:
        return _decode_beginning(message).stream
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def as_stream_error(error: ApiError) -> StreamError:
    """What HTTP would answer, as this protocol says it."""
    inner = error.body.error
    return StreamError(inner.message, error.status, inner.code, inner.param, error.retry_after_s)


def as_refused(refusal: gateway.Refused) -> StreamError:
    """Why a request cannot be resumed."""
    because = f": {refusal}" if str(refusal) else ""
    match refusal:
        case gateway.NotKept():
            return StreamError(f"Nothing is kept of this request{because}.", 404, "not_kept", "request")
        case gateway.Diverged():
            message = f"The text that the client has is not what was sent{because}."
            return StreamError(message, 409, "diverged", "positions")
        case gateway.Draining():
            return StreamError(f"The server is shutting down{because}.", 503, "draining")
        case _:
            return StreamError(f"The request was refused{because}.", 503)


def check_switches(body: bytes) -> None:
    """Refuse what HTTP's bodies may say and no stream can do; what is not JSON is refused later."""
    try:
        switches = _decode_switches(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return
    if switches.stream is False:
        raise ApiError(400, "'stream' cannot be false: there is nothing but streams here.", param="stream")
    if switches.echo:
        raise ApiError(400, "'echo' is for HTTP: a stream has the generated text only.", param="echo")


def delta_message(name: str, number: int, delta: gateway.Delta, *, told: bool) -> Delta:
    """A delta for the client; `told`: it asked for tokens."""
    if not told:
        return Delta(name, delta.sequence, delta.text, delta.choice, number=number)
    tokens = [
        ScoredToken(token) if scores is None else ScoredToken(token, scores.logprob, list(scores.top))
        for token, scores in delta.tokens
    ]
    return Delta(name, delta.sequence, delta.text, delta.choice, tokens, number)


def end_message(name: str, number: int, end: gateway.End, *, done: bool, tells_cache: bool = False) -> End:
    """A choice's end for the client; `tells_cache`: it asked where its prompt came from."""
    return End(
        name,
        end.reason,
        end.prompt_tokens,
        end.completion_tokens,
        end.choice,
        end.error,
        done,
        number,
        None if end.cached is None else end.cached.tokens,
        cache_use(end) if tells_cache else None,
    )


def too_many(what: str) -> StreamError:
    """Why there can be no more for now."""
    return StreamError(f"{what}; try again later.", 429, "too_many_streams", "stream", 1.0)


def ours() -> StreamError:
    """The failure is not the client's."""
    return StreamError("The request failed inside the server.", 500, "server_error")


_decode_switches = msgspec.json.Decoder(_Switches).decode
