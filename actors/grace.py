"""Requests that nobody reads, until somebody comes back for them or their time is over."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from actors.open_request import OpenRequest


class GracePeriod:
    """Who waits for a reader, the longest first; of every client only so many.

    All have the same time, so the order of coming is that of going.
    """

    def __init__(self, seconds: float, most: int) -> None:
        """`most`: requests of one client; of more, the oldest goes at once."""
        self.seconds = seconds
        self._most = most
        self._waiting: dict[int, OpenRequest] = {}
        self._clients: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: OpenRequest, now: float) -> list[OpenRequest]:
        """Its time begins (again); returns those whose time is over for it, since their client has too many.

        What has been delivered goes first: somebody may come for it only if its last words were lost.
        """
        self.discard(request)
        request.expires = now + self.seconds
        self._waiting[request.number] = request
        client = request.generation.client
        self._clients[client] += 1
        if self._clients[client] <= self._most:
            return []
        mine = [other for other in self._waiting.values() if other.generation.client == client]
        gone = next((other for other in mine if other.delivered), mine[0])
        self.discard(gone)
        return [gone]

    def discard(self, request: OpenRequest) -> None:
        """Somebody came for it, or nobody wants it any more."""
        if self._waiting.pop(request.number, None) is not None:
            client = request.generation.client
            self._clients[client] -= 1
            if not self._clients[client]:
                del self._clients[client]

    def next_end(self) -> float | None:
        """When the first one's time is over."""
        return next((request.expires for request in self._waiting.values()), None)

    def due(self, now: float) -> list[OpenRequest]:
        """Those whose time is over, taken out."""
        over = []
        for request in self._waiting.values():
            if request.expires > now:
                break
            over.append(request)
        for request in over:
            self.discard(request)
        return over
