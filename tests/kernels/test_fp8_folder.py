"""FP8 checkpoints as others write them: kept to the bit, dequantised on demand, refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch
from hf_files import prepared, refused, write_hf_folder, write_json
from hypothesis import given, settings
from hypothesis import strategies as st
from row_steps import Chunk, Pages
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model import CONFIG, read_config
from engine.text import TextCodec
from kernels.formats import WeightFormat
from kernels.packed import PackedWeights, pack
from kernels.quantize import dequantize, quantize
from kernels.safetensors_file import read_safetensors, safetensors_header
from kernels.weights import EMBEDDING, HEAD, Weights, default_format
from tools.quantize import quantize_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SINGLE = "model.safetensors"
DOWN = "model.layers.1.mlp.down_proj.weight"
SCALES = f"{DOWN}_scale_inv"
ODD = {"hidden_size": 200, "heads": 5, "kv_heads": 1, "head_dim": 24, "ffn_size": 136, "sharpness": 1.0}
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
Tensors = dict[str, torch.Tensor]


def write_fp8_folder(
    folder: Path,
    *,
    tied: bool = False,
    fp8_head: bool = False,
    left_out: tuple[str, ...] = (),
    scale_dtype: torch.dtype = torch.float32,
    edit: Callable[[Tensors], Any] = lambda tensors: None,
    shards: int = 1,
    **quantization: Any,
) -> Tensors:
    """A random model of odd shape whose layers are FP8, written by torch; the tensors as they are written.

    `left_out`: matrices that stay bf16. A value of None in `quantization` leaves the key out.
    """
    table = {key: value for key, value in (QUANTIZATION | quantization).items() if value is not None}
    write_hf_folder(folder, tied=tied, config={"quantization_config": table or None}, **ODD)
    tensors: Tensors = {}
    for name, tensor in load_file(folder / SINGLE).items():
        in_head = name in (HEAD, EMBEDDING)
        if tensor.ndim == 1 or name in left_out or (in_head and not (fp8_head and (tied or name == HEAD))):
            tensors[name] = tensor.to(torch.bfloat16)
            continue
        quantized = quantize(tensor.numpy(), "fp8")
        scales = torch.from_numpy(quantized.scales).to(scale_dtype)
        tensors[name] = torch.from_numpy(quantized.codes).view(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
    edit(tensors)
    (folder / SINGLE).unlink()
    if shards == 1:
        save_file(tensors, folder / SINGLE)
        return tensors
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return tensors


def expected_values(tensors: Tensors, name: str) -> np.ndarray:
    """What the checkpoint means, by torch: code × scale of its block."""
    values = tensors[name].to(torch.float32)
    if tensors[name].dtype == torch.float8_e4m3fn:
        scales = tensors[f"{name}_scale_inv"].to(torch.float32)
        blocks = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        values = values * blocks[: values.shape[0], : values.shape[1]]
    return values.numpy()


# ── read to the bit ───────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tied", "fp8_head"), [(True, False), (True, True), (False, False), (False, True)])
def test_codes_and_scales_are_kept(
    tmp_path: Path, tied: bool, fp8_head: bool, scale_dtype: torch.dtype, shards: int
) -> None:
    tensors = write_fp8_folder(
        tmp_path / "model", tied=tied, fp8_head=fp8_head, scale_dtype=scale_dtype, shards=shards
    )
    folder = prepared(tmp_path / "model")
    assert all(path.is_symlink() for path in folder.glob("weights*.safetensors"))
    config = read_config(folder)
    assert config.stored == "F8_E4M3"
    weight_format = default_format(folder, config)
    assert weight_format == WeightFormat("fp8", "fp8" if fp8_head else "bf16")
    weights = Weights(folder, config)
    packed = PackedWeights(pack(folder, weight_format), config, weight_format)
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        expected = expected_values(tensors, name)
        assert weights[name].dtype == np.float32
        assert not weights[name].flags.writeable
        assert (weights[name] == expected).all()
        if tensor.ndim == 1:
            assert (packed.vector(name) == expected).all()
            continue
        matrix = packed.matrix(name)
        assert (matrix.values() == expected).all()
        fp8 = tensor.dtype == torch.float8_e4m3fn
        assert matrix.kind == ("fp8" if fp8 else "bf16")
        if fp8:  # not by way of floats, which could give other codes for the same values
            scales = tensors[f"{name}_scale_inv"].to(torch.float32).numpy()
            assert (matrix.scales == scales[np.arange(matrix.strips) // 2]).all()
            counts = np.bincount(tensor.view(torch.uint8).numpy().reshape(-1), minlength=256)
            added = np.bincount(matrix.data, minlength=256) - counts
            assert (added[1:] == 0).all()
            assert added[0] == (64 * matrix.strips - matrix.outputs) * matrix.inputs


@pytest.mark.parametrize("kind", ["bf16", "fp32", "int8", "fp8-per-tensor"])
def test_another_kind_is_packed_from_the_values(tmp_path: Path, kind: Any) -> None:
    tensors = write_fp8_folder(tmp_path / "model")
    folder = prepared(tmp_path / "model")
    weight_format = WeightFormat(kind, kind)
    packed = PackedWeights(pack(folder, weight_format), read_config(folder), weight_format)
    for name in (DOWN, EMBEDDING, HEAD):
        values = expected_values(tensors, name)
        if kind == "bf16":
            values = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
        elif kind != "fp32":
            values = dequantize(*quantize(values, kind))
        assert packed.matrix(name).kind == kind
        assert (packed.matrix(name).values() == values).all()


def test_what_the_makers_left_out_stays_as_it_is(tmp_path: Path) -> None:
    tensors = write_fp8_folder(tmp_path / "model", left_out=(DOWN,), ignored_layers=[DOWN[: -len(".weight")]])
    folder = prepared(tmp_path / "model")
    for head in ("fp8", "bf16"):
        weight_format = WeightFormat("fp8", head)
        packed = PackedWeights(pack(folder, weight_format), read_config(folder), weight_format)
        assert packed.matrix(DOWN).kind == "bf16"
        assert (packed.matrix(DOWN).values() == expected_values(tensors, DOWN)).all()
        assert packed.matrix("model.layers.0.mlp.down_proj.weight").kind == "fp8"
        assert packed.matrix(EMBEDDING).kind == "bf16"
        assert packed.matrix(HEAD).kind == head
    other = WeightFormat("int8", "int8")
    assert PackedWeights(pack(folder, other), read_config(folder), other).matrix(DOWN).kind == "int8"


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_backends_that_want_floats_run_it(tmp_path: Path, backend: str) -> None:
    tensors = write_fp8_folder(tmp_path / "model")
    plain = tmp_path / "plain"
    floats = {
        name: torch.from_numpy(expected_values(tensors, name)) for name in tensors if "_inv" not in name
    }
    write_hf_folder(plain, tied=False, **ODD)
    save_file(floats, plain / SINGLE)
    logits = []
    for source in (tmp_path / "model", plain):
        folder = prepared(source)
        pages = Pages(backend, folder, read_config(folder))
        logits.append(pages.step([Chunk(0, 0, [1, 5, 9, 2, 7], "all")]).logits)
    assert logits[0].tobytes() == logits[1].tobytes()


def test_a_tied_model_may_carry_its_head(tmp_path: Path) -> None:
    def twins(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()
        tensors[f"{HEAD}_scale_inv"] = tensors[f"{EMBEDDING}_scale_inv"].clone()

    def other_scales(tensors: Tensors) -> None:
        twins(tensors)
        tensors[f"{HEAD}_scale_inv"].mul_(2)

    write_fp8_folder(tmp_path / "model", tied=True, fp8_head=True, edit=twins)
    folder = prepared(tmp_path / "model")
    assert default_format(folder, read_config(folder)) == WeightFormat("fp8", "fp8")
    write_fp8_folder(tmp_path / "deep" / "model", tied=True, fp8_head=True, edit=other_scales)
    assert f"'{HEAD}_scale_inv' is not part of a plain" in refused(tmp_path / "deep" / "model")


def test_the_weights_id_follows_codes_and_scales(tmp_path: Path) -> None:
    def identity(name: str, edit: Callable[[Tensors], Any] = lambda tensors: None, **changes: Any) -> str:
        write_fp8_folder(tmp_path / name, edit=edit, **changes)
        return read_config(prepared(tmp_path / name)).weights_id

    same = identity("one")
    assert identity("shards", shards=2) == same
    assert identity("scale", lambda tensors: tensors[SCALES].mul_(2)) != same
    assert identity("code", lambda tensors: tensors[DOWN].view(torch.uint8)[0, :1].bitwise_xor_(1)) != same


@pytest.mark.parametrize(
    "extra",
    [
        {"ignored_layers": ["lm_head"]},
        {"modules_to_not_convert": ["lm_head"]},
        {"dequantize": False, "scale_fmt": "float", "expert_dtype": "fp8", "modules_to_convert": []},
        {"fmt": None, "activation_scheme": None},
    ],
)
def test_what_others_write_into_the_config_is_read(tmp_path: Path, extra: dict[str, Any]) -> None:
    write_fp8_folder(tmp_path / "model", **extra)
    assert read_config(prepared(tmp_path / "model")).stored == "F8_E4M3"


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("F32", ("fp32", "fp32")),
        ("F16", ("fp32", "fp32")),
        ("BF16", ("bf16", "bf16")),
        ("Q8_0", ("bf16", "bf16")),
        ("Q4_1", ("fp8", "bf16")),
        ("Q6_K", ("fp8", "bf16")),
    ],
)
def test_the_kind_that_a_model_asks_for(tmp_path: Path, stored: str, expected: tuple[Any, Any]) -> None:
    write_hf_folder(tmp_path / "model")
    folder = prepared(tmp_path / "model")
    config = msgspec.structs.replace(read_config(folder), stored=stored)
    assert default_format(folder, config) == WeightFormat(*expected)


@pytest.mark.parametrize(("dtype", "stored"), [(np.float32, "F32"), (np.float16, "F16")])
def test_how_a_model_was_stored_is_recorded(tmp_path: Path, dtype: Any, stored: str) -> None:
    write_hf_folder(tmp_path / "model", dtype=dtype)
    assert read_config(prepared(tmp_path / "model")).stored == stored


def test_a_folder_from_before_is_read(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model")
    folder = prepared(tmp_path / "model")
    table = msgspec.json.decode((folder / CONFIG).read_bytes())
    del table["stored"]
    write_json(folder / CONFIG, table)
    assert read_config(folder).stored == "F32"


@given(
    st.dictionaries(
        st.text(min_size=1).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from(["F32", "F16", "BF16", "F8_E4M3"]), st.lists(st.integers(1, 9), max_size=3)
        ),
        max_size=5,
    )
)
@settings(deadline=None)
def test_headers_that_are_written_are_read(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, tuple[str, list[int]]]
) -> None:
    path = tmp_path_factory.getbasetemp() / "written.safetensors"
    given_tensors = {name: (kind, tuple(shape)) for name, (kind, shape) in tensors.items()}
    header, starts = safetensors_header(given_tensors)
    items = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}
    size = sum(items[kind] * int(np.prod(shape)) for kind, shape in given_tensors.values())
    path.write_bytes(header + bytes(size))
    found = read_safetensors(path).tensors
    assert {name: (tensor.type, tensor.shape) for name, tensor in found.items()} == given_tensors
    assert {name: tensor.offset for name, tensor in found.items()} == starts
    assert all(tensor.offset % items[tensor.type] == 0 for tensor in found.values())


@pytest.mark.model
def test_the_default_model_answers_from_its_fp8_folder(tmp_path: Path, model_folder: Path) -> None:
    report = quantize_model(model_folder, tmp_path / "out", "bf16", progress=False)
    assert report.matrix_bytes <= 0.52 * report.matrix_bf16_bytes
    folder = prepared(tmp_path / "out")
    config = read_config(folder)
    messages: list[dict[str, object]] = [{"role": "user", "content": "What is the capital of France?"}]
    codec = TextCodec.load(folder)
    prompt = codec.encode_chat(messages)
    assert prompt == TextCodec.load(model_folder).encode_chat(messages)
    pages = Pages("torch", folder, config, pages=16, threads=2)
    tokens = [int(pages.step([Chunk(0, 0, prompt, "last")]).logits[-1].argmax())]
    while len(tokens) < 8:
        position = len(prompt) + len(tokens) - 1
        tokens.append(int(pages.step([Chunk(0, position, [tokens[-1]], "last")]).logits[-1].argmax()))
    assert codec.decode(tokens).startswith("The capital of France is Paris.")


# ── refused by name ───────────────────────────────────────────────────────────────────────────


BAD_CONFIG: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "awq"}, "quantization_config.quant_method is 'awq': only 'fp8' is served"),
    "no method": ({"quant_method": None}, "quantization_config.quant_method is None: only 'fp8'"),
    "format": ({"fmt": "e5m2"}, "quantization_config.fmt is 'e5m2': only 'e4m3' is served"),
    "block": (
        {"weight_block_size": [64, 128]},
        "quantization_config.weight_block_size is [64, 128]: only [128, 128]",
    ),
    "no block": ({"weight_block_size": None}, "quantization_config.weight_block_size is None: only"),
    "block of text": ({"weight_block_size": "128"}, "weight_block_size is '128': only [128, 128]"),
    "static": ({"activation_scheme": "static"}, "quantization_config.activation_scheme is 'static': only"),
    "scales": ({"scale_fmt": "ue8m0"}, "quantization_config.scale_fmt is 'ue8m0': only 'float'"),
    "names": ({"ignored_layers": "lm_head"}, "quantization_config.ignored_layers is 'lm_head', not a list"),
    "numbers": ({"modules_to_not_convert": [1]}, "modules_to_not_convert is [1], not a list of names"),
    "unknown": (
        {"rotation": "hadamard"},
        "quantization_config.'rotation' is 'hadamard': such models are not",
    ),
    "none": (
        dict.fromkeys(QUANTIZATION),
        "has the type F8_E4M3, but config.json has no quantization_config",
    ),
}


@pytest.mark.parametrize("what", BAD_CONFIG)
def test_another_quantisation_is_refused(tmp_path: Path, what: str) -> None:
    changes, message = BAD_CONFIG[what]
    write_fp8_folder(tmp_path / "model", **changes)
    assert message in refused(tmp_path / "model")


def _set(name: str, value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[name].view(-1)[-1] = value

    return edit


def _code(code: int) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[DOWN].view(torch.uint8).view(-1)[-1] = code

    return edit


def _put(name: str, tensor: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: tensor})


UNUSABLE = f"tensor {SCALES} holds a scale that is NaN, infinite, zero or negative"
BAD_TENSOR: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "NaN code": (_code(0x7F), f"tensor {DOWN} holds NaN"),
    "negative NaN code": (_code(0xFF), f"tensor {DOWN} holds NaN"),
    "NaN scale": (_set(SCALES, np.nan), UNUSABLE),
    "infinite scale": (_set(SCALES, np.inf), UNUSABLE),
    "zero scale": (_set(SCALES, 0.0), UNUSABLE),
    "negative scale": (_set(SCALES, -0.1), UNUSABLE),
    "absurd scale": (_set(SCALES, 3e38), UNUSABLE),
    "no scales": (lambda tensors: tensors.pop(SCALES), f"tensor {SCALES}, the scales of {DOWN}, is missing"),
    "scales of another block size": (
        _put(SCALES, torch.ones(4, 3)),
        f"tensor {SCALES} is F32 [4, 3], not F32 or BF16 [2, 2], one for each block of 128 × 128",
    ),
    "scales of another type": (
        _put(SCALES, torch.ones(2, 2, dtype=torch.float16)),
        f"tensor {SCALES} is F16 [2, 2], not F32 or BF16 [2, 2]",
    ),
    "one scale": (_put(SCALES, torch.tensor(1.0)), f"tensor {SCALES} is F32 [], not F32 or BF16 [2, 2]"),
    "scales of no codes": (
        _put(DOWN, torch.ones(200, 136)),
        f"tensor {SCALES} holds scales, but {DOWN} is F32 and no matrix of F8_E4M3",
    ),
    "scales of a norm": (
        _put("model.norm.weight_scale_inv", torch.ones(2)),
        "tensor model.norm.weight_scale_inv holds scales, but model.norm.weight is BF16",
    ),
    "scales of nothing": (
        _put("model.x.weight_scale_inv", torch.ones(1, 1)),
        "'model.x.weight_scale_inv' is not",
    ),
    "codes of another shape": (
        _put(DOWN, torch.ones(136, 200).to(torch.float8_e4m3fn)),
        f"tensor {DOWN} has the shape [136, 200]",
    ),
    "other codes": (
        _put(DOWN, torch.ones(200, 136).to(torch.float8_e5m2)),
        f"tensor {DOWN} has the type F8_E5M2",
    ),
    "a norm of codes": (
        _put("model.norm.weight", torch.ones(200).to(torch.float8_e4m3fn)),
        "tensor model.norm.weight has the type F8_E4M3, but is no matrix",
    ),
    "infinite head": (_set(HEAD, np.inf), f"tensor {HEAD} holds NaN or Inf"),
}


@pytest.mark.parametrize("what", BAD_TENSOR)
def test_a_bad_tensor_is_named(tmp_path: Path, what: str) -> None:
    edit, message = BAD_TENSOR[what]
    write_fp8_folder(tmp_path / "model", edit=edit)
    assert message in refused(tmp_path / "model")


def test_a_config_that_says_fp8_of_a_model_that_is_not(tmp_path: Path) -> None:
    write_hf_folder(tmp_path / "model", config={"quantization_config": QUANTIZATION})
    assert "says that the model is FP8, but none of its tensors is F8_E4M3" in refused(tmp_path / "model")


@pytest.mark.parametrize("what", ["NaN code", "NaN scale", "zero scale", "negative scale", "infinite scale"])
def test_numbers_that_went_bad_later_are_refused_too(tmp_path: Path, what: str) -> None:
    source = tmp_path / "model"
    write_fp8_folder(source)
    folder = prepared(source)
    edit, _ = BAD_TENSOR[what]
    write_fp8_folder(source, edit=edit)
    link = folder / "weights.safetensors"
    link.unlink()
    save_file(load_file(source / SINGLE), link)
    name = DOWN if what == "NaN code" else SCALES
    with pytest.raises(ModelError, match=f"tensor {name} holds "):
        pack(folder, WeightFormat("fp8", "bf16"))
    with pytest.raises(ModelError, match=f"tensor {name} holds "):
        Weights(folder, read_config(folder))
