"""Philox4x64-10 over a vector of counters: the noise that sampling adds, one word a vocabulary id.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

ROUNDS = 10
MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
WORD = (1 << 64) - 1

LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)
CHUNK = 8192
"""Ids at a time: the dozen temporaries of a round then stay in the second-level cache."""


def philox_words(seed: int, choice: int, position: int, ids: Words) -> Words:
    """First output word of Philox4x64-10 with key (seed, choice) and counter (position, id, 0, 0).

    ids: [n] uint64; returns [n] uint64. Equal to `numpy.random.Philox(key=[seed, choice],
    counter=[position - 1, id, 0, 0])`'s first raw word, since numpy counts before it draws.
    """
    words = np.empty(len(ids), np.uint64)
    for start in range(0, len(ids), CHUNK):
        part = slice(start, start + CHUNK)
        words[part] = _first_words(seed, choice, position, ids[part])
    return words


def gumbel_noise(seed: int, choice: int, position: int, ids: Words) -> NDArray[np.float64]:
    """Standard Gumbel noise of each id at a log position; [n] float64, by the rule of engine.sampling.

    The rule's largest u, 1 - 2**-54, is no float64: it is taken as the largest float64 below 1, so that
    the noise is finite, between GUMBEL_LOW and GUMBEL_HIGH.
    """
    words = philox_words(seed, choice, position, ids)
    u = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    np.minimum(u, 1.0 - 2.0**-53, out=u)
    noise: NDArray[np.float64] = -np.log(-np.log(u))
    return noise


GUMBEL_LOW = float(-np.log(-np.log(2.0**-54)))
GUMBEL_HIGH = float(-np.log(-np.log(1.0 - 2.0**-53)))


def _first_words(seed: int, choice: int, position: int, ids: Words) -> Words:
    """The rounds. Counter words that are still equal for all ids have length 1 and broadcast."""
    c0, c1 = np.array([position], np.uint64), ids
    c2 = c3 = np.zeros(1, np.uint64)
    for turn in range(ROUNDS):
        key0 = np.uint64((seed + turn * WEYL[0]) & WORD)
        key1 = np.uint64((choice + turn * WEYL[1]) & WORD)
        high1 = _multiply_high(MULTIPLIERS[1], c2) ^ c1 ^ key0
        if turn == ROUNDS - 1:
            break
        high0 = _multiply_high(MULTIPLIERS[0], c0) ^ c3 ^ key1
        c0, c1, c2, c3 = high1, MULTIPLIERS[1] * c2, high0, MULTIPLIERS[0] * c0
    return high1


def _multiply_high(factor: Any, words: Words) -> Words:
    """Upper 64 bits of the 128-bit products, from four products of 32-bit halves."""
    factor_low, factor_high = factor & LOW, factor >> HALF
    low, high = words & LOW, words >> HALF
    carry = factor_low * low
    carry >>= HALF
    middle = factor_high * low
    middle += carry
    cross = factor_low * high
    cross += middle & LOW
    cross >>= HALF
    middle >>= HALF
    high *= factor_high
    high += middle
    high += cross
    return high
