"""Preparing a GGUF file: the numbers, the folder, and everything that can be wrong with a file."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf_files import write_raw_gguf, write_tiny_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import kernels.prepare
from engine.errors import EstafetError, ModelError, StartError
from engine.model import read_config
from kernels.convert import check_numbers, write_safetensors
from kernels.gguf_file import read_header
from kernels.prepare import cache_dir, main, prepare
from kernels.source import TensorPlan


def f16(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def scalar_q8_0(block: bytes) -> list[float]:
    return [f16(block[:2]) * q for q in struct.unpack("32b", block[2:])]


def scalar_q4(block: bytes, offset: float, shift: float) -> list[float]:
    low, high = [byte & 15 for byte in block[-16:]], [byte >> 4 for byte in block[-16:]]
    return [f16(block[:2]) * (q - shift) + offset for q in low + high]


def scalar_q4_k(block: bytes) -> list[float]:
    d, least, packed, nibbles = f16(block[:2]), f16(block[2:4]), block[4:16], block[16:]
    values = []
    for sub in range(8):
        if sub < 4:
            scale, minimum = packed[sub] & 63, packed[sub + 4] & 63
        else:
            scale = (packed[sub + 4] & 15) | (packed[sub - 4] >> 6 << 4)
            minimum = (packed[sub + 4] >> 4) | (packed[sub] >> 6 << 4)
        quants = [byte >> 4 if sub % 2 else byte & 15 for byte in nibbles[sub // 2 * 32 :][:32]]
        values += [d * scale * q - least * minimum for q in quants]
    return values


def scalar_q6_k(block: bytes) -> list[float]:
    low, high, scales, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), f16(block[208:])
    values = []
    for n in range(256):
        half, place = divmod(n, 128)
        nibble = low[half * 64 + place % 64] >> (4 if place >= 64 else 0) & 15
        top = high[half * 32 + place % 32] >> (place // 32 * 2) & 3
        values.append(d * scales[n // 16] * ((nibble | top << 4) - 32))
    return values


SCALAR = {
    "Q8_0": (32, 34, (0,), scalar_q8_0),
    "Q4_0": (32, 18, (0,), lambda block: scalar_q4(block, 0, 8)),
    "Q4_1": (32, 20, (0, 2), lambda block: scalar_q4(block, f16(block[2:4]), 0)),
    "Q4_K": (256, 144, (0, 2), scalar_q4_k),
    "Q6_K": (256, 210, (208,), scalar_q6_k),
}


def written(path: Path, name: str, heads: int = 0) -> np.ndarray:
    """The tensor as the safetensors file has it."""
    header = read_header(path)
    plan = TensorPlan(header.tensors[name], name, heads)
    check_numbers([plan], lambda _: None)
    write_safetensors([plan], path.with_suffix(".st"), lambda _: None)
    return load_file(path.with_suffix(".st"))[name]


@pytest.mark.parametrize("kind", SCALAR)
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_any_block_becomes_what_the_format_says(
    tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int
) -> None:
    path = tmp_path_factory.mktemp("blocks") / "blocks.gguf"
    random = np.random.default_rng(seed)
    numbers, size, scales, scalar = SCALAR[kind]
    blocks = random.integers(0, 256, (6, size), np.uint8)
    for offset in scales:
        blocks[:, offset : offset + 2] = random.normal(0, 0.1, (6, 1)).astype(np.float16).view(np.uint8)
    write_raw_gguf(path, {"x": (kind, blocks.reshape(3, 2 * size))})
    expected = np.array([scalar(block.tobytes()) for block in blocks]).reshape(3, 2 * numbers)
    np.testing.assert_allclose(written(path, "x"), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("F32", 0), ("F16", 1e-3), ("BF16", 8e-3), ("Q8_0", 8e-3), ("Q4_0", 0.2), ("Q4_1", 0.1)],
)
def test_quantised_numbers_come_back(tmp_path: Path, kind: str, error: float) -> None:
    numbers = np.random.default_rng(5).uniform(-1, 1, (48, 64)).astype(np.float32)
    data = gguf.quantize(numbers, GGMLQuantizationType[kind])
    write_raw_gguf(tmp_path / "x.gguf", {"x": (kind, data.view(np.uint8))})
    found = written(tmp_path / "x.gguf", "x")
    assert found.dtype == np.float32
    assert np.abs(found - numbers).max() <= error
    assert (found == gguf.dequantize(data, GGMLQuantizationType[kind])).all()


def test_rows_in_many_chunks_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.random.default_rng(6).normal(size=(40, 32)).astype(np.float32)
    write_raw_gguf(tmp_path / "x.gguf", {"x": ("F32", numbers.view(np.uint8))})
    whole = written(tmp_path / "x.gguf", "x", heads=4)
    monkeypatch.setattr("kernels.convert.CHUNK_ELEMENTS", 1)
    assert (written(tmp_path / "x.gguf", "x", heads=4) == whole).all()
    assert (written(tmp_path / "x.gguf", "x") == numbers).all()


@pytest.mark.parametrize("tied", [True, False])
def test_a_prepared_folder_is_a_hugging_face_llama(tmp_path: Path, tied: bool) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf", tied=tied)
    folder = prepare(tmp_path / "tiny.gguf", tmp_path / "cache", progress=False)
    config = read_config(folder)
    assert (config.name, config.layers, config.heads, config.kv_heads, config.head_dim) == (
        "tiny",
        2,
        4,
        2,
        16,
    )
    assert (config.rms_eps, config.rope_theta, config.eos_tokens, config.bos_token) == (1e-5, 1e4, (2,), 1)
    weights, source = load_file(folder / "weights.safetensors"), model.tensors()
    assert len(weights) == len(source)
    assert config.tied_embeddings == tied == ("lm_head.weight" not in weights)
    assert (weights["model.layers.1.mlp.down_proj.weight"] == source["blk.1.ffn_down.weight"]).all()
    # llama.cpp's row 2i + j of a head is Hugging Face's row 8j + i.
    rows = [head * 16 + 2 * i + j for head in range(2) for j in range(2) for i in range(8)]
    assert (weights["model.layers.0.self_attn.k_proj.weight"] == source["blk.0.attn_k.weight"][rows]).all()


def test_the_weights_id_follows_the_numbers_only(tmp_path: Path) -> None:
    def identity(name: str, **changes: Any) -> str:
        write_tiny_gguf(tmp_path / name, **changes)
        return read_config(prepare(tmp_path / name, tmp_path / "cache", progress=False)).weights_id

    same = identity("a.gguf")
    assert identity("b.gguf", metadata={"general.name": "another"}) == same
    assert identity("c.gguf", seed=1) != same


def test_the_second_call_only_finds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(source)
    folder = prepare(source, cache, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(kernels.prepare, "_convert", None)
        assert prepare(source, cache) == folder
        assert prepare(folder, cache) == folder
    os.utime(source, ns=(1, 1))
    assert prepare(source, cache, progress=False) != folder


def test_two_launches_at_once_prepare_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(source)
    conversions, folders, convert = [], [], kernels.prepare._convert
    monkeypatch.setattr(kernels.prepare, "_convert", lambda *args: (conversions.append(1), convert(*args)))
    launches = [
        threading.Thread(target=lambda: folders.append(prepare(source, cache, progress=False)))
        for _ in range(4)
    ]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join()
    assert len(conversions) == 1
    assert len(folders) == 4
    assert len(set(folders)) == 1


def test_a_killed_preparation_leaves_nothing_for_long(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    cache = tmp_path / "cache"
    leftover = cache / f"{kernels.prepare.PARTIAL}dead" / "tiny"
    leftover.mkdir(parents=True)
    (leftover / "weights.safetensors").write_bytes(b"half")
    folder = prepare(tmp_path / "tiny.gguf", cache, progress=False)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [folder.name]


def test_a_damaged_folder_is_made_again_or_named(tmp_path: Path) -> None:
    source, cache = tmp_path / "tiny.gguf", tmp_path / "cache"
    write_tiny_gguf(source)
    folder = prepare(source, cache, progress=False)
    weights = folder / "weights.safetensors"
    whole = weights.read_bytes()
    for damage in (b"", whole[:100], whole[:-1]):
        weights.write_bytes(damage)
        with pytest.raises(ModelError, match="prepare it again"):
            prepare(folder, cache)
        assert prepare(source, cache, progress=False) == folder
        assert weights.read_bytes() == whole
    with pytest.raises(ModelError, match="no model\\.json"):
        prepare(tmp_path, cache)


def refused(path: Path, cache: Path) -> str:
    """The error's line, which names the file; nothing stays in the cache."""
    with pytest.raises(ModelError) as caught:
        prepare(path, cache, progress=False)
    line = str(caught.value)
    assert "\n" not in line
    assert str(path) in line
    assert not cache.is_dir() or [entry.name for entry in cache.iterdir()] in ([], [".lock"])
    return line


def _set(name: str, value: float) -> Any:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[name].flat[-1] = value

    return edit


def _without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _reshaped(name: str, *shape: int) -> Any:
    return lambda tensors: tensors.update({name: np.ones(shape, np.float32)})


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"metadata": {"general.architecture": "mamba"}}, "'mamba' is not served"),
    "missing tensor": ({"edit": _without("blk.1.ffn_up.weight")}, "blk.1.ffn_up.weight is missing"),
    "missing embedding": ({"edit": _without("token_embd.weight")}, "token_embd.weight is missing"),
    "misshapen": ({"edit": _reshaped("blk.0.attn_k.weight", 16, 64)}, "blk.0.attn_k.weight has the shape"),
    "not a vector": ({"edit": _reshaped("output_norm.weight", 1, 64)}, "output_norm.weight has the shape"),
    "unknown tensor": ({"edit": _reshaped("blk.0.attn_sinks.weight", 4)}, "'blk.0.attn_sinks.weight' is not"),
    "scaled rope": ({"edit": _reshaped("rope_freqs.weight", 8)}, "scaled RoPE"),
    "rope scaling": ({"metadata": {"llama.rope.scaling.type": "yarn"}}, "scaled RoPE"),
    "experts": ({"edit": _reshaped("blk.0.ffn_gate_inp.weight", 8, 64)}, "mixture of experts"),
    "NaN": ({"edit": _set("blk.1.ffn_down.weight", np.nan)}, "blk.1.ffn_down.weight holds NaN or Inf"),
    "Inf": ({"edit": _set("output_norm.weight", -np.inf)}, "output_norm.weight holds NaN or Inf"),
    "NaN in F16": (
        {"edit": _set("blk.0.ffn_up.weight", np.nan), "types": {"ffn_up.weight": "F16"}},
        "blk.0.ffn_up.weight holds",
    ),
    "Inf in BF16": (
        {"edit": _set("blk.0.ffn_up.weight", np.inf), "types": {"ffn_up.weight": "BF16"}},
        "blk.0.ffn_up.weight holds",
    ),
    "type": ({"types": {"ffn_down.weight": "Q5_0"}}, "blk.0.ffn_down.weight has the type Q5_0"),
    "no head count": ({"metadata": {"llama.attention.head_count": None}}, "head_count is missing"),
    "no heads": ({"metadata": {"llama.attention.head_count": 0}}, "head_count is 0"),
    "heads": ({"metadata": {"llama.attention.head_count": 3}}, "do not go together"),
    "text for a number": ({"metadata": {"llama.block_count": "two"}}, "not int"),
    "layers": ({"metadata": {"llama.block_count": 3_000_000}}, "3000000 layers"),
    "more layers than tensors": ({"metadata": {"llama.block_count": 3}}, "blk.2.attn_norm.weight is missing"),
    "fewer layers than tensors": ({"metadata": {"llama.block_count": 1}}, "'blk.1.attn_norm.weight' is not"),
    "EOS": ({"metadata": {"tokenizer.ggml.eos_token_id": 320}}, "outside the vocabulary of 320"),
    "epsilon": ({"metadata": {"llama.attention.layer_norm_rms_epsilon": float("nan")}}, "is nan"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_model_is_refused_by_name(tmp_path: Path, what: str) -> None:
    changes, message = BAD[what]
    write_tiny_gguf(tmp_path / "bad.gguf", **changes)
    assert message in refused(tmp_path / "bad.gguf", tmp_path / "cache")


@pytest.mark.parametrize("kind", SCALAR)
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_not_finite_is_found(tmp_path: Path, kind: str, bits: int) -> None:
    _, size, scales, _ = SCALAR[kind]
    for offset in scales:
        blocks = np.zeros((4, size), np.uint8)
        blocks[-1, offset : offset + 2] = np.array([bits], "<u2").view(np.uint8)
        write_raw_gguf(tmp_path / "x.gguf", {"x": (kind, blocks)})
        with pytest.raises(ModelError, match="tensor x holds NaN or Inf"):
            written(tmp_path / "x.gguf", "x")


def test_a_missing_or_foreign_file_is_refused(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert "no such file" in refused(tmp_path / "none.gguf", cache)
    for content in (b"", b"GG", b"not a model", b"PK\x03\x04" * 100):
        (tmp_path / "other.gguf").write_bytes(content)
        assert "not a GGUF" in refused(tmp_path / "other.gguf", cache)
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in refused(tmp_path / "pipe.gguf", cache)
    (tmp_path / "big-endian.gguf").write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    assert "big-endian" in refused(tmp_path / "big-endian.gguf", cache)


def test_a_file_cut_anywhere_is_called_truncated(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    for cut in {*range(4, 200, 7), *range(200, len(data), len(data) // 40), len(data) - 1}:
        (tmp_path / "cut.gguf").write_bytes(data[:cut])
        assert "truncated" in refused(tmp_path / "cut.gguf", tmp_path / "cache")


@pytest.mark.parametrize("huge", [2**20, 2**32, 2**63, 2**64 - 1])
def test_absurd_counts_cost_nothing(tmp_path: Path, huge: int) -> None:
    text = struct.pack("<Q", 1) + b"k"
    for name, content in {
        "tensors": struct.pack("<IQQ", 3, huge, 0),
        "pairs": struct.pack("<IQQ", 3, 0, huge),
        "key": struct.pack("<IQQQ", 3, 0, 1, huge) + bytes(64),
        "string": struct.pack("<IQQ", 3, 0, 1) + text + struct.pack("<IQ", 8, huge) + bytes(64),
        "strings": struct.pack("<IQQ", 3, 0, 1) + text + struct.pack("<IIQ", 9, 8, huge) + bytes(64),
        "numbers": struct.pack("<IQQ", 3, 0, 1) + text + struct.pack("<IIQ", 9, 12, huge) + bytes(64),
        "rows": struct.pack("<IQQ", 3, 1, 0) + text + struct.pack("<IQQIQ", 2, huge, huge, 0, 0) + bytes(64),
        "offset": struct.pack("<IQQ", 3, 1, 0) + text + struct.pack("<IQIQ", 1, 1, 0, huge) + bytes(64),
        "dimensions": struct.pack("<IQQ", 3, 1, 0) + text + struct.pack("<I", huge % 2**32 or 9) + bytes(64),
    }.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(b"GGUF" + content)
        tracemalloc.start()
        try:
            with pytest.raises(ModelError):
                read_header(path)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, int]:
    """A folder to work in, a whole file, and the length of its header."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_tiny_gguf(folder / "whole.gguf", hidden=32, layers=1, ffn=32, vocab=270)
    header = read_header(folder / "whole.gguf")
    return folder, (folder / "whole.gguf").read_bytes(), min(t.offset for t in header.tensors.values())


@given(data=st.data())
@settings(max_examples=400, deadline=None)
def test_a_mangled_header_is_a_model_error_or_harmless(
    fuzzed: tuple[Path, bytes, int], data: st.DataObject
) -> None:
    folder, whole, header = fuzzed
    mangled = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header - 8))
        piece = data.draw(
            st.binary(min_size=1, max_size=8)
            | st.sampled_from([0, 1, 2**16, 2**31, 2**63, 2**64 - 1]).map(lambda n: struct.pack("<Q", n))
        )
        if data.draw(st.booleans()):
            mangled[place : place + len(piece)] = piece
        else:
            mangled[place:place] = piece
    path = folder / "mangled.gguf"
    path.write_bytes(mangled)
    with contextlib.suppress(ModelError):
        prepare(path, folder / "cache", progress=False)


def test_the_command_prints_the_folder_or_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))
    assert main([str(tmp_path / "tiny.gguf")]) == 0
    captured = capsys.readouterr()
    assert Path(captured.out.strip()).parent == tmp_path / "cache"
    assert captured.err == "", "a bar is for terminals"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main([str(tmp_path / "tiny.gguf"), "--cache", str(tmp_path / "again")]) == 0
    assert "preparing tiny.gguf" in capsys.readouterr().err
    monkeypatch.undo()
    write_tiny_gguf(tmp_path / "nan.gguf", edit=_set("output_norm.weight", np.nan))
    assert main([str(tmp_path / "nan.gguf"), "--cache", str(tmp_path / "other")]) == StartError.exit_code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1


def test_a_cache_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StartError, match="set ESTAFET_CACHE"):
        prepare(tmp_path / "tiny.gguf", tmp_path / "file" / "cache", progress=False)
    usage = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(EstafetError, match="1 MiB free"):
        prepare(tmp_path / "tiny.gguf", tmp_path / "cache", progress=False)


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESTAFET_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir() == Path("/own")
    monkeypatch.delenv("ESTAFET_CACHE")
    assert cache_dir() == Path("/xdg/estafet")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path.home() / ".cache" / "estafet"


@pytest.mark.model
def test_the_default_model_is_whole(model_folder: Path, model_file: Path) -> None:
    config = read_config(model_folder)
    assert (config.vocab_size, config.layers, config.eos_tokens) == (49152, 30, (2,))
    begin = time.perf_counter()
    assert prepare(model_file, cache_dir()) == model_folder
    assert time.perf_counter() - begin < 0.5
