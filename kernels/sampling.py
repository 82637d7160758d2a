"""From logits to tokens: the sampling rule of engine.sampling over rows of logits, in numpy.

Order for a row: the mask forbids ids; logits are divided by the temperature; top_k, then top_p over
what top_k left, then min_p drop the unlikely; Gumbel noise is added; the greatest wins. "More likely"
always means (logit descending, id ascending).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernels.philox import GUMBEL_HIGH, GUMBEL_LOW, gumbel_noise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from engine.sampling import SamplingParams

    Mask = NDArray[np.uint32]
    Ids = NDArray[np.int64]
    Scores = NDArray[np.float64]

NO_TOKEN = -1
"""The token of a row that cannot be sampled: a logit is not finite, or the mask forbids every id."""

NOISE_RANGE = GUMBEL_HIGH - GUMBEL_LOW + 1e-6
"""An id whose logit / temperature is further than this below the maximum cannot win."""

FIRST_TAKE = 256
"""Ids that the search for top_p sorts at first; it doubles eightfold until they suffice."""


def mask_words(vocab_size: int) -> int:
    """How many uint32 words a mask over the vocabulary has."""
    return -(-vocab_size // 32)


def sample_rows(
    logits: NDArray[np.float32],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[Mask | None],
) -> NDArray[np.int32]:
    """Sample one token for each row of `logits` [L, vocab_size]; returns [L] int32.

    `positions[i]` is the log position that the sampled token of row i will take. A row whose logits are
    not all finite, or whose mask allows no id, gets NO_TOKEN, and the other rows are not disturbed.
    """
    rows = zip(logits, positions, params, masks, strict=True)
    return np.fromiter((sample_row(*row) for row in rows), np.int32, count=len(logits))


def sample_row(logits: NDArray[np.float32], position: int, params: SamplingParams, mask: Mask | None) -> int:
    """The token that follows a row with the given logits [vocab_size], or NO_TOKEN."""
    if not np.isfinite(logits).all():
        return NO_TOKEN
    if params.temperature == 0.0:
        return _greedy(logits, mask)
    ids, scores = surviving_ids(logits, params, mask)
    if ids.size == 0:
        return NO_TOKEN
    near = scores >= -NOISE_RANGE
    ids, scores = ids[near], scores[near]
    noise = gumbel_noise(params.seed, params.choice, position, ids.astype(np.uint64))
    # argmax takes the first of equals, and ids ascend
    return int(ids[np.argmax(scores + noise)])


def surviving_ids(
    logits: NDArray[np.float32], params: SamplingParams, mask: Mask | None
) -> tuple[Ids, Scores]:
    """Ids (ascending) that mask and filters leave, and their (logit - maximum) / temperature.

    The temperature must be above 0. The maximum is taken over the allowed ids, so the likeliest has score
    0 and no temperature, however small, overflows.
    """
    allowed = np.flatnonzero(_allowed(mask, len(logits))) if mask is not None else np.arange(len(logits))
    if allowed.size == 0:
        return allowed, np.zeros(0)
    values = logits[allowed].astype(np.float64)
    # a denormal temperature makes -inf, which is "cannot win", as it should be
    with np.errstate(over="ignore"):
        scores = (values - values.max()) / params.temperature
    if 0 < params.top_k < allowed.size:
        keep = _most_likely(values, params.top_k)
        keep.sort()
        allowed, values, scores = allowed[keep], values[keep], scores[keep]
    if params.top_p < 1.0:
        keep = _nucleus(values, scores, params.top_p)
        keep.sort()
        allowed, scores = allowed[keep], scores[keep]
    if params.min_p > 0.0:
        likely = np.exp(scores) >= params.min_p
        allowed, scores = allowed[likely], scores[likely]
    return allowed, scores


def _greedy(logits: NDArray[np.float32], mask: Mask | None) -> int:
    if mask is None:
        return int(np.argmax(logits))
    allowed = _allowed(mask, len(logits))
    best = int(np.argmax(np.where(allowed, logits, -np.inf)))
    return best if allowed[best] else NO_TOKEN


def _allowed(mask: Mask, vocab_size: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.ascontiguousarray(mask, "<u4").view(np.uint8), bitorder="little")
    return bits[:vocab_size].view(np.bool_)


def _most_likely(values: Scores, count: int) -> Ids:
    """Indexes of the `count` greatest values, by (value descending, index ascending)."""
    threshold = np.partition(values, values.size - count)[values.size - count]
    tied = np.flatnonzero(values >= threshold)
    order: Ids = tied[np.argsort(-values[tied], kind="stable")]
    return order[:count]


def _nucleus(values: Scores, scores: Scores, top_p: float) -> Ids:
    """Indexes of the smallest set of most likely ids whose probabilities sum to at least top_p."""
    goal = top_p * np.exp(scores).sum()
    take = min(FIRST_TAKE, values.size)
    while True:
        order = _most_likely(values, take)
        weights = np.exp(scores[order])
        before = np.cumsum(weights) - weights
        if take == values.size or before[-1] >= goal:
            nucleus: Ids = order[before < goal]
            return nucleus
        take = min(take * 8, values.size)
