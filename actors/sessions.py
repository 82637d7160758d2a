"""What a front door (HTTP now; WebSocket and ZeroMQ later) needs from the gateway, and no more.

A door turns its protocol into a Generation, opens a Session and streams its events. Everything
about terms, placement, recovery and the token log happens behind `Sessions`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from engine.model import ModelConfig
    from engine.sampling import SamplingParams, TokenLogprobs
    from engine.text import TextCodec

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class Generation:
    """One choice to generate, checked by the door as far as the door can know."""

    prompt: tuple[int, ...]
    """Token ids; at least one."""
    max_tokens: int
    """At least 1; prompt and max_tokens together fit the context."""
    sampling: SamplingParams
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


class DeltaToken(NamedTuple):
    """One generated token, for who asked for tokens or logprobs."""

    token: int
    logprobs: TokenLogprobs | None
    """None where none were asked for, and for a stop token that is not shown."""


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that became certain: whole UTF-8 characters, nothing that may still be a stop string."""

    text: str
    tokens: tuple[DeltaToken, ...] = ()
    """Tokens that were committed, only when asked for. They may be ahead of the text."""


@dataclass(frozen=True, slots=True)
class End:
    """The one terminal event of a session."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None
    """One line for a person when the reason is "error"."""


class Refused(Exception):
    """The request was not accepted; nothing of it remains."""


class QueueFull(Refused):
    """No room for one more open request now; worth trying again."""


class Draining(Refused):
    """The system is shutting down."""


class Session(Protocol):
    """One open request."""

    @property
    def request_id(self) -> str:
        """How logs and clients name the request."""
        ...

    def events(self) -> AsyncIterator[Delta | End]:
        """Deltas as they are committed, then exactly one End. To be iterated once."""
        ...

    def cancel(self, by: str) -> None:
        """Give the request up everywhere at once, and say who did; idempotent, a no-op after the End."""
        ...


class Sessions(Protocol):
    """The gateway, as its doors see it."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def text(self) -> TextCodec: ...

    def draw_seed(self) -> int:
        """A fresh unsigned 64-bit seed for a request that brought none."""
        ...

    def open(self, generation: Generation) -> Session:
        """Accept a request, or raise Refused."""
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
