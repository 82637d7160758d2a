"""The mapped weights: what is checked at opening, and that nothing is copied."""

from __future__ import annotations

import re
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from row_steps import Chunk, Pages
from safetensors.numpy import load_file, save_file

from engine.errors import ModelError
from engine.model import WEIGHTS, read_config
from kernels.random_model import write_random_model
from kernels.weights import Weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_random_model(tmp_path, tied=False)
    return tmp_path


def test_random_model_is_quick_valid_and_repeatable(tmp_path: Path) -> None:
    started = time.perf_counter()
    first = write_random_model(tmp_path / "a", seed=3)
    assert time.perf_counter() - started < 1.0  # 2 ms on an idle machine
    assert write_random_model(tmp_path / "b", seed=3) == first == read_config(tmp_path / "a")
    assert write_random_model(tmp_path / "c", seed=4).weights_id != first.weights_id


def test_tensors_are_those_of_the_file(folder: Path) -> None:
    weights = Weights(folder, read_config(folder))
    for name, tensor in load_file(folder / WEIGHTS).items():
        assert np.array_equal(weights[name], tensor)
        assert not weights[name].flags.writeable
    assert np.array_equal(weights.head(), weights["lm_head.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight: F32 \[48\] expected"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight: F32 \[97, 48\] expected"),
        (
            lambda t: t.update({"model.layers.1.mlp.up_proj.weight": np.zeros((48, 80), np.float32)}),
            r"layers\.1\.mlp\.up_proj\.weight: F32 \[80, 48\] expected, F32 \[48, 80\] found",
        ),
        (
            lambda t: t.update({"model.norm.weight": np.zeros(48, np.float16)}),
            r"model\.norm\.weight: F32 \[48\] expected, F16 \[48\] found",
        ),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: object, message: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)  # type: ignore[operator]
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match=message):
        Weights(folder, read_config(folder))


@pytest.mark.parametrize("keep", [0, 4, 300, -4])
def test_a_truncated_file_is_refused(folder: Path, keep: int) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    with pytest.raises(ModelError, match=re.escape(str(path))):
        Weights(folder, read_config(folder))


def test_a_config_of_another_model_is_refused(folder: Path) -> None:
    config = msgspec.structs.replace(read_config(folder), layers=3)
    with pytest.raises(ModelError, match=r"layers\.2\.input_layernorm\.weight"):
        Weights(folder, config)


@pytest.mark.model
def test_workers_share_the_weights(model_folder: Path) -> None:
    """No private copy: the map has no anonymous page while a backend computes with it.

    A page that the process had written would be anonymous; dirty ones may be the page cache's own, not yet
    on disk.
    """
    pages = Pages("torch", model_folder, read_config(model_folder), pages=4)
    pages.step([Chunk(0, 0, [1, 2, 3])])
    maps = re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
    ours = [entry for entry in maps if str(model_folder / WEIGHTS) in entry.split("\n", 1)[0]]
    resident = [int(kib) * 1024 for kib in re.findall(r"^Rss: +(\d+) kB", "\n".join(ours), re.M)]
    assert max(resident) > (model_folder / WEIGHTS).stat().st_size // 2
    assert set(re.findall(r"^Anonymous: +(\d+) kB", "\n".join(ours), re.M)) == {"0"}
