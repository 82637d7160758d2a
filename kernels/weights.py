"""The weights of a prepared folder, mapped read-only so that all workers of a host share one copy."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import ModelError
from engine.model import WEIGHTS
from kernels.weight_files import REMEDY, read_weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from kernels.source import TensorInfo

    Weight = NDArray[np.float32]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


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
    """Every tensor of a Llama model by name, as read-only float32 views of the mapped files.

    Raises ModelError, naming the tensor and what was expected, when one is absent or has another shape
    or dtype, or when a file is not what its header says.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._folder = folder
        files = read_weight_files(folder)
        self._maps = {file.path: self._map(file.path) for file in files}
        found = {name: tensor for file in files for name, tensor in file.tensors.items()}
        self._tensors = {
            name: self._view(name, shape, found.get(name)) for name, shape in tensor_shapes(config).items()
        }

    def __getitem__(self, name: str) -> Weight:
        return self._tensors[name]

    def layer(self, index: int, name: str) -> Weight:
        """The tensor of a layer by its name within the layer."""
        return self._tensors[f"model.layers.{index}.{name}"]

    def head(self) -> Weight:
        """The LM head [vocab_size, hidden_size]: its own, or the embedding when they are tied."""
        return self._tensors.get(HEAD, self._tensors[EMBEDDING])

    def _map(self, path: Path) -> mmap.mmap:
        try:
            with path.open("rb") as file:
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: {error}; {REMEDY}") from None

    def _view(self, name: str, shape: tuple[int, ...], tensor: TensorInfo | None) -> Weight:
        expected = f"{name}: F32 {list(shape)} expected"
        if tensor is None:
            raise ModelError(f"{self._folder / WEIGHTS}: lacks a tensor; {expected}; {REMEDY}")
        if tensor.type != "F32" or tensor.shape != shape:
            raise ModelError(f"{tensor.path}: {expected}, {tensor.type} {list(tensor.shape)} found; {REMEDY}")
        if tensor.offset % 4:
            raise ModelError(f"{tensor.path}: {name} does not lie on a multiple of 4 bytes; {REMEDY}")
        data = np.frombuffer(self._maps[tensor.path], np.float32, tensor.elements, tensor.offset)
        return data.reshape(shape)
