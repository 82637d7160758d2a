"""A link that goes wrong on purpose: drops, delays, duplicates, reorders and cuts, by a seeded plan.

It wraps any LinkFactory. One `FaultyNetwork` serves all actors of a test; each gets its own view,
`network.links(NAME)`, so that a plan can tell who speaks. All waiting is by trio's clock, virtual
time included.

    actor ─▶ FaultyOutbox ─▶ fate by hook, script, cut or chance ─▶ held back until due ─▶ inner outbox
"""

from __future__ import annotations

import contextlib
import heapq
from typing import TYPE_CHECKING, Literal

import msgspec
import trio

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from transport.link import Inbox, LinkFactory, Outbox

Fate = Literal["pass", "drop", "delay", "duplicate", "reorder"]


class EdgePlan(msgspec.Struct, frozen=True):
    """What happens to the messages of one edge (source, destination endpoint).

    Rates are probabilities a message, tried in the order cut, drop, delay, duplicate, reorder.
    """

    drop: float = 0.0
    delay: float = 0.0
    """Held back for up to `delay_s`, with everything sent after it: order is kept."""
    duplicate: float = 0.0
    """Passed, and once more within `delay_s`."""
    reorder: float = 0.0
    """Held back for up to `delay_s` while later ones overtake it."""
    cut: float = 0.0
    """The edge is cut from this message on for `cut_s`: all of it is lost."""
    delay_s: float = 0.1
    cut_s: float = 1.0
    script: dict[int, Fate] = msgspec.field(default_factory=dict)
    """Fates by the number of the message on its edge, from 0; they win over the rates."""


NO_FAULTS = EdgePlan()


class FaultStatistics(msgspec.Struct):
    """What was done to how many messages; `sent` counts what actors sent, fates may overlap."""

    sent: int = 0
    dropped: int = 0
    delayed: int = 0
    duplicated: int = 0
    reordered: int = 0
    cut: int = 0


class FaultyNetwork:
    """The plan, the dice and the counters that all views share."""

    def __init__(
        self,
        inner: LinkFactory,
        nursery: trio.Nursery,
        dice: random.Random,
        *,
        plan: EdgePlan | Callable[[str, str], EdgePlan] = NO_FAULTS,
        on_message: Callable[[int, str, str, bytes], Fate | None] | None = None,
    ) -> None:
        """Wrap `inner`.

        `nursery`: where messages that are held back wait; cancelling it loses them. `dice`: decides
        by the rates; the same seed and the same order of sends give the same faults. `plan`: one for
        all edges, or a function of (source, destination endpoint) that is asked once an edge.
        `on_message(k, source, destination endpoint, message)`: called before message k of the whole
        network, from 0, goes anywhere; it may decide its fate, or kill somebody at that moment.
        """
        self._inner = inner
        self._nursery = nursery
        self._dice = dice
        self._plan = plan
        self._on_message = on_message
        self._edges: dict[tuple[str, str], _Edge] = {}
        self._statistics = FaultStatistics()

    def links(self, source: str) -> FaultyLinks:
        """The LinkFactory of the actor `source`, the name by which plans and hooks know it."""
        return FaultyLinks(self, source)

    def cut(self, source: str, destination: str) -> None:
        """Lose everything that `source` sends to the endpoint `destination`, until healed."""
        self._edge(source, destination).cut_until = float("inf")

    def heal(self, source: str | None = None, destination: str | None = None) -> None:
        """End cuts, by the plan or by `cut`: of one edge, of a source, of a destination, or all."""
        for (edge_source, edge_destination), edge in self._edges.items():
            if source in (None, edge_source) and destination in (None, edge_destination):
                edge.cut_until = float("-inf")

    def statistics(self) -> FaultStatistics:
        """A copy of the counters."""
        return msgspec.structs.replace(self._statistics)

    def _edge(self, source: str, destination: str) -> _Edge:
        edge = self._edges.get((source, destination))
        if edge is None:
            plan = self._plan if isinstance(self._plan, EdgePlan) else self._plan(source, destination)
            edge = self._edges[source, destination] = _Edge(source, destination, plan)
        return edge

    def _decide(self, edge: _Edge, message: bytes, now: float) -> Fate:
        number, edge.sent = edge.sent, edge.sent + 1
        overall = self._statistics.sent
        self._statistics.sent += 1
        if self._on_message is not None:
            fate = self._on_message(overall, edge.source, edge.destination, message)
            if fate is not None:
                return fate
        plan = edge.plan
        if number in plan.script:
            return plan.script[number]
        if now < edge.cut_until:
            self._statistics.cut += 1
            return "drop"
        if self._happens(plan.cut):
            edge.cut_until = now + plan.cut_s
            self._statistics.cut += 1
            return "drop"
        if self._happens(plan.drop):
            return "drop"
        if self._happens(plan.delay):
            return "delay"
        if self._happens(plan.duplicate):
            return "duplicate"
        if self._happens(plan.reorder):
            return "reorder"
        return "pass"

    def _happens(self, rate: float) -> bool:
        return rate > 0.0 and self._dice.random() < rate


class _Edge:
    """From one source to one destination; it outlives the outboxes that use it."""

    def __init__(self, source: str, destination: str, plan: EdgePlan) -> None:
        self.source = source
        self.destination = destination
        self.plan = plan
        self.sent = 0
        self.cut_until = float("-inf")


class FaultyLinks:
    """One actor's LinkFactory; its inboxes are the inner ones, its outboxes go wrong."""

    def __init__(self, network: FaultyNetwork, source: str) -> None:
        self._network = network
        self._source = source

    def bind(self, name: str) -> Inbox:
        """Open an inbox of the inner links."""
        return self._network._inner.bind(name)

    def connect(self, endpoint: str) -> FaultyOutbox:
        """Open an outbox whose messages suffer the fates of the edge to `endpoint`."""
        inner = self._network._inner.connect(endpoint)
        return FaultyOutbox(self._network, self._network._edge(self._source, endpoint), inner)


class FaultyOutbox:
    """The sending end; see `transport.link.Outbox`.

    A message that is dropped or held back counts as queued; those held back have no high-water mark.
    A message that meets no fault meets the inner outbox at once, with its mark.
    """

    def __init__(self, network: FaultyNetwork, edge: _Edge, inner: Outbox) -> None:
        self._network = network
        self._edge = edge
        self._inner = inner
        self._held: list[tuple[float, int, bool, bytes]] = []  # (due, number, in order, message)
        self._count = 0
        # Of those held back, how many are so in order: while there are any, the rest queues behind.
        self._in_order = 0
        self._not_before = float("-inf")
        self._sending = trio.Lock()
        self._news = trio.Event()
        self._carrier: trio.CancelScope | None = None
        self._carrying = False
        self._closed = False

    def send_nowait(self, message: bytes) -> None:
        """Queue a message; raises trio.WouldBlock or trio.ClosedResourceError."""
        if self._passes(message):
            self._inner.send_nowait(message)

    async def send(self, message: bytes) -> None:
        """Queue a message, waiting for room; raises trio.ClosedResourceError once closed."""
        await trio.lowlevel.checkpoint_if_cancelled()
        try:
            if self._passes(message):
                self._inner.send_nowait(message)
        except trio.WouldBlock:
            async with self._sending:
                await self._inner.send(message)
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()

    def close(self) -> None:
        """Drop what is still queued or held back, and disconnect. Idempotent."""
        if not self._closed:
            self._closed = True
            if self._carrier is not None:
                self._carrier.cancel()
            self._held.clear()
            self._inner.close()

    def _passes(self, message: bytes) -> bool:
        """Decide a message's fate; True if it is to be sent on now."""
        if self._closed:
            raise trio.ClosedResourceError
        now = trio.current_time()
        network, edge = self._network, self._edge
        fate = network._decide(edge, message, now)
        counts = network._statistics
        if fate == "drop":
            counts.dropped += 1
            return False
        later = now + network._dice.uniform(0.0, edge.plan.delay_s) if fate != "pass" else now
        if fate == "reorder":
            counts.reordered += 1
            self._hold(later, message)
            return False
        if fate == "duplicate":
            counts.duplicated += 1
            self._hold(later, message)
        elif fate == "delay":
            counts.delayed += 1
            self._not_before = max(self._not_before, later)
        if fate == "delay" or self._in_order:
            self._hold(max(now, self._not_before), message, in_order=True)
            return False
        return True

    def _hold(self, due: float, message: bytes, *, in_order: bool = False) -> None:
        self._count += 1
        self._in_order += in_order
        heapq.heappush(self._held, (due, self._count, in_order, message))
        self._news.set()
        if not self._carrying:
            self._carrying = True
            self._network._nursery.start_soon(self._carry)

    async def _carry(self) -> None:
        """Send on what is held back, each when it is due; ends when nothing is."""
        # The inner outbox can be closed under us by its network.
        with trio.CancelScope() as self._carrier, contextlib.suppress(trio.ClosedResourceError):
            while self._held:
                due = self._held[0][0]
                self._news = trio.Event()
                with trio.move_on_at(due):
                    await self._news.wait()
                if self._held and self._held[0][0] <= trio.current_time():
                    _, _, in_order, message = heapq.heappop(self._held)
                    async with self._sending:
                        await self._inner.send(message)
                    self._in_order -= in_order
        self._carrying = False
