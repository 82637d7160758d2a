"""How the numbers of a model's matrices are kept: the kinds, and which kind a model's matrices have."""

from __future__ import annotations

from typing import get_args

import msgspec

from engine.model import Activations, WeightKind

__all__ = ["BLOCK", "ITEM_BYTES", "KINDS", "Activations", "WeightFormat", "WeightKind", "activations_for"]

KINDS: tuple[WeightKind, ...] = get_args(WeightKind)

ITEM_BYTES: dict[WeightKind, int] = {"fp32": 4, "bf16": 2, "fp8": 1, "fp8-per-tensor": 1, "int8": 1}
"""Bytes of one weight, without its share of a scale."""

BLOCK = 128
"""Outputs and inputs of a block that has one scale, as GLM-5 and DeepSeek checkpoints have it."""


class WeightFormat(msgspec.Struct, frozen=True):
    """The kinds of one model's matrices."""

    layers: WeightKind
    """Of the decoder layers' matrices."""
    head: WeightKind
    """Of the embedding and the LM head; tied, they are one matrix."""

    def __str__(self) -> str:
        return self.layers if self.layers == self.head else f"{self.layers}+{self.head}-head"


def activations_for(weight_format: WeightFormat) -> Activations:
    """What is right unless somebody asks for something else: bf16 where weights have a fourth of its bits."""
    return "bf16" if weight_format.layers in ("fp8", "fp8-per-tensor") else "fp32"
