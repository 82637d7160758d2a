"""What a front door (HTTP, WebSocket, ZeroMQ) needs from the gateway, and no more.

A door turns its protocol into a Generation, opens a Session and streams its events. Everything
about terms, placement, recovery and the token log happens behind `Sessions`.

A request has one or more choices. What a client sees of a choice is a fold over its token log, so
a place in it has a number: the *sequence number* counts the choice's tokens, and one more for the
text that is held back until its end is known. A client that was cut off says for every choice how
far it got and the hash of its tail (`engine.transcript.tail_hash`), and gets what follows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import msgspec

from engine.messages import Cached
from engine.sampling import SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import trio

    from engine.model import ModelConfig
    from engine.pins import Prefix
    from engine.text import TextCodec
    from engine.transcript import Position

FinishReason = Literal["stop", "length", "cancelled", "error"]


class Generation(msgspec.Struct, frozen=True, array_like=True):
    """One request, checked by the door as far as the door can know."""

    prompt: tuple[int, ...]
    """Token ids; at least one."""
    max_tokens: int
    """At least 1, a choice; prompt and max_tokens together fit the context."""
    sampling: SamplingParams
    """Of choice 0; the others differ in their index only."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it beside the model's own; below the vocabulary's size."""
    show_stop: bool = False
    """Show the stop string or stop token that ended the text."""
    min_tokens: int = 0
    """Tokens before which nothing stops; at most max_tokens."""
    ignore_eos: bool = False
    """The model's own stop tokens do not end the text."""
    logprobs: int | None = None
    """Tell the logprob of every token and so many of the likeliest ids; None to tell none."""
    token_ids: bool = False
    """Tell the tokens, not only their text."""
    n: int = 1
    """Choices; they share the prompt's pages."""
    client: str = ""
    """Who asks, for fair shares: never a secret, since it is logged."""
    priority: int = 0
    """Of all requests of a client, those with the lowest number go first."""
    cache_salt: str = ""
    """Its pages are found again by requests of equal salt only."""
    resumable: bool = False
    """A client that goes away may come back for it, also after the gateway has died."""
    key: str = ""
    """An unguessable name of a resumable request, under which `find` finds it; drawn where there is none."""
    ticket: bytes = b""
    """What the door wants to have again when the request is resumed."""


class DeltaToken(NamedTuple):
    """One generated token, for who asked for tokens or logprobs."""

    token: int
    logprobs: TokenLogprobs | None
    """None where none were asked for, for a stop token that is not shown, and for a token that was
    committed before the gateway died."""


class Delta(msgspec.Struct, frozen=True, gc=False):
    """Text that became certain: whole UTF-8 characters, nothing that may still be a stop string."""

    text: str
    tokens: tuple[DeltaToken, ...] = ()
    """Tokens that were committed, only when asked for. They may be ahead of the text."""
    choice: int = 0
    sequence: int = 0
    """The sequence number of the place behind it."""
    tail: str = ""
    """`tail_hash` of all text up to there, for a request that can be resumed."""


class End(msgspec.Struct, frozen=True, gc=False):
    """The one terminal event of a choice."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None
    """One line for a person when the reason is "error"."""
    choice: int = 0
    cached: Cached | None = None
    """What of the prompt was found instead of being computed, told with choice 0: all share one prompt.

    None when nobody knows: it lost its worker before that one had it, or its gateway.
    """


class Refused(Exception):
    """The request was not accepted; nothing of it remains."""


class QueueFull(Refused):
    """No room for one more open request now; worth trying again."""


class Draining(Refused):
    """The system is shutting down."""


class NotKept(Refused):
    """Nothing is kept under this name: it never was, it cannot be resumed, or its time is over."""


class Diverged(Refused):
    """The client has not what was sent to it, so nothing can follow."""


class PrefixTooShort(Refused):
    """There is no whole page of it that could be kept."""


class PrefixRefused(Refused):
    """The allocator does not keep it: too much of the pool is pinned already."""


class PrefixUnfilled(Refused):
    """It could not be filled, or not in time; worth trying again."""


class KeptPrefix(msgspec.Struct, frozen=True):
    """A prefix that is kept in the cache."""

    name: str
    created: int
    expires_at: int
    """Both in Unix time."""
    tokens: int
    """All of it."""
    cached_tokens: int
    """Those that were in the cache already when it was asked for."""
    pinned_tokens: int
    """Those that are in memory now, and stay: whole pages of them. Fewer where pages were lost and did not
    fit any more."""
    pinned_pages: int


class Superseded(Exception):
    """The events of a session are read by somebody else from now on, who resumed it."""


class Session(Protocol):
    """One reader of one request."""

    @property
    def request_id(self) -> str:
        """How logs and clients name the request."""
        ...

    @property
    def generation(self) -> Generation:
        """What was asked for."""
        ...

    @property
    def resume_id(self) -> str:
        """What it takes to resume it: the request's id and a secret, so that nobody can guess it."""
        ...

    @property
    def superseded(self) -> trio.Event:
        """Set when `events` would raise Superseded: for a door that is not asking for the next one."""
        ...

    def events(self) -> AsyncIterator[Delta | End]:
        """Deltas as they are committed, exactly one End a choice, then the end of the iteration.

        To be iterated once. Superseded when another session of the same request was made, or may be,
        since this one was left.
        """
        ...

    def cancel(self, by: str) -> None:
        """Give the request up everywhere at once, and say who did; idempotent, a no-op after the end."""
        ...

    def leave(self, by: str) -> None:
        """The client is gone: keep what can be resumed for a while, cancel everything else."""
        ...


class Prefixes(Protocol):
    """The prefixes that are kept for clients, each by the one who asked for it."""

    async def keep(self, prefix: Prefix) -> KeptPrefix:
        """Keep a prefix: returns when all its pages are there, or raises Refused."""
        ...

    def kept(self, owner: str) -> Sequence[KeptPrefix]:
        """What is kept for an owner, the oldest first."""
        ...

    def find(self, owner: str, name: str) -> KeptPrefix:
        """One of an owner's; NotKept when there is none of that name."""
        ...

    def forget(self, owner: str, name: str) -> KeptPrefix:
        """Keep it no longer; NotKept when there is none of that name."""
        ...


class Sessions(Protocol):
    """The gateway, as its doors see it."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def text(self) -> TextCodec: ...

    @property
    def prefixes(self) -> Prefixes: ...

    @property
    def resume_grace_s(self) -> float:
        """For so long a request that can be resumed is kept when its client is gone."""
        ...

    def draw_seed(self) -> int:
        """A fresh unsigned 64-bit seed for a request that brought none."""
        ...

    def open(self, generation: Generation) -> Session:
        """Accept a request, or raise Refused."""
        ...

    def find(self, key: str) -> str | None:
        """The resume id of the request that was opened under a client's own key, while it is kept."""
        ...

    def resume(self, resume_id: str, positions: Sequence[Position] | None) -> Session:
        """Go on reading a request; a position a choice, None from its beginning.

        NotKept or Diverged when that cannot be.
        """
        ...

    def not_ready(self) -> str | None:
        """Why no token could be produced now, or None when it could."""
        ...

    def system_statistics(self) -> dict[str, dict[str, int | float]]:
        """What every actor of the system last published, by its name."""
        ...

    def render_metrics(self) -> bytes:
        """The body of GET /metrics."""
        ...
