"""The slots of all workers and who is in them.

    in a prefill slot of w ≤ prefill_slots(w)        in a decode slot of w ≤ decode_slots(w)

unless a worker came back with fewer, or a new scheduler is told what its predecessor placed. A
sequence has its decode slot from the start, so that a finished prefill never waits for one. Both are on
one host, where the pages that the prefill fills are read in place, unless nobody decodes there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection

    from engine.ids import Incarnation, SequenceKey


class Free(NamedTuple):
    """Slots of the whole system: those that are free, and how many there are."""

    prefill: int
    """Only where a decode slot of the same host is free too."""
    decode: int
    prefill_slots: int
    decode_slots: int


@dataclass(slots=True)
class WorkerSlots:
    """One worker's slots and who is in them."""

    prefill_slots: int
    decode_slots: int
    host: str
    prefilling: set[SequenceKey] = field(default_factory=set)
    decoding: set[SequenceKey] = field(default_factory=set)
    """Sequences that decode here, and those that will when their prefill is done."""


class Slots:
    """Where there is room."""

    def __init__(self) -> None:
        self._workers: dict[Incarnation, WorkerSlots] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def offered(self, worker: Incarnation, prefill_slots: int, decode_slots: int, host: str = "") -> bool:
        """A worker says what it has; whether it is new, so that nobody is known to be there."""
        new = worker not in self._workers
        slots = self._workers.setdefault(worker, WorkerSlots(0, 0, host))
        slots.prefill_slots, slots.decode_slots = prefill_slots, decode_slots
        return new

    def died(self, worker: Incarnation) -> None:
        """A worker has no slots any more; nothing if it was none."""
        self._workers.pop(worker, None)

    def occupy(self, key: SequenceKey, prefill: Incarnation | None, decode: Incarnation | None) -> None:
        """A sequence takes a slot of each worker that is given and known."""
        if prefill in self._workers:
            self._workers[prefill].prefilling.add(key)
        if decode in self._workers:
            self._workers[decode].decoding.add(key)

    def vacate(self, key: SequenceKey) -> None:
        """A sequence takes no slot any more."""
        for slots in self._workers.values():
            slots.prefilling.discard(key)
            slots.decoding.discard(key)

    def free(self) -> Free:
        """Of all workers together."""
        workers = self._workers.values()
        decoding = {slots.host for slots in workers if len(slots.decoding) < slots.decode_slots}
        if decoding:
            decoding |= {slots.host for slots in workers if not self._decodes_on(slots.host)}
        return Free(
            sum(max(0, s.prefill_slots - len(s.prefilling)) for s in workers if s.host in decoding),
            sum(max(0, slots.decode_slots - len(slots.decoding)) for slots in workers),
            sum(slots.prefill_slots for slots in workers),
            sum(slots.decode_slots for slots in workers),
        )

    def where(
        self,
        excluding: Collection[Incarnation],
        hosts: Collection[str] = ("",),
        filled_on: str | None = None,
    ) -> tuple[Incarnation, Incarnation] | None:
        """A prefill and a decode worker of these hosts with a free slot each, or None without.

        The worker that prefills also decodes where it can: nothing has to be handed over then.
        Otherwise the one with the fewest sequences decodes. `filled_on`: the host that is to prefill.
        """
        decodes = {
            worker: count
            for worker, count in self._decodes(excluding).items()
            if self._workers[worker].host in hosts
        }
        decoding = {self._workers[worker].host for worker in decodes}
        if decodes:
            # A host that only fills hands over to another one.
            decoding |= {host for host in hosts if not self._decodes_on(host)}
        if filled_on is not None:
            decoding &= {filled_on}
        prefills = [
            (len(slots.prefilling), len(slots.decoding), worker)
            for worker, slots in self._workers.items()
            if len(slots.prefilling) < slots.prefill_slots
            and worker not in excluding
            and slots.host in decoding
        ]
        if not prefills:
            return None
        prefill = min(prefills)[-1]
        host = self._workers[prefill].host
        near = [worker for worker in decodes if self._workers[worker].host == host] or list(decodes)
        return prefill, min(near, key=lambda worker: (worker != prefill, decodes[worker], worker))

    def _decodes_on(self, host: str) -> bool:
        """Whether a host has workers that decode, busy or not."""
        return any(slots.host == host and slots.decode_slots > 0 for slots in self._workers.values())

    def prefill_workers(self, host: str) -> int:
        """How many workers of a host prefill."""
        return sum(slots.host == host and slots.prefill_slots > 0 for slots in self._workers.values())

    def where_of(
        self, workers: Collection[Incarnation], excluding: Collection[Incarnation]
    ) -> Incarnation | None:
        """Of these workers the one with the fewest sequences that has a free decode slot, or None."""
        decodes = self._decodes(excluding)
        free = [worker for worker in workers if worker in decodes]
        return min(free, key=lambda worker: (decodes[worker], worker), default=None)

    def _decodes(self, excluding: Collection[Incarnation]) -> dict[Incarnation, int]:
        """Workers with a free decode slot, and how many they decode."""
        return {
            worker: len(slots.decoding)
            for worker, slots in self._workers.items()
            if len(slots.decoding) < slots.decode_slots and worker not in excluding
        }

    def check(self, placed: dict[SequenceKey, tuple[Incarnation | None, Incarnation | None]]) -> None:
        """Against where each sequence that holds slots was placed."""
        for worker, slots in self._workers.items():
            assert slots.prefilling == {key for key, (prefill, _) in placed.items() if prefill == worker}
            assert slots.decoding == {key for key, (_, decode) in placed.items() if decode == worker}
