"""What a Hugging Face folder's config.json says of a Llama, and what in it we would run wrongly.

Names and defaults: `LlamaConfig` of the transformers package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.model import ModelConfig
from kernels.facts import Facts, shown
from kernels.formats import BLOCK
from kernels.source import E4M3

if TYPE_CHECKING:
    from pathlib import Path

GENERATION_CONFIG = "generation_config.json"
ARCHITECTURE = "llama"
NEUTRAL: dict[str, tuple[object, ...]] = {
    # key: the values with which a model is the plain Llama that it is without the key
    "model_type": (ARCHITECTURE,),
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "qkv_bias": (False,),
    "sliding_window": (),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1,),
    "rope_interleaved": (False,),
    "use_qk_norm": (False,),
    "pretraining_tp": (1,),
    "num_local_experts": (0, 1),
    "attention_multiplier": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "compression_config": (),
    "auto_map": (),
    "is_encoder_decoder": (False,),
}
PLAIN_LAYERS = "full_attention"
QUANTIZATION = "quantization_config"
BLOCK_SIZE = "weight_block_size"
QUANTIZED: dict[str, tuple[object, ...]] = {
    # key of quantization_config: the values that we run as they are meant
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    BLOCK_SIZE: ([BLOCK, BLOCK],),
    # How activations are rounded where 8-bit products are taken; ours stay float32.
    "activation_scheme": ("dynamic",),
    "dequantize": (False,),
    "scale_fmt": ("float",),
    "expert_dtype": ("fp8",),
    "modules_to_convert": ([],),
}
LEFT_OUT = ("modules_to_not_convert", "ignored_layers")
"""Two names for the list of modules that are not FP8; which ones are not, the types of the tensors say."""


def read_hf_config(folder: Path) -> ModelConfig:
    """The model's configuration without `weights_id`; its special tokens as config and generation config
    have them, `stored` F8_E4M3 when it says that the checkpoint is FP8 and F32 otherwise. ModelError, naming
    the key and its value, when it is not a plain Llama, or quantised in another way."""
    facts = Facts.read_json(folder / "config.json")
    _refuse_variants(facts)
    hidden, heads = facts.count("hidden_size"), facts.count("num_attention_heads")
    kv_heads = facts.count("num_key_value_heads", heads)
    head_dim = facts.count("head_dim", hidden // heads)
    facts.check_heads(heads, kv_heads, head_dim)
    vocab_size = facts.count("vocab_size")
    return ModelConfig(
        name=model_name(folder),
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden,
        layers=facts.layers("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=facts.count("intermediate_size"),
        context_length=facts.count("max_position_embeddings", 2048),
        rope_theta=_rope_theta(facts),
        rms_eps=facts.positive("rms_norm_eps", 1e-6),
        tied_embeddings=facts.flag("tie_word_embeddings", False),
        bos_token=facts.token("bos_token_id", vocab_size),
        eos_tokens=_eos_tokens(folder, facts, vocab_size),
        weights_id="",
        stored=E4M3 if _is_fp8(facts) else "F32",
    )


def model_name(folder: Path) -> str:
    """What people call the model: the folder's name, or the repository's in a cache of downloads."""
    folder = folder.resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rsplit("--", 1)[1]
    return folder.name


def _refuse_variants(facts: Facts) -> None:
    architectures = facts.get("architectures")
    if facts.get("model_type") is None and not architectures:
        raise facts.wrong("neither model_type nor architectures says what the model is")
    if architectures not in (None, [], ["LlamaForCausalLM"]):
        raise facts.wrong(f"architectures is {shown(architectures)}: only ['LlamaForCausalLM'] is served yet")
    for key, neutral in NEUTRAL.items():
        facts.refuse_unless(key, neutral)
    layer_types = facts.get("layer_types")
    if layer_types is not None and (
        not isinstance(layer_types, list) or any(kind != PLAIN_LAYERS for kind in layer_types)
    ):
        raise facts.wrong(f"layer_types is {shown(layer_types)}: only {PLAIN_LAYERS!r} is served yet")


def _is_fp8(facts: Facts) -> bool:
    """Whether the weights are block-wise FP8; ModelError when they are quantised in another way."""
    table = facts.table(QUANTIZATION, {})
    if not table:
        return False
    quantization = Facts(facts.path, table, kind=f"{QUANTIZATION}.")
    for key, known in QUANTIZED.items():
        value = quantization.get(key)
        if value not in known and (value is not None or key in ("quant_method", BLOCK_SIZE)):
            raise facts.wrong(f"{QUANTIZATION}.{key} is {shown(value)}: only {known[0]!r} is served yet")
    for key in LEFT_OUT:
        names = quantization.get(key)
        if names is not None and not (
            isinstance(names, list) and all(isinstance(name, str) for name in names)
        ):
            raise facts.wrong(f"{QUANTIZATION}.{key} is {shown(names)}, not a list of names")
    for key, value in table.items():
        if key not in QUANTIZED and key not in LEFT_OUT and value is not None:
            raise facts.wrong(
                f"{QUANTIZATION}.{shown(key)} is {shown(value)}: such models are not served yet"
            )
    return True


def _rope_theta(facts: Facts) -> float:
    """The base of the rotary frequencies: transformers 5 writes it into a table, earlier ones beside it."""
    values = {"rope_theta": facts.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        table = facts.table(key, {})
        kind = table.get("rope_type", table.get("type", "default"))
        unknown = table.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
        if kind != "default" or unknown or table.get("partial_rotary_factor", 1) != 1:
            raise facts.wrong(f"{key} is {shown(table)}: scaled or partial RoPE is not served yet")
        values |= table
    return Facts(facts.path, values).positive("rope_theta", 10000.0)


def _eos_tokens(folder: Path, facts: Facts, vocab_size: int) -> tuple[int, ...]:
    """The generation config's, else the model's."""
    path = folder / GENERATION_CONFIG
    if path.exists():
        generation = Facts.read_json(path)
        if generation.get("eos_token_id") is not None:
            facts = generation
    value = facts.get("eos_token_id")
    tokens = value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(facts.one_token("eos_token_id", token, vocab_size) for token in tokens))
