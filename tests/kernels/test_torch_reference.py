"""The torch backend against the float64 reference, over poisoned pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from row_steps import Chunk, Pages, random_logs

from engine.sampling import SamplingParams
from kernels.random_model import write_random_model
from kernels.reference import from_page, to_page
from kernels.sampling import NO_TOKEN, mask_words

if TYPE_CHECKING:
    from pathlib import Path

SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": False, "heads": 6, "kv_heads": 6, "head_dim": 10, "hidden_size": 52, "ffn_size": 77},
    {"tied": False, "heads": 5, "kv_heads": 1, "head_dim": 34, "layers": 3, "vocab_size": 211},
    {"heads": 8, "kv_heads": 4, "head_dim": 32, "hidden_size": 192, "ffn_size": 320, "rope_theta": 5e5},
]

TOLERANCE = {"float32": 1e-5, "float16": 1e-4, "bfloat16": 1e-3}
"""Largest difference over largest logit. With 16-bit pages, a number that the two round to different
neighbours differs by 2**-11 or 2**-8 of itself, and both are right."""


def relative(made: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(made).all()
    return float(np.abs(made - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_reference(tmp_path: Path, shape: dict[str, Any], dtype: Any) -> None:
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, **shape)
    logs = random_logs(5, 150, config.vocab_size, seed=1)
    expected = Pages("reference", tmp_path, config, dtype=dtype, pages=60).run(logs, batch=5, chunk=150)
    made = Pages("torch", tmp_path, config, dtype=dtype, pages=60, seed=1).run(logs, batch=5, chunk=40)
    for ours, theirs in zip(made, expected, strict=True):
        assert relative(ours, theirs) <= TOLERANCE[dtype]


def test_greedy_continuations_agree_and_wander(tmp_path: Path) -> None:
    config = write_random_model(tmp_path, seed=8)
    answers = []
    for name in ("torch", "reference"):
        pages = Pages(name, tmp_path, config, pages=20)
        tokens = [5]
        for position in range(80):
            tokens.append(int(pages.step([Chunk(0, position, [tokens[-1]])]).tokens[0]))
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 20


def test_a_mixed_step_of_decode_prefill_and_verification(tmp_path: Path) -> None:
    """Rows of all kinds in one call give the logits of step-by-step decode, to the bit."""
    config = write_random_model(tmp_path, seed=2)
    logs = random_logs(4, 120, config.vocab_size, seed=3)
    logs = [(log * 120)[: 40 + 20 * i] for i, log in enumerate(logs)]
    alone = Pages("torch", tmp_path, config, pages=80).run(logs, batch=1, chunk=1)
    pages = Pages("torch", tmp_path, config, pages=80, seed=4)
    pages.step([Chunk(i, 0, log[:30], "none") for i, log in enumerate(logs)])
    result = pages.step(
        [
            Chunk(2, 30, logs[2][30:31]),
            Chunk(0, 30, logs[0][30:36], "all", drafts=5),
            Chunk(3, 30, logs[3][30:95]),
            Chunk(1, 30, logs[1][30:33], "none"),
        ]
    )
    expected = np.concatenate([alone[2][30:31], alone[0][30:36], alone[3][94:95]])
    assert result.logits is not None
    assert np.array_equal(result.logits, expected)
    assert result.tokens.tolist() == expected.argmax(1).tolist()
    # the drafts are rejected after two: their slots are written again
    again = pages.step([Chunk(0, 32, logs[0][5:9], "all", drafts=3)])
    other = Pages("torch", tmp_path, config, pages=80).run([logs[0][:32] + logs[0][5:9]], batch=1, chunk=1)
    assert np.array_equal(again.logits, other[0][32:])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "reference"])
def test_masks_and_parameters_reach_their_rows(tmp_path: Path, name: str) -> None:
    config = write_random_model(tmp_path, seed=2)
    pages = Pages(name, tmp_path, config, pages=20)
    only = np.zeros(mask_words(97), np.uint32)
    only[40 // 32] = 1 << (40 % 32)
    nothing = np.zeros_like(only)
    sampled = SamplingParams(temperature=1.0, seed=9, choice=1)
    chunks = [
        Chunk(0, 0, [1, 2, 3], mask=only),
        Chunk(1, 0, [1, 2, 3], mask=nothing),
        Chunk(2, 0, [1, 2, 3]),
        Chunk(3, 0, [1, 2, 3], params=sampled),
        Chunk(4, 0, [1, 2, 3], params=SamplingParams(temperature=1.0, seed=9, choice=1)),
    ]
    masked, forbidden, greedy, first, second = pages.step(chunks).tokens.tolist()
    assert (masked, forbidden) == (40, NO_TOKEN)
    assert greedy not in (40, NO_TOKEN)
    assert first == second


def test_a_sequence_with_ruined_pages_spares_the_others(tmp_path: Path) -> None:
    config = write_random_model(tmp_path, seed=2)
    pages = Pages("torch", tmp_path, config, pages=20)
    pages.step([Chunk(i, 0, [1, 2, 3], "none") for i in range(2)])
    table = pages.table(0, 3)
    pages.pool.reshape(-1, pages.shape.page_bytes)[table] = 0xFF
    assert pages.step([Chunk(0, 3, [4]), Chunk(1, 3, [4])]).tokens[0] == NO_TOKEN
    fresh = Pages("torch", tmp_path, config, pages=20)
    assert pages.step([Chunk(1, 4, [5])]).tokens == fresh.step([Chunk(1, 0, [1, 2, 3, 4, 5])]).tokens


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_reference_rounds_to_pages_as_torch_does(dtype: Any) -> None:
    torch = pytest.importorskip("torch")
    values = np.random.default_rng(0).standard_normal(10_000, np.float32) * np.float32(100)
    values[:4] = [0.0, -0.0, np.inf, -np.inf]
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).double().numpy()
    assert np.array_equal(from_page(to_page(values.astype(np.float64), dtype), dtype), expected)
    assert np.isnan(from_page(to_page(np.array([np.nan]), dtype), dtype)).all()
