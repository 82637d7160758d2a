"""Hugging Face folders: equal to transformers' own reading, mapped where possible, read whole."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hf_files import (
    TEMPLATE,
    byte_tokenizer,
    link_default_model,
    prepared,
    refused,
    sentence_piece_tokenizer,
    write_hf_folder,
    write_json,
)
from row_steps import Chunk, Pages
from safetensors.numpy import load_file

import kernels.prepare
from engine.errors import ModelError
from engine.model import WEIGHTS, read_config
from engine.text import TextCodec
from kernels.weights import Weights

if TYPE_CHECKING:
    from pathlib import Path

SINGLE = "model.safetensors"
NEW_TOKENS = 16


# ── equal to transformers ─────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("default")  # transformers and what it imports use deprecated parts of others
@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    ("dtype", "shard_size", "shape"),
    [
        ("float32", "1GB", {}),
        ("float32", "30KB", {"head_dim": 24, "tie_word_embeddings": True}),
        ("bfloat16", "30KB", {"num_key_value_heads": 4, "rope_theta": 500000.0}),
        ("float16", "1GB", {"hidden_size": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    ],
)
def test_logits_and_tokens_are_those_of_transformers(
    tmp_path: Path, backend: str, dtype: str, shard_size: str, shape: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    sizes = {
        "vocab_size": 270,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.15,
    }
    config = transformers.LlamaConfig(**sizes | shape)
    source = tmp_path / "model"
    model = transformers.LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(source, max_shard_size=shard_size)
    byte_tokenizer().save(str(source / "tokenizer.json"))
    folder = prepared(source)
    weights = sorted(folder.glob("weights*"))
    assert all(path.is_symlink() == (dtype == "float32") for path in weights)
    assert len(weights) == (len(list(source.glob("*.safetensors"))) if dtype == "float32" else 1)
    assert (len(list(source.glob("*.safetensors"))) > 1) == (shard_size != "1GB")

    theirs = transformers.LlamaForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    prompt = np.random.default_rng(1).integers(0, 270, 24).tolist()
    with torch.inference_mode():
        made = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0]
        expected = theirs(made[None]).logits[0].numpy()
    log = made.tolist()
    ours = Pages(backend, folder, read_config(folder))
    logits = ours.run([log], batch=1, chunk=len(log))[0]
    worst = np.abs(logits - expected).max() / np.abs(expected).max()
    print(f"largest difference of logits over largest logit: {worst:.1e}")
    assert worst <= 1e-5
    assert logits[len(prompt) - 1 : -1].argmax(1).tolist() == log[len(prompt) :]


@pytest.mark.model
def test_the_default_model_has_the_same_bits_from_a_folder(tmp_path: Path, model_folder: Path) -> None:
    source = tmp_path / "model"
    link_default_model(source, model_folder)
    (source / SINGLE).symlink_to(model_folder / WEIGHTS)
    folder = prepared(source)
    config, own = read_config(folder), read_config(model_folder)
    assert (config.bos_token, config.eos_tokens) == (own.bos_token, own.eos_tokens)
    assert (folder / WEIGHTS).samefile(model_folder / WEIGHTS)
    messages: list[dict[str, object]] = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = TextCodec.load(model_folder).encode_chat(messages)
    assert TextCodec.load(folder).encode_chat(messages) == prompt
    logits = [
        Pages("torch", path, read_config(path), pages=16, threads=2).step([Chunk(0, 0, prompt, "all")]).logits
        for path in (folder, model_folder)
    ]
    assert logits[0] is not None
    assert logits[0].tobytes() == logits[1].tobytes()


# ── the folder and what is read from it ───────────────────────────────────────────────────────


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_tensors_are_those_of_the_files(tmp_path: Path, shards: int, dtype: type[np.generic]) -> None:
    tensors: dict[str, np.ndarray] = {}
    write_hf_folder(tmp_path / "model", shards=shards, dtype=dtype, tied=False, edit=tensors.update)
    kept: dict[str, np.ndarray] = {}
    for file in (tmp_path / "model").glob("*.safetensors"):
        kept |= load_file(file)
    folder = prepared(tmp_path / "model")
    weights = Weights(folder, read_config(folder))
    for name, tensor in kept.items():
        assert np.array_equal(weights[name], tensor.astype(np.float32))
        assert not weights[name].flags.writeable


def test_the_weights_id_follows_the_numbers_only(tmp_path: Path) -> None:
    def identity(name: str, **changes: Any) -> str:
        write_hf_folder(tmp_path / name, **changes)
        return read_config(prepared(tmp_path / name)).weights_id

    same = identity("one")
    assert identity("sharded", shards=4) == same
    assert identity("renamed", config={"eos_token_id": 3}) == same
    assert identity("other", seed=1) != same


def test_the_second_call_only_finds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model"
    write_hf_folder(source, shards=2)
    folder = prepared(source)
    with monkeypatch.context() as patch:
        patch.setattr(kernels.prepare, "_convert", None)
        begin = time.process_time()
        assert prepared(source) == folder
        assert time.process_time() - begin < 0.1
        assert prepared(folder) == folder
    for name in ("config.json", "tokenizer.json", "model-00002-of-00002.safetensors"):
        os.utime(source / name, ns=(1, 1))
        earlier, folder = folder, prepared(source)
        assert folder != earlier


def test_a_mapped_file_that_changed_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    source = tmp_path / "model"
    config = write_hf_folder(source)
    folder = prepared(source)
    Weights(folder, config)
    write_hf_folder(source, seed=1)
    os.utime(source / SINGLE, ns=(1, 1))
    for check in (lambda: Weights(folder, config), lambda: prepared(folder)):
        with pytest.raises(ModelError, match=r"model\.safetensors: changed since"):
            check()
    (source / SINGLE).unlink()
    with pytest.raises(ModelError, match=r"weights\.safetensors: .*No such file"):
        Weights(folder, config)


def test_special_tokens_and_defaults(tmp_path: Path) -> None:
    source = tmp_path / "model"
    gone = dict.fromkeys(["rope_theta", "rms_norm_eps", "num_key_value_heads", "head_dim", "bos_token_id"])
    write_hf_folder(source, kv_heads=4, head_dim=12, tied=False, config=gone | {"tie_word_embeddings": None})
    config = read_config(prepared(source))
    assert (config.rope_theta, config.rms_eps, config.tied_embeddings) == (10000.0, 1e-6, False)
    assert (config.kv_heads, config.head_dim, config.name) == (4, 12, "model")
    assert (config.bos_token, config.eos_tokens) == (None, (2,))
    write_json(source / "generation_config.json", {"eos_token_id": [2, 0]})
    assert read_config(prepared(source)).eos_tokens == (2, 0)
    names = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "model_max_length": 10**30}
    write_json(source / "tokenizer_config.json", names)
    config = read_config(prepared(source))
    assert (config.bos_token, config.eos_tokens) == (1, (3, 2, 0))


def test_a_model_is_called_as_its_repository(tmp_path: Path) -> None:
    source = tmp_path / "models--someone--Tiny-Llama-1.1B" / "snapshots" / "0123abc"
    write_hf_folder(source)
    assert read_config(prepared(source)).name == "Tiny-Llama-1.1B"


def test_rope_theta_of_the_table(tmp_path: Path) -> None:
    table = {"rope_type": "default", "rope_theta": 5e5}
    write_hf_folder(tmp_path / "model", config={"rope_theta": None, "rope_parameters": table})
    assert read_config(prepared(tmp_path / "model")).rope_theta == 5e5


def test_a_chat_template_from_each_place(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_hf_folder(source)
    messages: list[dict[str, object]] = [{"role": "user", "content": "hi"}]
    places = {
        "tokenizer_config.json": [
            {"name": "tool_use", "template": "a"},
            {"name": "default", "template": "b"},
        ],
        "chat_template.json": "c",
        "chat_template.jinja": TEMPLATE,
    }
    names = {"bos_token": "<s>", "eos_token": "<|end|>"}
    made = []
    for name, template in places.items():
        if name.endswith(".json"):
            write_json(source / name, names | {"chat_template": template})
        else:
            (source / name).write_text(TEMPLATE)
        made.append(TextCodec.load(prepared(source)).apply_template(messages))
    assert made == ["b", "c", "<s>user: hi<|end|>"]


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_sentence_piece_tokenisers_cut_and_show_as_their_own(tmp_path: Path, scheme: str) -> None:
    source = tmp_path / "model"
    write_hf_folder(source)
    tokenizer = sentence_piece_tokenizer(scheme)
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(source / "tokenizer.json"))
    if scheme == "never":  # the decoder takes a space away that the pre-tokeniser did not put there
        assert "its way with text is not served" in refused(source)
        return
    codec = TextCodec.load(prepared(source))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in ("x y", " x", "He said: <s>x</s> x<|end|>", "<s>x", ""):
        expected = tokenizer.encode(text).ids
        assert codec.encode(text, special=True) == expected
    tokens = tokenizer.encode("x ö  y").ids
    assert codec.decode(tokens) == tokenizer.decode(tokens) == "x ö  y"
