"""How far a model's predictions are from another's: likelihood, divergence, agreement, position by position.

Everything is float64 from the logits on. With p and q the probabilities of the reference and of the other
one, z their logits and Z = log Σ exp z:

    −log q(t)  = Z_q − z_q[t]                              t: the token that the text has
    KL(p ‖ q)  = Σ p ((z_p − Z_p) − (z_q − Z_q))           in nats
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Logits = NDArray[np.float32]
    Numbers = NDArray[np.float64]

BLOCK_ROWS = 8
"""Positions worked on at a time: their float64 numbers stay in the processor's cache."""


class NotFiniteError(ValueError):
    """Logits with NaN or Inf."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """What a model says of R consecutive positions: logits [R, vocab_size], and Z [R]."""

    logits: Logits
    normaliser: Numbers

    @classmethod
    def of(cls, logits: Logits) -> Predictions:
        """NotFiniteError where there is nothing to compare."""
        normaliser = np.empty(len(logits))
        for rows in _blocks(len(logits)):
            values = logits[rows].astype(np.float64)
            if not np.isfinite(values).all():
                raise NotFiniteError("logits that are not finite")
            largest = values.max(axis=1, keepdims=True)
            values -= largest
            np.exp(values, out=values)
            normaliser[rows] = largest[:, 0] + np.log(values.sum(axis=1))
        return cls(logits, normaliser)

    def surprise(self, targets: NDArray[np.int32]) -> Numbers:
        """−log q of the targets [R]."""
        return self.normaliser - self.logits[np.arange(len(targets)), targets]

    def divergence(self, other: Predictions) -> Numbers:
        """KL(this ‖ the other) [R]; a rounding below zero is zero."""
        found = np.empty(len(self.logits))
        for rows in _blocks(len(found)):
            values = self.logits[rows].astype(np.float64)
            difference = values - other.logits[rows]
            # Before the sum: behind it, what the probabilities lack of 1 would be multiplied by it.
            difference -= (self.normaliser[rows] - other.normaliser[rows])[:, np.newaxis]
            values -= self.normaliser[rows, np.newaxis]
            np.exp(values, out=values)
            found[rows] = np.einsum("rv,rv->r", values, difference)
        return np.maximum(found, 0.0)

    def agrees(self, other: Predictions) -> NDArray[np.bool_]:
        """[R]: whether both find the same token the likeliest; of equals, the first."""
        same: NDArray[np.bool_] = self.logits.argmax(axis=1) == other.logits.argmax(axis=1)
        return same


def _blocks(rows: int) -> list[slice]:
    return [slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS)]


@dataclass(slots=True)
class Scores:
    """What was found of one weight format, a number a position."""

    surprises: list[Numbers] = field(default_factory=list)
    divergences: list[Numbers] = field(default_factory=list)
    agreements: list[NDArray[np.bool_]] = field(default_factory=list)

    def add(self, found: Predictions, reference: Predictions, targets: NDArray[np.int32]) -> None:
        """Compare some positions' predictions with the reference's."""
        self.surprises.append(found.surprise(targets))
        self.divergences.append(reference.divergence(found))
        self.agreements.append(reference.agrees(found))

    def summary(self, reference: Scores) -> dict[str, Any]:
        """The figures, of two positions at least. Standard errors take positions for independent."""
        surprise, other = np.concatenate(self.surprises), np.concatenate(reference.surprises)
        divergence = np.concatenate(self.divergences)
        perplexity, reference_perplexity = math.exp(surprise.mean()), math.exp(other.mean())
        # Of exp(mean) by its derivative, which is exp(mean) itself; of the difference position by position,
        # since both predict the same tokens.
        paired = perplexity * surprise - reference_perplexity * other
        return {
            "perplexity": perplexity,
            "perplexity_se": perplexity * standard_error(surprise),
            "perplexity_difference": perplexity - reference_perplexity,
            "perplexity_difference_se": standard_error(paired),
            "kl_mean": float(divergence.mean()),
            "kl_se": standard_error(divergence),
            "kl_median": float(np.median(divergence)),
            "kl_p99": float(np.percentile(divergence, 99)),
            "kl_max": float(divergence.max()),
            "same_choice": float(np.concatenate(self.agreements).mean()),
        }


def standard_error(values: Numbers) -> float:
    """Of the mean."""
    return float(values.std(ddof=1)) / math.sqrt(len(values))
