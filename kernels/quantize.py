"""Numbers of fewer bits: e4m3fn codes, signed bytes and bfloat16, and the scales of blocks of a matrix.

e4m3fn (https://arxiv.org/abs/2209.05433): sign, four bits of exponent with the bias 7, three of mantissa;
largest 448, least normal 2⁻⁶, least subnormal 2⁻⁹, no infinity, NaN only as 0x7F and 0xFF. A quantised
matrix is codes and one float32 scale for each block of 128 × 128, the last ones cut short by the matrix's
edge; value = code × scale, and scale = max(largest absolute value of the block, 1e-4) / largest code, as
GLM-5 and DeepSeek checkpoints have it (they call the scale `weight_scale_inv`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernels.formats import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kernels.formats import WeightKind

    Floats = NDArray[np.float32]

E4M3_MAX = 448.0
E4M3_NAN = 0x7F
"""The bits of a NaN without its sign."""
INT8_MAX = 127
LEAST_MAXIMUM = np.float32(1e-4)
"""A block of smaller values than this is scaled as if it held one: scales stay far from zero."""
PIECE = 1 << 15
"""Values worked on at a time, so that what lies between two passes over them stays in the cache."""


class Quantized(NamedTuple):
    """A matrix [outputs, inputs] as codes and scales."""

    codes: NDArray[Any]
    """[outputs, inputs]: uint8 (e4m3fn) or int8."""
    scales: Floats
    """[ceil(outputs / 128), ceil(inputs / 128)]"""


def encode_e4m3(values: Floats) -> NDArray[np.uint8]:
    """The nearest e4m3fn code of each float32, ties to the even one, beyond ±448 that code; NaN stays NaN."""
    # How a float32 rounds is decided by its upper half and by whether anything is set in the lower one:
    # the least bit of the upper half is already behind the place where e4m3fn rounds.
    table = _e4m3_table()
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    codes = np.empty(bits.shape, np.uint8)
    for piece in _pieces(bits.size):
        key = bits[piece] >> np.uint32(16)
        key |= (bits[piece] & np.uint32(0xFFFF)) != 0
        np.take(table, key, out=codes[piece], mode="clip")
    return codes.reshape(values.shape)


def decode_e4m3(codes: NDArray[np.uint8]) -> Floats:
    """The float32 that each e4m3fn code stands for, exact."""
    values = np.empty(codes.shape, np.float32)
    flat, out = codes.reshape(-1), values.reshape(-1)
    for piece in _pieces(flat.size):
        np.take(_e4m3_values(), flat[piece], out=out[piece], mode="clip")
    return values


def has_nan_codes(codes: NDArray[np.uint8]) -> bool:
    """Whether one of the e4m3fn codes stands for NaN."""
    flat = codes.reshape(-1)
    return any(bool(((flat[piece] & 0x7F) == E4M3_NAN).any()) for piece in _pieces(flat.size))


def round_bf16(values: Floats) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of each float32, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    halves = np.empty(bits.shape, np.uint16)
    for piece in _pieces(bits.size):
        part = bits[piece]
        upper = part >> np.uint32(16)
        rounded = (part + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)
        not_a_number = (part & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
        halves[piece] = np.where(not_a_number, upper | np.uint32(0x40), rounded)
    return halves.reshape(values.shape)


def decode_bf16(bits: NDArray[np.uint16]) -> Floats:
    """The float32 that each bfloat16 stands for, exact."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def quantize(values: Floats, kind: WeightKind, maximum: float | None = None) -> Quantized:
    """Quantise a finite matrix [outputs, inputs].

    kind: fp8, int8 (a scale for each block) or fp8-per-tensor (one, which every block repeats). `maximum`,
    for the last one: the largest absolute value of the whole matrix, of which `values` may be some rows.
    """
    outputs, inputs = values.shape
    largest = E4M3_MAX if kind != "int8" else float(INT8_MAX)
    codes = np.empty(values.shape, np.int8 if kind == "int8" else np.uint8)
    scales = np.empty((-(-outputs // BLOCK), -(-inputs // BLOCK)), np.float32)
    if kind == "fp8-per-tensor":
        maximum = float(np.abs(values).max(initial=0)) if maximum is None else maximum
        scales[:] = _scale(np.float32(maximum), largest)
    starts = np.arange(0, inputs, BLOCK)
    for row in range(len(scales)):
        rows = slice(row * BLOCK, (row + 1) * BLOCK)
        slab = values[rows]
        if kind != "fp8-per-tensor":
            scales[row] = _scale(np.maximum.reduceat(np.abs(slab).max(axis=0), starts), largest)
        scaled = slab / np.repeat(scales[row], BLOCK)[:inputs]
        if kind == "int8":
            codes[rows] = np.clip(np.rint(scaled), -INT8_MAX, INT8_MAX)
        else:
            codes[rows] = encode_e4m3(scaled)
    return Quantized(codes, scales)


def dequantize(codes: NDArray[Any], scales: Floats) -> Floats:
    """Codes [outputs, inputs] (uint8: e4m3fn; int8) times the scales of their blocks, as float32."""
    inputs = codes.shape[1]
    values = decode_e4m3(codes) if codes.dtype == np.uint8 else codes.astype(np.float32)
    for row, block_scales in enumerate(scales):
        values[row * BLOCK : (row + 1) * BLOCK] *= np.repeat(block_scales, BLOCK)[:inputs]
    return values


def _scale(maximum: Any, largest: float) -> Any:
    """float32 all the way: what a checkpoint stores."""
    return np.maximum(maximum, LEAST_MAXIMUM) / np.float32(largest)


@functools.cache
def _e4m3_values() -> Floats:
    """[256]: what each code stands for."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    normal = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    values = np.where(exponent == 0, mantissa / 8 * 2.0**-6, normal)
    values[(code & 0x7F) == E4M3_NAN] = np.nan
    values[code >= 0x80] *= -1
    return values.astype(np.float32)


@functools.cache
def _e4m3_table() -> NDArray[np.uint8]:
    """[65536]: the code of the float32 whose upper 16 bits are the index and whose lower ones are 0."""
    bits = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    with np.errstate(invalid="ignore"):  # some are signalling NaN
        values = np.abs(bits.view(np.float32).astype(np.float64))
    ordered = _e4m3_values()[:E4M3_NAN].astype(np.float64)  # 0 to 448
    known = np.nan_to_num(values, nan=0.0, posinf=E4M3_MAX).clip(0, E4M3_MAX)
    below = np.searchsorted(ordered, known, side="right") - 1
    above = np.minimum(below + 1, E4M3_NAN - 1)
    to_below, to_above = known - ordered[below], ordered[above] - known
    up = (to_above < to_below) | ((to_above == to_below) & (below % 2 == 1))
    codes = np.where(up, above, below)
    codes[np.isnan(values)] = E4M3_NAN
    codes |= (bits >> np.uint32(24) & np.uint32(0x80)).astype(codes.dtype)
    return codes.astype(np.uint8)


def _pieces(size: int) -> Iterator[slice]:
    return (slice(start, start + PIECE) for start in range(0, size, PIECE))
