"""Prefixes that a gateway keeps in the cache of its host for its clients: asked for, filled, kept, let go.

    open ──▶ ASKING ── all pages are there ──▶ SETTLED ── a new allocator ──▶ ASKING
               │  ▲                                │
      some are │  │ filled, or given up            │ released, or its time is over: gone, from every state
      missing  ▼  │
             FILLING ── failed ──▶ PAUSING ── a little later ──▶ FILLING

The allocator keeps what is there (PinWanted) and says how much that is (PinFact); what is missing is filled
by a request for one token that nobody sees, and asked for again. No question is asked before the last one
was answered, but to a new allocator, which is told every pin anew: its predecessor's pages may have gone.

A pin is *established* once all its pages were there. Before that its client waits, and a pin that is refused
or cannot be filled in MAX_FILLS attempts ends. An established one stays to its end, with the pages that there
are. Only whole pages are kept: what is behind the last one is computed by everybody, like the last token of
any prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from engine.chain import token_bytes
from engine.core import Send, Statistics
from engine.ids import pack_request, prefix_name
from engine.lifecycle import PIN, PinEvent, PinState, advance
from engine.messages import PinWanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.ids import Incarnation
    from engine.messages import Member, PinFact

MOST_PINS = 64
"""Of one gateway: each keeps its tokens, and is said again to a new allocator."""
MAX_FILLS = 3
"""Requests in a row by which a prefix is filled."""
REFILL_S = 1.0
"""After a request that failed, until the next."""

Outcome = Literal["pinned", "short", "refused", "unfilled", "expired"]
"""pinned: all is there. short: an established one whose pages have gone and could not be filled again.

refused: by the allocator; unfilled, expired: ended before it was established.
"""


class Prefix(msgspec.Struct, frozen=True, array_like=True):
    """What is to be kept."""

    tokens: tuple[int, ...]
    ttl_s: int
    """Seconds from now."""
    salt: str = ""
    owner: str = ""
    """Who may see it and let go of it."""
    client: str = ""
    """Whose share of the system filling it counts against."""
    created: int = 0
    """Unix time, for people."""


class Fill(NamedTuple):
    """To be done: run a request for one token over this prompt, and say how it ended by `filled`."""

    name: str
    prompt: tuple[int, ...]
    prefix: Prefix


class Cease(NamedTuple):
    """To be done: give up the request that fills a prefix. Nothing is to be said of it."""

    name: str


class Settled(NamedTuple):
    """A pin has come to rest: established, as good as can be, or ended."""

    name: str
    outcome: Outcome
    detail: str = ""
    """One line for a person, where it is not what was wanted."""


class PinsFull(Exception):
    """There are MOST_PINS already."""


PinEffect = Send | Fill | Cease | Settled


@dataclass(slots=True)
class Pin:
    """One prefix."""

    name: str
    prefix: Prefix
    until: float
    """Time of the host's monotonic clock."""
    whole: int
    """Its whole pages."""
    state: PinState = PinState.ASKING
    pages: int = 0
    """Of those, kept by the allocator as it last said."""
    found: int | None = None
    """Those that were there when it was first asked; None: it has not answered yet."""
    fills: int = 0
    """Attempts in a row."""
    retry: float = 0.0
    """When the next one is due, while PAUSING."""
    established: bool = False
    failed: str = ""
    """Why the last attempt did not fill it, or why it was refused."""


class Pins:
    """All pins of one incarnation of a gateway; they end with it."""

    def __init__(
        self, me: Incarnation, ordinal: int, page_tokens: int, *, allocator: str = "allocator"
    ) -> None:
        """`allocator`: the name of the one of this gateway's host."""
        self.page_tokens = page_tokens
        self._me = me
        self._ordinal = ordinal
        self._allocator = allocator
        self._pins: dict[str, Pin] = {}
        self._counter = 0
        self.refills = 0
        """Requests that were to fill a prefix."""

    # ── from the doors ────────────────────────────────────────────────────────────────────────

    def open(self, prefix: Prefix, now: float) -> tuple[str, list[PinEffect]]:
        """Keep a prefix: its name, until `Settled` says how that went.

        PinsFull when there are too many; ValueError when it has no whole page.
        """
        whole = len(prefix.tokens) // self.page_tokens
        if whole == 0:
            raise ValueError(f"{len(prefix.tokens)} tokens are no page of {self.page_tokens}")
        if len(self._pins) >= MOST_PINS:
            raise PinsFull
        self._counter += 1
        name = prefix_name(pack_request(self._ordinal, self._me.epoch, self._counter))
        pin = self._pins[name] = Pin(name, prefix, now + prefix.ttl_s, whole)
        return name, [self._want(pin)]

    def release(self, name: str) -> list[PinEffect]:
        """Nobody wants it kept any more; nothing when there is no such pin."""
        pin = self._pins.get(name)
        return [] if pin is None else self._end(pin)

    def get(self, name: str) -> Pin | None:
        """The pin of that name, while there is one."""
        return self._pins.get(name)

    @property
    def pins(self) -> tuple[Pin, ...]:
        """All of them, the oldest first."""
        return tuple(self._pins.values())

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member]) -> list[PinEffect]:
        """State all of them again to a new allocator; those that are being filled when that is over."""
        if not any(member.name == self._allocator for member in up):
            return []
        effects: list[PinEffect] = []
        for pin in self._pins.values():
            if pin.state is PinState.SETTLED:
                pin.fills = 0
                effects.append(self._ask(pin, PinEvent.FORGOTTEN))
            elif pin.state is PinState.ASKING:
                effects.append(self._want(pin))
        return effects

    def handle(self, message: PinFact) -> list[PinEffect]:
        """The allocator's answer; one to a pin that asks nothing is none."""
        pin = self._pins.get(message.name)
        if pin is not None and pin.state is PinState.SETTLED and message.refused:
            # It had to give way. It is asked for again when somebody else speaks for the pages.
            pin.pages = 0
            return [Settled(pin.name, "short", message.refused)]
        if pin is None or pin.state is not PinState.ASKING:
            return []
        pin.pages = max(0, min(message.pages, pin.whole))
        if pin.found is None:
            pin.found = pin.pages
        if message.refused:
            return self._refused(pin, message.refused)
        if pin.pages == pin.whole:
            pin.established = True
            return self._settle(pin, "pinned")
        if pin.fills < MAX_FILLS:
            return self._fill(pin, PinEvent.SHORT)
        if pin.established:
            return self._settle(pin, "short", self._what_is_there(pin))
        return self._end(pin, "unfilled", self._what_is_there(pin))

    def filled(self, name: str, now: float, failed: str = "") -> list[PinEffect]:
        """The request that fills a prefix has ended; `failed`: one line that says why it did not fill it."""
        pin = self._pins.get(name)
        if pin is None or pin.state is not PinState.FILLING:
            return []
        pin.failed = failed
        if not failed or (pin.fills == MAX_FILLS and pin.established):
            # What there is is kept, also when it is not all.
            return [self._ask(pin, PinEvent.FILLED)]
        pin.state = advance(PIN, pin.state, PinEvent.FAILED)
        if pin.fills == MAX_FILLS:
            return self._end(pin, "unfilled", failed)
        pin.retry = now + REFILL_S
        return []

    def tick(self, now: float) -> list[PinEffect]:
        """Do what the time has come for."""
        effects: list[PinEffect] = []
        for pin in self.pins:
            if now >= pin.until:
                effects += self._end(pin, "expired", "its time was over before it was filled")
            elif pin.state is PinState.PAUSING and now >= pin.retry:
                effects += self._fill(pin, PinEvent.RETRIED)
        return effects

    def next_turn(self) -> float | None:
        """When `tick` has something to do, if nothing happens before."""
        turns = (
            min(pin.until, pin.retry) if pin.state is PinState.PAUSING else pin.until
            for pin in self._pins.values()
        )
        return min(turns, default=None)

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _want(self, pin: Pin) -> Send:
        tokens = token_bytes(pin.prefix.tokens[: pin.whole * self.page_tokens])
        return Send(self._allocator, PinWanted(pin.name, pin.prefix.salt, tokens, pin.until))

    def _ask(self, pin: Pin, event: PinEvent) -> Send:
        pin.state = advance(PIN, pin.state, event)
        return self._want(pin)

    def _fill(self, pin: Pin, event: PinEvent) -> list[PinEffect]:
        pin.state = advance(PIN, pin.state, event)
        pin.fills += 1
        self.refills += 1
        # One more token than the pages hold: all of them are filled before it is computed, whatever it is.
        at = pin.whole * self.page_tokens
        tokens = pin.prefix.tokens
        return [Fill(pin.name, (*tokens[:at], tokens[min(at, len(tokens) - 1)]), pin.prefix)]

    def _settle(self, pin: Pin, outcome: Outcome, detail: str = "") -> list[PinEffect]:
        pin.state = advance(PIN, pin.state, PinEvent.ANSWERED)
        pin.fills = 0
        return [Settled(pin.name, outcome, detail)]

    def _refused(self, pin: Pin, why: str) -> list[PinEffect]:
        pin.pages = 0
        if pin.established:
            return self._settle(pin, "refused", why)
        return self._end(pin, "refused", why)

    def _what_is_there(self, pin: Pin) -> str:
        return pin.failed or f"{pin.pages} of its {pin.whole} pages stayed in memory"

    def _end(self, pin: Pin, outcome: Outcome | None = None, detail: str = "") -> list[PinEffect]:
        """Forget it and let go of its pages; tell how it ended if its client waits for that."""
        filling, established = pin.state is PinState.FILLING, pin.established
        pin.state = advance(PIN, pin.state, PinEvent.ENDED)
        del self._pins[pin.name]
        effects: list[PinEffect] = [Cease(pin.name)] if filling else []
        effects.append(Send(self._allocator, PinWanted(pin.name, pin.prefix.salt, b"", pin.until)))
        if outcome is not None and not established:
            effects.append(Settled(pin.name, outcome, detail))
        return effects

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def check(self) -> None:
        assert len(self._pins) <= MOST_PINS
        for name, pin in self._pins.items():
            assert pin.name == name
            assert pin.state is not PinState.OVER
            assert 0 <= pin.pages <= pin.whole
            assert 0 <= pin.fills <= MAX_FILLS
            assert pin.state is not PinState.SETTLED or pin.established, f"{name} rests, and was never there"
            assert pin.state not in (PinState.FILLING, PinState.PAUSING) or pin.fills, (
                f"{name} fills for free"
            )

    def statistics(self) -> Statistics:
        established = [pin for pin in self._pins.values() if pin.established]
        return {
            "prefixes": len(established),
            "prefixes_coming": len(self._pins) - len(established),
            "prefix_tokens": sum(pin.pages for pin in established) * self.page_tokens,
            "prefix_fills": self.refills,
        }
