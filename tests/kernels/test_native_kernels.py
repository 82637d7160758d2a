"""The parts of the native kernels one by one: products, embeddings, SiLU, sliding windows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kernels import kernels
from row_steps import POISON, Chunk, Pages, random_logs

from kernels.formats import BLOCK
from kernels.packed import STRIP, PackedMatrix, to_strips
from kernels.quantize import decode_bf16, quantize, round_bf16
from kernels.random_model import write_random_model
from kernels.reference import ReferenceBackend

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from kernels.cpu.backend import NativeBackend

NATIVE = kernels()
VARIANTS = NATIVE.variants()
KINDS: list[Any] = ["fp32", "bf16", "fp8", "fp8-per-tensor", "int8"]
PRODUCTS = [*((kind, False) for kind in KINDS), ("fp8", True), ("fp8-per-tensor", True)]
"""Kinds of weights, and whether the rows are rounded to bf16 before."""
SHAPES = [(1, 1), (3, 200), (70, 131), (129, 257), (64, 128), (213, 163), (128, 384)]
"""[outputs, inputs]"""
UNIT = 2.0**-24
"""Largest relative error of one rounded float32 operation."""


def random_matrix(kind: Any, outputs: int, inputs: int, seed: int = 0) -> PackedMatrix:
    """A packed matrix whose blocks differ in size."""
    random = np.random.default_rng(seed)
    values = random.standard_normal((outputs, inputs), np.float32)
    values *= np.exp(random.standard_normal((1, inputs))).astype(np.float32)
    scales = np.empty((0, 0), np.float32)
    if kind == "fp32":
        items: NDArray[Any] = values
    elif kind == "bf16":
        items = round_bf16(values)
    else:
        items, blocks = quantize(values, kind)
        scales = np.ascontiguousarray(np.repeat(blocks, BLOCK // STRIP, axis=0)[: -(-outputs // STRIP)])
    return PackedMatrix(kind, outputs, inputs, to_strips(items).reshape(-1).view(np.uint8), scales)


def multiply(
    variant: str, matrix: PackedMatrix, x: NDArray[np.float32], rounds: bool = False
) -> NDArray[np.float32]:
    """x [rows, inputs] times the matrix: [rows, outputs]. `rounds`: x to bf16 before, if weights are FP8."""
    out = np.full((len(x), matrix.outputs), np.nan, np.float32)
    sizes = matrix.outputs, matrix.inputs
    NATIVE.multiply(variant, matrix.kind, *sizes, matrix.data, matrix.scales, x, out, rounds)
    return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "rounds"), PRODUCTS)
def test_a_row_of_a_product_has_the_same_bits_in_any_number_and_variant(
    kind: Any, rounds: bool, shape: tuple[int, int]
) -> None:
    matrix = random_matrix(kind, *shape)
    x = np.random.default_rng(1).standard_normal((40, matrix.inputs), np.float32)
    expected = np.concatenate([multiply(VARIANTS[0], matrix, row[None], rounds) for row in x])
    for variant in VARIANTS:
        # rows lie elsewhere in every batch, and all sizes occur
        counts = range(1, 41) if variant != "portable" else (1, 2, 5, 16, 31, 40)
        for count in counts:
            first = (7 * count) % (41 - count)
            made = multiply(variant, matrix, x[first : first + count], rounds)
            assert np.array_equal(made, expected[first : first + count]), (variant, count)


def rounded(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the nearest bf16, what is below 2**-60 to 0, what is above 2**64 to infinity."""
    nearest = decode_bf16(round_bf16(x))
    kept = np.where(np.abs(nearest) < 2.0**-60, np.float32(0), nearest)
    return np.where(np.abs(x) > 2.0**64, np.copysign(np.float32(np.inf), x), kept)


@pytest.mark.parametrize("spread", [1, 12, 40])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounded_rows_are_those_of_plain_products(shape: tuple[int, int], spread: int) -> None:
    """Activations of all sizes, down to the subnormal, with weights as small as FP8's: the bits are those of
    multiply-adds over the rounded numbers, where bf16 dot products would take subnormals for 0, and where
    AVX2 has the powers of two elsewhere."""
    random = np.random.default_rng(spread)
    codes = random.integers(0, 256, shape).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes[::2] &= 0x8F  # subnormal or nearly so
    blocks = np.exp2(random.integers(-20, 20, (-(-shape[0] // STRIP), -(-shape[1] // BLOCK))))
    data = to_strips(codes).reshape(-1).view(np.uint8)
    matrix = PackedMatrix("fp8", *shape, data, blocks.astype(np.float32))
    x = random.standard_normal((9, shape[1])) * np.exp2(random.integers(-60, 61, (9, 1)) / 60 * 3 * spread)
    x *= np.exp2(random.integers(-spread, spread, x.shape))
    x[0] *= 1e-30
    x = np.clip(x, -(2.0**100), 2.0**100).astype(np.float32)
    expected = multiply(VARIANTS[-1], matrix, rounded(x))
    for variant in VARIANTS:
        assert np.array_equal(multiply(variant, matrix, x, True), expected, equal_nan=True), variant


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_only_rows_for_fp8_are_rounded(kind: Any, shape: tuple[int, int]) -> None:
    matrix = random_matrix(kind, *shape)
    x = np.random.default_rng(1).standard_normal((3, matrix.inputs), np.float32)
    for variant in VARIANTS:
        assert np.array_equal(multiply(variant, matrix, x, True), multiply(variant, matrix, x))


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_too_great_for_products_are_alike(variant: str) -> None:
    """Where a product is beyond float32 in one variant, it is in all."""
    codes = np.full((64, 130), 0x7E, np.uint8)  # 448
    data = to_strips(codes).reshape(-1).view(np.uint8)
    matrix = PackedMatrix("fp8", 64, 130, data, np.full((1, 2), 2.0**-30, np.float32))
    x = np.zeros((6, 130), np.float32)
    x[:, 3] = 3e38, -3e38, 1e37, 1e36, 1e35, np.inf
    x[3, 4] = -1e36
    made = multiply(variant, matrix, x, True)
    assert np.array_equal(made, multiply(VARIANTS[-1], matrix, x, True), equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("kind", "rounds"), PRODUCTS)
def test_a_product_is_as_near_as_its_roundings_allow(kind: Any, rounds: bool, shape: tuple[int, int]) -> None:
    """Of a chain of n rounded operations the error is at most n u / (1 - n u) of the sum of magnitudes."""
    matrix = random_matrix(kind, *shape, seed=2)
    x = np.random.default_rng(3).standard_normal((5, matrix.inputs), np.float32)
    weights = matrix.values().astype(np.float64)
    operations = min(matrix.inputs, BLOCK) + 2 * -(-matrix.inputs // BLOCK) + 2
    bound = operations * UNIT / (1 - operations * UNIT) * (np.abs(x) @ np.abs(weights).T)
    exact = (rounded(x) if rounds else x).astype(np.float64) @ weights.T
    assert (np.abs(multiply(VARIANTS[0], matrix, x, rounds) - exact) <= 1.01 * bound).all()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("kind", "rounds"), PRODUCTS)
def test_numbers_that_are_not_finite_stay_in_their_rows(kind: Any, rounds: bool, variant: str) -> None:
    matrix = random_matrix(kind, 70, 131)
    x = np.random.default_rng(1).standard_normal((9, 131), np.float32)
    expected = multiply(variant, matrix, x, rounds)
    x[4, 130], x[6, 0] = np.nan, np.inf
    made = multiply(variant, matrix, x, rounds)
    good = [0, 1, 2, 3, 5, 7, 8]
    assert np.array_equal(made[good], expected[good])
    assert np.isnan(made[4]).all()
    assert not np.isfinite(made[6]).any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_every_code_and_the_scales_of_checkpoints_are_exact(kind: Any, variant: str) -> None:
    """Each code by itself, times scales from the least to the greatest that a checkpoint may have."""
    codes = np.arange(256, dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    items = np.zeros((256, 129), np.uint8 if kind == "fp8" else np.int8)
    items[:, 0] = items[:, 128] = codes.view(items.dtype)
    scales = np.array([[1e-30, 1.0], [3e-7, 1e30], [2.0**-60, 3.0], [0.1, 7e34]], np.float32)
    matrix = PackedMatrix(kind, 256, 129, to_strips(items).reshape(-1).view(np.uint8), scales)
    values = matrix.values()
    for column in (0, 128):
        x = np.zeros((1, 129), np.float32)
        x[0, column] = 1.0
        assert np.array_equal(multiply(variant, matrix, x)[0], values[:, column])
        assert np.array_equal(multiply(variant, matrix, x, True)[0], values[:, column])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_the_row_of_its_matrix(kind: Any, shape: tuple[int, int]) -> None:
    matrix = random_matrix(kind, *shape)
    values = matrix.values()
    for variant in VARIANTS:
        for token in range(matrix.outputs):
            out = np.full(matrix.inputs, np.nan, np.float32)
            NATIVE.embed(variant, kind, matrix.outputs, matrix.inputs, matrix.data, matrix.scales, token, out)
            assert np.array_equal(out, values[token])


def silu(variant: str, gates: NDArray[np.float32], ups: NDArray[np.float32]) -> NDArray[np.float32]:
    out = np.full(gates.shape, np.nan, np.float32)
    NATIVE.gate(variant, gates, ups, out)
    return out


def test_silu_is_near_and_alike_in_all_variants() -> None:
    random = np.random.default_rng(0)
    gates = np.concatenate(
        [
            np.linspace(-100, 100, 4000),
            random.standard_normal(4000) * 4,
            [
                0.0,
                -0.0,
                88.3,
                -88.3,
                88.4,
                -88.4,
                87.3,
                -87.3,
                3e38,
                -3e38,
                1e-45,
                -1e-45,
                1e-38,
                -1e-38,
                1,
                -1,
            ],
        ]
    ).astype(np.float32)
    ups = random.standard_normal(len(gates), np.float32)
    made = silu(VARIANTS[0], gates, ups)
    g = gates.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * ups
    # exp within two units, a sum, a quotient and a product; below e^-87 SiLU is taken for 0
    assert (np.abs(made - expected) <= 8 * UNIT * np.abs(expected) + 2e-36).all()
    for variant in VARIANTS[1:]:
        assert np.array_equal(silu(variant, gates, ups), made)


@pytest.mark.parametrize("variant", VARIANTS)
def test_silu_of_what_is_not_finite_is_not_finite(variant: str) -> None:
    gates = np.zeros(16, np.float32)
    gates[:3] = np.nan, np.inf, 1.0
    ups = np.ones(16, np.float32)
    ups[2] = np.nan
    made = silu(variant, gates, ups)
    assert np.isnan(made[[0, 2]]).all()
    assert made[1] == np.inf
    assert (made[3:] == 0).all()


class Windowed(ReferenceBackend):
    """The reference with sliding windows: how many positions, its own included, each layer's query sees."""

    windows: tuple[int, ...] = ()

    def _seen(self, layer: int, position: int) -> NDArray[np.intp]:
        first = max(0, position + 1 - self.windows[layer]) if self.windows[layer] else 0
        return np.arange(first, position + 1)


def with_windows(pages: Pages, windows: tuple[int, ...]) -> Pages:
    backend: NativeBackend = pages.backend  # type: ignore[assignment]
    for layer, window in enumerate(windows):
        backend._model.set_window(layer, window)
    return pages


WINDOWS = [(1, 0, 5), (63, 64, 65), (100, 128, 1), (150, 1000, 20)]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_sliding_window_is_that_of_the_reference(tmp_path: Path, windows: tuple[int, ...]) -> None:
    config = write_random_model(tmp_path, seed=4, layers=3, sharpness=1.0, vocab_size=101)
    logs = random_logs(3, 210, config.vocab_size, seed=2)
    reference = Pages("reference", tmp_path, config, pages=60)
    windowed = Windowed(tmp_path, reference.pool, reference.shape)
    windowed.windows = windows
    reference.backend = windowed
    expected = reference.run(logs, batch=3, chunk=210)
    made = with_windows(Pages("native", tmp_path, config, pages=60, kind="fp32"), windows)
    for ours, theirs in zip(made.run(logs, batch=3, chunk=70), expected, strict=True):
        assert np.abs(ours - theirs).max() / np.abs(theirs).max() <= 1e-5


@pytest.mark.parametrize("dtype", ["float32", "float8"])
def test_windows_do_not_change_what_a_row_does_not_see(tmp_path: Path, dtype: str) -> None:
    """Rows in windows are exact too, in chunks of all sizes, and in all variants."""
    config = write_random_model(tmp_path, seed=4, layers=3, head_dim=18, heads=6)
    logs = random_logs(3, 210, config.vocab_size, seed=2)
    windows = (40, 64, 100)

    def run(chunk: int, **kinds: Any) -> list[NDArray[np.float32]]:
        pages = Pages("native", tmp_path, config, pages=90, kind="fp32", dtype=dtype, **kinds)
        return with_windows(pages, windows).run(logs, batch=3, chunk=chunk)

    expected = run(1)
    plain = Pages("native", tmp_path, config, pages=90, kind="fp32", dtype=dtype).run(logs, batch=3, chunk=1)
    assert np.array_equal(plain[0][:40], expected[0][:40])
    assert not np.array_equal(plain[0][40], expected[0][40])
    for variant in VARIANTS:
        for chunk in (5, 64, 210):
            made = run(chunk, variant=variant, tokens=8 if chunk == 5 else 32, threads=1 + (chunk == 64))
            assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True)), (variant, chunk)


@pytest.mark.parametrize("rows", [1, 30])
def test_pages_far_before_the_window_are_not_read(tmp_path: Path, rows: int) -> None:
    """Whole blocks of 64 positions that no query sees may be gone: their pages belong to others by then."""
    config = write_random_model(tmp_path, seed=4)
    log = random_logs(1, 200, config.vocab_size, seed=2)[0]
    windows = (50, 64)
    pages = with_windows(Pages("native", tmp_path, config, pages=20, kind="fp32"), windows)
    pages.step([Chunk(0, 0, log[:-rows], "none")])
    kept = pages.pool.copy()
    expected = pages.step([Chunk(0, len(log) - rows, log[-rows:], "all")]).logits
    pages.pool[:] = kept
    seen_from = (len(log) - rows - 63) // 64 * 64
    gone = pages.table(0, len(log))[: seen_from // pages.shape.tokens]
    assert len(gone) >= 4
    pages.pool.reshape(-1, pages.shape.page_bytes)[gone] = POISON
    made = pages.step([Chunk(0, len(log) - rows, log[-rows:], "all")]).logits
    assert np.array_equal(made, expected)  # type: ignore[arg-type]
