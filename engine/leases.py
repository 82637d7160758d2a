"""Leases: pages that workers take ahead of their tokens, so that no token waits for the allocator.

outstanding = granted − consumed        in absolute counts over a worker's life: saying it twice is harmless
who starves is served first, then who has least
nobody has a page to spare and somebody starves  ⇒  the scheduler is told once, and somebody gives way
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.core import Send
from engine.lifecycle import PageState
from engine.messages import LeaseGranted, LeaseRecall, PoolExhausted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from engine.ids import Incarnation
    from engine.layout import Owner
    from engine.messages import LeaseReturned, LeaseWanted, PagesHeld
    from engine.pages import Pages
    from engine.shapes import PageRef


@dataclass(slots=True)
class LeaseAccount:
    """What one worker was granted."""

    granted: int
    consumed: int
    ahead: int = 0
    need: int = 0
    recalled: bool = False

    @property
    def outstanding(self) -> int:
        """Granted pages that the worker has not said it used."""
        return self.granted - self.consumed

    @property
    def spare(self) -> bool:
        """It has more than will be used at once: taking what is needed there would move the need."""
        return self.outstanding > self.need

    @property
    def starving(self) -> bool:
        """A sequence of the worker stands still for want of a page."""
        return self.need > 0 and self.outstanding == 0


class Leases:
    """The accounts of all workers of a pool."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._accounts: dict[Incarnation, LeaseAccount] = {}
        self._freed_then = 0
        self.exhausted_told = False
        """The scheduler knows that somebody starves, and nothing has changed since."""

    def introduced(self, worker: Incarnation, held: PagesHeld) -> None:
        """A worker says what it has: what was granted and not heard of does not count."""
        self._accounts[worker] = LeaseAccount(held.consumed + len(held.leased), held.consumed)

    def want(self, worker: Incarnation, message: LeaseWanted) -> bool:
        """How many pages a worker wants ahead; False when it has not introduced itself."""
        account = self._accounts.get(worker)
        if account is None:
            return False
        account.consumed = max(account.consumed, message.consumed)
        account.ahead, account.need = message.ahead, message.need
        # Whoever gave way may have had no page: a changed want is all that shows it.
        self.exhausted_told = False
        return True

    def returned(self, worker: Incarnation, message: LeaseReturned) -> None:
        """A worker gives leases back; they count as consumed."""
        account = self._accounts.get(worker)
        if account is not None:
            account.consumed = max(account.consumed, message.consumed)
            account.ahead, account.recalled = message.ahead, False
            account.need = min(account.need, message.ahead)

    def lose(self, worker: Incarnation) -> None:
        """A worker is dead."""
        self._accounts.pop(worker, None)
        self.exhausted_told = False

    def grant(self, owner_of: Callable[[Incarnation], Owner]) -> list[Send]:
        """Lease what is wanted, as far as there are pages."""
        sends: list[Send] = []
        # Who starves goes first, else a recalled lease would go back; then who has least, so that a
        # hungry worker cannot starve another one.
        order = sorted(self._accounts.items(), key=lambda item: (not item[1].starving, item[1].outstanding))
        for worker, account in order:
            wanted = account.consumed + account.ahead - account.granted
            if wanted > 0 and self._pages.available:
                pages = tuple(self._pages.take(wanted, owner_of(worker)))
                account.granted += len(pages)
                sends.append(Send(worker, LeaseGranted(pages)))
        return sends

    def relieve(self) -> list[Send]:
        """Recall spare leases for a starving worker; when there are none, the scheduler must preempt."""
        if self._pages.freed != self._freed_then:
            self._freed_then, self.exhausted_told = self._pages.freed, False
        starving = next((worker for worker, account in self._accounts.items() if account.starving), None)
        if starving is None or self._pages.available:
            return []
        spare = [(worker, account) for worker, account in self._accounts.items() if account.spare]
        sends = []
        for worker, account in spare:
            if not account.recalled:
                account.recalled = True
                sends.append(Send(worker, LeaseRecall()))
        if sends or any(account.recalled for _, account in spare) or self.exhausted_told:
            return sends
        self.exhausted_told = True
        return [Send("scheduler", PoolExhausted(starving))]

    def check(self, owner_of: Callable[[Incarnation], Owner], doubted: Collection[PageRef]) -> None:
        """Against the table; `doubted` pages may be nobody's."""
        table = self._pages.table
        leased = Counter(
            table.owner(page)
            for page in self._pages.in_state(PageState.LEASED)
            if table.ref(page) not in doubted
        )
        for worker, account in self._accounts.items():
            assert account.outstanding >= 0, f"{worker} consumed more than it was granted"
            assert leased[owner_of(worker)] <= account.outstanding, f"{worker} holds uncounted leases"
