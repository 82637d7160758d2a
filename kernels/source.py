"""A model as its files describe it: what GGUF files and Hugging Face folders have alike."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from tokenizers import Tokenizer

    from engine.model import ModelConfig


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file: rows last to first as numpy has them, its bytes not yet read."""

    path: Path
    name: str
    type: str
    """F32, F16, BF16 (GGUF and safetensors agree in these), or another type of the file's format."""
    shape: tuple[int, ...]
    """Outermost dimension first (GGUF itself writes the innermost first)."""
    offset: int
    """From the start of the file, in bytes."""
    size: int
    """In bytes."""

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write: where it comes from, what it is called, how its rows are ordered."""

    source: TensorInfo
    name: str
    """In Hugging Face's Llama checkpoints."""
    heads: int = 0
    """When positive: the rows are those of Q or K in llama.cpp's order for so many heads."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Everything that preparing needs; the numbers themselves are still to be checked."""

    config: ModelConfig
    """With an empty `weights_id`."""
    plans: list[TensorPlan]
    """Every tensor of the model in the order of computation."""
    tokenizer: Tokenizer
    template: str | None
    as_they_are: tuple[tuple[Path, int], ...] = ()
    """(file, its modification time in ns): safetensors that may be mapped where they lie; empty: convert."""
