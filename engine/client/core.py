"""All requests of a client over one connection at a time: no I/O, no clock.

The shell tells what happens (`connected`, `receive`, `disconnected`, `turn`) and when; it sends what
`take_outgoing` gives, calls `turn` at `next_turn`, and replaces a connection that `is_dead`. Every
connection is a new one: the gateway knows nothing of an earlier one, and nothing of it can still come.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import msgspec

from engine.client.errors import ClientClosed
from engine.client.exchange import Exchange
from engine.client.patience import Patience
from engine.stream_protocol import Failed, Ping, Pong, decode_to_client, encode

if TYPE_CHECKING:
    from engine.client.request import Request
    from engine.stream_protocol import ToGateway


class ClientCore:
    """Every request of a client, and the connection as far as they need to know it."""

    def __init__(self, patience: Patience | None = None) -> None:
        self._patience = patience or Patience()
        self._exchanges: dict[int, Exchange] = {}
        self._opened = 0
        self.is_connected = False
        self._heard = 0.0
        self._pinged = -inf
        self._outgoing: list[bytes] = []
        self.connections = 0
        self.strange = 0
        """Messages that were none, or none of ours."""

    # ── requests ──────────────────────────────────────────────────────────────────────────────

    def open(self, request: Request, now: float) -> Exchange:
        """Ask for something; it goes out with the next `take_outgoing` that finds a connection."""
        if not self._exchanges:
            # While there was nothing to ask, nobody listened for silence.
            self._heard = now
        self._opened += 1
        exchange = Exchange(self._opened, request, self._patience, self._say, now)
        self._exchanges[self._opened] = exchange
        exchange.turn(now, self.is_connected)
        self._ping(now)
        return exchange

    def close(self, now: float) -> None:
        """Give everything up; what is cancelled is worth a moment of waiting until `is_idle`."""
        for exchange in list(self._exchanges.values()):
            exchange.abandon(now, ClientClosed("the client was closed"))
        self._sweep()

    @property
    def is_idle(self) -> bool:
        """Nothing is asked, and nothing is being cancelled."""
        return not self._exchanges

    # ── the connection ────────────────────────────────────────────────────────────────────────

    def connected(self, now: float) -> None:
        """There is a new connection, on which nothing has been said."""
        assert not self.is_connected, "one connection at a time"
        self.is_connected = True
        self.connections += 1
        self._heard = now
        self._pinged = -inf
        self.turn(now)

    def disconnected(self, now: float) -> None:
        """The connection is gone, with whatever was under way on it."""
        self.is_connected = False
        self._outgoing.clear()
        for exchange in self._exchanges.values():
            exchange.lost(now)
        self.turn(now)

    def receive(self, data: bytes, now: float) -> None:
        """Take one message of the gateway."""
        self._heard = now
        try:
            message = decode_to_client(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.strange += 1
            return
        if isinstance(message, Pong):
            return
        number = 0 if message.stream is None else _number(message.stream)
        exchange = self._exchanges.get(number)
        if exchange is not None and exchange.name == message.stream:
            exchange.handle(message, now)
            if exchange.state == "over":
                del self._exchanges[number]
        elif isinstance(message, Failed):
            # What was said crossed the end of its stream, or is none of ours.
            self.strange += 1

    def is_dead(self, now: float) -> bool:
        """The connection is silent although it was asked for signs of life."""
        return self.is_connected and bool(self._exchanges) and now >= self._heard + self._patience.silence_s

    def take_outgoing(self) -> list[bytes]:
        """What to send now, in order."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    # ── time ──────────────────────────────────────────────────────────────────────────────────

    def turn(self, now: float) -> None:
        """Do what the time has come for."""
        for exchange in list(self._exchanges.values()):
            exchange.turn(now, self.is_connected)
        self._sweep()
        self._ping(now)

    def next_turn(self) -> float:
        """When to call `turn`, and look whether the connection `is_dead`, if nothing happens before."""
        due = min((each.next_turn(self.is_connected) for each in self._exchanges.values()), default=inf)
        if self.is_connected and self._exchanges:
            due = min(due, self._pinged + self._patience.ping_s, self._heard + self._patience.silence_s)
        return due

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Assert what always holds."""
        assert self.is_connected or not self._outgoing, "something is said to nobody"
        for exchange in self._exchanges.values():
            assert self.is_connected or exchange.state in ("waiting", "over"), "asked without a connection"
            exchange.check()

    def statistics(self) -> dict[str, int | float]:
        """Requests now, and what happened since the beginning."""
        return {
            "requests": len(self._exchanges),
            "requests_opened": self._opened,
            "connections": self.connections,
            "strange_messages": self.strange,
        }

    def _ping(self, now: float) -> None:
        if self.is_connected and self._exchanges and now >= self._pinged + self._patience.ping_s:
            self._pinged = now
            self._say(Ping())

    def _say(self, message: ToGateway) -> None:
        if self.is_connected:
            self._outgoing.append(encode(message))

    def _sweep(self) -> None:
        for number, exchange in list(self._exchanges.items()):
            if exchange.state == "over":
                del self._exchanges[number]


def _number(stream: str) -> int:
    """Of the exchange whose stream it is; 0 is nobody's."""
    number = stream.partition(".")[0]
    return int(number) if number.isascii() and number.isdigit() and len(number) < 19 else 0
