"""An allocator over a table, and workers that are not more than their rows of holders."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tables import OldestFirst, page_table

from engine.allocator import Allocator
from engine.chain import Chain, chain_root, token_bytes
from engine.ids import Incarnation, SequenceKey
from engine.layout import Owner, Seal
from engine.messages import (
    LeaseGranted,
    LeaseRecall,
    LeaseWanted,
    Member,
    PagesHeld,
    PagesReleased,
    PagesSealed,
    PoolExhausted,
    PrefixFact,
    PrefixGranted,
    PrefixWanted,
)

if TYPE_CHECKING:
    from engine.core import Send
    from engine.shapes import PageRef

ORDINALS = {"scheduler": 2, "a": 5, "b": 6, "c": 7, "replicator": 8}
A, B, C = (Incarnation(name, 1) for name in "abc")
SCHEDULER, REPLICATOR = Incarnation("scheduler", 1), Incarnation("replicator", 1)


def member(incarnation: Incarnation) -> Member:
    kind = incarnation.name if incarnation.name in ("scheduler", "replicator") else "worker"
    return Member(incarnation.name, kind, ORDINALS[incarnation.name], incarnation.epoch, "", True)  # type: ignore[arg-type]


def owner(incarnation: Incarnation) -> Owner:
    return Owner(ORDINALS[incarnation.name], incarnation.epoch)


PAGE = 4
ROOT = chain_root("")
KEY = SequenceKey(1, 0)


def seals(log: list[int], salt: str = "") -> list[Seal]:
    """What the full pages of a log are sealed with."""
    chain = Chain(chain_root("", salt), PAGE)
    found = []
    for end in range(PAGE, len(log) + 1, PAGE):
        parent, tokens = chain.parent, token_bytes(log[end - PAGE : end])
        found.append(Seal(chain.append(tokens), parent, tokens, None))
    return found


class Desk:
    """An allocator over a table, and what it said last."""

    def __init__(self, pages: int, *workers: Incarnation) -> None:
        self.table = page_table(pages, PAGE)
        self.gone: set[Owner] | None = None
        """Of the dead, those who are proven gone; None: all."""
        self.rows = {worker: self.table.claim(owner(worker)) for worker in workers}
        self.consumed: Counter[Incarnation] = Counter()
        self.start(*workers)
        for worker in workers:
            self.tell(worker, PagesHeld((), (), 0))

    def start(self, *workers: Incarnation) -> list[Send]:
        """A new allocator, and its first roster."""
        self.core = Allocator(self.table, ORDINALS, OldestFirst(), self.is_gone)
        self.core.check()
        return self.peers([SCHEDULER, *workers], [])

    def is_gone(self, dead: Owner) -> bool:
        return self.gone is None or dead in self.gone

    def peers(self, up: list[Incarnation], down: list[Incarnation]) -> list[Send]:
        sends = self.core.peers([member(incarnation) for incarnation in up], down, 0.0)
        self.core.check()
        return sends

    def tell(self, source: Incarnation, message: object) -> list[Send]:
        sends = self.core.handle(source, message, 0.0)  # type: ignore[arg-type]
        self.core.check()
        return sends

    def want(self, worker: Incarnation, ahead: int, consumed: int = 0, need: int = 0) -> list[Send]:
        return self.tell(worker, LeaseWanted(consumed, ahead, need))

    def figures(self) -> dict[str, int | float]:
        return self.core.statistics()

    def census(self) -> dict[str, int]:
        """Only what there is."""
        return {kind: count for kind, count in self.core.census().items() if count}

    def fill(self, worker: Incarnation, log: list[int], *, term: int = 1) -> tuple[PageRef, ...]:
        """A worker fills the pages of a log with leases, and announces those that are full."""
        count = -(-len(log) // PAGE)
        pages = lease(self, worker, count)
        assert len(pages) == count
        use(self, *pages, worker=worker)
        full = seals(log)
        for page, seal in zip(pages, full, strict=False):
            self.table.seal(page.index, seal)
        self.consumed[worker] += count
        self.want(worker, 0, self.consumed[worker])
        self.tell(worker, PagesSealed(KEY, term, pages[: len(full)]))
        return pages

    def let_go(self, worker: Incarnation, *pages: PageRef) -> list[Send]:
        for page in pages:
            self.rows[worker][page.index] = 0
        return self.tell(worker, PagesReleased(pages))

    def seek(
        self, worker: Incarnation, log: list[int], *, number: int = 9, have: int = 0, salt: str = ""
    ) -> PrefixGranted:
        """A worker asks for the pages of a log."""
        key, tokens = SequenceKey(number, 0), token_bytes(log[: (len(log) - 1) // PAGE * PAGE])
        sends = self.tell(worker, PrefixWanted(key, 1, chain_root("", salt), tokens, have, True))
        [answer] = [
            send.message for send in sends if isinstance(send.message, PrefixGranted) and send.to == worker
        ]
        assert isinstance(answer, PrefixGranted)
        return answer

    def take(self, worker: Incarnation, grant: PrefixGranted, *, filling: bool = True) -> list[Send]:
        """It holds what it was granted, and says so."""
        for page in grant.pages:
            self.rows[worker][page.index] = 1
        return self.tell(worker, PrefixFact(grant.key, grant.term, len(grant.pages), filling))


def granted(sends: list[Send]) -> dict[str, tuple[PageRef, ...]]:
    return {str(s.to): s.message.pages for s in sends if isinstance(s.message, LeaseGranted)}


def recalled(sends: list[Send]) -> list[str]:
    return [str(send.to) for send in sends if isinstance(send.message, LeaseRecall)]


def exhausted(sends: list[Send]) -> int:
    return sum(isinstance(send.message, PoolExhausted) for send in sends)


def lease(desk: Desk, worker: Incarnation, ahead: int, need: int = 0) -> tuple[PageRef, ...]:
    """What a worker is granted for its want."""
    return granted(desk.want(worker, ahead, desk.consumed[worker], need)).get(str(worker), ())


def use(desk: Desk, *pages: PageRef, worker: Incarnation = A) -> None:
    """The owner opens and holds them."""
    for block, page in enumerate(pages):
        desk.rows[worker][page.index] = 1
        desk.table.open(page.index, 1, 0, 1, block)
