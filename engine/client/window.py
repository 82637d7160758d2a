"""What waits for a reader, and how much more the gateway may send.

granted ≥ received                    deltas, counted since the request was last asked
waiting ≤ window + one a time asked   pieces: a request that is asked needs one to begin with
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from engine.client.events import Piece

if TYPE_CHECKING:
    from engine.client.events import Event


class Window:
    """The events of one request that its reader has not taken."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._events: deque[Event] = deque()
        self.waiting = 0
        """Pieces among the events."""
        self.received = 0
        """Deltas since it was last asked."""
        self.granted = 0
        """Deltas that may be sent since then."""

    def __len__(self) -> int:
        return len(self._events)

    def restart(self) -> int:
        """The request is asked (again): how many deltas may come."""
        self.received = 0
        self.granted = max(1, self._size - self.waiting)
        return self.granted

    def put(self, event: Event) -> None:
        """Something for the reader."""
        self._events.append(event)
        self.waiting += isinstance(event, Piece)

    def take(self) -> Event:
        """The oldest event."""
        event = self._events.popleft()
        self.waiting -= isinstance(event, Piece)
        return event

    def clear(self) -> None:
        """Nobody reads any more."""
        self._events.clear()
        self.waiting = 0

    def grant(self) -> bool:
        """Allow more when half of the window is free; whether there is more to allow."""
        upto = self.received + max(0, self._size - self.waiting)
        if upto - self.granted < max(1, self._size // 2):
            return False
        self.granted = upto
        return True

    def check(self) -> None:
        """Assert what always holds."""
        assert self.waiting == sum(isinstance(event, Piece) for event in self._events)
        assert self.granted >= self.received, "more came than was granted"
