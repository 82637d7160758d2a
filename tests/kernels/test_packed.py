"""Packed files: where every number lies, what it stands for, and files that are not what they should be."""

from __future__ import annotations

import os
import stat
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import kernels.packed
from engine.errors import ModelError, StartError
from engine.model import WEIGHTS, read_config
from kernels.formats import ITEM_BYTES, KINDS, WeightFormat
from kernels.packed import PackedWeights, from_strips, pack, packed_file, to_strips
from kernels.quantize import decode_bf16, dequantize, quantize, round_bf16
from kernels.random_model import write_random_model
from kernels.weights import EMBEDDING, HEAD, Weights, tensor_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from engine.model import ModelConfig

FP8 = WeightFormat("fp8", "fp8")
ODD = {"vocab_size": 301, "hidden_size": 200, "heads": 5, "kv_heads": 1, "head_dim": 24, "ffn_size": 136}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model", **ODD, tied=False)
    return tmp_path / "model"


def opened(folder: Path, weight_format: WeightFormat) -> PackedWeights:
    return PackedWeights(pack(folder, weight_format), read_config(folder), weight_format)


# ── layout ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.float32])
@pytest.mark.parametrize("shape", [(1, 1), (64, 3), (65, 130), (200, 7)])
def test_every_item_lies_where_the_layout_says(dtype: Any, shape: tuple[int, int]) -> None:
    outputs, inputs = shape
    items = np.random.default_rng(outputs).integers(0, 100, shape).astype(dtype)
    packed = to_strips(items)
    strips = -(-outputs // 64)
    if dtype is np.float32:
        expected = np.zeros((strips, inputs, 64), dtype)
        for o, k in np.ndindex(shape):
            expected[o // 64, k, o % 64] = items[o, k]
    else:
        expected = np.zeros((strips, -(-inputs // 2), 64, 2), dtype)
        for o, k in np.ndindex(shape):
            expected[o // 64, k // 2, o % 64, 1 - k % 2] = items[o, k]
    assert packed.dtype == dtype
    assert packed.flags.c_contiguous
    assert (packed == expected).all()
    assert (from_strips(packed, outputs, inputs) == items).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("head", KINDS)
@pytest.mark.parametrize("layers", KINDS)
def test_all_tensors_in_all_kinds(tmp_path: Path, layers: Any, head: Any, tied: bool) -> None:
    config = write_random_model(tmp_path, **ODD, tied=tied)
    own, packed = Weights(tmp_path, config), opened(tmp_path, WeightFormat(layers, head))
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 1:
            vector = packed.vector(name)
            assert vector.dtype == np.float32
            assert vector.ctypes.data % 64 == 0
            assert (vector == own[name]).all()
            continue
        matrix, kind = packed.matrix(name), head if name in (EMBEDDING, HEAD) else layers
        assert (matrix.kind, matrix.outputs, matrix.inputs) == (kind, *shape)
        assert matrix.data.ctypes.data % 4096 == 0
        inputs = shape[1] + (shape[1] % 2 if kind != "fp32" else 0)
        assert matrix.data.shape == (matrix.strips * 64 * inputs * ITEM_BYTES[kind],)
        assert matrix.scales.size == 0 or matrix.scales.ctypes.data % 64 == 0
        assert not matrix.data.flags.writeable
        assert matrix.scales.size == 0 or not matrix.scales.flags.writeable
        if kind in ("fp32", "bf16"):
            assert matrix.scales.size == 0
            expected = own[name] if kind == "fp32" else decode_bf16(round_bf16(own[name]))
        else:
            quantized = quantize(own[name], kind)
            strips = np.arange(matrix.strips) // 2
            assert (matrix.scales == quantized.scales[strips]).all()
            codes = to_strips(quantized.codes).view(np.uint8).reshape(-1)
            assert (matrix.data == codes).all()
            expected = dequantize(quantized.codes, quantized.scales)
        assert (matrix.values() == expected).all()
    if tied:
        assert packed.matrix(HEAD) is packed.matrix(EMBEDDING)


@pytest.mark.parametrize("kind", KINDS)
def test_how_many_rows_are_packed_at_a_time_does_not_show(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    weight_format = WeightFormat(kind, kind)
    path = pack(folder, weight_format)
    whole = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(kernels.packed, "CHUNK_ELEMENTS", 1)
    assert pack(folder, weight_format, verify=False).read_bytes() == whole


def test_arrays_keep_the_map_alive(folder: Path) -> None:
    matrix = opened(folder, FP8).matrix(EMBEDDING)
    before = matrix.data.tobytes()
    pack(folder, FP8).unlink()
    assert matrix.data.tobytes() == before


# ── once, and where ───────────────────────────────────────────────────────────────────────────


def test_packed_once_and_found_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(folder, FP8)
    assert path == packed_file(folder, read_config(folder), FP8) == folder / "packed" / "fp8.packed"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "fp8.packed"]
    monkeypatch.setattr(kernels.packed, "_write", None)
    assert pack(folder, FP8) == pack(folder, FP8, verify=False) == path


def test_launches_at_once_pack_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, paths, write = [], [], kernels.packed._write
    monkeypatch.setattr(kernels.packed, "_write", lambda *args: (written.append(1), write(*args)))
    launches = [threading.Thread(target=lambda: paths.append(pack(folder, FP8))) for _ in range(4)]
    for launch in launches:
        launch.start()
    for launch in launches:
        launch.join()
    assert len(written) == 1
    assert len(paths) == 4
    assert len(set(paths)) == 1


def test_a_folder_that_cannot_be_written_is_packed_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    monkeypatch.setenv("ESTAFET_CACHE", str(tmp_path / "cache"))
    path = pack(folder, WeightFormat("fp8", "bf16"))
    config = read_config(folder)
    assert path == tmp_path / "cache" / "packed" / f"{config.weights_id}-fp8+bf16-head.packed"
    assert not (folder / "packed").exists()
    monkeypatch.undo()


def test_what_a_killed_packing_left_is_swept(folder: Path) -> None:
    (folder / "packed").mkdir()
    (folder / "packed" / f"{kernels.packed.PARTIAL}dead").write_bytes(b"half")
    path = pack(folder, FP8)
    assert sorted(entry.name for entry in path.parent.iterdir()) == [".lock", "fp8.packed"]


def test_no_room_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1 << 20})
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: usage)
        with pytest.raises(StartError, match=r"1 MiB free; set ESTAFET_CACHE"):
            pack(folder, FP8)

    def full(number: int, start: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        StartError, match=r"cannot hold the packed weights: No space left on device; set ESTA"
    ):
        pack(folder, FP8)
    assert [entry.name for entry in (folder / "packed").iterdir()] == [".lock"]


def test_the_bar_is_for_those_who_ask(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    pack(folder, FP8, progress=True)
    assert "packing random-llama as fp8" in capsys.readouterr().err
    pack(folder, WeightFormat("bf16", "bf16"))
    assert capsys.readouterr().err == ""


# ── files that are not what they should be ────────────────────────────────────────────────────


def retabled(data: bytes, **changes: Any) -> bytes:
    """The file with changes in its table, whose checksum is right again."""
    length = struct.unpack_from("=8s5I", data)[3]
    table = msgspec.json.decode(data[28 : 28 + length]) | changes
    text = msgspec.json.encode(table)
    return data[:16] + struct.pack("=3I", len(text), zlib.crc32(text), 0) + text + data[28 + len(text) :]


def swapped(data: bytes, place: int) -> bytes:
    return data[:place] + data[place : place + 4][::-1] + data[place + 4 :]


def entry(data: bytes, name: str) -> dict[str, Any]:
    length = struct.unpack_from("=8s5I", data)[3]
    found: dict[str, Any] = msgspec.json.decode(data[28 : 28 + length])["tensors"]
    return found[name]


STALE = {
    "empty": (lambda data: b"", "cut short: 0 bytes"),
    "cut in the table": (lambda data: data[:900], "cut short in its table: 900 bytes"),
    "cut": (lambda data: data[:-1], r"cut short or too long: \d+ bytes, its table says \d+"),
    "longer": (lambda data: data + b"\0", r"cut short or too long"),
    "other version": (
        lambda data: data[:8] + struct.pack("=I", 77) + data[12:],
        r"packed by another version \(layout 77, this is 2\)",
    ),
    "other byte order": (lambda data: swapped(data, 12), "packed on a machine of another byte order"),
    "other weights": (lambda data: retabled(data, weights_id="0123"), "packed of the weights 0123, not of"),
    "other format": (
        lambda data: retabled(data, format={"layers": "bf16", "head": "fp8"}),
        "packed as bf16\\+fp8-head, not as fp8",
    ),
    "table": (lambda data: data[:100] + b"#" + data[101:], "damaged in its table"),
    "no table": (lambda data: retabled(data, tensors=3), "corrupt: Expected `object`"),
    "no tensors": (
        lambda data: retabled(data, tensors={}),
        r"tensor model\.embed_tokens\.weight .* is missing",
    ),
    "no packed file": (lambda data: b"GGUF" + data[4:], "not a file of packed weights"),
}


@pytest.mark.parametrize("what", STALE)
def test_a_file_that_does_not_fit_is_named_and_made_again(
    folder: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    change, message = STALE[what]
    path = pack(folder, FP8)
    whole = path.read_bytes()
    path.write_bytes(change(whole))
    with pytest.raises(ModelError, match=message) as caught:
        PackedWeights(path, read_config(folder), FP8)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert line.endswith("delete it, it is made again at the next start")
    assert "\n" not in line
    assert pack(folder, FP8) == path
    assert path.read_bytes() == whole
    (words,) = capsys.readouterr().err.splitlines()
    assert words.startswith(f"estafet: {path}: ")
    assert words.endswith("; packing anew")


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small model's folder and its packed file."""
    folder = tmp_path_factory.mktemp("fuzz")
    write_random_model(folder, hidden_size=16, ffn_size=16, layers=1, heads=1, kv_heads=1)
    return folder, pack(folder, FP8).read_bytes()


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_mangled_table_is_a_model_error(fuzzed: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, whole = fuzzed
    end = 24 + struct.unpack_from("=8s5I", whole)[3]
    mangled = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, 23) | st.integers(28, end - 8))
        piece = data.draw(st.binary(min_size=1, max_size=4))
        mangled[place : place + len(piece)] = piece
    path = folder / "mangled.packed"
    path.write_bytes(mangled[: data.draw(st.integers(0, len(mangled)) | st.just(len(mangled)))])
    if path.read_bytes() == whole:
        return
    try:
        weights = PackedWeights(path, read_config(folder), FP8)
    except ModelError as error:
        assert str(error).startswith(f"{path}: ")  # noqa: PT017
        return
    # Nothing but the unused word and what lies between the table and the first tensor may differ.
    assert mangled[:24] == whole[:24]
    assert mangled[28 : end + 4] == whole[28 : end + 4]
    assert len(weights.matrix(EMBEDDING).data) > 0


def test_a_table_that_points_elsewhere_is_refused(folder: Path) -> None:
    path = pack(folder, FP8)
    whole = path.read_bytes()
    right = entry(whole, EMBEDDING)
    config = read_config(folder)
    length = struct.unpack_from("=8s5I", whole)[3]
    tensors = msgspec.json.decode(whole[28 : 28 + length])["tensors"]
    for change in (
        {"data": right["data"] | {"offset": right["data"]["offset"] + 1}},
        {"data": right["data"] | {"offset": -4096}},
        {"data": right["data"] | {"offset": 1 << 40}},
        {"data": right["data"] | {"size": 4096}},
        {"scales": right["scales"] | {"size": 0}},
        {"kind": "bf16"},
        {"shape": [1, 2]},
    ):
        path.write_bytes(retabled(whole, tensors=tensors | {EMBEDDING: right | change}))
        with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight"):
            PackedWeights(path, config, FP8)
    path.write_bytes(retabled(whole, tensors=tensors | {"other": right}))
    with pytest.raises(ModelError, match="tensors that are not the model's"):
        PackedWeights(path, config, FP8)


def test_no_file_says_how_to_make_it(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"fp8\.packed: no such packed weights; make them with"):
        PackedWeights(packed_file(folder, read_config(folder), FP8), read_config(folder), FP8)


@pytest.mark.parametrize("part", ["data", "scales"])
@pytest.mark.parametrize("name", [EMBEDDING, "model.layers.1.mlp.down_proj.weight", HEAD])
def test_damage_in_the_numbers_is_found_and_packed_anew(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, part: str
) -> None:
    path = pack(folder, FP8)
    whole = path.read_bytes()
    place = entry(whole, name)[part]
    damaged = bytearray(whole)
    damaged[place["offset"] + place["size"] - 1] ^= 1
    path.write_bytes(damaged)
    assert pack(folder, FP8) == path
    assert f"{path}: damaged in tensor {name}; packing anew" in capsys.readouterr().err
    assert path.read_bytes() == whole


def test_who_maps_a_damaged_file_is_not_disturbed_by_the_new_one(folder: Path) -> None:
    path = pack(folder, FP8)
    weights = PackedWeights(path, read_config(folder), FP8)
    before = weights.matrix(HEAD).data.tobytes()
    with path.open("r+b") as file:
        file.write(b"spoilt!!")
    pack(folder, FP8)
    assert weights.matrix(HEAD).data.tobytes() == before


def replaced(folder: Path, name: str, value: float) -> ModelConfig:
    tensors = load_file(folder / WEIGHTS)
    tensors[name].flat[-1] = value
    save_file(tensors, folder / WEIGHTS)
    return read_config(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", EMBEDDING])
def test_numbers_that_cannot_be_computed_with_are_refused(
    folder: Path, kind: Any, value: float, name: str
) -> None:
    replaced(folder, name, value)
    with pytest.raises(ModelError, match=f"{WEIGHTS}: tensor {name} holds NaN or Inf; fetch the model again"):
        pack(folder, WeightFormat(kind, kind))
    assert [left.name for left in (folder / "packed").iterdir()] == [".lock"]


def test_a_number_beyond_bfloat16_is_refused(folder: Path) -> None:
    replaced(folder, HEAD, float(np.finfo(np.float32).max))
    with pytest.raises(ModelError, match=f"tensor {HEAD} holds a number beyond bfloat16"):
        pack(folder, WeightFormat("bf16", "bf16"))
