"""Interleaved rounds of a comparison: who is measured, what was found, and how much others disturbed it."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from engine.errors import EstafetError
from tools.bench_load import BenchFailed
from tools.install import say
from tools.peers import PeerFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

BUSY = 0.05
"""Where others took more of the cores than this, figures are not to be trusted."""


@dataclass(slots=True)
class Contender:
    """Something that is measured once a round."""

    name: str
    gives: tuple[str, ...]
    """The figures it makes, unless it fails."""
    measure: Callable[[], Mapping[str, float | None]]


@dataclass(slots=True)
class Findings:
    """Figures of all rounds by their names, and why others are not there."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, str] = field(default_factory=dict)

    def rounds(self, part: str, contenders: Sequence[Contender], number: int, spare: int = 0) -> None:
        """Interleaved rounds; who fails once is not asked again.

        A round in which others took much of the cores is made up for, up to `spare` times; the quietest
        `number` count.
        """
        left = list(contenders)
        made: list[tuple[float, dict[str, float]]] = []
        while left and len(made) < number + spare and _quiet(made) < number:
            before, found = Cores.now(), dict[str, float]()
            for contender in list(left):
                say(f"{part}, round {len(made) + 1}: {contender.name}")
                try:
                    found |= self._measured(contender)
                except (PeerFailed, EstafetError, BenchFailed) as error:
                    reason = " ".join(str(error).split())
                    say(f"{contender.name}: {reason}")
                    self.reasons.update(dict.fromkeys(contender.gives, reason))
                    left.remove(contender)
            made.append((Cores.now().others_since(before), found))
        made.sort(key=lambda one: one[0])
        for share, found in made[:number]:
            for name, value in {f"others_{part}": share, **found}.items():
                self.values[name].append(value)

    def _measured(self, contender: Contender) -> dict[str, float]:
        """One measurement, without the figures that it does not tell."""
        found = contender.measure()
        silent = [name for name, value in found.items() if value is None]
        self.reasons.update(dict.fromkeys(silent, f"{contender.name}: the backend does not tell"))
        return {name: value for name, value in found.items() if value is not None}

    def medians(self) -> dict[str, float]:
        """Of every figure that there is; of the machine's floor the best, which is what it means."""
        found = {
            name: max(values) if name.startswith("floor_") else statistics.median(values)
            for name, values in self.values.items()
        }
        variants = [
            name for name in ("llamacpp_q8_total32_tok_s", "llamacpp_f16_total32_tok_s") if name in found
        ]
        if variants:
            found["llamacpp_best_total32_tok_s"] = max(found[name] for name in variants)
        elif reason := self.reasons.get("llamacpp_f16_total32_tok_s"):
            self.reasons["llamacpp_best_total32_tok_s"] = reason
        return found


def _quiet(made: Sequence[tuple[float, dict[str, float]]]) -> int:
    """How many rounds others hardly disturbed."""
    return sum(share <= BUSY for share, _ in made)


class Cores(NamedTuple):
    """Processor time that was used up to a moment, in seconds."""

    at: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> Cores:
        """Of the whole machine, and of us with the children that have ended."""
        with Path("/proc/stat").open(encoding="ascii") as stream:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, stream.readline().split()[1:9])
        times = os.times()
        used = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return cls(time.perf_counter(), used, sum(times[:4]))

    def others_since(self, before: Cores) -> float:
        """The share of all cores that others used, from 0 to 1."""
        wall = self.at - before.at
        theirs = (self.all_s - before.all_s) - (self.own_s - before.own_s)
        return min(1.0, max(0.0, theirs / (wall * (os.cpu_count() or 1))))
