"""What does not fit is refused, and what is damaged stays with whom it belongs to."""

from __future__ import annotations

import faulthandler
import os
import struct
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kernels import kernels
from row_steps import POISON, Chunk, Pages
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError, StartError
from engine.model import WEIGHTS
from engine.sampling import SamplingParams
from kernels.backend import TokenLog
from kernels.backends import open_backend
from kernels.cpu.backend import NativeBackend
from kernels.formats import WeightFormat
from kernels.packed import PackedWeights, pack, packed_file
from kernels.random_model import write_random_model
from kernels.sampling import NO_TOKEN
from kernels.weights import EMBEDDING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model import ModelConfig

NATIVE = kernels()
VARIANTS = NATIVE.variants()
FP8 = WeightFormat("fp8", "fp8")


def refused(
    call: Callable[[], Any], errors: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> None:
    """The call raises one of the errors, tried in a child process: a crash must not end ours."""
    child = os.fork()
    if not child:
        faulthandler.disable()
        try:
            call()
        except errors:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(2)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code >= 0, f"it crashed with signal {-code}"
    assert code == 0, "nothing was refused" if code == 2 else "another error, see stderr"


# ── the functions of the extension ────────────────────────────────────────────────────────────

MULTIPLY: dict[str, Any] = {
    "variant": VARIANTS[0],
    "kind": "fp32",
    "outputs": 64,
    "inputs": 130,
    "data": np.zeros(64 * 130 * 4, np.uint8),
    "scales": np.zeros((0, 0), np.float32),
    "x": np.zeros((2, 130), np.float32),
    "out": np.zeros((2, 64), np.float32),
}
CODES: dict[str, Any] = {"data": np.zeros(64 * 130, np.uint8), "scales": np.zeros((1, 2), np.float32)}


@pytest.mark.parametrize(
    "change",
    [
        {"variant": "abacus"},
        {"variant": ""},
        {"kind": "fp64"},
        {"kind": "fp16"},
        {"kind": "float16"},
        {"outputs": 0},
        {"outputs": -64},
        {"outputs": 65},
        {"outputs": 2**31 - 1},
        {"outputs": 2**31 - 1, "inputs": 2**31 - 1},
        {"inputs": 0},
        {"inputs": -1},
        {"inputs": 131},
        {"data": np.zeros(64 * 130 * 4 - 1, np.uint8)},
        {"data": np.zeros(64 * 130 * 4 + 1, np.uint8)},
        {"data": np.zeros(0, np.uint8)},
        {"x": np.zeros((2, 129), np.float32)},
        {"x": np.zeros((2, 131), np.float32)},
        {"x": np.zeros((0, 130), np.float32), "out": np.zeros((0, 64), np.float32)},
        {"out": np.zeros((2, 63), np.float32)},
        {"out": np.zeros((1, 64), np.float32)},
        {"out": np.zeros((3, 64), np.float32)},
        CODES | {"kind": "fp8", "scales": np.zeros((0, 0), np.float32)},
        CODES | {"kind": "fp8", "scales": np.zeros((1, 1), np.float32)},
        CODES | {"kind": "fp8", "scales": np.zeros((2, 1), np.float32)},
        CODES | {"kind": "int8", "scales": np.zeros((2, 2), np.float32)},
        CODES | {"kind": "int8", "scales": np.zeros((1, 3), np.float32)},
    ],
    ids=lambda change: "-".join(f"{key}={getattr(value, 'shape', value)}" for key, value in change.items()),
)
def test_a_product_whose_arrays_do_not_fit(change: dict[str, Any]) -> None:
    assert NATIVE.multiply(**MULTIPLY) is None
    refused(lambda: NATIVE.multiply(**MULTIPLY | change))


@pytest.mark.parametrize(
    "change",
    [
        {"data": np.zeros(64 * 130, np.float32)},
        {"x": np.zeros((2, 130), np.float64)},
        {"x": np.zeros((130, 2), np.float32).T},
        {"x": np.zeros(130, np.float32)},
        {"x": None},
        {"out": np.zeros((2, 64), np.float64)},
        {"out": np.zeros((4, 64), np.float32)[::2]},
        {"outputs": 2**31},
        {"outputs": 64.5},
    ],
    ids=lambda change: "-".join(f"{key}={getattr(value, 'dtype', value)}" for key, value in change.items()),
)
def test_arrays_of_another_type_or_order(change: dict[str, Any]) -> None:
    refused(lambda: NATIVE.multiply(**MULTIPLY | change), TypeError)


def test_what_is_read_only_is_not_written() -> None:
    out = np.zeros((2, 64), np.float32)
    out.flags.writeable = False
    refused(lambda: NATIVE.multiply(**MULTIPLY | {"out": out}), TypeError)


@pytest.mark.parametrize(
    "change", [{"token": 64}, {"token": -1}, {"out": np.zeros(129, np.float32)}, {"variant": "x"}], ids=str
)
def test_an_embedding_that_is_not_there(change: dict[str, Any]) -> None:
    arguments = {key: value for key, value in MULTIPLY.items() if key != "x"}
    arguments |= {"token": 63, "out": np.zeros(130, np.float32)}
    NATIVE.embed(**arguments)
    refused(lambda: NATIVE.embed(**arguments | change))


@pytest.mark.parametrize("sizes", [(16, 16, 32), (16, 32, 16), (17, 17, 17), (16, 0, 16)])
def test_gates_that_do_not_fit(sizes: tuple[int, int, int]) -> None:
    gates, ups, out = (np.zeros(size, np.float32) for size in sizes)
    refused(lambda: NATIVE.gate(VARIANTS[0], gates, ups, out))


@pytest.mark.parametrize("threads", [0, -1])
def test_floors_on_no_thread(threads: int) -> None:
    refused(lambda: NATIVE.read_bandwidth(threads, 1))
    refused(lambda: NATIVE.fma_rate(threads))


@pytest.mark.parametrize("megabytes", [0, -1])
def test_a_bandwidth_of_nothing(megabytes: int) -> None:
    refused(lambda: NATIVE.read_bandwidth(1, megabytes))


def sample_arguments() -> dict[str, Any]:
    """Two rows over 40 ids: the first with a mask, a bias, a log of three and two logprobs."""
    return {
        "variant": VARIANTS[0],
        "logits": np.zeros((2, 40), np.float32),
        "doubles": np.array([[1.0, 1.0, 0.0, 0.5, 0.5, 1.5], [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]]),
        "integers": np.array([[1, 2, 3, 0, 0, 0, 1, 0, 1], [0, 0, 5, 0, -1, 1, 0, -1, 0]], np.int64),
        "masks": np.full((1, 2), 0xFFFFFFFF, np.uint32),
        "bias_ids": np.array([7], np.int32),
        "biases": np.array([1.0]),
        "logs": np.array([1, 2, 3], np.int32),
        "told": np.array([2, -1], np.int32),
        "sampled": np.zeros(2, np.int32),
        "top_ids": np.zeros(4, np.int32),
        "top_logprobs": np.zeros(6),
    }


def changed(column: str, place: tuple[int, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(arguments: dict[str, Any]) -> None:
        arguments[column][place] = value

    return change


def instead(column: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda arguments: arguments.update({column: value})


SAMPLE_DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "unknown variant": instead("variant", "abacus"),
    "too few parameters": instead("doubles", np.zeros((1, 6))),
    "too narrow parameters": instead("doubles", np.zeros((2, 5))),
    "too few integers": instead("integers", np.zeros((3, 9), np.int64)),
    "too narrow integers": instead("integers", np.zeros((2, 8), np.int64)),
    "told of one": instead("told", np.zeros(1, np.int32)),
    "one token for two": instead("sampled", np.zeros(1, np.int32)),
    "three tokens for two": instead("sampled", np.zeros(3, np.int32)),
    "biases without ids": instead("bias_ids", np.zeros(0, np.int32)),
    "no room for ids": instead("top_ids", np.zeros(0, np.int32)),
    "no room for logprobs": instead("top_logprobs", np.zeros(5)),
    "more logprobs than room": changed("told", (0,), 3),
    "narrow masks": instead("masks", np.zeros((1, 1), np.uint32)),
    "mask that is not there": changed("integers", (0, 4), 1),
    "bias that is not there": changed("integers", (0, 5), 1),
    "bias before the first": changed("integers", (0, 5), -1),
    "more biases than there are": changed("integers", (0, 6), 2),
    "less than no bias": changed("integers", (0, 6), -1),
    "biases beyond all numbers": changed("integers", (0, 5), 2**63 - 1),
    "biased id beyond the vocabulary": changed("bias_ids", (0,), 40),
    "biased id before the vocabulary": changed("bias_ids", (0,), -1),
    "log that is not there": changed("integers", (0, 7), 1),
    "log beyond all numbers": changed("integers", (0, 7), 2**63 - 1),
    "position beyond the log": changed("integers", (0, 2), 4),
    "position before the log": changed("integers", (0, 2), -1),
    "prompt of less than nothing": changed("integers", (0, 8), -1),
    "log token beyond the vocabulary": changed("logs", (2,), 40),
    "log token before the vocabulary": changed("logs", (0,), -1),
}


@pytest.mark.parametrize("damage", SAMPLE_DAMAGES)
def test_sampling_parameters_that_reach_beyond_their_arrays(damage: str) -> None:
    arguments = sample_arguments()
    NATIVE.sample(**arguments)
    assert (arguments["sampled"] >= 0).all()
    SAMPLE_DAMAGES[damage](arguments)
    refused(lambda: NATIVE.sample(**arguments))


@pytest.mark.parametrize("shape", [(0, 40), (0, 0), (2, 0)])
def test_sampling_of_nothing_touches_nothing(shape: tuple[int, int]) -> None:
    """Of no rows nothing is sampled; of no vocabulary nothing can be."""
    count = shape[0]
    arguments = sample_arguments() | {
        "logits": np.zeros(shape, np.float32),
        "doubles": np.ones((count, 6)),
        "integers": np.tile(np.array([0, 0, 5, 0, -1, 0, 0, -1, 0], np.int64), (count, 1)),
        "told": np.full(count, -1, np.int32),
        "sampled": np.zeros(count, np.int32),
    }
    if count:
        refused(lambda: NATIVE.sample(**arguments))
    else:
        NATIVE.sample(**arguments)


# ── the model ─────────────────────────────────────────────────────────────────────────────────

SHAPE = [97, 48, 2, 4, 2, 16, 80, 64]
"""vocabulary, hidden, layers, heads, KV heads, head dim, FFN, context"""
PAGE_BYTES = 8 * 2 * 2 * 2 * 16 * 4


def model_arguments() -> dict[str, Any]:
    return {
        "variant": VARIANTS[0],
        "shape": SHAPE,
        "epsilon": 1e-5,
        "pool": np.full(4 * PAGE_BYTES, POISON, np.uint8),
        "page_kind": "float32",
        "page_tokens": 8,
        "cos": np.zeros((64, 8), np.float32),
        "sin": np.zeros((64, 8), np.float32),
        "threads": 1,
        "cores": [],
    }


def shape_with(place: int, value: int) -> dict[str, Any]:
    return {"shape": [value if i == place else number for i, number in enumerate(SHAPE)]}


@pytest.mark.parametrize(
    "change",
    [
        {"variant": "abacus"},
        {"shape": SHAPE[:-1]},
        {"shape": [*SHAPE, 1]},
        {"shape": []},
        *(shape_with(place, value) for place in range(8) for value in (0, -1)),
        shape_with(4, 3),
        shape_with(5, 15),
        {"pool": np.zeros(4 * PAGE_BYTES - 1, np.uint8)},
        {"pool": np.zeros(0, np.uint8)},
        {"page_kind": "float64"},
        {"page_kind": "int8"},
        {"page_tokens": 0},
        {"page_tokens": -8},
        {"page_tokens": 2**31 - 1},
        {"cos": np.zeros((63, 8), np.float32)},
        {"cos": np.zeros((64, 16), np.float32)},
        {"sin": np.zeros((64, 7), np.float32)},
        {"sin": np.zeros((32, 16), np.float32)},
        {"threads": 0},
        {"threads": -1},
        {"threads": -(2**31)},
    ],
    ids=lambda change: "-".join(f"{key}={getattr(value, 'shape', value)}" for key, value in change.items()),
)
def test_a_model_that_does_not_fit(change: dict[str, Any]) -> None:
    NATIVE.Model(**model_arguments())
    refused(lambda: NATIVE.Model(**model_arguments() | change))


@pytest.mark.parametrize(
    ("layer", "name", "outputs", "inputs"),
    [
        (0, "z", 64, 48),
        (2, "q", 64, 48),
        (-1, "q", 64, 48),
        (0, "q", 65, 48),
        (0, "q", 64, 47),
        (0, "k", 64, 48),
        (0, "v", 32, 49),
        (0, "o", 64, 48),
        (0, "gate", 81, 48),
        (1, "up", 80, 80),
        (1, "down", 80, 48),
        (0, "embedding", 96, 48),
        (0, "head", 97, 64),
    ],
)
def test_matrices_that_are_not_the_models(layer: int, name: str, outputs: int, inputs: int) -> None:
    model = NATIVE.Model(**model_arguments())
    data = np.zeros(-(-outputs // 64) * 64 * inputs * 4, np.uint8)
    refused(
        lambda: model.set_matrix(layer, name, "fp32", outputs, inputs, data, np.zeros((0, 0), np.float32)),
        (ValueError, IndexError),
    )


@pytest.mark.parametrize(
    ("layer", "name", "width"), [(0, "attention", 47), (0, "ffn", 49), (2, "ffn", 48), (0, "last", 48)]
)
def test_norms_that_are_not_the_models(layer: int, name: str, width: int) -> None:
    model = NATIVE.Model(**model_arguments())
    refused(lambda: model.set_norm(layer, name, np.ones(width, np.float32)), (ValueError, IndexError))


@pytest.mark.parametrize(("layer", "window"), [(2, 8), (-1, 8), (0, -1)])
def test_windows_that_are_not_the_models(layer: int, window: int) -> None:
    model = NATIVE.Model(**model_arguments())
    refused(lambda: model.set_window(layer, window), (ValueError, IndexError))


def step_arguments(rows: int = 3, vocab: int = 97) -> dict[str, Any]:
    """A step of one sequence, whose last row is sampled."""
    return {
        "tokens": np.arange(rows, dtype=np.int32),
        "spans": np.array([[0, rows, 0, 0]], np.int32),
        "tables": np.array([2], np.int32),
        "wanted": np.array([rows - 1], np.int32),
        "doubles": np.array([[0.0, 1.0, 0.0, 0.0, 0.0, 1.0]]),
        "integers": np.array([[0, 0, rows, 0, -1, 0, 0, -1, 0]], np.int64),
        "masks": np.empty((0, 1), np.uint32),
        "bias_ids": np.empty(0, np.int32),
        "biases": np.empty(0),
        "logs": np.empty(0, np.int32),
        "told": np.array([-1], np.int32),
        "sampled": np.zeros(1, np.int32),
        "logits": np.zeros((1, vocab), np.float32),
        "top_ids": np.empty(0, np.int32),
        "top_logprobs": np.empty(0),
    }


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("small")
    return folder, write_random_model(folder, context_length=64, seed=2)


STEP_DAMAGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "token beyond the vocabulary": changed("tokens", (1,), 97),
    "token before the vocabulary": changed("tokens", (0,), -1),
    "no rows in the spans": instead("spans", np.empty((0, 4), np.int32)),
    "narrow spans": instead("spans", np.array([[0, 3]], np.int32)),
    "wide spans": instead("spans", np.array([[0, 3, 0, 0, 0]], np.int32)),
    "more rows than tokens": changed("spans", (0, 1), 4),
    "fewer rows than tokens": changed("spans", (0, 1), 2),
    "a span of nothing": instead("spans", np.array([[0, 0, 0, 0], [0, 3, 0, 0]], np.int32)),
    "a span that begins later": changed("spans", (0, 0), 1),
    "position before the first": changed("spans", (0, 2), -1),
    "position beyond the context": changed("spans", (0, 2), 62),
    "position beyond its table": changed("spans", (0, 2), 6),
    "table that begins before the first": changed("spans", (0, 3), -1),
    "table that begins behind the last": changed("spans", (0, 3), 1),
    "no table": instead("tables", np.empty(0, np.int32)),
    "page beyond the pool": changed("tables", (0,), 10),
    "page before the pool": changed("tables", (0,), -1),
    "wanted row beyond the last": changed("wanted", (0,), 3),
    "wanted row before the first": changed("wanted", (0,), -1),
    "two wanted, one sampled": instead("wanted", np.array([1, 2], np.int32)),
    "wanted rows out of order": lambda arguments: arguments.update(
        wanted=np.array([2, 1], np.int32), sampled=np.zeros(2, np.int32), logits=np.zeros((2, 97), np.float32)
    ),
    "a row wanted twice": lambda arguments: arguments.update(
        wanted=np.array([2, 2], np.int32), sampled=np.zeros(2, np.int32), logits=np.zeros((2, 97), np.float32)
    ),
    "logits of another shape": instead("logits", np.zeros((1, 96), np.float32)),
    "too few parameters": instead("doubles", np.zeros((0, 6))),
    "narrow mask": lambda arguments: arguments.update(
        masks=np.zeros((1, 1), np.uint32),
        integers=np.array([[0, 0, 3, 0, 0, 0, 0, -1, 0]], np.int64),
    ),
}


@pytest.mark.parametrize("damage", STEP_DAMAGES)
def test_a_native_step_that_reaches_beyond_its_arrays(small: tuple[Path, ModelConfig], damage: str) -> None:
    pages = Pages("native", *small, tokens=8, pages=10)
    model: Any = pages.backend._model  # type: ignore[attr-defined]
    arguments = step_arguments()
    model.step(*arguments.values())
    assert arguments["sampled"][0] >= 0
    assert (pages.pool != POISON).any()
    pages.pool[:] = POISON
    STEP_DAMAGES[damage](arguments)
    refused(lambda: model.step(*arguments.values()))


def test_a_step_without_rows_is_nothing(small: tuple[Path, ModelConfig]) -> None:
    pages = Pages("native", *small, tokens=8, pages=10)
    model: Any = pages.backend._model  # type: ignore[attr-defined]
    none = {key: np.empty((0, *value.shape[1:]), value.dtype) for key, value in step_arguments().items()}
    model.step(*none.values())
    assert (pages.pool == POISON).all()


def test_a_step_before_the_weights_are_there() -> None:
    model = NATIVE.Model(**model_arguments())
    refused(lambda: model.step(*step_arguments().values()), (ValueError, RuntimeError))


# ── the backend ───────────────────────────────────────────────────────────────────────────────


def test_backends_that_cannot_be_opened(small: tuple[Path, ModelConfig]) -> None:
    folder, config = small
    shape = config.page_shape(8, "float32")
    pool = np.zeros(shape.page_bytes * 2, np.uint8)
    for threads in (0, -1):
        with pytest.raises(StartError, match="threads"):
            open_backend("native", folder, pool, shape, threads)
    with pytest.raises((StartError, ValueError), match="abacus"):
        NativeBackend(folder, pool, shape, 1, variant="abacus")
    with pytest.raises(StartError, match="not some pages"):
        open_backend("native", folder, pool[:-4], shape, 1)
    float8 = config.page_shape(8, "float8")
    with pytest.raises(StartError, match="not some pages"):
        open_backend("native", folder, np.zeros(float8.page_bytes + 1, np.uint8), float8, 1)


@pytest.mark.parametrize("size", [0, 10, 60, -1, -4096])
def test_a_packed_file_that_is_cut_short_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], size: int
) -> None:
    config = write_random_model(tmp_path, seed=2)
    expected = first_logits(tmp_path, config)
    path = packed_file(tmp_path, config, FP8)
    whole = path.read_bytes()
    path.write_bytes(whole[:size])
    assert np.array_equal(first_logits(tmp_path, config), expected)
    assert "packing anew" in capsys.readouterr().err
    assert path.read_bytes() == whole


@pytest.mark.parametrize("place", [0, 9, 13, 20, 40])
def test_a_packed_file_whose_head_is_damaged_is_made_again(tmp_path: Path, place: int) -> None:
    config = write_random_model(tmp_path, seed=2)
    expected = first_logits(tmp_path, config)
    path = packed_file(tmp_path, config, FP8)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 0x11
    path.write_bytes(damaged)
    with pytest.raises(ModelError, match=str(path)):
        PackedWeights(path, config, FP8)
    assert np.array_equal(first_logits(tmp_path, config), expected)


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    config = write_random_model(tmp_path, seed=2)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    save_file(tensors, tmp_path / WEIGHTS)
    shape = config.page_shape(8, "float32")
    pool = np.zeros(shape.page_bytes, np.uint8)
    for kind in ("fp8", "bf16", "fp32", "int8"):
        with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or Inf"):
            open_backend("native", tmp_path, pool, shape, 1, WeightFormat(kind, kind))  # type: ignore[arg-type]


def first_logits(folder: Path, config: ModelConfig) -> np.ndarray:
    logits = Pages("native", folder, config, pages=4, kind="fp8").step([Chunk(0, 0, [1, 2, 3])]).logits
    assert logits is not None
    return logits


# ── numbers that are not finite ───────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_sequence_with_ruined_pages_spares_the_others(
    small: tuple[Path, ModelConfig], variant: str, dtype: str
) -> None:
    pages = Pages("native", *small, pages=20, dtype=dtype, variant=variant)
    pages.step([Chunk(i, 0, [1, 2, 3], "none") for i in range(3)])
    table = pages.table(1, 3)
    pages.pool.reshape(-1, pages.shape.page_bytes)[table] = 0xFF
    rows = pages.rows([Chunk(i, 3, [4]) for i in range(3)])
    made = pages.backend.step(replace(rows, logprobs=(2, 2, 2)), return_logits=True)
    fresh = Pages("native", *small, pages=20, dtype=dtype, variant=variant)
    fresh.step([Chunk(i, 0, [1, 2, 3], "none") for i in range(3)])
    expected = fresh.step([Chunk(i, 3, [4]) for i in range(3)])
    assert made.tokens.tolist() == [expected.tokens[0], NO_TOKEN, expected.tokens[2]]
    assert made.logprobs[1] is None
    assert made.logprobs[0] == made.logprobs[2] is not None
    assert made.logits is not None
    assert expected.logits is not None
    assert np.array_equal(made.logits[[0, 2]], expected.logits[[0, 2]])
    assert np.isnan(made.logits[1]).all()
    # and later steps have forgotten it
    assert np.array_equal(
        pages.step([Chunk(2, 4, [5])]).logits,  # type: ignore[arg-type]
        fresh.step([Chunk(2, 4, [5])]).logits,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("which", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_one_bad_number_in_a_page_is_found(
    small: tuple[Path, ModelConfig], which: int, number: float
) -> None:
    """It lies at a position that every later query sees, and in rows and tiles with other sequences'."""
    pages = Pages("native", *small, pages=20)
    logs = [[7 + i, *range(40)] for i in range(4)]
    pages.step([Chunk(i, 0, log[:20], "none") for i, log in enumerate(logs)])
    fresh = Pages("native", *small, pages=20)
    fresh.pool[:] = pages.pool
    shape = pages.shape
    heads = pages.pool.view(np.float32).reshape(-1, shape.layers, 2, shape.kv_heads, 16, shape.head_dim)
    heads[pages.table(2, 20)[0], 0, which, 1, 5, 3] = number
    chunks = [Chunk(i, 20, log[20:24], "all") for i, log in enumerate(logs)]
    made, expected = pages.step(chunks), fresh.step(chunks)
    others = [*range(8), *range(12, 16)]
    assert made.tokens[others].tolist() == expected.tokens[others].tolist()
    assert np.array_equal(made.logits[others], expected.logits[others])  # type: ignore[index]
    assert np.isfinite(expected.logits).all()  # type: ignore[arg-type]
    if number == -np.inf and which == 0:
        return  # a score of minus infinity is no weight, and one of plus infinity no number
    assert made.tokens[8:12].tolist() == [NO_TOKEN] * 4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8"])
def test_a_token_whose_embedding_overflows_spares_the_others(
    tmp_path: Path, variant: str, dtype: str
) -> None:
    """Numbers that are finite and so great that their squares are not."""
    config = write_random_model(tmp_path, seed=2, tied=False)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[EMBEDDING][13] = 3e38
    tensors[EMBEDDING][14] = -3e38
    tensors[EMBEDDING][15, ::2] = 1e-44
    save_file(tensors, tmp_path / WEIGHTS)
    kinds: dict[str, Any] = {"kind": "fp32", "dtype": dtype, "variant": variant, "pages": 20}
    chunks = [
        Chunk(0, 0, [1, 2, 3]),
        Chunk(1, 0, [1, 13, 3], "all"),
        Chunk(2, 0, [14, 14], "all"),
        Chunk(3, 0, [15, 1], "all"),
        Chunk(4, 0, [5] * 30),
    ]
    made = Pages("native", tmp_path, config, **kinds).step(chunks)
    expected = [
        Pages("native", tmp_path, config, **kinds).step([chunk]).tokens.tolist()
        for chunk in (chunks[0], chunks[3], chunks[4])
    ]
    assert made.tokens[[0]].tolist() == expected[0]
    assert made.tokens[6:8].tolist() == expected[1]
    assert made.tokens[[8]].tolist() == expected[2]
    assert NO_TOKEN not in made.tokens[[0, 1, 6, 7, 8]]
    again = Pages("native", tmp_path, config, **kinds | {"variant": VARIANTS[0]}).step(chunks)
    assert made.tokens.tolist() == again.tokens.tolist()


def test_float16_pages_that_overflow_end_their_own_sequence_only(tmp_path: Path) -> None:
    config = write_random_model(tmp_path, seed=2)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors["model.layers.0.self_attn.v_proj.weight"] *= np.float32(4e4)
    tensors["model.norm.weight"] *= np.float32(1e-6)
    save_file(tensors, tmp_path / WEIGHTS)
    logs = [[i, i + 1, i + 2] for i in range(90)]
    chunks = [Chunk(i, 0, log) for i, log in enumerate(logs)]
    made = Pages("native", tmp_path, config, dtype="float16", kind="fp32").step(chunks).tokens.tolist()
    alone = [
        Pages("native", tmp_path, config, dtype="float16", kind="fp32", pages=2).step([chunk]).tokens[0]
        for chunk in chunks
    ]
    assert made == alone
    assert made.count(NO_TOKEN) > 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0, top_k=2**31, seed=2**64 - 1, choice=2**64 - 1),
        SamplingParams(temperature=1.0, top_k=2**63 - 1),
        SamplingParams(temperature=5e-324, top_p=5e-324, min_p=1.0),
        SamplingParams(temperature=1.7e308, top_p=1.0, min_p=0.0),
        SamplingParams(repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0),
    ],
)
def test_parameters_at_their_limits_are_sampled_with(
    small: tuple[Path, ModelConfig], params: SamplingParams
) -> None:
    log = TokenLog(np.array([1, 2, 3], np.int32), 1)
    tokens = []
    for name in ("native", "reference"):
        pages = Pages(name, *small, pages=10)
        rows = replace(pages.rows([Chunk(0, 0, [1, 2, 3], params=params)]), logs=(log,), logprobs=(1000,))
        result = pages.backend.step(rows)
        tokens.append(int(result.tokens[0]))
        assert result.logprobs[0] is not None
        assert len(result.logprobs[0].top) == 97
    assert tokens[0] == tokens[1]


def test_the_machines_byte_order_is_looked_at(small: tuple[Path, ModelConfig]) -> None:
    folder, config = small
    path = pack(folder, FP8)
    data = bytearray(path.read_bytes())
    order = struct.unpack_from("=I", data, 12)[0]
    struct.pack_into(">I" if struct.pack("=I", 1) == struct.pack("<I", 1) else "<I", data, 12, order)
    other = folder / "other.packed"
    other.write_bytes(data)
    with pytest.raises(ModelError, match="another byte order"):
        PackedWeights(other, config, FP8)
