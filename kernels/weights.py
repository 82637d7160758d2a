"""The weights of a prepared folder, mapped read-only so that all workers of a host share one copy.

Format of the file: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from engine.errors import ModelError
from engine.model import WEIGHTS

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.model import ModelConfig

    Weight = NDArray[np.float32]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name within a layer -> shape of each tensor of a Llama layer; matrices are [outputs, inputs]."""
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, ffn = config.hidden_size, config.ffn_size
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a model of this configuration has."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for layer in range(config.layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(config).items()}
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


class Weights:
    """Every tensor of a Llama model by name, as read-only float32 views of the mapped file.

    Raises ModelError, naming the tensor and what was expected, when one is absent or has another shape
    or dtype, or when the file is shorter than its header says.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self.path = folder / WEIGHTS
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{self.path}: {error}; prepare the model again") from None
        entries, start = self._read_header()
        self._tensors = {
            name: self._view(name, shape, entries.get(name), start)
            for name, shape in tensor_shapes(config).items()
        }

    def __getitem__(self, name: str) -> Weight:
        return self._tensors[name]

    def layer(self, index: int, name: str) -> Weight:
        """The tensor of a layer by its name within the layer."""
        return self._tensors[f"model.layers.{index}.{name}"]

    def head(self) -> Weight:
        """The LM head [vocab_size, hidden_size]: its own, or the embedding when they are tied."""
        return self._tensors.get(HEAD, self._tensors[EMBEDDING])

    def _read_header(self) -> tuple[dict[str, _Entry], int]:
        start = 8 + int.from_bytes(self._map[:8], "little")
        if len(self._map) < start:
            raise self._wrong("ends within its header")
        try:
            header = msgspec.json.decode(self._map[8:start], type=dict[str, msgspec.Raw])
            header.pop("__metadata__", None)
            return {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}, start
        except msgspec.DecodeError as error:
            raise self._wrong(f"has no readable header ({error})") from None

    def _view(self, name: str, shape: tuple[int, ...], entry: _Entry | None, start: int) -> Weight:
        expected = f"{name}: F32 {list(shape)} expected"
        if entry is None:
            raise self._wrong(f"lacks a tensor; {expected}")
        if entry.dtype != "F32" or entry.shape != shape:
            raise self._wrong(f"{expected}, {entry.dtype} {list(entry.shape)} found")
        first, end = entry.data_offsets
        count = int(np.prod(shape))
        if first < 0 or end - first != 4 * count:
            raise self._wrong(f"{expected}, {end - first} bytes found")
        if start + end > len(self._map):
            raise self._wrong(f"{expected}, but the file ends before it")
        if (start + first) % 4:
            raise self._wrong(f"{name} does not lie on a multiple of 4 bytes")
        return np.frombuffer(self._map, np.float32, count, start + first).reshape(shape)

    def _wrong(self, reason: str) -> ModelError:
        return ModelError(f"{self.path}: {reason}; delete the folder and prepare the model again")
