"""The native sampler against numpy's, token by token, in every variant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import kernels

from engine.sampling import GREEDY, SamplingParams, TokenLogprobs
from kernels.backend import Rows, TokenLog
from kernels.cpu.backend import SamplingColumns, logprobs_of
from kernels.sampling import NO_TOKEN, forbidding, mask_words, sample_rows
from kernels.sampling import logprobs_of as expected_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

NATIVE = kernels()
VARIANTS = NATIVE.variants()
VOCABULARY = 49152
UNTOUCHED = -77


def native_sample(
    variant: str,
    logits: NDArray[np.float32],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[NDArray[np.uint32] | None] | None = None,
    logs: Sequence[TokenLog | None] | None = None,
    told: Sequence[int | None] = (),
) -> tuple[list[int], tuple[TokenLogprobs | None, ...], bytes]:
    """Tokens and logprobs of rows of logits [L, vocab], and the bits of the logprobs as they were made.

    `positions` are those that the sampled tokens will take.
    """
    count, vocab = logits.shape
    number = np.arange(count, dtype=np.int32)
    rows = Rows(
        sequence=number,
        position=np.array(positions, np.int32) - 1,
        token=np.zeros(count, np.int32),
        is_draft=np.zeros(count, np.bool_),
        needs_logits=np.ones(count, np.bool_),
        masks=tuple(masks) if masks is not None else (None,) * count,
        block_tables=(np.zeros(0, np.int32),) * count,
        sampling=tuple(params),
        logs=tuple(logs) if logs is not None else (),
        logprobs=tuple(told),
    )
    columns = SamplingColumns(vocab).of(rows, number)
    most = int(columns.told.max(initial=0))
    sampled = np.full(count, UNTOUCHED, np.int32)
    top_ids = np.full(count * most, UNTOUCHED, np.int32)
    top_logprobs = np.full(count * (most + 1), np.nan)
    NATIVE.sample(
        variant,
        logits,
        columns.doubles,
        columns.integers,
        columns.masks,
        columns.bias_ids,
        columns.biases,
        columns.logs,
        columns.told,
        sampled,
        top_ids,
        top_logprobs,
    )
    bits = sampled.tobytes() + top_ids.tobytes() + top_logprobs.tobytes()
    return sampled.tolist(), logprobs_of(sampled, columns.told, top_ids, top_logprobs, most), bits


def check(
    logits: NDArray[np.float32],
    positions: Sequence[int],
    params: Sequence[SamplingParams],
    masks: Sequence[NDArray[np.uint32] | None] | None = None,
    logs: Sequence[TokenLog | None] | None = None,
    told: Sequence[int | None] = (),
) -> list[int]:
    """Every variant samples what numpy does, and all tell the same bits; returns the tokens."""
    expected = sample_rows(logits, positions, params, masks or [None] * len(logits), logs).tolist()
    made = [native_sample(variant, logits, positions, params, masks, logs, told) for variant in VARIANTS]
    for variant, (tokens, logprobs, bits) in zip(VARIANTS, made, strict=True):
        assert tokens == expected, variant
        assert bits == made[0][2], variant
        for row, count in enumerate(told):
            if count is None or expected[row] == NO_TOKEN:
                assert logprobs[row] is None
                continue
            ours, theirs = logprobs[row], expected_logprobs(logits[row], expected[row], count)
            assert ours is not None
            assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
            ours_told, theirs_told = ([p.logprob, *(value for _, value in p.top)] for p in (ours, theirs))
            # of a logprob of 1e38, 1e-12 is less than a unit in the last place
            np.testing.assert_allclose(ours_told, theirs_told, rtol=1e-15, atol=1e-12)
    return expected


# No fractions k / n of few equal ids, where the order in which a sum is rounded decides.
TOP_P = [1e-9, 0.053, 0.47, 0.93, 0.9999, 1.0]
WORDS = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 2**63 - 1, 2**63, 2**64 - 1]))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list, ...]:
    """Rows of one vocabulary: logits, positions, parameters, masks, logs, logprobs wanted."""
    size = draw(st.one_of(st.integers(1, 3), st.integers(1, 70), st.sampled_from([8, 16, 32, 64, 257])))
    count = draw(st.integers(1, 4))
    # few distinct values make ties, wide ones reach past the range of the noise
    value = draw(
        st.sampled_from(
            [
                st.integers(-3, 3).map(float),
                st.floats(-90, 90, width=32),
                st.floats(allow_nan=False, allow_infinity=False, width=32),
                st.just(-0.0),
            ]
        )
    )
    logits, positions, params, masks, logs, told = [], [], [], [], [], []
    for _ in range(count):
        filled = st.lists(value, min_size=min(size, 70), max_size=min(size, 70))
        logits.append((draw(filled) * 4)[:size])
        log = draw(st.one_of(st.none(), st.lists(st.integers(0, size - 1), min_size=1, max_size=30)))
        penalty = st.one_of(st.just(0.0), st.floats(-2, 2)) if log is not None else st.just(0.0)
        repetition = [1.0, 0.01, 0.5, 1.3, 100.0] if log is not None else [1.0]
        biases = st.dictionaries(st.integers(0, size - 1), st.floats(-100, 100), max_size=4)
        params.append(
            SamplingParams(
                temperature=draw(st.sampled_from([0.0, 1e-300, 0.1, 0.7, 1.0, 3.0, 1e300])),
                top_k=draw(st.one_of(st.just(0), st.integers(1, 80))),
                top_p=draw(st.sampled_from(TOP_P)),
                min_p=draw(st.sampled_from([0.0, 1e-12, 0.03, 0.3, 1.0])),
                seed=draw(WORDS),
                choice=draw(WORDS),
                presence_penalty=draw(penalty),
                frequency_penalty=draw(penalty),
                repetition_penalty=draw(st.sampled_from(repetition)),
                logit_bias=tuple(draw(biases).items()),
            )
        )
        logs.append(
            None if log is None else TokenLog(np.array(log, np.int32), draw(st.integers(0, len(log))))
        )
        positions.append(draw(st.integers(1, len(log) if log is not None else 2**31 - 1)))
        words = st.lists(
            st.sampled_from([0, 1, 2**31, 2**32 - 1, 0x5A5A5A5A]),
            min_size=mask_words(size),
            max_size=mask_words(size),
        )
        mask = draw(st.one_of(st.none(), words))
        masks.append(None if mask is None else np.array(mask, np.uint32))
        told.append(draw(st.one_of(st.none(), st.integers(0, 90))))
    return np.array(logits, np.float32), positions, params, masks, logs, told  # type: ignore[return-value]


@settings(max_examples=400, deadline=None)
@given(steps())
def test_tokens_and_logprobs_are_those_of_numpy(step: tuple[list, ...]) -> None:
    check(*step)  # type: ignore[arg-type]


def test_the_vocabulary_of_a_real_model() -> None:
    random = np.random.default_rng(5)
    params, logits, masks, logs, told = [], [], [], [], []
    for number in range(40):
        spread = [0.5, 3.0, 10.0, 40.0][number % 4]
        row = (random.standard_normal(VOCABULARY) * spread).astype(np.float32)
        logits.append(np.round(row) if number % 7 == 0 else row)  # many ties
        params.append(
            SamplingParams(
                temperature=[1.0, 0.7, 0.0, 2.0, 0.1][number % 5],
                top_k=[0, 40, 0, 1000, 300, 1][number % 6],
                top_p=[1.0, 0.9, 0.99, 0.053][number // 2 % 4],
                min_p=[0.0, 0.05, 0.0][number % 3],
                seed=int(random.integers(0, 2**64, dtype=np.uint64)),
                choice=number,
                repetition_penalty=1.2 if number % 4 == 1 else 1.0,
                frequency_penalty=0.3 if number % 8 == 3 else 0.0,
                logit_bias=((number, 50.0), (VOCABULARY - 1, -100.0)) if number % 9 == 2 else (),
            )
        )
        logs.append(TokenLog(random.integers(0, VOCABULARY, 300).astype(np.int32), 100))
        masks.append(
            forbidding(VOCABULARY, random.integers(0, VOCABULARY, 2000)) if number % 5 == 1 else None
        )
        told.append([None, 0, 5, 20][number % 4])
    tokens = check(np.stack(logits), [200] * 40, params, masks, logs, told)
    assert len(set(tokens)) > 20
    # A row is itself in whatever company.
    for row in (0, 13, 39):
        alone = native_sample(
            VARIANTS[0], logits[row][None], [200], [params[row]], [masks[row]], [logs[row]], [told[row]]
        )
        assert alone[0] == [tokens[row]]


def test_a_nucleus_of_many_equals_is_whole() -> None:
    """More ids than are sorted at first, all as likely; where the nucleus ends, ids decide."""
    logits = np.zeros((30, VOCABULARY), np.float32)
    params = [SamplingParams(temperature=1.0, top_p=0.47, seed=seed) for seed in range(30)]
    tokens = check(logits, [9] * 30, params)
    assert max(tokens) < int(0.47 * VOCABULARY) + 1
    assert max(tokens) > VOCABULARY * 0.4


def test_the_noise_decides_where_nothing_else_does() -> None:
    """Over many seeds and equal logits, each id comes as often as others."""
    count = 3000
    params = [SamplingParams(temperature=1.0, seed=seed, choice=2**64 - 1 - seed) for seed in range(count)]
    tokens = check(np.ones((count, 3), np.float32), [2**31 - 1] * count, params)
    often = np.bincount(tokens, minlength=3)
    assert (np.abs(often - count / 3) < 5 * np.sqrt(count / 3)).all()


@pytest.mark.parametrize("size", [1, 31, 32, 33, 97])
def test_masks_of_nothing_and_of_one(size: int) -> None:
    random = np.random.default_rng(size)
    logits = random.standard_normal((4, size)).astype(np.float32)
    one = np.zeros(mask_words(size), np.uint32)
    one[(size - 1) // 32] = 1 << (size - 1) % 32
    nothing = np.zeros_like(one)
    # what a mask says of ids beyond the vocabulary is not asked
    beyond = nothing.copy()
    if size % 32:
        beyond[-1] = ~np.uint32(0) << np.uint32(size % 32)
    for params in (GREEDY, SamplingParams(temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, seed=3)):
        tokens = check(logits, [5] * 4, [params] * 4, [one, nothing, beyond, None], None, [1, 1, 1, 1])
        assert tokens[:3] == [size - 1, NO_TOKEN, NO_TOKEN]
        assert tokens[3] != NO_TOKEN


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0), SamplingParams(top_k=3)])
@pytest.mark.parametrize("place", [0, 15, 36, 39])
def test_a_row_that_is_not_finite_has_no_token_and_spares_the_others(
    variant: str, bad: float, params: SamplingParams, place: int
) -> None:
    logits = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    expected = native_sample(variant, logits, [1] * 3, [params] * 3, told=[2] * 3)
    logits[1, place] = bad
    tokens, logprobs, _ = native_sample(variant, logits, [1] * 3, [params] * 3, told=[2] * 3)
    assert tokens == [expected[0][0], NO_TOKEN, expected[0][2]]
    assert logprobs == (expected[1][0], None, expected[1][2])
