"""From logits to tokens: the sampling rule of engine.sampling over rows of logits, in numpy.

Order for a row: the mask forbids ids; biases and penalties change logits (`adjusted`); they are divided by
the temperature; top_k, then top_p over what top_k left, then min_p drop the unlikely; Gumbel noise is
added; the greatest wins. "More likely" always means (logit descending, id ascending).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.sampling import TokenLogprobs
from kernels.philox import GUMBEL_HIGH, GUMBEL_LOW, gumbel_noise

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from engine.sampling import SamplingParams
    from kernels.backend import Rows, TokenLog

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


def forbidding(vocab_size: int, tokens: Iterable[int]) -> Mask:
    """The mask that allows every id but the given ones."""
    mask = np.full(mask_words(vocab_size), 0xFFFFFFFF, np.uint32)
    for token in tokens:
        mask[token // 32] &= ~np.uint32(1 << token % 32)
    return mask


def sample_step(rows: Rows, logits: NDArray[np.float32]) -> NDArray[np.int32]:
    """One token for each row of a step that needs logits, which are [L, vocab_size]; [L] int32."""
    wanted = np.flatnonzero(rows.needs_logits)
    sequences = rows.sequence[wanted].tolist()
    return sample_rows(
        logits,
        (rows.position[wanted] + 1).tolist(),
        [rows.sampling[sequence] for sequence in sequences],
        [rows.masks[row] for row in wanted],
        [rows.logs[sequence] for sequence in sequences] if rows.logs else None,
    )


def logprobs_step(
    rows: Rows, tokens: NDArray[np.int32], logits: NDArray[np.float32]
) -> tuple[TokenLogprobs | None, ...]:
    """The logprobs that a step was asked for, one for each row that needs logits."""
    if not rows.logprobs:
        return ()
    counts = [rows.logprobs[sequence] for sequence in rows.sequence[rows.needs_logits].tolist()]
    return tuple(
        None if count is None or token == NO_TOKEN else logprobs_of(row, token, count)
        for row, token, count in zip(logits, tokens.tolist(), counts, strict=True)
    )


def logprobs_of(logits: NDArray[np.float32], token: int, count: int) -> TokenLogprobs:
    """The logprob of a token and of the `count` likeliest ids; logits [vocab_size], all finite."""
    values = logits.astype(np.float64)
    # of the logits, which tell apart what logprobs round to equals
    top = _most_likely(values, min(count, values.size)) if count else np.zeros(0, np.int64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    return TokenLogprobs(float(values[token]), tuple(zip(top.tolist(), values[top].tolist(), strict=True)))


def sample_rows(
    logits: NDArray[np.float32],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[Mask | None],
    logs: Sequence[TokenLog | None] | None = None,
) -> NDArray[np.int32]:
    """Sample one token for each row of `logits` [L, vocab_size]; returns [L] int32.

    `positions[i]` is the log position that the sampled token of row i will take. A row whose logits are
    not all finite, or whose mask allows no id, gets NO_TOKEN, and the other rows are not disturbed.
    """
    logs = [None] * len(logits) if logs is None else logs
    rows = zip(logits, positions, params, masks, logs, strict=True)
    return np.fromiter((sample_row(*row) for row in rows), np.int32, count=len(logits))


def sample_row(
    logits: NDArray[np.float32],
    position: int,
    params: SamplingParams,
    mask: Mask | None,
    log: TokenLog | None = None,
) -> int:
    """The token that follows a row with the given logits [vocab_size], or NO_TOKEN."""
    if not np.isfinite(logits).all():
        return NO_TOKEN
    if params.logit_bias or params.needs_log:
        return _choose(adjusted(logits, position, params, log), position, params, mask)
    return _choose(logits, position, params, mask)


def adjusted(
    logits: NDArray[np.float32], position: int, params: SamplingParams, log: TokenLog | None
) -> Scores:
    """The logits [vocab_size] of one row after biases and penalties, in float64.

    `position` is the sampled token's; ValueError when the penalties need a log and there is none.
    """
    values = logits.astype(np.float64)
    if params.logit_bias:
        ids, biases = zip(*params.logit_bias, strict=True)
        values[list(ids)] += biases
    if not params.needs_log:
        return values
    if log is None:
        raise ValueError("penalties need the token log")
    if params.repetition_penalty != 1.0:
        seen = np.unique(log.tokens[:position])
        old = values[seen]
        values[seen] = np.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        counts = np.bincount(log.tokens[log.prompt_length : position], minlength=len(values))
        values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    return values


def _choose(
    logits: NDArray[np.float32] | Scores, position: int, params: SamplingParams, mask: Mask | None
) -> int:
    """The token of a row whose logits are finite."""
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
    logits: NDArray[np.float32] | Scores, params: SamplingParams, mask: Mask | None
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


def _greedy(logits: NDArray[np.float32] | Scores, mask: Mask | None) -> int:
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
