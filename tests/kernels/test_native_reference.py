"""The native backend against the float64 reference, over poisoned pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from native_kernels import kernels
from row_steps import Chunk, Pages, random_logs
from safetensors.numpy import load_file, save_file

from engine.model import CONFIG, WEIGHTS
from engine.sampling import SamplingParams
from kernels.formats import WeightFormat
from kernels.packed import PackedWeights, pack
from kernels.random_model import write_random_model
from kernels.reference import ReferenceBackend, from_page, to_float8, to_page
from kernels.sampling import NO_TOKEN, mask_words
from kernels.weights import tensor_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from engine.model import ModelConfig

VARIANTS = kernels().variants()

SHAPES: list[dict[str, Any]] = [
    {},
    {"tied": False, "heads": 6, "kv_heads": 6, "head_dim": 10, "hidden_size": 52, "ffn_size": 77},
    {"tied": False, "heads": 5, "kv_heads": 1, "head_dim": 34, "layers": 3, "vocab_size": 211},
    {"heads": 8, "kv_heads": 4, "head_dim": 32, "hidden_size": 192, "ffn_size": 320, "rope_theta": 5e5},
    # so many heads to a group that one position makes more queries than a tile has; several blocks of scales
    {"heads": 40, "kv_heads": 1, "head_dim": 6, "hidden_size": 161, "ffn_size": 301, "vocab_size": 67},
    {
        "heads": 110,
        "kv_heads": 1,
        "head_dim": 2,
        "hidden_size": 33,
        "ffn_size": 1,
        "vocab_size": 3,
        "layers": 1,
    },
    {
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 130,
        "hidden_size": 21,
        "ffn_size": 65,
        "layers": 1,
        "tied": False,
    },
]

TOLERANCE = {"float32": 1e-5, "float16": 1e-4, "bfloat16": 1e-3, "float8": 1.6e-2}
"""Largest difference over largest logit. A number between two that a page can hold may go to either of them,
which are 2**-10, 2**-7 and 2**-3 of it apart at most, and both are right: a tenth to an eighth of that."""


def relative(made: np.ndarray, expected: np.ndarray) -> float:
    assert np.isfinite(made).all()
    return float(np.abs(made - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_logits_are_those_of_the_reference(tmp_path: Path, shape: dict[str, Any], dtype: Any) -> None:
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, **shape)
    logs = random_logs(4, 150, config.vocab_size, seed=1)
    expected = Pages("reference", tmp_path, config, dtype=dtype, pages=60).run(logs, batch=4, chunk=150)
    pages = Pages("native", tmp_path, config, dtype=dtype, pages=60, seed=1, kind="fp32")
    for ours, theirs in zip(pages.run(logs, batch=4, chunk=40), expected, strict=True):
        assert relative(ours, theirs) <= TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 7, 16, 256])
def test_long_prompts_and_long_contexts(tmp_path: Path, tokens: int) -> None:
    """A prompt of 330 tokens at once, then decode: six blocks of attention, in pages that do not fit them."""
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, tied=False, heads=6, kv_heads=2)
    log = random_logs(1, 340, config.vocab_size, seed=1)[0]
    expected = Pages("reference", tmp_path, config, pages=400, tokens=tokens).run([log], batch=1, chunk=340)[
        0
    ]
    pages = Pages("native", tmp_path, config, pages=400, tokens=tokens, seed=1, threads=2, kind="fp32")
    made = [pages.step([Chunk(0, 0, log[:330], "all")]).logits]
    made += [pages.step([Chunk(0, at, log[at : at + 1])]).logits for at in range(330, 340)]
    logits = np.concatenate(made)  # type: ignore[arg-type]
    for part in (logits, logits[64 * 3 :], logits[330:]):
        assert relative(part, expected[-len(part) :]) <= 1e-5


def dequantised(folder: Path, config: ModelConfig, kind: Any, into: Path) -> None:
    """Write the prepared folder whose float32 weights are what packed ones stand for."""
    weights = WeightFormat(kind, kind)
    packed = PackedWeights(pack(folder, weights), config, weights)
    tensors = {
        name: packed.vector(name) if len(shape) == 1 else packed.matrix(name).values()
        for name, shape in tensor_shapes(config).items()
    }
    into.mkdir()
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, into / WEIGHTS)
    (into / CONFIG).write_bytes(msgspec.json.encode(config))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["bf16", "fp8", "fp8-per-tensor", "int8"])
def test_only_the_quantisation_of_weights_is_lost(tmp_path: Path, kind: Any, variant: str) -> None:
    """Computed with the quantised weights, the reference agrees as closely as with float32 ones."""
    shape: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 22, "hidden_size": 163, "ffn_size": 261}
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, tied=False, **shape)
    dequantised(tmp_path, config, kind, tmp_path / "quantised")
    logs = random_logs(2, 80, config.vocab_size, seed=1)
    expected = Pages("reference", tmp_path / "quantised", config, pages=20).run(logs, batch=2, chunk=80)
    pages = Pages("native", tmp_path, config, pages=20, kind=kind, activations="fp32", variant=variant)
    for ours, theirs in zip(pages.run(logs, batch=2, chunk=80), expected, strict=True):
        assert relative(ours, theirs) <= 1e-5
    # and it is lost: these are not the float32 weights
    plain = Pages("reference", tmp_path, config, pages=20).run(logs[:1], batch=1, chunk=80)
    assert relative(plain[0], expected[0]) > 1e-4


class Rounded(ReferenceBackend):
    """The reference with inputs of all matrices rounded to bf16."""

    def _linear(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        return super()._linear(layer, name, self._round(x))

    def _row(self, token: int, position: int, table: np.ndarray) -> np.ndarray:
        return self._round(super()._row(token, position, table))

    def _round(self, x: np.ndarray) -> np.ndarray:
        return from_page(to_page(x, "bfloat16"), "bfloat16")


def test_rounded_activations_are_those_of_the_reference(tmp_path: Path) -> None:
    """A number between two of bf16 may go to either, 2**-7 of it apart at most, as in 16-bit pages."""
    shape: dict[str, Any] = {"heads": 9, "kv_heads": 3, "head_dim": 22, "hidden_size": 163, "ffn_size": 261}
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, tied=False, **shape)
    dequantised(tmp_path, config, "fp8", tmp_path / "quantised")
    logs = random_logs(2, 80, config.vocab_size, seed=1)
    reference = Pages("reference", tmp_path / "quantised", config, pages=20)
    plain = reference.run(logs, batch=2, chunk=80)
    reference.backend = Rounded(tmp_path / "quantised", reference.pool, reference.shape)
    expected = reference.run(logs, batch=2, chunk=80)
    pages = Pages("native", tmp_path, config, pages=20, kind="fp8", activations="bf16")
    for ours, theirs, unrounded in zip(pages.run(logs, batch=2, chunk=80), expected, plain, strict=True):
        assert relative(ours, theirs) <= 2e-3
        assert relative(ours, unrounded) > 2 * relative(ours, theirs)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_of_the_same_pages_the_same_is_made(tmp_path: Path, dtype: Any) -> None:
    """Over pages that both read, a row that rounds its own numbers alike agrees to float32's precision."""
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, heads=6, kv_heads=2, head_dim=18)
    log = random_logs(1, 200, config.vocab_size, seed=3)[0]
    native = Pages("native", tmp_path, config, dtype=dtype, pages=20, kind="fp32")
    native.run([log], batch=1, chunk=200, logits="none")
    filled = native.pool.copy()
    reference = Pages("reference", tmp_path, config, dtype=dtype, pages=20)  # the same pages: the same seed
    alike = 0
    positions = [0, 1, 15, 16, 63, 64, 65, *range(90, 200, 11)]
    for at in positions:
        native.pool[:] = reference.pool[:] = filled
        ours, theirs = (pages.step([Chunk(0, at, log[at : at + 1])]).logits for pages in (native, reference))
        numbers = config.head_dim * native.shape.item_bytes  # not the scales: they are never rounded alike
        stored = [pages.stored(0, at + 1)[at, ..., :numbers] for pages in (native, reference)]
        if dtype == "float32" or np.array_equal(*stored):
            alike += 1
            assert relative(ours, theirs) <= 1e-5  # type: ignore[arg-type]
        else:
            assert relative(ours, theirs) <= TOLERANCE[dtype]  # type: ignore[arg-type]
    assert alike > len(positions) * 2 // 3


def test_scales_of_float8_pages_are_those_of_the_reference(tmp_path: Path) -> None:
    config = write_random_model(tmp_path, seed=5, sharpness=1.0, head_dim=18)
    log = random_logs(1, 60, config.vocab_size, seed=3)[0]
    stored = []
    for name in ("native", "reference"):
        pages = Pages(name, tmp_path, config, dtype="float8", pages=20, kind="fp32")
        pages.run([log], batch=1, chunk=60)
        stored.append(pages.stored(0, 60))
    # of the first layer, whose numbers no page has been read for
    (codes, scales), (their_codes, their_scales) = (
        (part[:, 0, ..., :18], np.ascontiguousarray(part[:, 0, ..., 18:]).view(np.float32)) for part in stored
    )
    np.testing.assert_allclose(scales, their_scales, rtol=2e-6)
    assert ((codes & 0x7F).max(axis=-1) == 0x7E).all()  # the greatest is the greatest code
    assert (codes != their_codes).mean() < 1e-3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8"])
def test_pages_store_the_nearest_numbers(tmp_path: Path, dtype: Any, variant: str) -> None:
    """Of the first layer's keys and values, which float32 pages show before they are rounded."""
    config = write_random_model(tmp_path, seed=5, head_dim=38, heads=6, kv_heads=3, hidden_size=77)
    log = random_logs(1, 90, config.vocab_size, seed=3)[0]
    stored = []
    for kind in ("float32", dtype):
        pages = Pages("native", tmp_path, config, dtype=kind, pages=20, kind="fp8", variant=variant)
        pages.run([log], batch=1, chunk=90, logits="none")
        stored.append(np.ascontiguousarray(pages.stored(0, 90)[:, 0]))
    numbers = stored[0].view(np.float32).astype(np.float64)
    if dtype == "float8":
        codes, scales = to_float8(numbers)
        expected = np.concatenate([codes, scales[..., None].view(np.uint8)], axis=-1)
    else:
        expected = to_page(numbers, dtype).view(np.uint8)
    assert np.array_equal(stored[1], expected)


@pytest.mark.parametrize("name", ["native", "reference"])
def test_values_that_are_zero_have_a_scale(tmp_path: Path, name: str) -> None:
    """Of what is smaller than 1e-4 the scale is that of 1e-4: nothing is divided by zero."""
    config = write_random_model(tmp_path, seed=5)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.layers.0.self_attn.v_proj.weight"][:] = 0
    save_file(tensors, tmp_path / WEIGHTS)
    pages = Pages(name, tmp_path, config, dtype="float8", pages=4)
    assert pages.step([Chunk(0, 0, [1, 2, 3])]).tokens[0] != NO_TOKEN
    values = np.ascontiguousarray(pages.stored(0, 3)[:, 0, 1])
    assert not (values[..., :16] & 0x7F).any()
    assert (values[..., 16:].view(np.float32) == np.float32(1e-4) / np.float32(448)).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_continuations_agree_and_wander(tmp_path: Path, variant: str) -> None:
    config = write_random_model(tmp_path, seed=8)
    answers = []
    for name in ("native", "reference"):
        kinds: dict[str, Any] = {"kind": "fp32", "variant": variant} if name == "native" else {}
        pages = Pages(name, tmp_path, config, pages=20, **kinds)
        tokens = [5]
        for position in range(80):
            tokens.append(int(pages.step([Chunk(0, position, [tokens[-1]])]).tokens[0]))
        answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(set(answers[0])) > 20


def test_a_mixed_step_of_decode_prefill_and_verification(tmp_path: Path) -> None:
    """Rows of all kinds in one call give the logits of step-by-step decode, to the bit."""
    config = write_random_model(tmp_path, seed=2)
    logs = [
        (log * 120)[: 40 + 20 * i] for i, log in enumerate(random_logs(4, 120, config.vocab_size, seed=3))
    ]
    alone = Pages("native", tmp_path, config, pages=80).run(logs, batch=1, chunk=1)
    pages = Pages("native", tmp_path, config, pages=80, seed=4, threads=2)
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
    other = Pages("native", tmp_path, config, pages=80).run([logs[0][:32] + logs[0][5:9]], batch=1, chunk=1)
    assert np.array_equal(again.logits, other[0][32:])  # type: ignore[arg-type]


@pytest.mark.parametrize("variant", VARIANTS)
def test_masks_and_parameters_reach_their_rows(tmp_path: Path, variant: str) -> None:
    config = write_random_model(tmp_path, seed=2)
    pages = Pages("native", tmp_path, config, pages=20, variant=variant, threads=2)
    only = np.zeros(mask_words(97), np.uint32)
    only[40 // 32] = 1 << (40 % 32)
    sampled = SamplingParams(temperature=1.0, seed=9, choice=1)
    chunks = [
        Chunk(0, 0, [1, 2, 3], mask=only),
        Chunk(1, 0, [1, 2, 3], mask=np.zeros_like(only)),
        Chunk(2, 0, [1, 2, 3]),
        Chunk(3, 0, [1, 2, 3], params=sampled),
        Chunk(4, 0, [1, 2, 3], "none"),
        Chunk(5, 0, [1, 2, 3], params=SamplingParams(temperature=1.0, seed=9, choice=1)),
    ]
    masked, forbidden, greedy, first, second = pages.step(chunks).tokens.tolist()
    assert (masked, forbidden) == (40, NO_TOKEN)
    assert greedy not in (40, NO_TOKEN)
    assert first == second


def test_logits_are_not_asked_for_and_tokens_are_the_same(tmp_path: Path) -> None:
    config = write_random_model(tmp_path, seed=2)
    pages = Pages("native", tmp_path, config, pages=20)
    rows = pages.rows([Chunk(i, 0, [1, 2, 3 + i], "all") for i in range(4)])
    with_logits = pages.backend.step(rows, return_logits=True)
    without = pages.backend.step(rows)
    assert without.logits is None
    assert without.tokens.tolist() == with_logits.tokens.tolist()
    assert with_logits.logits is not None
    assert with_logits.tokens.tolist() == with_logits.logits.argmax(1).tolist()
