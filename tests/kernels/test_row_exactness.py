"""A row's bits are its own: batch, chunk, page size, page placement, threads and neighbours do not enter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from row_steps import Chunk, Pages, random_logs

from engine.model import ModelConfig, read_config
from kernels.random_model import write_random_model

if TYPE_CHECKING:
    from pathlib import Path

ODD = {"vocab_size": 131, "hidden_size": 52, "heads": 6, "kv_heads": 2, "head_dim": 10, "ffn_size": 77}
LOGS = random_logs(32, 150, 131, seed=0)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("odd")
    return folder, write_random_model(folder, seed=6, **ODD)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone(odd: tuple[Path, ModelConfig]) -> dict[str, list[np.ndarray]]:
    """Logits of every row by page dtype, each sequence by itself, one token at a time, on one thread."""
    folder, config = odd
    return {
        dtype: Pages("torch", folder, config, dtype=dtype).run(LOGS, batch=1, chunk=1)
        for dtype in ("float32", "bfloat16")
    }


# Every value of every axis, the extremes together; the full product was seen to hold too.
@pytest.mark.parametrize(
    ("batch", "chunk", "tokens", "threads"),
    [
        (1, 1, 8, 2),
        (1, 16, 16, 2),
        (1, 100, 32, 1),
        (1, 150, 16, 1),
        (2, 1, 32, 1),
        (2, 16, 8, 1),
        (2, 100, 16, 2),
        (2, 150, 8, 2),
        (7, 1, 16, 1),
        (7, 16, 32, 2),
        (7, 100, 8, 1),
        (7, 150, 32, 2),
        (32, 1, 8, 2),
        (32, 16, 16, 1),
        (32, 100, 8, 2),
        (32, 150, 32, 1),
    ],
)
def test_logits_of_a_random_model(
    odd: tuple[Path, ModelConfig],
    alone: dict[str, list[np.ndarray]],
    batch: int,
    chunk: int,
    tokens: int,
    threads: int,
) -> None:
    # one token at a time is a step a token: keep the slow combinations few
    logs = LOGS if batch == 32 or chunk > 1 else LOGS[:7]
    folder, config = odd
    dtype = "bfloat16" if tokens == 32 else "float32"
    pages = Pages("torch", folder, config, tokens=tokens, dtype=dtype, pages=900, threads=threads, seed=chunk)
    made = pages.run(logs, batch=batch, chunk=chunk)
    for ours, expected in zip(made, alone[dtype], strict=False):
        assert np.array_equal(ours, expected)


@pytest.mark.model
def test_pages_and_logits_of_the_real_model(model_folder: Path) -> None:
    """The stored keys and values of every row, and the logits of the last, on the default model."""
    config = read_config(model_folder)
    logs = random_logs(32, 12, config.vocab_size, seed=1)
    logs[:3] = [log * 40 for log in logs[:3]]
    logs[:3] = [log[:length] for log, length in zip(logs, (90, 40, 20), strict=False)]

    def run(batch: int, chunk: int, count: int, **kind: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        pages = Pages("torch", model_folder, config, pages=140, **kind)
        made = pages.run(logs[:count], batch=batch, chunk=chunk, logits="last")
        return [logits[-1] for logits in made], [pages.stored(i, len(logs[i])) for i in range(count)]

    expected = run(batch=32, chunk=1000, count=32, tokens=16, threads=2, seed=1)
    for case in (
        {"batch": 1, "chunk": 1000, "count": 32, "tokens": 32, "threads": 1, "seed": 2},
        {"batch": 7, "chunk": 16, "count": 32, "tokens": 8, "threads": 2, "seed": 3},
        {"batch": 2, "chunk": 100, "count": 3, "tokens": 32, "threads": 2, "seed": 4},
        {"batch": 3, "chunk": 1, "count": 3, "tokens": 16, "threads": 1, "seed": 5},
    ):
        made = run(**case)  # type: ignore[arg-type]
        for ours, theirs in zip(made, expected, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=False)), case


def test_workers_that_compute_alike_have_one_id(odd: tuple[Path, ModelConfig], tmp_path: Path) -> None:
    folder, config = odd
    ids = {Pages("torch", folder, config, threads=threads).backend.numerics_id for threads in (1, 2)}
    assert len(ids) == 1
    assert f":fp32:{config.weights_id}:kv-float32:tp1" in ids.pop()
    half = Pages("torch", folder, config, dtype="float16").backend.numerics_id
    assert half not in ids
    other = write_random_model(tmp_path, seed=7, **ODD)  # type: ignore[arg-type]
    assert Pages("torch", tmp_path, other).backend.numerics_id not in (half, *ids)


def test_a_sequence_survives_a_change_of_worker(odd: tuple[Path, ModelConfig], alone: dict[str, Any]) -> None:
    """A second backend over the same pool and block table goes on with the bits of the first."""
    folder, config = odd
    first = Pages("torch", folder, config, threads=1)
    first.step([Chunk(0, 0, LOGS[0][:90], "none")])
    second = Pages("torch", folder, config, threads=2)
    second.pool[:] = first.pool
    rows = first.rows([Chunk(0, 90, LOGS[0][90:91])])
    result = second.backend.step(rows, return_logits=True)
    assert np.array_equal(result.logits, alone["float32"][0][90:91])  # type: ignore[arg-type]
