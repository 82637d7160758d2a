"""Small Hugging Face folders of the Llama architecture, whole or broken on purpose."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from engine.errors import ModelError
from engine.model import CONFIG, WEIGHTS, read_config
from kernels.prepare import prepare
from kernels.random_model import write_random_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model import ModelConfig

CONTROLS = ["<unk>", "<s>", "</s>", "<|end|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
)


def write_hf_folder(
    folder: Path,
    *,
    shards: int = 1,
    dtype: type[np.generic] = np.float32,
    tied: bool = True,
    edit: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None,
    config: dict[str, Any] | None = None,
    **shape: Any,
) -> ModelConfig:
    """Write a random model; `edit` changes its tensors before they are written, `config` its config.json.

    A value of None in `config` leaves the key out. Shards are listed in an index.
    """
    facts = write_random_model(folder, vocab_size=270, tied=tied, **shape)
    tensors = {name: tensor.astype(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    (folder / CONFIG).unlink()
    edit(tensors)
    write_shards(folder, tensors, shards)
    values = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.ffn_size,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": facts.heads,
        "num_key_value_heads": facts.kv_heads,
        "head_dim": facts.head_dim,
        "max_position_embeddings": facts.context_length,
        "rope_theta": facts.rope_theta,
        "rms_norm_eps": facts.rms_eps,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
    } | (config or {})
    write_json(folder / "config.json", {key: value for key, value in values.items() if value is not None})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return facts


def write_shards(folder: Path, tensors: dict[str, np.ndarray], count: int) -> None:
    """Write `model.safetensors`, or `count` shards and their index."""
    if count == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        part = {key: tensors[key] for key in list(tensors)[number::count]}
        save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON."""
    path.write_text(json.dumps(value))


def byte_tokenizer() -> Tokenizer:
    """Byte-level: the control tokens, then one token a byte; BOS comes first."""
    tokens = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


def sentence_piece_tokenizer(scheme: str = "first") -> Tokenizer:
    """SentencePiece's BPE in its newer form: the space before the text is the pre-tokeniser's."""
    tokens = [*CONTROLS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"xyHe"]
    tokens.append("▁x")
    model = BPE(
        {token: number for number, token in enumerate(tokens)}, [("▁", "x")], unk_token="<unk>", fuse_unk=True
    )
    model.byte_fallback = True
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


def _finished(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROLS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", 1)]
    )
    return tokenizer


def link_default_model(folder: Path, model_folder: Path) -> None:
    """All of the default model but its weights, as a Hugging Face folder."""
    own = read_config(model_folder)
    folder.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        (folder / name).symlink_to(model_folder / name)
    facts = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": own.vocab_size,
        "hidden_size": own.hidden_size,
        "intermediate_size": own.ffn_size,
        "num_hidden_layers": own.layers,
        "num_attention_heads": own.heads,
        "num_key_value_heads": own.kv_heads,
        "max_position_embeddings": own.context_length,
        "rope_theta": own.rope_theta,
        "rms_norm_eps": own.rms_eps,
        "tie_word_embeddings": own.tied_embeddings,
        "bos_token_id": own.bos_token,
        "eos_token_id": list(own.eos_tokens),
    }
    write_json(folder / "config.json", facts)


def prepared(folder: Path) -> Path:
    """The prepared folder, in a cache beside the model."""
    return prepare(folder, folder.parent / "cache", progress=False)


def refused(folder: Path) -> str:
    """The error's line; nothing stays in the cache."""
    cache = folder.parent / "cache"
    with pytest.raises(ModelError) as caught:
        prepare(folder, cache, progress=False)
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(str(folder))
    assert not cache.is_dir() or [entry.name for entry in cache.iterdir()] in ([], [".lock"])
    return line
