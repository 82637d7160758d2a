"""The scheduler: who runs next and where. Soft state only.

It holds nothing that it could not be told again: gateways restate every open request to a new
scheduler, workers their slots, the allocator how full the pool is. A slot is taken from the moment
a request is placed until its gateway says that the request moved on or ended, or died itself; the
slots of a worker are an absolute number, so that no crash can leak one.

    placed on w (prefilling) ≤ prefill_slots(w)        placed for w (either stage) ≤ decode_slots(w)

Requests go oldest first. One that does not fit now holds back those behind it, so that short ones
cannot starve a long one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from engine.core import Send, Statistics
from engine.ids import owner_of
from engine.messages import (
    Drain,
    Place,
    PoolExhausted,
    PoolFact,
    Preempt,
    RequestEnded,
    RequestFact,
    Roster,
    Stop,
    WorkerFact,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.ids import Incarnation, SequenceKey
    from engine.messages import Member, ToScheduler


@dataclass(slots=True)
class Slots:
    """A worker's slots and who is in them."""

    prefill_slots: int
    decode_slots: int
    prefilling: set[SequenceKey] = field(default_factory=set)
    decoding: set[SequenceKey] = field(default_factory=set)
    """Sequences that decode here, and those that will when their prefill is done."""


class Scheduler:
    """Admission and placement over one pool of pages."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._requests: dict[SequenceKey, RequestFact] = {}
        self._gateways: dict[int, Incarnation] = {}
        self._ordinals: dict[Incarnation, int] = {}
        self._workers: dict[Incarnation, Slots] = {}
        self._pool: PoolFact | None = None
        self._exhausted = False
        """Somebody starves, and nobody was known that could give way."""
        self.placements = 0
        self.preemptions = 0

    # ── events ────────────────────────────────────────────────────────────────────────────────

    def peers(self, up: Sequence[Member], down: Sequence[Incarnation], now: float) -> list[Send]:
        for dead in down:
            self._workers.pop(dead, None)
            ordinal = self._ordinals.pop(dead, None)
            if ordinal is not None:
                self._gateways.pop(ordinal, None)
                for key in [k for k in self._requests if owner_of(k.request) == (ordinal, dead.epoch)]:
                    self._forget(key)
        for member in up:
            if member.kind == "gateway":
                self._gateways[member.ordinal] = member.incarnation
                self._ordinals[member.incarnation] = member.ordinal
        # Requests placed on the dead stay where they are until their gateway takes them back.
        return self._place()

    def handle(self, source: Incarnation, message: ToScheduler, now: float) -> list[Send]:
        """Take one message; the answers are placements."""
        match message:
            case RequestFact():
                known = self._requests.get(message.key)
                if source not in self._ordinals or (known is not None and known.term > message.term):
                    return []
                self._forget(message.key)
                self._requests[message.key] = message
                self._occupy(message)
                if self._exhausted:
                    return [*self._preempt(), *self._place()]
            case RequestEnded():
                self._forget(message.key)
            case WorkerFact():
                slots = self._workers.setdefault(source, Slots(0, 0))
                slots.prefill_slots, slots.decode_slots = message.prefill_slots, message.decode_slots
                for fact in self._requests.values():
                    self._occupy(fact)
            case PoolFact():
                self._pool = message
                self._exhausted = self._exhausted and message.free == 0
            case PoolExhausted():
                self._exhausted = True
                return self._preempt()
            case Roster() | Drain() | Stop():
                return []
            case _:
                assert_never(message)
        return self._place()

    # ── placement ─────────────────────────────────────────────────────────────────────────────

    def _forget(self, key: SequenceKey) -> None:
        if self._requests.pop(key, None) is not None:
            for slots in self._workers.values():
                slots.prefilling.discard(key)
                slots.decoding.discard(key)

    def _occupy(self, fact: RequestFact) -> None:
        if fact.stage == "prefilling" and fact.prefill in self._workers:
            self._workers[fact.prefill].prefilling.add(fact.key)
        if fact.stage != "waiting" and fact.decode in self._workers:
            self._workers[fact.decode].decoding.add(fact.key)

    def _waiting(self) -> list[RequestFact]:
        waiting = [fact for fact in self._requests.values() if fact.stage == "waiting"]
        return sorted(waiting, key=lambda fact: (fact.arrival, fact.key))

    def _place(self) -> list[Send]:
        sends: list[Send] = []
        for fact in self._waiting():
            where = self._where(fact)
            if where is None:
                break
            prefill, decode = where
            placed = RequestFact(
                fact.key, fact.term + 1, "prefilling", fact.arrival, fact.length, fact.limit, prefill, decode
            )
            self._requests[fact.key] = placed
            self._occupy(placed)
            self.placements += 1
            gateway = self._gateways[owner_of(fact.key.request)[0]]
            sends.append(Send(gateway, Place(fact.key, fact.term, prefill, decode)))
        return sends

    def _where(self, fact: RequestFact) -> tuple[Incarnation, Incarnation] | None:
        """A prefill and a decode worker with a free slot each, or None while there are none.

        The worker that prefills also decodes where it can: nothing has to be handed over then.
        Otherwise the one with the fewest sequences decodes.
        """
        if not self._pages_suffice(fact):
            return None
        prefills = [
            (len(slots.prefilling), worker)
            for worker, slots in self._workers.items()
            if len(slots.prefilling) < slots.prefill_slots and worker not in fact.excluding
        ]
        decodes = {
            worker: len(slots.decoding)
            for worker, slots in self._workers.items()
            if len(slots.decoding) < slots.decode_slots and worker not in fact.excluding
        }
        if not prefills or not decodes:
            return None
        prefill = min(prefills)[1]
        decode = min(decodes, key=lambda worker: (worker != prefill, decodes[worker], worker))
        return prefill, decode

    def _pages_suffice(self, fact: RequestFact) -> bool:
        """Whether the pages that the log needs now are free, beside what is promised already.

        Growth while decoding is not reserved: when the pool runs out, the newest gives way. A
        request that is alone always goes.
        """
        if self._pool is None:
            return False
        active = [other for other in self._requests.values() if other.stage != "waiting"]
        if not active:
            return True
        promised = sum(self._pages(other) for other in active if other.stage == "prefilling")
        return self._pages(fact) + promised + len(active) <= self._pool.free

    def _pages(self, fact: RequestFact) -> int:
        return -(-fact.length // self.page_tokens)

    def _preempt(self) -> list[Send]:
        """The newest give way until one of them surely had pages; the oldest never does.

        One that is still in prefill may have had none yet, and then nothing would be freed.
        """
        active = [fact for fact in self._requests.values() if fact.stage != "waiting"]
        active.sort(key=lambda fact: (fact.arrival, fact.key))
        sends: list[Send] = []
        for fact in reversed(active[1:]):
            self._exhausted = False
            self.preemptions += 1
            gateway = self._gateways[owner_of(fact.key.request)[0]]
            sends.append(Send(gateway, Preempt(fact.key, fact.term)))
            if fact.stage == "decoding":
                break
        return sends

    # ── for people and tests ──────────────────────────────────────────────────────────────────

    def check(self) -> None:
        for worker, slots in self._workers.items():
            for key in slots.prefilling:
                fact = self._requests[key]
                assert fact.stage == "prefilling", f"{key} in a prefill slot is {fact.stage}"
                assert fact.prefill == worker
            for key in slots.decoding:
                fact = self._requests[key]
                assert fact.stage != "waiting", f"{key} in a decode slot waits"
                assert fact.decode == worker

    def statistics(self) -> Statistics:
        stages = [fact.stage for fact in self._requests.values()]
        return {
            "requests": len(stages),
            "requests_waiting": stages.count("waiting"),
            "requests_prefilling": stages.count("prefilling"),
            "requests_decoding": stages.count("decoding"),
            "workers": len(self._workers),
            "placements": self.placements,
            "preemptions": self.preemptions,
        }
