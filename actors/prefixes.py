"""Prefixes that clients keep in the cache: the requests, the clock and the waiting around `engine.pins`."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import structlog
import trio

from actors.sessions import (
    Draining,
    KeptPrefix,
    NotKept,
    PrefixRefused,
    PrefixTooShort,
    PrefixUnfilled,
    QueueFull,
)
from engine.ids import owner_of, parse_prefix_name, request_name
from engine.pins import MOST_PINS, Cease, Fill, PinsFull, Settled
from engine.sampling import GREEDY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from engine.core import Send, Statistics
    from engine.ids import SequenceKey
    from engine.ledger import Effect, Ledger
    from engine.messages import Member, PinFact
    from engine.pins import Pin, PinEffect, Pins, Prefix
    from engine.topology import Topology

log = structlog.get_logger()

KEEP_S = 120.0
"""How long a client waits at most until its prefix is filled and pinned."""
LAST_PRIORITY = 1000
"""Behind everything that clients can ask for themselves."""


class Surroundings(NamedTuple):
    """What a gateway's keeper of prefixes has to know of the topology."""

    other_gateways: dict[int, str]
    """By ordinal."""
    other_workers: frozenset[str]
    """On other hosts: what they fill is not in the pool of this one."""

    @classmethod
    def of(cls, gateway: str, topology: Topology) -> Surroundings:
        """Those of a gateway."""
        others = {
            actor.ordinal: actor.name
            for actor in topology.actors()
            if actor.kind == "gateway" and actor.name != gateway
        }
        here = topology.workers_on(topology.host_of(gateway))
        return cls(others, frozenset(topology.worker) - frozenset(here))


class PrefixKeeper:
    """Implements `actors.sessions.Prefixes` for the doors of one gateway."""

    def __init__(
        self,
        pins: Pins,
        ledger: Ledger,
        reserved: int,
        around: Surroundings,
        apply: Callable[[Iterable[Effect]], None],
    ) -> None:
        """`reserved`: places that are not for filling; `apply` performs what the ledger or a pin decided."""
        self.core = pins
        self._ledger = ledger
        self._reserved = reserved
        self._around = around
        self._apply = apply
        self._fills: dict[SequenceKey, str] = {}
        """The open requests that nobody sees, and the pins that they fill."""
        self._waiting: dict[str, trio.Event] = {}
        self._outcomes: dict[str, Settled] = {}
        """Of pins whose clients wait and have not looked yet."""
        self._draining = False
        self._news = trio.Event()

    # ── what the doors see ────────────────────────────────────────────────────────────────────

    async def keep(self, prefix: Prefix) -> KeptPrefix:
        """Keep a prefix: returns when all its pages are there and pinned, or raises Refused.

        Cancelled, it is kept no longer.
        """
        if self._draining:
            raise Draining
        try:
            name, effects = self.core.open(prefix, trio.current_time())
        except PinsFull:
            raise QueueFull(f"{MOST_PINS} prefixes are kept") from None
        except ValueError as error:
            raise PrefixTooShort(str(error)) from None
        log.info("prefix_wanted", prefix=name, tokens=len(prefix.tokens), ttl_s=prefix.ttl_s)
        settled = self._waiting[name] = trio.Event()
        try:
            self._do(effects)
            with trio.move_on_after(KEEP_S):
                await settled.wait()
            return self._told(name)
        finally:
            del self._waiting[name]
            self._outcomes.pop(name, None)
            pin = self.core.get(name)
            if pin is not None and not pin.established:
                self._do(self.core.release(name))

    def _told(self, name: str) -> KeptPrefix:
        """What the client of a pin is told, now that it has waited."""
        outcome = self._outcomes.get(name)
        if outcome is None and self._draining:
            raise Draining
        if outcome is None:
            raise PrefixUnfilled(f"it was not filled within {KEEP_S:g} s")
        pin = self.core.get(name)
        if outcome.outcome == "pinned" and pin is not None:
            return self._shown(pin)
        if outcome.outcome == "refused":
            raise PrefixRefused(outcome.detail)
        raise PrefixUnfilled(outcome.detail)

    def kept(self, owner: str) -> tuple[KeptPrefix, ...]:
        """What is kept for an owner, the oldest first."""
        mine = (pin for pin in self.core.pins if pin.established and pin.prefix.owner == owner)
        return tuple(self._shown(pin) for pin in mine)

    def find(self, owner: str, name: str) -> KeptPrefix:
        """One of an owner's; NotKept when there is none of that name."""
        pin = self.core.get(name)
        if pin is None or not pin.established or pin.prefix.owner != owner:
            raise NotKept(self._why_not(name))
        return self._shown(pin)

    def forget(self, owner: str, name: str) -> KeptPrefix:
        """Keep it no longer; NotKept when there is none of that name."""
        kept = self.find(owner, name)
        log.info("prefix_let_go", prefix=name, by="client")
        self._do(self.core.release(name))
        return kept

    def _why_not(self, name: str) -> str:
        number = parse_prefix_name(name)
        other = None if number is None else self._around.other_gateways.get(owner_of(number)[0])
        if other is not None:
            return f"it belongs to the gateway {other!r}"
        return "it never was, its time is over, or its gateway was started again"

    def _shown(self, pin: Pin) -> KeptPrefix:
        size = self.core.page_tokens
        return KeptPrefix(
            name=pin.name,
            created=pin.prefix.created,
            expires_at=pin.prefix.created + pin.prefix.ttl_s,
            tokens=len(pin.prefix.tokens),
            cached_tokens=(pin.found or 0) * size,
            pinned_tokens=pin.pages * size,
            pinned_pages=pin.pages,
        )

    # ── called by the gateway ─────────────────────────────────────────────────────────────────

    @property
    def filling(self) -> frozenset[SequenceKey]:
        """The open requests that are not a client's."""
        return frozenset(self._fills)

    def peers(self, up: Sequence[Member]) -> None:
        """Members that became ready."""
        self._do(self.core.peers(up))

    def handle(self, message: PinFact) -> None:
        """What the allocator says of a pin."""
        self._do(self.core.handle(message))

    def closed(self, key: SequenceKey, error: str | None) -> None:
        """A request has ended; nothing where it filled no prefix."""
        name = self._fills.pop(key, None)
        if name is not None:
            self._do(self.core.filled(name, trio.current_time(), error or ""))

    async def keep_time(self) -> None:
        """Let go of prefixes whose time is over, and try again what failed; runs until cancelled."""
        while True:
            self._news = trio.Event()
            turn = self.core.next_turn()
            with trio.move_on_at(float("inf") if turn is None else turn):
                await self._news.wait()
            self._do(self.core.tick(trio.current_time()))

    def drain(self) -> None:
        """Fill nothing more: nobody may begin what keeps the system from ending."""
        self._draining = True
        for key in list(self._fills):
            self._cease(key)
        for settled in self._waiting.values():
            settled.set()

    # ── inside ────────────────────────────────────────────────────────────────────────────────

    def _do(self, effects: Iterable[PinEffect]) -> None:
        sends: list[Send] = []
        for effect in effects:
            match effect:
                case Fill():
                    self._fill(effect)
                case Cease(name=name):
                    for key in [key for key, filled in self._fills.items() if filled == name]:
                        self._cease(key)
                case Settled(name=name, outcome=outcome, detail=detail):
                    tell = log.info if outcome == "pinned" else log.warning
                    tell("prefix_settled", prefix=name, outcome=outcome, detail=detail or None)
                    if name in self._waiting:
                        self._outcomes[name] = effect
                        self._waiting[name].set()
                case _:
                    sends.append(effect)
        self._apply(sends)
        self._news.set()

    def _fill(self, fill: Fill) -> None:
        """Open the request that fills a prefix, unless the last places would go to it."""
        now = trio.current_time()
        if self._draining or self._ledger.slots_free <= self._reserved:
            self._do(self.core.filled(fill.name, now, "no request could be opened to fill it"))
            return
        (key,), effects = self._ledger.open(
            fill.prompt,
            len(fill.prompt) + 1,
            (),
            GREEDY,
            now,
            client=fill.prefix.client,
            priority=LAST_PRIORITY,
            cache_salt=fill.prefix.salt,
            avoids=self._around.other_workers,
        )
        self._fills[key] = fill.name
        log.info("prefix_filling", prefix=fill.name, request_id=request_name(key.request))
        self._apply(effects)

    def _cease(self, key: SequenceKey) -> None:
        del self._fills[key]
        self._apply(self._ledger.cancel(key))

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Assert what always holds."""
        self.core.check()
        names = list(self._fills.values())
        assert len(names) == len(set(names)), "a prefix is filled twice"
        assert all(self.core.get(name) is not None for name in names), "a request fills nothing"
        assert self._outcomes.keys() <= self._waiting.keys()

    def statistics(self) -> Statistics:
        """Prefixes now, and requests that were to fill them."""
        return self.core.statistics()
