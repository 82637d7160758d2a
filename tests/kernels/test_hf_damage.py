"""Hugging Face folders that are damaged, or that we would run wrongly: refused in one line by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hf_files import (
    byte_tokenizer,
    link_default_model,
    prepared,
    refused,
    write_hf_folder,
    write_json,
    write_shards,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel

from engine.errors import ModelError, StartError
from engine.model import WEIGHTS, read_config
from kernels.prepare import main
from kernels.safetensors_file import read_safetensors
from kernels.weights import Weights

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architectures": ["MistralForCausalLM"]}, "architectures is ['MistralForCausalLM']"),
    "model type": ({"model_type": "mistral"}, "model_type is 'mistral'"),
    "unnamed": ({"model_type": None, "architectures": None}, "neither model_type nor architectures"),
    "rope_scaling": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling is {'type': 'linear', 'factor': 2.0}",
    ),
    "rope_parameters": ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters is {'rope_type'"),
    "rope by layer": ({"rope_parameters": {"full_attention": {}}}, "rope_parameters is {'full_attention'"),
    "rope text": ({"rope_scaling": "linear"}, "rope_scaling is 'linear', not dict"),
    "partial": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    "partial table": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor': 0.5"),
    "attention bias": ({"attention_bias": True}, "attention_bias is True"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias is True"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    "window": ({"sliding_window": 4096}, "sliding_window is 4096"),
    "layer types": ({"layer_types": ["sliding_attention"]}, "layer_types is ['sliding_attention']"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method is None"),
    "tp": ({"pretraining_tp": 2}, "pretraining_tp is 2"),
    "own code": ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map is"),
    "no size": ({"hidden_size": None}, "hidden_size is missing"),
    "text": ({"num_attention_heads": "4"}, "num_attention_heads is '4', not int"),
    "heads": ({"num_attention_heads": 3, "head_dim": 16}, "do not go together"),
    "no heads": ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    "layers": ({"num_hidden_layers": 10**6}, "1000000 layers"),
    "more layers": ({"num_hidden_layers": 3}, "tensor model.layers.2.input_layernorm.weight is missing"),
    "fewer layers": ({"num_hidden_layers": 1}, "layers.1.input_layernorm.weight' is not part of"),
    "vocabulary": ({"vocab_size": 271}, "embed_tokens.weight has the shape [270, 48], config.json asks"),
    "untied": ({"tie_word_embeddings": False}, "tensor lm_head.weight is missing"),
    "tied is no flag": ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, not bool"),
    "theta": ({"rope_theta": -1}, "rope_theta is -1"),
    "epsilon": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "EOS": ({"eos_token_id": [2, 270]}, "eos_token_id is 270, outside the vocabulary of 270"),
    "BOS": ({"bos_token_id": "<s>"}, "bos_token_id is '<s>', outside"),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_a_model_that_we_would_run_wrongly_is_refused(tmp_path: Path, what: str) -> None:
    config, message = CONFIGS[what]
    write_hf_folder(tmp_path / "model", config=config)
    assert message in refused(tmp_path / "model")


def _set(name: str, value: float) -> Any:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].flat[-1] = value

    return edit


def _put(name: str, *shape: int, dtype: type[np.generic] = np.float32) -> Any:
    return lambda tensors: tensors.update({name: np.ones(shape, dtype)})


UP = "model.layers.1.mlp.up_proj.weight"
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"edit": lambda tensors: tensors.pop(UP)}, f"tensor {UP} is missing"),
    "misshapen": ({"edit": _put(UP, 48, 80)}, f"{SINGLE}: tensor {UP} has the shape [48, 80]"),
    "type": ({"edit": _put(UP, 80, 48, dtype=np.int8)}, f"tensor {UP} has the type I8; convert the model to"),
    "double": ({"edit": _put(UP, 80, 48, dtype=np.float64)}, f"tensor {UP} has the type F64"),
    "bias": (
        {"edit": _put("model.layers.0.self_attn.q_proj.bias", 64)},
        "self_attn.q_proj.bias' is not part",
    ),
    "head": ({"edit": _put("lm_head.weight", 270, 48)}, "'lm_head.weight' is not part of"),
    "NaN": ({"edit": _set(UP, np.nan)}, f"{SINGLE}: tensor {UP} holds NaN or Inf"),
    "Inf": ({"edit": _set(UP, -np.inf), "dtype": np.float16}, f"tensor {UP} holds NaN or Inf"),
    "NaN in a shard": ({"edit": _set(UP, np.nan), "shards": 3}, f"-of-00003.safetensors: tensor {UP} holds"),
}


@pytest.mark.parametrize("what", TENSORS)
def test_a_bad_tensor_is_named(tmp_path: Path, what: str) -> None:
    changes, message = TENSORS[what]
    write_hf_folder(tmp_path / "model", **changes)
    assert message in refused(tmp_path / "model")


def test_what_follows_from_the_rest_may_be_there(tmp_path: Path) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)

    write_hf_folder(tmp_path / "model", edit=edit)
    folder = prepared(tmp_path / "model")
    assert len(Weights(folder, read_config(folder)).head()) == 270


def test_a_bad_index_names_what_is_wrong(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_hf_folder(source, shards=2)
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    weight_map = json.loads((source / INDEX).read_text())["weight_map"]
    norm = "model.norm.weight"
    other = first if weight_map[norm] == second else second
    for change, message in (
        ({norm: other}, f"{other}: tensor '{norm}' is missing, {INDEX} has it there"),
        ({norm: "model-3.safetensors"}, f"model-3.safetensors: missing; {INDEX} has tensor '{norm}' there"),
        ({norm: f"../model/{first}"}, f"'../model/{first}', not a file of this folder"),
        ({norm: 3}, "lies in 3, not a file"),
    ):
        write_json(source / INDEX, {"weight_map": weight_map | change})
        assert message in refused(source)
    write_json(source / INDEX, {"weight_map": []})
    assert f"{INDEX}: weight_map is [], not dict" in refused(source)
    (source / INDEX).write_text("{")
    assert f"{INDEX}: not JSON" in refused(source)
    write_json(source / INDEX, {"weight_map": weight_map})
    tensors = load_file(source / first)
    write_shards(source, tensors | load_file(source / second), 1)
    os.replace(source / SINGLE, source / second)
    assert "is in model-0000" in refused(source)
    (source / second).unlink()
    assert f"{second}: missing" in refused(source)
    (source / INDEX).unlink()
    assert f"no {SINGLE} and no {INDEX}" in refused(source)


def test_a_bad_tokeniser_or_template_is_named(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_hf_folder(source)
    path = source / "tokenizer.json"
    whole = path.read_text()

    def saying(tokenizer: Tokenizer) -> str:
        tokenizer.save(str(path))
        return refused(source)

    assert "of the kind WordLevel, only BPE" in saying(Tokenizer(WordLevel({"a": 0}, "a")))
    large = byte_tokenizer()
    large.add_tokens([f"<{number}>" for number in range(20)])
    assert "its largest token id is 279, the embedding has 270 rows" in saying(large)
    closing = byte_tokenizer()
    closing.post_processor = processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", 2)]
    )
    assert "its way with the beginning of a prompt is not served" in saying(closing)
    path.write_text(whole.replace('"rstrip": false', '"rstrip": true'))
    assert "its way with control tokens is not served" in refused(source)
    for damage in ("", "{", whole[: len(whole) // 2], "[]", '{"model": 1}'):
        path.write_text(damage)
        assert "tokenizer.json: broken: " in refused(source)
    undefined = json.loads(whole)
    undefined["post_processor"]["special_tokens"] = {}
    write_json(path, undefined)
    assert "tokenizer.json: broken: post_processor does not define '<s>'" in refused(source)
    path.unlink()
    assert "no tokenizer.json" in refused(source)
    path.write_text(whole)
    write_json(source / "tokenizer_config.json", {"eos_token": "<nowhere>"})
    assert "eos_token is '<nowhere>', which tokenizer.json does not have" in refused(source)
    for template, message in (("{% if", "chat template, line 1"), ([{"name": "x"}], "not a text")):
        write_json(source / "tokenizer_config.json", {"chat_template": template})
        assert message in refused(source)


# ── damaged files ─────────────────────────────────────────────────────────────────────────────


def with_header(data: bytes, table: Any) -> bytes:
    """The file with another header."""
    header = table if isinstance(table, bytes) else json.dumps(table).encode()
    length = int.from_bytes(data[:8], "little")
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def test_a_damaged_header_says_what_is_wrong(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_hf_folder(source)
    data = (source / SINGLE).read_bytes()
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    first, end = table[UP]["data_offsets"]

    def saying(content: bytes) -> str:
        (source / SINGLE).write_bytes(content)
        line = refused(source)
        assert f"{SINGLE}: " in line
        return line

    def changed(**entry: Any) -> str:
        return saying(with_header(data, table | {UP: table[UP] | entry}))

    assert "truncated or corrupt: a header of 0 bytes in a file of 0" in saying(b"")
    assert "a header of" in saying(data[:100])
    assert "truncated: tensor" in saying(data[:-1])
    assert "4 bytes behind the last tensor" in saying(data + bytes(4))
    assert "corrupt header" in saying(with_header(data, b"{" + b"[" * 10**5))
    assert "corrupt header" in saying(with_header(data, b"[]"))
    assert "corrupt header" in saying(with_header(data, b'{"\xff": 1}'))
    assert f"at tensor '{UP}'" in saying(with_header(data, table | {UP: {}}))
    assert f"corrupt: tensor '{UP}', F32 [80, 48], has the offsets" in changed(data_offsets=[first, end - 4])
    assert f"tensor '{UP}' overlaps" in changed(data_offsets=[first - 4, end - 4])
    assert "lies behind a gap" in changed(data_offsets=[first + 4, end + 4])
    assert f"truncated: tensor '{UP}' ends" in changed(data_offsets=[10**15, 10**15 + end - first])
    assert "corrupt: tensor" in changed(data_offsets=[end, first])
    for entry in ({"data_offsets": [-4, 0]}, {"shape": [-1]}, {"shape": [2**70]}, {"dtype": "F32\n"}):
        assert f"corrupt header, at tensor '{UP}'" in changed(**entry)
    (source / SINGLE).unlink()
    os.mkfifo(source / SINGLE)
    assert "not a regular file" in refused(source)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model")
    path = tmp_path / "model" / SINGLE
    data = path.read_bytes()
    for cut in {*range(0, 60, 7), *range(60, len(data), len(data) // 40), len(data) - 1}:
        path.write_bytes(data[:cut])
        assert "truncated" in refused(tmp_path / "model")


@pytest.mark.parametrize("length", [2**20, 2**32, 2**63, 2**64 - 1])
def test_an_absurd_header_costs_nothing(tmp_path: Path, length: int) -> None:
    path = tmp_path / SINGLE
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{}")
        file.truncate(2**20 if length < 2**30 else 2**40)  # a hole: the length may even be there
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=f"a header of {length} bytes"):
            read_safetensors(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_mangled_header_is_a_model_error_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    source = tmp_path_factory.getbasetemp() / "fuzz" / "model"
    if not source.exists():
        write_hf_folder(source, hidden_size=16, layers=1, heads=2, kv_heads=1, head_dim=8, ffn_size=16)
        os.replace(source / SINGLE, source.parent / "whole")
    mangled = bytearray((source.parent / "whole").read_bytes())
    header = 8 + int.from_bytes(mangled[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header - 1))
        piece = data.draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([b'"', b"}", b"]", b",", b"[" * 2000, b"9" * 5000, b"-1", b"1e400", b"\\ud800"])
            | st.sampled_from([0, 1, 2**31, 2**63, 2**64 - 1]).map(lambda n: n.to_bytes(8, "little"))
        )
        if data.draw(st.booleans()):
            mangled[place : place + len(piece)] = piece
        else:
            mangled[place:place] = piece
            if data.draw(st.booleans()):  # such that the header's end is still where it says
                mangled[:8] = (int.from_bytes(mangled[:8], "little") + len(piece)).to_bytes(9, "little")[:8]
    (source / SINGLE).write_bytes(mangled)
    with contextlib.suppress(ModelError):
        prepared(source)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe\xfd", b"[" * 10**5, b'{"a": ' + b"9" * 5000, b'{"a": "\\ud800"}']
)
def test_a_broken_json_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    write_hf_folder(tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    assert f"{name}: not " in refused(tmp_path / "model")


def test_the_command_prints_the_folder_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_hf_folder(tmp_path / "model", dtype=np.float16)
    cache = str(tmp_path / "cache")
    assert main([str(tmp_path / "model"), "--cache", cache]) == 0
    captured = capsys.readouterr()
    assert Path(captured.out.strip()).parent == Path(cache)
    assert captured.err == "", "a bar is for terminals; tests/kernels/test_prepare.py looks at it there"
    write_hf_folder(tmp_path / "bad", edit=_set(UP, np.nan))
    assert main([str(tmp_path / "bad"), "--cache", cache]) == StartError.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty"), "--cache", cache]) == StartError.exit_code
    assert "no model.json and no config.json" in capsys.readouterr().err


@pytest.mark.model
def test_damage_in_a_large_file_is_found_soon(tmp_path: Path, model_folder: Path) -> None:
    """Of the default model's size, but holes for numbers: read at the same speed, written in no time."""
    source = tmp_path / "model"
    link_default_model(source, model_folder)
    whole = read_safetensors(model_folder / WEIGHTS)
    size = (model_folder / WEIGHTS).stat().st_size
    header = min(tensor.offset for tensor in whole.tensors.values())
    with (model_folder / WEIGHTS).open("rb") as file:
        (source / SINGLE).write_bytes(file.read(header))
    with (source / SINGLE).open("r+b") as file:
        file.truncate(size)
        file.seek(-2, os.SEEK_END)
        file.write(b"\xc0\x7f")
    last = max(whole.tensors.values(), key=lambda tensor: tensor.offset).name
    begin = time.process_time()
    with (source / SINGLE).open("rb") as file:
        hashlib.file_digest(file, "blake2b")
    once = time.process_time() - begin
    begin = time.process_time()
    assert f"tensor {last} holds NaN or Inf" in refused(source)
    assert time.process_time() - begin < 3 * once, "read once, hashed once"
    os.truncate(source / SINGLE, size - 1)
    begin = time.process_time()
    assert f"truncated: tensor {last!r} ends at byte {size}, the file at {size - 1}" in refused(source)
    assert time.process_time() - begin < 1
