"""What every pure core looks like from outside: facts in, messages to send out."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.ids import Incarnation
    from engine.messages import Member, Message


class Send(NamedTuple):
    """A message to post. A plain name means the incarnation that is alive now.

    When nobody of that name is alive, or the named incarnation is not any more, the message is
    dropped: whoever comes back is told everything it needs by `peers`.
    """

    to: str | Incarnation
    message: Message


Statistics = dict[str, int | float]


class Core(Protocol):
    """A pure actor. `now` is the host's monotonic clock in seconds."""

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        """Incarnations that became ready and incarnations that died, as the roster says."""
        ...

    def check(self) -> None:
        """Raise AssertionError if an invariant does not hold."""
        ...

    def statistics(self) -> Statistics:
        """Figures for people, metrics and tests."""
        ...
