"""A prepared model folder: what the engine knows about a model without touching its weights.

`python -m kernels.prepare SOURCE` makes such a folder from a GGUF file or a Hugging Face folder. It holds

    model.json            this module's ModelConfig
    tokenizer.json        for the `tokenizers` package
    chat_template.jinja   absent when the model has none
    weights.safetensors   float32, named and laid out as Hugging Face Llama checkpoints are; or several,
                          weights-*.safetensors; or links to such files of the model itself, of an FP8
                          checkpoint with its codes and scales as they are
    packed/               made of them when they are first needed (kernels.packed)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from engine.errors import ModelError
from engine.shapes import KVDtype, PageShape

if TYPE_CHECKING:
    from pathlib import Path

WeightKind = Literal["fp32", "bf16", "fp8", "fp8-per-tensor", "int8"]
"""fp8: e4m3fn codes with a scale for each block of 128 × 128; fp8-per-tensor: one scale for the matrix;
int8: signed codes with a scale for each block of 128 × 128. The last two are there to be compared with."""

Activations = Literal["fp32", "bf16"]
"""What the inputs of FP8 matrices are computed in. bf16: they are rounded first, which processors with bf16
dot products compute twice as fast; the others get the same bits."""

CONFIG = "model.json"
TOKENIZER = "tokenizer.json"
TEMPLATE = "chat_template.jinja"
WEIGHTS = "weights.safetensors"


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Architecture and vocabulary facts of a model."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn_size: int
    context_length: int
    rope_theta: float
    rms_eps: float
    tied_embeddings: bool
    bos_token: int | None
    eos_tokens: tuple[int, ...]
    weights_id: str
    """Content hash of the source's weights: part of `numerics_id` and of every cache key."""
    stored: str = "F32"
    """The type that most numbers of the source's matrices have, as GGUF files and safetensors call it."""

    def page_shape(self, tokens: int, dtype: KVDtype) -> PageShape:
        """The page of this model for the given number of tokens and KV dtype."""
        return PageShape(tokens, self.layers, self.kv_heads, self.head_dim, dtype)


def read_config(folder: Path) -> ModelConfig:
    """Read `model.json` of a prepared folder; a ModelError says what is wrong with it."""
    path = folder / CONFIG
    try:
        return msgspec.json.decode(path.read_bytes(), type=ModelConfig)
    except FileNotFoundError:
        raise ModelError(
            f"{folder}: no {CONFIG}; make the folder with `python -m kernels.prepare SOURCE`"
        ) from None
    except msgspec.DecodeError as error:
        raise ModelError(f"{path}: {error}; delete the folder and prepare it again") from None
