"""Calls that share one connection: whose turn it is, what is in flight, and what a cut gives back.

call ──▶ job ──▶ waiting, in a line of jobs: a run from each in turn ──▶ in flight, at most a window
                    ▲                                                      │
                    └───── cut: what was not answered goes back, whole ◀───┴──▶ settled page by page

unsettled pages of a job = those that wait + those in flight        a job is in the line = some wait
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    from collections.abc import Sequence

Item = TypeVar("Item")


class Job(Generic[Item]):
    """One call: which of its pages are settled, and how."""

    def __init__(self, items: Sequence[Item], epoch: int | None, since: float) -> None:
        self.items = items
        self.epoch = epoch
        """The incarnation of the peer that the items speak of; None until there is a connection."""
        self.since = since
        """When it came or last got on."""
        self.answers = [False] * len(items)
        self.waiting = deque(range(len(items)))
        self.unsettled = len(items)
        self.error: Exception | None = None
        self.live = True
        """Whether somebody still waits for it: if not, its targets must be left alone."""
        self.done = trio.Event()

    def finish(self, error: Exception | None = None) -> None:
        """Wake the caller, with what is settled or with an error."""
        self.error = error
        self.live = False
        self.done.set()


class Flight(Generic[Item]):
    """Pages of one job that are asked for, or handed over, under one number."""

    def __init__(self, number: int, job: Job[Item], positions: list[int]) -> None:
        self.number = number
        self.job = job
        self.positions = positions

    def items(self) -> list[Item]:
        """The pages, in the order of the run."""
        return [self.job.items[position] for position in self.positions]


class JobLine(Generic[Item]):
    """All jobs of a client."""

    def __init__(self, run_pages: int, window_pages: int) -> None:
        """`run_pages`: how many of a job go together; `window_pages`: in flight, or one run."""
        self.jobs: set[Job[Item]] = set()
        self.flights: deque[Flight[Item]] = deque()
        """Oldest first, which is the order of the answers."""
        self._line: deque[Job[Item]] = deque()
        self._in_flight = 0
        self._number = 0
        self._run_pages = run_pages
        self._window_pages = window_pages

    def enter(self, job: Job[Item]) -> None:
        """A job comes, at the end of the line."""
        self.jobs.add(job)
        self._line.append(job)

    def leave(self, job: Job[Item], error: Exception | None = None) -> None:
        """A job goes, done or not; what it has in flight will be received and forgotten. Idempotent."""
        job.finish(error or job.error)
        self.jobs.discard(job)
        with contextlib.suppress(ValueError):
            self._line.remove(job)
        job.waiting.clear()

    def take_off(self) -> Flight[Item] | None:
        """A run of the job whose turn it is, in flight from now on; None when the window has no room."""
        if not self._line:
            return None
        job = self._line[0]
        count = min(self._run_pages, len(job.waiting))
        if self._in_flight and self._in_flight + count > self._window_pages:
            return None
        self._line.popleft()
        self._number += 1
        flight = Flight(self._number, job, [job.waiting.popleft() for _ in range(count)])
        if job.waiting:
            self._line.append(job)
        self.flights.append(flight)
        self._in_flight += count
        return flight

    def keep(self, flight: Flight[Item], positions: list[int]) -> None:
        """Of the youngest flight only these go out; the others are settled with no."""
        assert self.flights[-1] is flight
        self._in_flight -= len(flight.positions) - len(positions)
        self._settle(flight.job, len(flight.positions) - len(positions))
        flight.positions = positions
        if not positions:
            self.flights.pop()

    def land(self, answers: Sequence[bool], now: float) -> None:
        """The oldest flight is answered, page by page."""
        flight = self.flights.popleft()
        self._in_flight -= len(flight.positions)
        if not flight.job.live:
            return
        for position, answer in zip(flight.positions, answers, strict=True):
            flight.job.answers[position] = answer
        flight.job.since = now
        self._settle(flight.job, len(answers))

    def take_back(self) -> None:
        """After a cut: what is in flight waits again, the oldest first."""
        while self.flights:
            flight = self.flights.pop()
            if flight.job.live:
                if not flight.job.waiting:
                    self._line.appendleft(flight.job)
                flight.job.waiting.extendleft(reversed(flight.positions))
        self._in_flight = 0

    def check(self) -> None:
        """Raise AssertionError unless every page of every job is in exactly one place."""
        assert self._in_flight == sum(len(flight.positions) for flight in self.flights)
        assert len(self._line) == len(set(self._line))
        assert set(self._line) == {job for job in self.jobs if job.waiting}
        flying: Counter[Job[Item]] = Counter()
        for flight in self.flights:
            flying[flight.job] += len(flight.positions)
        for job in self.jobs:
            assert job.live
            assert 0 < job.unsettled == len(job.waiting) + flying[job]

    def _settle(self, job: Job[Item], pages: int) -> None:
        if not job.live:
            return
        job.unsettled -= pages
        if job.unsettled == 0:
            self.leave(job)
