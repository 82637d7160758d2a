"""How the numbers of a model's matrices are kept: the kinds, and which kind a model's matrices have."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

WeightKind = Literal["fp32", "bf16", "fp8", "fp8-per-tensor", "int8"]
"""fp8: e4m3fn codes with a scale for each block of 128 × 128; fp8-per-tensor: one scale for the matrix;
int8: signed codes with a scale for each block of 128 × 128. The last two are there to be compared with."""

KINDS: tuple[WeightKind, ...] = get_args(WeightKind)

ITEM_BYTES: dict[WeightKind, int] = {"fp32": 4, "bf16": 2, "fp8": 1, "fp8-per-tensor": 1, "int8": 1}
"""Bytes of one weight, without its share of a scale."""

BLOCK = 128
"""Outputs and inputs of a block that has one scale, as GLM-5 and DeepSeek checkpoints have it."""


Activations = Literal["fp32", "bf16"]
"""What the inputs of FP8 matrices are computed in. bf16: they are rounded first, which processors with bf16
dot products compute twice as fast; the others get the same bits."""


class WeightFormat(msgspec.Struct, frozen=True):
    """The kinds of one model's matrices."""

    layers: WeightKind
    """Of the decoder layers' matrices."""
    head: WeightKind
    """Of the embedding and the LM head; tied, they are one matrix."""

    def __str__(self) -> str:
        return self.layers if self.layers == self.head else f"{self.layers}+{self.head}-head"
