"""A prepared folder with a small random Llama: the model that tests of the whole engine run."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from safetensors.numpy import save_file

from engine.model import CONFIG, WEIGHTS, ModelConfig
from kernels.weights import EMBEDDING, tensor_shapes

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
    sharpness: float = 2.8,
    name: str = "random-llama",
) -> ModelConfig:
    """Write `model.json` and `weights.safetensors` into `folder` (made if absent); returns the config.

    Norms are near 1 and matrices have variance 1 / inputs times a gain, so activations keep their size.
    Queries and keys have the gain `sharpness`, so that attention picks few positions (1 makes it even
    and the model well-conditioned, for comparisons of numbers), values one that makes what it picks
    count, and the LM head (or the tied embedding) is small, lest each token predict itself: greedy
    continuations wander (14 or more different tokens of 80 for eight seeds of the default shape)
    instead of repeating one. `weights_id` is a hash of the weights. The caller adds a tokenizer when it
    needs one.
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
    gains = {"q_proj": sharpness, "k_proj": sharpness, "v_proj": 3.0}
    tensors: dict[str, np.ndarray] = {}
    digest = hashlib.blake2b(digest_size=8)
    for tensor, shape in tensor_shapes(config).items():
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 1:
            values = 1.0 + 0.1 * values
        elif tensor != EMBEDDING or tied:
            gain = next((gain for part, gain in gains.items() if part in tensor), 1.0)
            values *= np.float32(gain / np.sqrt(shape[1]))
        tensors[tensor] = np.ascontiguousarray(values, np.float32)
        digest.update(tensors[tensor].tobytes())
    config = msgspec.structs.replace(config, weights_id=digest.hexdigest())
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_bytes(msgspec.json.encode(config))
    return config
