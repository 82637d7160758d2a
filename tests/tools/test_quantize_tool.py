"""Quantised folders: read back to the bit, accepted by transformers, written whole or not at all."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from gguf_files import write_tiny_gguf
from hf_files import TEMPLATE, prepared, write_hf_folder, write_json
from row_steps import Chunk, Pages
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tools.quantize
from engine.errors import ModelError, StartError, UsageError
from engine.model import read_config
from engine.text import TextCodec
from kernels.formats import WeightFormat
from kernels.packed import PackedWeights, pack
from kernels.prepare import prepare
from kernels.quantize import quantize
from kernels.weights import EMBEDDING, HEAD, Weights, default_format
from tools.quantize import main, quantize_model

SINGLE = "model.safetensors"
ODD = {"hidden_size": 200, "heads": 5, "kv_heads": 1, "head_dim": 24, "ffn_size": 136}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where IN is prepared."""
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def quantized(source: Path, head: str = "bf16", name: str = "out") -> Path:
    quantize_model(source, source.parent / name, head, progress=False)
    return source.parent / name


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


# ── what is written ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 60_000])
@pytest.mark.parametrize("head", ["bf16", "fp8"])
@pytest.mark.parametrize("tied", [True, False])
def test_it_reads_back_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, head: str, shard_bytes: int
) -> None:
    monkeypatch.setattr(tools.quantize, "SHARD_BYTES", shard_bytes)
    source = tmp_path / "model"
    write_hf_folder(source, tied=tied, **ODD)
    own = load_file(source / SINGLE)
    out = quantized(source, head)
    found = all_tensors(out)
    fp8 = {name for name, tensor in own.items() if tensor.ndim == 2} - {EMBEDDING, HEAD}
    if head == "fp8":
        fp8.add(EMBEDDING if tied else HEAD)
    assert found.keys() == own.keys() | {f"{name}_scale_inv" for name in fp8}
    for name, tensor in own.items():
        if name in fp8:
            expected = quantize(tensor.numpy(), "fp8")
            assert found[name].dtype == torch.float8_e4m3fn
            assert (found[name].view(torch.uint8).numpy() == expected.codes).all()
            assert found[f"{name}_scale_inv"].dtype == torch.float32
            assert (found[f"{name}_scale_inv"].numpy() == expected.scales).all()
        elif tensor.ndim == 2:
            assert torch.equal(found[name], tensor.to(torch.bfloat16))
        else:  # the random norms need more bits than bfloat16 has
            assert torch.equal(found[name], tensor)
    folder = prepared(out)
    config = read_config(folder)
    weight_format = default_format(folder, config)
    assert weight_format == WeightFormat("fp8", "fp8" if head == "fp8" else "bf16")
    packed = PackedWeights(pack(folder, weight_format), config, weight_format)
    weights = Weights(folder, config)
    for name in own:
        if own[name].ndim == 2:
            assert packed.matrix(name).kind == ("fp8" if name in fp8 else "bf16")
            assert (packed.matrix(name).values() == weights[name]).all()
    logits = Pages("torch", folder, config).step([Chunk(0, 0, [1, 5, 9], "all")]).logits
    reference = Pages("reference", folder, config).step([Chunk(0, 0, [1, 5, 9], "all")]).logits
    assert np.abs(logits - reference).max() <= 1e-3 * np.abs(reference).max()


def test_shards_stay_small_and_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools.quantize, "SHARD_BYTES", 120_000)
    write_hf_folder(tmp_path / "model", **ODD)
    out = quantized(tmp_path / "model")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert files == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
    assert len(files) > 1
    total = 0
    for file in files:
        with safe_open(out / file, "pt") as opened:
            assert {name for name, where in index["weight_map"].items() if where == file} == set(
                opened.keys()
            )
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]  # noqa: SIM118
        assert sum(sizes) <= 120_000
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total


def test_norms_that_bfloat16_holds_are_bfloat16(tmp_path: Path) -> None:
    def rounded(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][:] = np.round(tensors["model.norm.weight"] * 64) / 64

    write_hf_folder(tmp_path / "model", edit=rounded)
    found = all_tensors(quantized(tmp_path / "model"))
    assert found["model.norm.weight"].dtype == torch.bfloat16
    assert found["model.layers.0.input_layernorm.weight"].dtype == torch.float32


def test_what_is_fp8_already_is_copied(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", tied=False, **ODD)
    once = quantized(tmp_path / "model")
    # A block whose scale is not what its codes ask for: quantised again it would be another.
    tensors = all_tensors(once)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[f"{name}_scale_inv"].mul_(3)
    del tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"]
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.ones(200, 120, dtype=torch.bfloat16)
    save_file(tensors, once / SINGLE)
    report = quantize_model(once, tmp_path / "again", "bf16", progress=False)
    assert report.worst_error == 0
    found = all_tensors(tmp_path / "again")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8))
    table = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert table["modules_to_not_convert"] == ["lm_head", "model.layers.0.self_attn.o_proj"]


def test_the_report_is_that_of_the_files(tmp_path: Path) -> None:
    source = tmp_path / "model"
    write_hf_folder(source, hidden_size=256, ffn_size=384, head_dim=64)
    report = quantize_model(source, tmp_path / "out", "bf16", progress=False)
    found, own = all_tensors(tmp_path / "out"), load_file(source / SINGLE)
    fp8 = [name for name, tensor in found.items() if tensor.dtype == torch.float8_e4m3fn]
    scales = [f"{name}_scale_inv" for name in fp8]
    assert report.matrix_bytes == sum(found[name].nbytes for name in fp8 + scales)
    assert report.matrix_bf16_bytes == sum(2 * own[name].numel() for name in fp8)
    assert report.model_bytes == sum(tensor.nbytes for tensor in found.values())
    assert report.model_bf16_bytes == sum(2 * tensor.numel() for tensor in own.values())
    assert report.matrix_bytes <= 0.52 * report.matrix_bf16_bytes
    weights = Weights(prepared(tmp_path / "out"), read_config(prepared(tmp_path / "out")))
    errors = {
        name: np.linalg.norm(weights[name] - own[name].numpy()) / np.linalg.norm(own[name].numpy())
        for name in fp8
    }
    assert report.worst_matrix == max(errors, key=lambda name: errors[name])
    assert report.worst_error == pytest.approx(errors[report.worst_matrix], rel=1e-4)
    assert 0.02 < report.worst_error < 0.04  # of the format: 2⁻⁴ / √3 and less


# ── what others make of it ────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("default")  # transformers and what it imports use deprecated parts of others
@pytest.mark.parametrize("kind", ["gguf", "hf", "prepared"])
def test_transformers_accepts_it(tmp_path: Path, cache: Path, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    if kind == "hf":
        source = tmp_path / "model"
        write_hf_folder(source)
        (source / "chat_template.jinja").write_text(TEMPLATE)
        write_json(source / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    else:
        source = tmp_path / "model.Q4_1.gguf"
        write_tiny_gguf(source, types={"ffn_up.weight": "Q4_1"}, metadata={"tokenizer.ggml.eot_token_id": 0})
        if kind == "prepared":
            source = prepare(source, cache, progress=False)
    out = quantized(source)
    own = prepare(source, cache, progress=False)
    folder = prepared(out)
    config, expected = read_config(folder), read_config(own)
    assert config == msgspec.structs.replace(
        expected, name="out", weights_id=config.weights_id, stored="F8_E4M3"
    )
    theirs = transformers.AutoConfig.from_pretrained(out)
    assert isinstance(theirs, transformers.LlamaConfig)
    assert (theirs.hidden_size, theirs.num_hidden_layers) == (expected.hidden_size, expected.layers)
    assert theirs.rope_parameters["rope_theta"] == expected.rope_theta
    assert theirs.dtype == torch.bfloat16
    assert theirs.quantization_config == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["lm_head"],
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.eos_token_id == expected.eos_tokens[0]
    assert tokenizer.bos_token_id == expected.bos_token
    codec = TextCodec.load(folder)
    for text in ("The capital of France is", " don't  wörld 🙂\n", "system"):
        assert tokenizer.encode(text) == codec.encode(text, special=True)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        codec.apply_template(messages)
    )


def test_the_type_beside_the_quantised_keeps_its_key(tmp_path: Path) -> None:
    for number, key in enumerate(["dtype", "torch_dtype", "other"]):
        source = tmp_path / f"model{number}"
        write_hf_folder(source, config={key: "float32", "rms_norm_eps": 1e-6})
        values = json.loads((quantized(source, name=f"out{number}") / "config.json").read_text())
        assert values["rms_norm_eps"] == 1e-6
        kept = {key: values[key] for key in ("dtype", "torch_dtype") if key in values}
        assert kept == {"torch_dtype" if key == "other" else key: "bfloat16"}


# ── whole or not at all ───────────────────────────────────────────────────────────────────────


def test_what_is_there_is_replaced_only_by_force(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model")
    out = quantized(tmp_path / "model")
    before = (out / SINGLE).read_bytes()
    write_hf_folder(tmp_path / "other", seed=1)
    with pytest.raises(UsageError, match=r"out: exists; name another folder, or replace it with --force"):
        quantize_model(tmp_path / "other", out, "bf16", progress=False)
    assert (out / SINGLE).read_bytes() == before
    (out / "stale.safetensors").write_bytes(b"x")
    quantize_model(tmp_path / "other", out, "bf16", progress=False, force=True)
    assert (out / SINGLE).read_bytes() != before
    assert not (out / "stale.safetensors").exists()
    assert not list(tmp_path.glob(".*partial-*"))


@pytest.mark.parametrize("what", ["file", "folder", "link", "source", "parent"])
def test_force_does_not_replace_what_is_no_model_or_is_read(tmp_path: Path, what: str) -> None:
    source = tmp_path / "model"
    write_hf_folder(source)
    out = tmp_path / "out"
    match what:
        case "file":
            out.write_text("precious")
        case "folder":
            out.mkdir()
            (out / "precious").write_text("precious")
        case "link":
            out.symlink_to(source)
        case "source":
            out = source
        case "parent":
            out = tmp_path
            (out / "config.json").write_text("{}")
    before = sorted(path for path in tmp_path.rglob("*") if "cache" not in str(path))
    with pytest.raises(UsageError, match="name another folder"):
        quantize_model(source, out, "bf16", progress=False, force=True)
    assert sorted(path for path in tmp_path.rglob("*") if "cache" not in str(path)) == before


def test_a_failure_leaves_nothing_and_keeps_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_hf_folder(tmp_path / "model")
    out = quantized(tmp_path / "model")
    before = (out / SINGLE).read_bytes()

    def full(number: int, data: memoryview, position: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tools.quantize, "write_at", full)
        with pytest.raises(
            StartError, match="cannot be written: No space left on device; name another folder"
        ):
            quantize_model(tmp_path / "model", out, "bf16", progress=False, force=True)
    rename = Path.rename

    def unmovable(path: Path, to: Path) -> Path:
        if path.name == "out" and to.name == "out" and path.parent.name.startswith(".out"):
            raise OSError(18, "Invalid cross-device link")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", unmovable)
        with pytest.raises(StartError, match="cannot be written: Invalid cross-device link"):
            quantize_model(tmp_path / "model", out, "bf16", progress=False, force=True)
    assert (out / SINGLE).read_bytes() == before
    usage = type("Usage", (), {"free": 1 << 20})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(StartError, match="1 MiB free; name a folder on a disk with room"):
            quantize_model(tmp_path / "model", tmp_path / "new", "bf16", progress=False)
    assert (out / SINGLE).read_bytes() == before
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob(".*partial-*"))


def test_a_bad_source_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        quantize_model(tmp_path / "none.gguf", tmp_path / "out", "bf16", progress=False)
    write_hf_folder(tmp_path / "model", config={"quantization_config": {"quant_method": "gptq"}})
    with pytest.raises(ModelError, match="quant_method is 'gptq'"):
        quantize_model(tmp_path / "model", tmp_path / "out", "bf16", progress=False)
    assert not (tmp_path / "out").exists()


def test_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "model", tmp_path / "deep" / "out"
    write_hf_folder(source)
    assert main([str(source), str(out)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == str(out)
    assert lines[1].startswith("FP8 matrices  0.")
    assert "of bf16's" in lines[2]
    assert lines[3].startswith("worst relative error of a matrix (RMS): 2.")
    assert captured.err == "", "a bar is for terminals"
    assert main([str(source), str(out)]) == UsageError.exit_code
    assert (
        capsys.readouterr().err
        == f"estafet: {out}: exists; name another folder, or replace it with --force\n"
    )
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([str(source), str(out), "--force", "--head", "fp8", "--kind", "fp8"]) == 0
    assert "quantising model" in capsys.readouterr().err
    for wrong in (["--kind", "int4"], ["--head", "fp32"], []):
        with pytest.raises(SystemExit) as left:
            main([str(source), *wrong])
        assert left.value.code == 2
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    words = capsys.readouterr().out
    for part in ("IN", "OUT", "--head", "--force", "model.path=", "weight_scale_inv", "tools.evaluate"):
        assert part in words
