"""Codes and scales against slow definitions of their own, and against torch's e4m3fn and bfloat16."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kernels.quantize import (
    E4M3_MAX,
    decode_bf16,
    decode_e4m3,
    dequantize,
    encode_e4m3,
    has_nan_codes,
    quantize,
    round_bf16,
)

ANY_FLOAT = st.floats(width=32, allow_nan=False)


def slow_decode(code: int) -> Fraction:
    """By the definition of the format, exact."""
    sign = -1 if code & 0x80 else 1
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return sign * Fraction(mantissa, 8 * 64)
    return sign * (1 + Fraction(mantissa, 8)) * Fraction(2) ** (exponent - 7)


def slow_encode(value: float) -> int:
    """The nearest of all codes of the value's sign, of two the one with the even mantissa."""
    sign = 0x80 if math.copysign(1, value) < 0 else 0
    exact = Fraction(min(abs(value), 448.0))
    return sign | min(range(0x7F), key=lambda code: (abs(slow_decode(code) - exact), code & 1))


def torch_encode(values: np.ndarray) -> np.ndarray:
    """Torch does not saturate: it is given what lies within."""
    within = torch.from_numpy(values.clip(-448, 448))
    return within.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@given(st.lists(ANY_FLOAT | st.floats(-1, 1, width=32), min_size=1, max_size=20))
@settings(deadline=None)
def test_codes_are_the_nearest(values: list[float]) -> None:
    found = encode_e4m3(np.array(values, np.float32))
    assert found.tolist() == [slow_encode(value) for value in values]


def test_every_code_and_its_neighbourhood() -> None:
    finite = [code for code in range(256) if code & 0x7F != 0x7F]
    values = decode_e4m3(np.array(finite, np.uint8))
    assert [Fraction(float(value)) for value in values] == [slow_decode(code) for code in finite]
    assert np.isnan(decode_e4m3(np.array([0x7F, 0xFF], np.uint8))).all()
    assert (encode_e4m3(values) == finite).all()
    halfway = (values[:-1] + values[1:]) / 2
    for direction in (-np.inf, 0.0, np.inf):
        near = np.nextafter(halfway, np.float32(direction)) if direction else halfway
        assert encode_e4m3(near).tolist() == [slow_encode(float(value)) for value in near]


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0xFFFF])
def test_every_upper_half_of_a_float32_has_the_code_and_the_bfloat16_of_torch(low: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16) | np.uint32(low)
    values = bits.view(np.float32)
    numbers = values[~np.isnan(values)]
    assert (encode_e4m3(numbers) == torch_encode(numbers)).all()
    assert (
        round_bf16(numbers) == torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint16).numpy()
    ).all()
    not_numbers = values[np.isnan(values)]
    assert np.isnan(decode_e4m3(encode_e4m3(not_numbers))).all()
    assert np.isnan(decode_bf16(round_bf16(not_numbers))).all()


@given(st.binary(min_size=4, max_size=400))
def test_bfloat16_keeps_what_it_can_hold(data: bytes) -> None:
    bits = np.frombuffer(data[: len(data) // 2 * 2], np.uint16)
    values = decode_bf16(bits)
    assert (values.view(np.uint32) == bits.astype(np.uint32) << 16).all()
    finite = ~np.isnan(values)
    assert (round_bf16(values)[finite] == bits[finite]).all()


@given(st.integers(0, 100_000))
@settings(max_examples=20, deadline=None)
def test_a_nan_code_is_found_wherever_it_is(place: int) -> None:
    codes = np.full(100_001, 0x7E, np.uint8)
    assert not has_nan_codes(codes)
    codes[place] = 0xFF
    assert has_nan_codes(codes)


def slow_quantize(values: np.ndarray, largest: float, block: tuple[int, int]) -> tuple[Any, Any]:
    """Block by block; the codes themselves are torch's."""
    outputs, inputs = values.shape
    down, across = -(-outputs // block[0]), -(-inputs // block[1])
    codes, scales = np.zeros(values.shape, int), np.zeros((down, across), np.float32)
    for i in range(down):
        for j in range(across):
            part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            maximum = max(np.float32(abs(float(value))) for value in values[part].flat)
            scales[i, j] = scale = np.float32(max(maximum, np.float32(1e-4))) / np.float32(largest)
            scaled = values[part] / scale
            codes[part] = scaled.round().clip(-127, 127) if largest == 127 else torch_encode(scaled)
    return codes, scales


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 130), (130, 5), (128, 128), (129, 257)])
def test_blocks_are_quantised_as_defined(kind: Any, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(shape[1])
    values = random.normal(0, 0.05, shape).astype(np.float32) * np.exp(random.normal(0, 2, (shape[0], 1)))
    values = values.astype(np.float32)
    if shape[0] > 128:
        values[128:] = 0  # a block of zeros
    if shape == (129, 257):
        values = values[:, ::1].copy(order="F")  # no matter how it lies in memory
    codes, scales = slow_quantize(values, 127 if kind == "int8" else 448, (128, 128))
    found = quantize(values, kind)
    assert found.codes.dtype == (np.int8 if kind == "int8" else np.uint8)
    assert (found.scales == scales).all()
    assert (found.codes == codes).all()
    exact = np.array([float(slow_decode(int(code))) for code in codes.flat]) if kind == "fp8" else codes
    expected = exact.reshape(shape).astype(np.float32)
    expected *= np.kron(scales, np.ones((128, 128), np.float32))[: shape[0], : shape[1]]
    assert (dequantize(found.codes, found.scales) == expected).all()


def test_one_scale_for_the_matrix_even_when_it_comes_in_parts() -> None:
    values = np.random.default_rng(4).normal(size=(200, 150)).astype(np.float32)
    values[150, 3] = -30
    found = quantize(values, "fp8-per-tensor")
    assert found.scales.shape == (2, 2)
    assert (found.scales == np.float32(30) / np.float32(448)).all()
    assert (found.codes == torch_encode(values / found.scales[0, 0])).all()
    part = quantize(values[:128], "fp8-per-tensor", maximum=30.0)
    assert (part.codes == found.codes[:128]).all()


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=150),
        elements=st.floats(-(2.0**100), 2.0**100, width=32),
        fill=st.floats(-1, 1, width=32),
    )
)
@settings(deadline=None, max_examples=60)
def test_the_error_is_that_of_the_format(values: np.ndarray) -> None:
    found = quantize(values, "fp8")
    assert not has_nan_codes(found.codes)
    assert ((found.scales > 0) & np.isfinite(found.scales)).all()
    scales = np.kron(found.scales, np.ones((128, 128)))[: len(values), : values.shape[1]]
    error = np.abs(dequantize(found.codes, found.scales).astype(np.float64) - values)
    # Half a step: 2⁻⁴ of the value, 2⁻¹⁰ of the scale among the subnormals; and float32's own rounding.
    assert (error <= np.maximum(np.abs(values) * 2.0**-4, scales * 2.0**-10) * (1 + 1e-5)).all()
    assert np.abs(found.codes.astype(int) & 0x7F).max() == 0x7E or np.abs(values).max() < 1e-4


def test_the_ends_of_the_range() -> None:
    ends = np.array([448, 464, 1e30, np.inf, -np.inf, 2.0**-10, 2.0**-10 * 1.0001, -0.0], np.float32)
    assert encode_e4m3(ends).tolist() == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0, 1, 0x80]
    assert decode_e4m3(np.array([0x7E], np.uint8))[0] == E4M3_MAX
    assert encode_e4m3(np.empty((0, 3), np.float32)).shape == (0, 3)
