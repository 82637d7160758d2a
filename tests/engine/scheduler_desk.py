"""A scheduler without a system around it, and short ways to tell it facts and to read its answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.fairness import Fairness
from engine.ids import Incarnation, SequenceKey, pack_request
from engine.messages import Member, Place, PoolFact, Preempt, RequestEnded, RequestFact, WorkerFact
from engine.scheduler import Scheduler

if TYPE_CHECKING:
    from engine.core import Send

PAGE_TOKENS = 4
FRONT, BACK = Incarnation("front", 1), Incarnation("back", 1)
ORDINALS = {"front": 4, "back": 5}
P, D, E, B = (Incarnation(name, 1) for name in ("p", "d", "e", "b"))
ALLOCATOR = Incarnation("allocator", 1)


def gateway(incarnation: Incarnation) -> Member:
    return Member(incarnation.name, "gateway", ORDINALS[incarnation.name], incarnation.epoch, "", True)


def key_of(count: int, owner: Incarnation = FRONT, choice: int = 0) -> SequenceKey:
    return SequenceKey(pack_request(ORDINALS[owner.name], owner.epoch, count), choice)


def waiting(count: int, length: int = 4, owner: Incarnation = FRONT, term: int = 0) -> RequestFact:
    """A request that came in as the `count`th."""
    return RequestFact(key_of(count, owner), term, "waiting", float(count), length, 100)


class Desk:
    """A scheduler with gateways, workers with slots, and a pool; nothing is reserved if not asked for."""

    def __init__(
        self,
        *workers: tuple[Incarnation, int, int],
        free: int | None = 1000,
        reserve: float = 0.0,
        weights: dict[str, float] | None = None,
        hosts: dict[str, str] | None = None,
    ) -> None:
        self.core = Scheduler(PAGE_TOKENS, Fairness(weights or {}, reserve), hosts)
        self.told: dict[SequenceKey, RequestFact] = {}
        """The last word of the gateway, which obeys every placement at once."""
        assert self.core.peers([gateway(FRONT), gateway(BACK)], (), 0.0) == []
        for worker, prefill, decode in workers:
            self.tell(worker, WorkerFact(prefill, decode))
        if free is not None:
            self.pool(free)

    def tell(self, source: Incarnation, message: object) -> list[Send]:
        if isinstance(message, RequestFact):
            self.told[message.key] = message
        sends = self.core.handle(source, message, 0.0)  # type: ignore[arg-type]
        self.core.check()
        for place in places(sends):
            self.told[place.key] = msgspec.structs.replace(
                self.told[place.key],
                term=place.term + 1,
                stage="prefilling",
                prefill=place.prefill,
                decode=place.decode,
            )
        return sends

    def pool(self, free: int, allocator: Incarnation = ALLOCATOR) -> list[Send]:
        return self.tell(allocator, PoolFact(1000, free))

    def submit(self, *counts: int, length: int = 4) -> list[int]:
        return placed([send for count in counts for send in self.tell(FRONT, waiting(count, length))])

    def decoding(self, count: int, decode: Incarnation = D, length: int = 5) -> list[Send]:
        fact = RequestFact(key_of(count), 2, "decoding", float(count), length, 100, P, decode)
        return self.tell(FRONT, fact)

    def end(self, count: int, choice: int = 0) -> list[Send]:
        return self.tell(FRONT, RequestEnded(key_of(count, choice=choice), 9))

    def ask(
        self,
        count: int,
        client: str = "",
        *,
        length: int = 4,
        limit: int = 100,
        priority: int = 0,
        choices: int = 1,
    ) -> list[tuple[int, int]]:
        """A client's request comes in; which (request, choice) is placed."""
        sends = []
        for choice in range(choices):
            fact = RequestFact(
                key_of(count, choice=choice),
                0,
                "waiting",
                float(count),
                length,
                limit,
                client=client,
                priority=priority,
            )
            sends += self.tell(FRONT, fact)
        return choices_placed(sends)

    def accepted(self, count: int, choice: int = 0) -> list[tuple[int, int]]:
        """The prefill of a choice is done: it decodes. Which others are placed."""
        fact = self.told[key_of(count, choice=choice)]
        return choices_placed(
            self.tell(FRONT, msgspec.structs.replace(fact, term=fact.term + 1, stage="decoding"))
        )

    def taken_back(self, count: int, choice: int = 0) -> list[tuple[int, int]]:
        """A choice waits again. Which ones are placed."""
        fact = self.told[key_of(count, choice=choice)]
        return choices_placed(
            self.tell(
                FRONT,
                msgspec.structs.replace(fact, term=fact.term + 2, stage="waiting", prefill=None, decode=None),
            )
        )


def places(sends: list[Send]) -> list[Place]:
    return [send.message for send in sends if isinstance(send.message, Place)]


def placed(sends: list[Send]) -> list[int]:
    """Which requests were placed, by their count."""
    return [place.key.request & 0xFFFF for place in places(sends)]


def choices_placed(sends: list[Send]) -> list[tuple[int, int]]:
    """Which choices were placed, as (request, choice)."""
    return [(place.key.request & 0xFFFF, place.key.choice) for place in places(sends)]


def preempted(sends: list[Send]) -> list[int]:
    return [send.message.key.request & 0xFFFF for send in sends if isinstance(send.message, Preempt)]
