"""The sampler against a naive loop over ids, and against the distribution it promises."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_philox import numpy_word

from engine.sampling import GREEDY, SamplingParams
from kernels.backend import TokenLog
from kernels.sampling import (
    NO_TOKEN,
    adjusted,
    forbidding,
    logprobs_of,
    mask_words,
    sample_row,
    sample_rows,
    surviving_ids,
)


def naive_sample(
    logits: list[float],
    position: int,
    params: SamplingParams,
    allowed: list[bool],
    log: list[int] | None = None,
    prompt_length: int = 0,
) -> int:
    """The rule of engine.sampling, read aloud."""
    logits = list(logits)
    for token, bias in params.logit_bias:
        logits[token] += bias
    before = (log or [])[:position]
    generated = before[prompt_length:]
    for token in range(len(logits)):
        if token in before:
            penalty = params.repetition_penalty
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        count = generated.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    ids = [i for i in range(len(logits)) if allowed[i]]
    if not ids:
        return NO_TOKEN
    ids.sort(key=lambda i: (-logits[i], i))
    if params.temperature == 0:
        return ids[0]
    greatest = logits[ids[0]]
    if params.top_k:
        ids = ids[: params.top_k]
    likely = {i: math.exp((logits[i] - greatest) / params.temperature) for i in ids}
    total, kept, nucleus = math.fsum(likely.values()), 0.0, []
    for i in ids:
        if params.top_p < 1 and kept >= params.top_p * total:
            break
        nucleus.append(i)
        kept += likely[i]
    ids = [i for i in nucleus if likely[i] >= params.min_p]
    best, token = -math.inf, NO_TOKEN
    for i in sorted(ids):
        u = ((numpy_word(params.seed, params.choice, position, i) >> 11) + 0.5) * 2.0**-53
        value = (logits[i] - greatest) / params.temperature - math.log(-math.log(min(u, 1 - 2.0**-53)))
        if value > best:
            best, token = value, i
    return token


def mask_of(allowed: list[bool]) -> np.ndarray:
    mask = np.zeros(mask_words(len(allowed)), np.uint32)
    for token, bit in enumerate(allowed):
        mask[token // 32] |= np.uint32(bit) << np.uint32(token % 32)
    return mask


TOP_P = [0.053, 0.47, 0.93, 1.0]
"""No fractions k / n of few equal ids, where the order in which a sum is rounded decides."""

parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 12),
    top_p=st.sampled_from(TOP_P),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], list[bool]]:
    size = draw(st.integers(1, 70))
    # few distinct values make ties, wide ones reach past the range of the noise
    value = st.one_of(st.integers(-3, 3).map(float), st.floats(-90, 90, width=32))
    logits = draw(st.lists(value, min_size=size, max_size=size))
    return logits, draw(st.lists(st.booleans(), min_size=size, max_size=size))


@settings(max_examples=200, deadline=None)
@given(rows(), parameters, st.integers(1, 10_000), st.booleans())
def test_sampler_is_the_naive_loop(
    row: tuple[list[float], list[bool]], params: SamplingParams, position: int, masked: bool
) -> None:
    logits, allowed = row
    made = sample_row(np.array(logits, np.float32), position, params, mask_of(allowed) if masked else None)
    assert made == naive_sample(logits, position, params, allowed if masked else [True] * len(logits))


@st.composite
def penalised(draw: st.DrawFn) -> tuple[list[float], SamplingParams, list[int], int, int]:
    """Logits, parameters, a log, the prompt's length and the position of the sampled token."""
    size = draw(st.integers(1, 40))
    value = st.one_of(st.integers(-3, 3).map(float), st.floats(-90, 90, width=32))
    logits = draw(st.lists(value, min_size=size, max_size=size))
    log = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30))
    penalty = st.one_of(st.just(0.0), st.floats(-2, 2))
    biases = st.dictionaries(st.integers(0, size - 1), st.floats(-100, 100), max_size=5)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        top_k=draw(st.integers(0, 12)),
        top_p=draw(st.sampled_from(TOP_P)),
        seed=draw(st.integers(0, 2**64 - 1)),
        presence_penalty=draw(penalty),
        frequency_penalty=draw(penalty),
        repetition_penalty=draw(st.sampled_from([0.01, 0.5, 1.0, 1.3, 100.0])),
        logit_bias=tuple(draw(biases).items()),
    )
    return logits, params, log, draw(st.integers(0, len(log))), draw(st.integers(1, len(log)))


@settings(max_examples=200, deadline=None)
@given(penalised())
def test_penalties_and_biases_are_the_naive_fold_over_the_log(
    case: tuple[list[float], SamplingParams, list[int], int, int],
) -> None:
    logits, params, log, prompt_length, position = case
    mask = forbidding(len(logits), {0, len(logits) - 1})
    allowed = [0 < token < len(logits) - 1 for token in range(len(logits))]
    tokens = TokenLog(np.array(log, np.int32), prompt_length)
    for forbidden, ids in ((None, [True] * len(logits)), (mask, allowed)):
        made = sample_row(np.array(logits, np.float32), position, params, forbidden, tokens)
        assert made == naive_sample(logits, position, params, ids, log, prompt_length)


def test_penalties_without_a_log_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="need the token log"):
        sample_row(np.zeros(4, np.float32), 1, SamplingParams(presence_penalty=1.0), None)


def test_penalties_count_what_was_generated_and_repetition_the_prompt_too() -> None:
    logits = np.array([4, 3, 2, -1], np.float32)
    log = TokenLog(np.array([0, 3, 1, 1, 2], np.int32), 2)
    counted = adjusted(logits, 4, SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), log)
    assert counted.tolist() == [4, 3 - 2 * 0.5 - 0.25, 2, -1]
    repeated = adjusted(logits, 4, SamplingParams(repetition_penalty=2.0), log)
    assert repeated.tolist() == [2, 1.5, 2, -2]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-90, 90, width=32), min_size=1, max_size=50), st.integers(0, 60), st.data())
def test_logprobs_are_the_log_softmax(logits: list[float], count: int, data: st.DataObject) -> None:
    token = data.draw(st.integers(0, len(logits) - 1))
    made = logprobs_of(np.array(logits, np.float32), token, count)
    greatest = max(logits)
    total = greatest + math.log(math.fsum(math.exp(value - greatest) for value in logits))
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert made.logprob == pytest.approx(logits[token] - total, abs=1e-9)
    assert [token for token, _ in made.top] == order
    assert [value for _, value in made.top] == pytest.approx([logits[i] - total for i in order], abs=1e-9)


def test_noise_in_range_only_chooses_as_noise_for_all() -> None:
    random = np.random.default_rng(0)
    for seed in range(20):
        logits = (random.standard_normal(3000) * 25).astype(np.float32)
        params = SamplingParams(temperature=1.0, seed=seed)
        expected = naive_sample(logits.tolist(), 4, params, [True] * 3000)
        assert sample_row(logits, 4, params, None) == expected


def test_nucleus_beyond_the_first_take_is_whole() -> None:
    logits = np.zeros(5000, np.float32)
    ids, _ = surviving_ids(logits, SamplingParams(temperature=1.0, top_p=0.6), None)
    assert ids.tolist() == list(range(3000))


CHI_SQUARE_999 = {3: 16.27, 5: 20.52, 7: 24.32}
"""Values that chi-square exceeds once in a thousand, by degrees of freedom."""


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(temperature=1.0, seed=11), {0, 1, 2, 3, 4, 5, 6, 7}),
        (SamplingParams(temperature=0.5, seed=12, top_k=4), {4, 5, 6, 7}),
        (SamplingParams(temperature=2.0, seed=13, choice=2, top_k=6), {2, 3, 4, 5, 6, 7}),
    ],
)
def test_frequencies_are_the_softmax(params: SamplingParams, expected: set[int]) -> None:
    logits = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
    draws = 4000
    counts = np.bincount(
        sample_rows(np.tile(logits, (draws, 1)), range(1, draws + 1), [params] * draws, [None] * draws),
        minlength=8,
    )
    kept = sorted(expected)
    weights = np.exp(logits[kept].astype(np.float64) / params.temperature)
    mean = draws * weights / weights.sum()
    assert counts.sum() == counts[kept].sum() == draws
    assert ((counts[kept] - mean) ** 2 / mean).sum() < CHI_SQUARE_999[len(kept) - 1]


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.array([1, 5, 5, 2], np.float32)
    assert sample_row(logits, 0, GREEDY, None) == 1
    assert sample_row(logits, 0, GREEDY, mask_of([True, False, True, True])) == 2
    assert sample_row(logits, 0, SamplingParams(temperature=1e-300), None) in (1, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0)])
def test_a_bad_row_is_named_and_spares_the_others(bad: float, params: SamplingParams) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[:, 7] = 90
    logits[1, 3] = bad
    nothing = np.zeros(2, np.uint32)
    assert sample_rows(logits, [1, 1, 1], [params] * 3, [None] * 3).tolist() == [7, NO_TOKEN, 7]
    assert sample_rows(logits, [1, 1, 1], [params] * 3, [None, None, nothing]).tolist() == [
        7,
        NO_TOKEN,
        NO_TOKEN,
    ]
