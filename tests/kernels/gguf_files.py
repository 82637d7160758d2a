"""Small GGUF files of the Llama architecture, whole or broken on purpose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@dataclass
class TinyModel:
    """What the file says; change a field to write another model."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 96
    vocab: int = 320
    seed: int = 0
    tied: bool = True
    types: dict[str, str] = field(default_factory=dict)
    """Quantisation by tensor name without "blk.N."; F32 where not named."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Added to, or put in place of, the usual keys; None leaves a key out."""
    edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None
    """Changes the dictionary of float32 tensors before they are quantised and written."""

    def tensors(self) -> dict[str, np.ndarray]:
        """Random weights by GGUF name, in llama.cpp's row order, float32 [out][in]."""
        random = np.random.default_rng(self.seed)
        head_dim = self.hidden // self.heads
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab, self.hidden)}
        for layer in range(self.layers):
            shapes |= {
                f"blk.{layer}.attn_norm.weight": (self.hidden,),
                f"blk.{layer}.attn_q.weight": (self.heads * head_dim, self.hidden),
                f"blk.{layer}.attn_k.weight": (self.kv_heads * head_dim, self.hidden),
                f"blk.{layer}.attn_v.weight": (self.kv_heads * head_dim, self.hidden),
                f"blk.{layer}.attn_output.weight": (self.hidden, self.heads * head_dim),
                f"blk.{layer}.ffn_norm.weight": (self.hidden,),
                f"blk.{layer}.ffn_gate.weight": (self.ffn, self.hidden),
                f"blk.{layer}.ffn_up.weight": (self.ffn, self.hidden),
                f"blk.{layer}.ffn_down.weight": (self.hidden, self.ffn),
            }
        shapes["output_norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["output.weight"] = (self.vocab, self.hidden)
        tensors = {
            name: random.normal(1.0 if len(shape) == 1 else 0.0, 0.1, shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        self.edit(tensors)
        return tensors


def write_tiny_gguf(path: Path, **changes: Any) -> TinyModel:
    """Write a random Llama of 80k parameters that prepares and runs; `changes` are TinyModel's fields."""
    model = TinyModel(**changes)
    tokens, merges = byte_level_vocabulary(model.vocab)
    metadata: dict[str, Any] = {
        "general.name": "tiny",
        "llama.block_count": model.layers,
        "llama.context_length": 512,
        "llama.embedding_length": model.hidden,
        "llama.feed_forward_length": model.ffn,
        "llama.attention.head_count": model.heads,
        "llama.attention.head_count_kv": model.kv_heads,
        "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": model.hidden // model.heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | model.metadata
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture", "llama"))
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in model.tensors().items():
        role = name.split(".", 2)[2] if name.startswith("blk.") else name
        kind = GGMLQuantizationType[model.types.get(role, "F32")]
        writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    _finish(writer)
    return model


def write_raw_gguf(path: Path, tensors: dict[str, tuple[str, np.ndarray]], **metadata: Any) -> None:
    """Write the given bytes as tensors, {name: (type, uint8 [rows][bytes])}; metadata as given."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    _finish(writer)


def byte_level_vocabulary(size: int) -> tuple[list[str], list[str]]:
    """(tokens, merges): three control tokens, the 256 byte characters, then merged pieces, in all `size`."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [chr(byte) for byte in printable] + [chr(256 + n) for n in range(256 - len(printable))]
    words = ["Ġthe", "Ġcapital", "Ġof", "France", "Paris", "system", "user", "assistant", "ing", "Ġis", "end"]
    tokens, merges = [*CONTROL_TOKENS, *characters], []
    for word in words:
        for end in range(2, len(word) + 1):
            if len(tokens) < size and word[:end] not in tokens:
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
                tokens.append(word[:end])
    return tokens + [f"<unused{n}>" for n in range(size - len(tokens))], merges


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
