"""The weights of a prepared folder, mapped read-only so that all workers of a host share one copy."""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import ModelError
from engine.model import WEIGHTS
from kernels.formats import BLOCK, WeightFormat
from kernels.quantize import E4M3_MAX, decode_bf16, dequantize, has_nan_codes
from kernels.source import E4M3
from kernels.weight_files import REMEDY, read_weight_files

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from kernels.formats import WeightKind
    from kernels.source import TensorInfo

    Weight = NDArray[np.float32]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCALES_SUFFIX = "_scale_inv"
"""What the tensor of a matrix's scales is called after the matrix."""
SCALES_TYPES = ("F32", "BF16")
STORED_KINDS: dict[str, WeightKind] = {"F32": "fp32", "F16": "fp32", "BF16": "bf16", E4M3: "fp8"}
"""The kind that keeps the numbers of a type as they are."""


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


def head_name(config: ModelConfig) -> str:
    """The tensor that is the LM head: its own, or the embedding when they are tied."""
    return EMBEDDING if config.tied_embeddings else HEAD


def scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a matrix [outputs, inputs]: one for each block of 128 × 128."""
    return tuple(-(-length // BLOCK) for length in shape)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a prepared folder as the files hold it, to be read in parts and checked as it is read.

    ModelError, naming the tensor, for numbers that cannot be computed with.
    """

    name: str
    info: TensorInfo
    scales: TensorInfo | None = None
    """Of e4m3fn codes."""

    def rows(self, start: int, stop: int) -> Weight:
        """Some rows of a matrix as float32 [stop − start, inputs]; of codes, `start` begins a block."""
        if self.info.type == E4M3:
            blocks = self.block_scales()[start // BLOCK : -(-stop // BLOCK)]
            return dequantize(self.codes(start, stop), blocks)
        return self._floats(start, stop)

    def values(self) -> Weight:
        """All of it as float32, in its shape."""
        return self.rows(0, self.info.shape[0])

    def codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Some rows of a matrix of e4m3fn codes as they are, [stop − start, inputs]."""
        codes = self._bytes(start, stop).reshape(stop - start, -1)
        if has_nan_codes(codes):
            raise self.wrong("holds codes that are NaN")
        return codes

    def block_scales(self) -> Weight:
        """The scales of a matrix of codes, float32 [ceil(outputs / 128), ceil(inputs / 128)]."""
        if self.scales is None:
            raise ValueError(f"{self.name} has no scales")
        stored = StoredTensor(self.scales.name, self.scales)
        scales = stored._floats(0, self.scales.shape[0])
        # Written so that NaN fails it too.
        if not ((scales > 0) & (scales <= np.finfo(np.float32).max / E4M3_MAX)).all():
            raise stored.wrong("holds a scale that is NaN, infinite, zero or negative")
        return scales

    def wrong(self, what: str, remedy: str = "fetch the model again") -> ModelError:
        """The error to raise for numbers that cannot be computed with."""
        return ModelError(f"{self.info.path}: tensor {self.name} {what}; {remedy}")

    def _floats(self, start: int, stop: int) -> Weight:
        data, shape = self._bytes(start, stop), (stop - start, *self.info.shape[1:])
        if self.info.type == "BF16":
            return decode_bf16(data.view("<u2")).reshape(shape)
        values = data.view("<f4" if self.info.type == "F32" else "<f2")
        return values.reshape(shape).astype(np.float32, copy=False)

    def _bytes(self, start: int, stop: int) -> NDArray[np.uint8]:
        row = self.info.size // self.info.shape[0]
        return self.info.read(start * row, (stop - start) * row)


def read_stored(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Every tensor of the model by name, its numbers not yet read.

    ModelError, naming the tensor and what was expected, when one is absent or has another shape or type,
    or when a file is not what its header says.
    """
    found = {name: tensor for file in read_weight_files(folder) for name, tensor in file.tensors.items()}
    return {
        name: _stored(folder, config, name, shape, found) for name, shape in tensor_shapes(config).items()
    }


def _stored(
    folder: Path, config: ModelConfig, name: str, shape: tuple[int, ...], found: dict[str, TensorInfo]
) -> StoredTensor:
    def checked(name: str, shape: tuple[int, ...], types: tuple[str, ...]) -> TensorInfo:
        expected = f"{name}: {' or '.join(types)} {list(shape)} expected"
        tensor = found.get(name)
        if tensor is None:
            raise ModelError(f"{folder / WEIGHTS}: lacks a tensor; {expected}; {REMEDY}")
        if tensor.type not in types or tensor.shape != shape:
            raise ModelError(f"{tensor.path}: {expected}, {tensor.type} {list(tensor.shape)} found; {REMEDY}")
        return tensor

    if config.stored != E4M3:  # everything else was converted when the folder was prepared
        return StoredTensor(name, checked(name, shape, ("F32",)))
    matrix = len(shape) == 2
    info = checked(name, shape, (E4M3, "BF16", "F16", "F32") if matrix else ("BF16", "F16", "F32"))
    if info.type != E4M3:
        return StoredTensor(name, info)
    return StoredTensor(name, info, checked(name + SCALES_SUFFIX, scales_shape(shape), SCALES_TYPES))


def matrix_sizes(config: ModelConfig) -> tuple[int, int]:
    """Weights of all layers' matrices, and of the LM head."""
    layer = sum(math.prod(shape) for shape in layer_shapes(config).values() if len(shape) == 2)
    return config.layers * layer, config.vocab_size * config.hidden_size


def float32_bytes(config: ModelConfig) -> tuple[int, int]:
    """Bytes of the layers' matrices, and of the LM head, as float32."""
    layers, head = matrix_sizes(config)
    return 4 * layers, 4 * head


def default_format(folder: Path, config: ModelConfig) -> WeightFormat:
    """The kinds that a prepared model asks for itself.

    Checkpoints keep their precision: FP8 ones have FP8 layers and the LM head that they store, BF16 ones
    are bf16, F16 and F32 ones fp32. Of GGUF files Q8_0 becomes bf16; what has fewer bits becomes FP8 with a
    bf16 head: as FP8 checkpoints have it, and an FP8 head costs more accuracy than all layers together
    (`python -m tools.evaluate`). ModelError when the folder is damaged.
    """
    if config.stored == E4M3:
        head = read_stored(folder, config)[head_name(config)]
        return WeightFormat("fp8", STORED_KINDS[head.info.type])
    if config.stored == "Q8_0":
        return WeightFormat("bf16", "bf16")
    kind = STORED_KINDS.get(config.stored)
    return WeightFormat(kind, kind) if kind else WeightFormat("fp8", "bf16")


class Weights:
    """Every tensor of a Llama model by name, as read-only float32: views of the mapped files.

    What an FP8 checkpoint does not store as float32 is converted into private memory instead. ModelError
    as in `read_stored`, and for codes and scales that are NaN.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._maps: dict[Path, mmap.mmap] = {}
        self._tensors = {name: self._values(stored) for name, stored in read_stored(folder, config).items()}

    def __getitem__(self, name: str) -> Weight:
        return self._tensors[name]

    def layer(self, index: int, name: str) -> Weight:
        """The tensor of a layer by its name within the layer."""
        return self._tensors[f"model.layers.{index}.{name}"]

    def head(self) -> Weight:
        """The LM head [vocab_size, hidden_size]: its own, or the embedding when they are tied."""
        return self._tensors.get(HEAD, self._tensors[EMBEDDING])

    def _values(self, stored: StoredTensor) -> Weight:
        tensor = stored.info
        if tensor.type == "F32" and tensor.offset % 4 == 0:
            data = np.frombuffer(self._map(tensor.path), np.float32, tensor.elements, tensor.offset)
            return data.reshape(tensor.shape)
        values = stored.values()
        values.flags.writeable = False
        return values

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            try:
                with path.open("rb") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise ModelError(f"{path}: {error}; {REMEDY}") from None
        return self._maps[path]
