"""The stream protocol: what clients and gateways say over a WebSocket or a ZeroMQ socket.

One protocol, two carriers. Every message is one JSON object with a `type`; many requests share a
connection, each under a `stream` name that the client chose. The life of a stream:

    create ──▶ opened ──▶ delta … delta ──▶ end        one `end` a choice, the last has `done`
      │          resume ─▶ opened ─▶ …                 after a lost connection, on another one
      └──────▶ error                                   refused, or failed: nothing follows

**Resuming.** A `delta` carries the sequence number of the place behind its text. A client that was
cut off says for every choice how far it got and `engine.transcript.tail_hash` of its text; the
gateway goes on behind that place or refuses, never guesses. A request whose connection is gone is
kept for the gateway's `resume_grace_s`. `create` with a `key` is idempotent: said again (because the
answer to it was lost), it resumes the same request from its beginning.

**Back-pressure.** What a client has not taken yet waits in the gateway as text, one piece a choice,
and costs no more than its length. With `window` a client takes at most so many deltas ahead: the
gateway sends while the number of deltas sent is below what the client granted. The grant is absolute
(`credit.upto`), so that saying it twice, or losing one of two, is harmless. A browser, whose WebSocket has no
back-pressure of its own, and a ZeroMQ client, whose socket is shared, need it; a plain WebSocket client
may leave it to TCP. An `end` needs no credit.

**Errors.** An error with a `stream` is that stream's terminal message. One without speaks of a message
that began nothing and ended nothing: it was none (code "invalid_message"), its stream's name is in use
("stream_in_use"; the open stream goes on), or a cancel or credit named a stream that is not open
("unknown_stream"; no fault when it crossed the end). A stream whose request another connection has
resumed ends with "superseded". The other codes are HTTP's.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.transcript import Position

StreamName = Annotated[str, Meta(min_length=1, max_length=64)]
Key = Annotated[str, Meta(min_length=16, max_length=64, pattern=r"^[\x21-\x7e]+$")]
"""Unguessable: whoever knows it may read the stream."""
Endpoint = Literal["chat", "completion"]


class StreamMessage(
    msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, omit_defaults=True
):
    """Base of all messages."""


# ── client → gateway ──────────────────────────────────────────────────────────────────────────


class Create(StreamMessage, frozen=True, tag="create"):
    """Ask for something, as a body of /v1/chat/completions or /v1/completions does.

    `stream` and `stream_options` are of no use in it, and `stream: false` and `echo` are refused.
    """

    stream: StreamName
    endpoint: Endpoint
    body: msgspec.Raw
    key: Key | None = None
    """Makes it idempotent, and lets it be found again without its id."""
    window: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None
    """Deltas that may be sent before any is credited; None leaves it to the carrier."""


class Resume(StreamMessage, frozen=True, tag="resume"):
    """Go on with a request of an earlier connection."""

    stream: StreamName
    request: Annotated[str, Meta(max_length=64)]
    """Its id, from `opened`."""
    positions: Annotated[list[Position], Meta(max_length=64)]
    """How far the client got: one a choice."""
    window: Annotated[int, Meta(ge=1, le=1 << 20)] | None = None


class Credit(StreamMessage, frozen=True, tag="credit"):
    """More may be sent: deltas of this stream, counted since it was created or resumed here."""

    stream: StreamName
    upto: Annotated[int, Meta(ge=1)]


class Cancel(StreamMessage, frozen=True, tag="cancel"):
    """Nobody wants it any more: an `end` with the reason "cancelled" follows, unless it has ended.

    One `end` a choice; one alone, without an `opened` before it, where the request was not accepted yet.
    """

    stream: StreamName


class Ping(StreamMessage, frozen=True, tag="ping"):
    """Still here? Answered with a pong at once."""


# ── gateway → client ──────────────────────────────────────────────────────────────────────────


class Opened(StreamMessage, frozen=True, tag="opened"):
    """The request was accepted, or found again."""

    stream: str
    request: str
    """What `resume` needs: the id under which it is logged, a dot, and a secret."""
    model: str
    prompt_tokens: int
    choices: int
    resumed: bool = False
    grace_s: float = 0.0
    """For so long it is kept when the connection is lost."""


class ScoredToken(msgspec.Struct, frozen=True, omit_defaults=True):
    """One token, for who asked for tokens or logprobs."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []
    """(token, logprob) of the likeliest."""


class Delta(StreamMessage, frozen=True, tag="delta"):
    """Text of one choice that became certain."""

    stream: str
    sequence: int
    """Of the place behind this text."""
    text: str
    choice: int = 0
    tokens: list[ScoredToken] | UnsetType = UNSET
    """When asked for."""
    number: int = 0
    """Of this delta since the stream was created or resumed here, from 1: shows when one was lost."""


class CacheUse(msgspec.Struct, frozen=True):
    """How many tokens of a prompt came from where: together they are all of it."""

    memory: int
    """From pages in the memory of the worker that took them up, or of an earlier life of it."""
    worker: int
    """From pages that another worker of the host had filled."""
    host: int
    """From pages that were fetched from another host."""
    file: int
    """From pages that were read from the file tier."""
    computed: int


class End(StreamMessage, frozen=True, tag="end"):
    """One choice is complete."""

    stream: str
    reason: Literal["stop", "length", "cancelled", "error"]
    prompt_tokens: int
    completion_tokens: int
    choice: int = 0
    error: str | None = None
    done: bool = False
    """It was the last choice: the stream's name is free again."""
    number: int = 0
    """Of the last delta before it."""
    cached_tokens: int | None = None
    """Prompt tokens that were found instead of being computed, with choice 0: all choices share one prompt.
    Absent when nobody knows, as after the death of a gateway."""
    cache: CacheUse | None = None
    """The same by where they were, for who asked by `x_estafet`."""


class StreamError(msgspec.Struct, frozen=True):
    """What is wrong, for a person (message) and for a program (status as HTTP has it, code, param)."""

    message: str
    status: int = 400
    code: str | None = None
    param: str | None = None
    retry_after_s: float | None = None


class Failed(StreamMessage, frozen=True, tag="error"):
    """A message could not be followed: its stream is over; without a stream, it concerns none."""

    error: StreamError
    stream: str | None = None


class Pong(StreamMessage, frozen=True, tag="pong"):
    """Still here."""


ToGateway: TypeAlias = Create | Resume | Credit | Cancel | Ping
ToClient: TypeAlias = Opened | Delta | End | Failed | Pong

encode = msgspec.json.Encoder().encode
decode_to_gateway = msgspec.json.Decoder(ToGateway).decode
decode_to_client = msgspec.json.Decoder(ToClient).decode
