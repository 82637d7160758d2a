"""What a GGUF file of the Llama architecture says about the model, and which tensors it must hold."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import ModelError
from engine.model import ModelConfig
from kernels.gguf_file import shown

if TYPE_CHECKING:
    from kernels.gguf_file import GGUFHeader, TensorInfo

ARCHITECTURE = "llama"
MAX_LAYERS = 1 << 12
_FORMAT_SUFFIX = re.compile(r"[.-](F32|F16|BF16|I?Q[0-9]\w*)$", re.IGNORECASE)
UNSERVED_TENSORS = {
    "rope_freqs.weight": "scaled RoPE",
    "blk.0.ffn_gate_inp.weight": "a mixture of experts",
    "blk.0.attn_q.bias": "biases in attention",
}


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor to write: where it comes from, what it is called, how its rows are ordered."""

    source: TensorInfo
    name: str
    """In Hugging Face's Llama checkpoints."""
    heads: int = 0
    """When positive: the rows are those of Q or K in llama.cpp's order for so many heads."""


def read_llama_config(header: GGUFHeader, weights_id: str) -> ModelConfig:
    """The model's configuration; ModelError when it is another architecture or contradicts itself."""
    facts = _Facts(header)
    architecture = facts.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"{header.path}: architecture {shown(architecture)} is not served yet; take a model of the "
            f"architecture {ARCHITECTURE!r}"
        )
    facts.refuse_variants()
    hidden = facts.count("embedding_length")
    heads = facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    head_dim = facts.count("attention.key_length", hidden // heads)
    if head_dim % 2 or heads % kv_heads:
        raise facts.wrong(f"{heads} heads of {head_dim}, {kv_heads} for keys and values, do not go together")
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.count(key, head_dim) != head_dim:
            raise facts.wrong(f"{ARCHITECTURE}.{key} differs from the head size {head_dim}: not served yet")
    layers = facts.count("block_count")
    if layers > MAX_LAYERS:
        raise facts.wrong(f"{layers} layers")
    vocab_size = facts.shape("token_embd.weight")[0]
    return ModelConfig(
        # What people call it; `general.name` is free text, often of a training run.
        name=_FORMAT_SUFFIX.sub("", header.path.stem),
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=facts.count("feed_forward_length"),
        context_length=facts.count("context_length"),
        rope_theta=facts.positive("rope.freq_base", 10000.0),
        rms_eps=facts.positive("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in header.tensors,
        bos_token=facts.token("bos", vocab_size),
        eos_tokens=tuple(
            dict.fromkeys(t for name in ("eos", "eot") if (t := facts.token(name, vocab_size)) is not None)
        ),
        weights_id=weights_id,
    )


def plan_llama_tensors(header: GGUFHeader, config: ModelConfig) -> list[TensorPlan]:
    """Every tensor of the model in the order of computation.

    ModelError when one is missing or misshapen, or when the file holds one that we would ignore.
    """
    hidden, queries, values = (
        config.hidden_size,
        config.heads * config.head_dim,
        config.kv_heads * config.head_dim,
    )
    plans: list[TensorPlan] = []

    def want(source: str, name: str, *shape: int, heads: int = 0) -> None:
        tensor = header.tensors.get(source)
        if tensor is None:
            raise ModelError(f"{header.path}: tensor {source} is missing; fetch the file again")
        if tensor.shape != shape:
            raise ModelError(
                f"{header.path}: tensor {source} has the shape {list(tensor.shape)}, the metadata asks for "
                f"{list(shape)}; fetch the file again"
            )
        plans.append(TensorPlan(tensor, name, heads))

    want("token_embd.weight", "model.embed_tokens.weight", config.vocab_size, hidden)
    for layer in range(config.layers):
        here, there = f"blk.{layer}.", f"model.layers.{layer}."
        attention, mlp = there + "self_attn.", there + "mlp."
        want(here + "attn_norm.weight", there + "input_layernorm.weight", hidden)
        want(here + "attn_q.weight", attention + "q_proj.weight", queries, hidden, heads=config.heads)
        want(here + "attn_k.weight", attention + "k_proj.weight", values, hidden, heads=config.kv_heads)
        want(here + "attn_v.weight", attention + "v_proj.weight", values, hidden)
        want(here + "attn_output.weight", attention + "o_proj.weight", hidden, queries)
        want(here + "ffn_norm.weight", there + "post_attention_layernorm.weight", hidden)
        want(here + "ffn_gate.weight", mlp + "gate_proj.weight", config.ffn_size, hidden)
        want(here + "ffn_up.weight", mlp + "up_proj.weight", config.ffn_size, hidden)
        want(here + "ffn_down.weight", mlp + "down_proj.weight", hidden, config.ffn_size)
    want("output_norm.weight", "model.norm.weight", hidden)
    if not config.tied_embeddings:
        want("output.weight", "lm_head.weight", config.vocab_size, hidden)
    known = {plan.source.name for plan in plans}
    for name in header.tensors:
        if name not in known:
            raise ModelError(
                f"{header.path}: tensor {shown(name)} is not part of a plain Llama model of {config.layers} "
                "layers: such models are not served yet"
            )
    return plans


class _Facts:
    """Typed access to the metadata, with the architecture's prefix where the name has none."""

    def __init__(self, header: GGUFHeader) -> None:
        self._header = header

    def wrong(self, reason: str) -> ModelError:
        return ModelError(f"{self._header.path}: {reason}; take another file")

    def refuse_variants(self) -> None:
        """Llamas that would run, wrongly, if we ignored what sets them apart."""
        for tensor, what in UNSERVED_TENSORS.items():
            if tensor in self._header.tensors:
                raise self.wrong(f"{what} (tensor {tensor}) is not served yet")
        if self._get("rope.scaling.type", str, "none") != "none":
            raise self.wrong("scaled RoPE (llama.rope.scaling.type) is not served yet")

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._get(key, str, default))

    def count(self, key: str, default: int | None = None) -> int:
        value = int(self._get(key, int, default))
        if not 1 <= value < 1 << 31:
            raise self.wrong(f"metadata {key} is {value}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        value = float(self._get(key, float, default))
        if not 0 < value < float("inf"):
            raise self.wrong(f"metadata {key} is {value}")
        return value

    def token(self, name: str, vocab_size: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._header.metadata:
            return None
        token = int(self._get(key, int, None))
        if not 0 <= token < vocab_size:
            raise self.wrong(f"metadata {key} is {token}, outside the vocabulary of {vocab_size}")
        return token

    def shape(self, tensor: str) -> tuple[int, ...]:
        if tensor not in self._header.tensors:
            raise ModelError(f"{self._header.path}: tensor {tensor} is missing; fetch the file again")
        return self._header.tensors[tensor].shape

    def _get(self, key: str, kind: type, default: Any) -> Any:
        full = key if key.startswith(("general.", "tokenizer.")) else f"{ARCHITECTURE}.{key}"
        value = self._header.metadata.get(full, default)
        if type(value) is kind:
            return value
        if value is None:
            raise self.wrong(f"metadata {full} is missing")
        raise self.wrong(f"metadata {full} is {shown(str(value))}, not {kind.__name__}")
