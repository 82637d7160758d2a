"""A prepared folder with a small random Llama: the model that tests of the whole engine run."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from safetensors.numpy import save_file

from engine.model import CONFIG, WEIGHTS, ModelConfig
from kernels.weights import tensor_shapes

if TYPE_CHECKING:
    from pathlib import Path


def write_random_model(
    folder: Path,
    *,
    vocab_size: int = 97,
    hidden_size: int = 48,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    ffn_size: int = 80,
    context_length: int = 512,
    tied: bool = True,
    seed: int = 0,
    bos_token: int | None = 1,
    eos_tokens: tuple[int, ...] = (2,),
    rope_theta: float = 10000.0,
    rms_eps: float = 1e-5,
    name: str = "random-llama",
) -> ModelConfig:
    """Write `model.json` and `weights.safetensors` into `folder` (made if absent); returns the config.

    Matrices are drawn with variance 1 / inputs and norms near 1, so activations keep their size through
    any depth; the LM head (or the tied embedding) has entries of variance 1, so logits spread over
    several units and greedy continuations wander instead of repeating one token. `weights_id` is a hash
    of the weights. The caller adds a tokenizer when it needs one.
    """
    config = ModelConfig(
        name=name,
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn_size,
        context_length=context_length,
        rope_theta=rope_theta,
        rms_eps=rms_eps,
        tied_embeddings=tied,
        bos_token=bos_token,
        eos_tokens=eos_tokens,
        weights_id="",
    )
    random = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = {}
    digest = hashlib.blake2b(digest_size=8)
    for tensor, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 1:
            values = 1.0 + 0.1 * values
        elif "layers" in tensor:
            values /= np.float32(np.sqrt(shape[1]))
        tensors[tensor] = np.ascontiguousarray(values, np.float32)
        digest.update(tensors[tensor].tobytes())
    config = msgspec.structs.replace(config, weights_id=digest.hexdigest())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_bytes(msgspec.json.encode(config))
    return config
