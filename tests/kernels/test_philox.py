"""The generator against numpy's, and the noise rule against its formula."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kernels.philox import CHUNK, GUMBEL_HIGH, GUMBEL_LOW, gumbel_noise, philox_words

words = st.integers(0, 2**64 - 1)


def numpy_word(seed: int, choice: int, position: int, token: int) -> int:
    # numpy counts up before its first output; no sampled token takes position 0
    key, counter = np.array([seed, choice], np.uint64), np.array([position - 1, token, 0, 0], np.uint64)
    return int(np.random.Philox(key=key, counter=counter).random_raw())


@given(words, words, st.integers(1, 2**40), st.lists(st.integers(0, 2**32), min_size=1, max_size=5))
def test_words_are_those_of_numpy(seed: int, choice: int, position: int, tokens: list[int]) -> None:
    made = philox_words(seed, choice, position, np.array(tokens, np.uint64))
    assert made.tolist() == [numpy_word(seed, choice, position, token) for token in tokens]


def test_chunks_join_without_seam() -> None:
    ids = np.arange(2 * CHUNK + 3, dtype=np.uint64)
    made = philox_words(7, 1, 9, ids)
    probe = [0, CHUNK - 1, CHUNK, 2 * CHUNK, 2 * CHUNK + 2]
    assert [int(made[i]) for i in probe] == [numpy_word(7, 1, 9, i) for i in probe]


def test_noise_is_the_rule_and_stays_in_its_range() -> None:
    ids = np.arange(20_000, dtype=np.uint64)
    noise = gumbel_noise(3, 0, 5, ids)
    for token in range(0, 20_000, 997):
        u = ((numpy_word(3, 0, 5, token) >> 11) + 0.5) * 2.0**-53
        assert math.isclose(noise[token], -math.log(-math.log(u)), rel_tol=1e-14)
    assert GUMBEL_LOW <= noise.min() < -1.5
    assert 7 < noise.max() <= GUMBEL_HIGH
    # mean and variance of the Gumbel distribution: Euler's constant and pi²/6
    assert abs(noise.mean() - 0.5772) < 0.03
    assert abs(noise.var() - math.pi**2 / 6) < 0.06
