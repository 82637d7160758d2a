"""A model as its files describe it: what GGUF files and Hugging Face folders have alike."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    from engine.model import ModelConfig

E4M3 = "F8_E4M3"
"""What safetensors call e4m3fn."""


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

    def read(self, start: int, size: int) -> NDArray[np.uint8]:
        """Some of its bytes; ModelError when they cannot be read.

        Read, not mapped: a file cut short meanwhile is an error then, not a SIGBUS.
        """
        try:
            with self.path.open("rb") as file:
                data = np.fromfile(file, np.uint8, size, offset=self.offset + start)
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        if data.size != size:
            raise ModelError(
                f"{self.path}: truncated while it was read, in tensor {self.name}; fetch the file again"
            )
        return data


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write: where it comes from, what it is called, how its rows are ordered."""

    source: TensorInfo
    name: str
    """In Hugging Face's Llama checkpoints."""
    heads: int = 0
    """When positive: the rows are those of Q or K in llama.cpp's order for so many heads."""
    scales: TensorInfo | None = None
    """Of a matrix of e4m3fn codes: the scales of its blocks, F32 or BF16."""


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

    @property
    def stored(self) -> str:
        """The type of most numbers of the layers' matrices; F8_E4M3 as soon as there is a matrix of that."""
        numbers: Counter[str] = Counter()
        for plan in self.plans:
            if plan.source.type == E4M3:
                return E4M3
            if len(plan.source.shape) == 2 and plan.name.startswith("model.layers."):
                numbers[plan.source.type] += plan.source.elements
        return numbers.most_common(1)[0][0]
