"""What a GGUF file of the Llama architecture says about the model, and which tensors it must hold."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from engine.errors import ModelError
from engine.model import ModelConfig
from kernels.convert import check_types
from kernels.facts import Facts, shown
from kernels.gguf_file import read_header
from kernels.gguf_tokenizer import build_tokenizer, read_chat_template
from kernels.source import ModelSource, TensorPlan

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.gguf_file import GGUFHeader
    from kernels.source import TensorInfo

ARCHITECTURE = "llama"
TOKEN_ID = "tokenizer.ggml.{}_token_id"
_FORMAT_SUFFIX = re.compile(r"[.-](F32|F16|BF16|I?Q[0-9]\w*)$", re.IGNORECASE)
UNSERVED_TENSORS = {
    "rope_freqs.weight": "scaled RoPE",
    "blk.0.ffn_gate_inp.weight": "a mixture of experts",
    "blk.0.attn_q.bias": "biases in attention",
}


def read_gguf_model(path: Path) -> ModelSource:
    """The model that a GGUF file holds; ModelError when it cannot be served. Its numbers are not read yet."""
    header = read_header(path)
    config = read_llama_config(header)
    plans = plan_llama_tensors(header, config)
    check_types(plans)
    return ModelSource(config, plans, build_tokenizer(header, config.vocab_size), read_chat_template(header))


def read_llama_config(header: GGUFHeader) -> ModelConfig:
    """The model's configuration without `weights_id`; ModelError when it is contradictory or no Llama."""
    facts = Facts(header.path, header.metadata, kind="metadata ", prefix=f"{ARCHITECTURE}.")
    architecture = facts.text("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"{header.path}: architecture {shown(architecture)} is not served yet; take a model of the "
            f"architecture {ARCHITECTURE!r}"
        )
    _refuse_variants(header, facts)
    hidden = facts.count("embedding_length")
    heads = facts.count("attention.head_count")
    kv_heads = facts.count("attention.head_count_kv", heads)
    head_dim = facts.count("attention.key_length", hidden // heads)
    facts.check_heads(heads, kv_heads, head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        if facts.count(key, head_dim) != head_dim:
            raise facts.wrong(f"{ARCHITECTURE}.{key} differs from the head size {head_dim}: not served yet")
    vocab_size = _tensor(header, "token_embd.weight").shape[0]
    return ModelConfig(
        # What people call it; `general.name` is free text, often of a training run.
        name=_FORMAT_SUFFIX.sub("", header.path.stem),
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=facts.layers("block_count"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=facts.count("feed_forward_length"),
        context_length=facts.count("context_length"),
        rope_theta=facts.positive("rope.freq_base", 10000.0),
        rms_eps=facts.positive("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in header.tensors,
        bos_token=facts.token(TOKEN_ID.format("bos"), vocab_size),
        eos_tokens=tuple(
            dict.fromkeys(
                token
                for name in ("eos", "eot")
                if (token := facts.token(TOKEN_ID.format(name), vocab_size)) is not None
            )
        ),
        weights_id="",
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
        tensor = _tensor(header, source)
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


def _refuse_variants(header: GGUFHeader, facts: Facts) -> None:
    """Llamas that would run, wrongly, if we ignored what sets them apart."""
    for tensor, what in UNSERVED_TENSORS.items():
        if tensor in header.tensors:
            raise facts.wrong(f"{what} (tensor {tensor}) is not served yet")
    if facts.text("rope.scaling.type", "none") != "none":
        raise facts.wrong("scaled RoPE (llama.rope.scaling.type) is not served yet")


def _tensor(header: GGUFHeader, name: str) -> TensorInfo:
    if name not in header.tensors:
        raise ModelError(f"{header.path}: tensor {name} is missing; fetch the file again")
    return header.tensors[name]
