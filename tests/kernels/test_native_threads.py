"""Threads, processes and memory: what the native backend shares, and what it leaves behind."""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kernels import kernels
from row_steps import Chunk, Pages, random_logs

from kernels.random_model import write_random_model

if TYPE_CHECKING:
    from engine.model import ModelConfig

VARIANTS = kernels().variants()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig]:
    folder = tmp_path_factory.mktemp("threads")
    return folder, write_random_model(folder, seed=3, hidden_size=163, ffn_size=261, vocab_size=213)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_more_threads_than_work_or_cores_change_nothing(
    model: tuple[Path, ModelConfig], threads: int
) -> None:
    logs = random_logs(9, 40, 213, seed=0)
    expected = Pages("native", *model, kind="fp8").run(logs, batch=1, chunk=40)
    for batch, chunk in ((9, 7), (2, 40)):
        made = Pages("native", *model, kind="fp8", threads=threads).run(logs, batch=batch, chunk=chunk)
        assert all(np.array_equal(a, b) for a, b in zip(made, expected, strict=True))


@pytest.mark.parametrize("head_dim", [22, 64])
@pytest.mark.parametrize("window", [0, 700])
def test_threads_that_share_the_keys_of_a_head_change_nothing(
    tmp_path: Path, window: int, head_dim: int
) -> None:
    """Of a long sequence alone the keys of the last heads are cut into parts, which the last thread joins."""
    config = write_random_model(
        tmp_path, seed=4, heads=9, kv_heads=3, head_dim=head_dim, vocab_size=213, context_length=1200
    )
    [log] = random_logs(1, 1151, 213, seed=2)

    def backend(pool: np.ndarray | None, threads: int, variant: str) -> Pages:
        how: Any = {"kind": "fp8", "threads": threads, "variant": variant, "dtype": "float16", "pages": 80}
        pages = Pages("native", tmp_path, config, pool=pool, **how)
        native: Any = pages.backend
        native._model.set_window(1, window)
        return pages

    def logits(pages: Pages, cuts: list[int]) -> list[Any]:
        return [pages.step([Chunk(0, start, log[start:end])]).logits for start, end in pairwise(cuts)]

    filled = backend(None, 1, VARIANTS[0])
    logits(filled, [0, 1100])
    cuts = [1100, 1101, 1102, 1107, 1124, 1151]
    expected = logits(backend(filled.pool.copy(), 1, "portable"), cuts)
    for variant in VARIANTS:
        for threads in (2, 4, 5):
            for _ in range(3):
                assert np.array_equal(logits(backend(filled.pool.copy(), threads, variant), cuts), expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_backends_that_step_at_once_do_not_meet(model: tuple[Path, ModelConfig], threads: int) -> None:
    """Four backends over the same packed file, of different variants, each in a Python thread of its own."""
    logs = random_logs(6, 60, 213, seed=1)
    expected = Pages("native", *model, kind="fp8").run(logs, batch=6, chunk=60)
    made: dict[int, list[np.ndarray]] = {}
    together = threading.Barrier(4)

    def work(number: int) -> None:
        variant = VARIANTS[number % len(VARIANTS)]
        pages = Pages("native", *model, kind="fp8", threads=threads, seed=number, variant=variant)
        together.wait(60)
        made[number] = pages.run(logs, batch=1 + number, chunk=9)

    workers = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(made) == [0, 1, 2, 3]
    for logits in made.values():
        assert all(np.array_equal(a, b) for a, b in zip(logits, expected, strict=True))


def mapped(folder: Path) -> int:
    """How many maps of this process are of packed files of the folder."""
    return sum(
        line.rstrip().endswith(".packed") and str(folder) in line
        for line in Path("/proc/self/maps").read_text().splitlines()
    )


def native_threads() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_backends_that_are_gone_leave_no_threads_and_no_maps(model: tuple[Path, ModelConfig]) -> None:
    before = native_threads()
    assert mapped(model[0]) == 0
    for round_ in range(30):
        pages = Pages("native", *model, kind="fp8", threads=3, pages=2)
        if round_ % 3:  # some never step
            pages.step([Chunk(0, 0, [1, 2, 3])])
        assert native_threads() == before + 2
        assert mapped(model[0]) == 1
        del pages
    assert native_threads() == before
    assert mapped(model[0]) == 0
    assert len(os.listdir("/proc/self/fd")) < 200


def test_the_backend_keeps_pool_and_weights_alive(model: tuple[Path, ModelConfig]) -> None:
    pages = Pages("native", *model, kind="fp8", threads=2)
    expected = pages.step([Chunk(0, 0, [1, 2, 3])])
    backend, rows = pages.backend, pages.rows([Chunk(0, 0, [1, 2, 3])])
    del pages
    gc.collect()
    again = backend.step(rows, return_logits=True)
    assert np.array_equal(again.logits, expected.logits)  # type: ignore[arg-type]


OTHER = """
import hashlib, sys
from pathlib import Path
from row_steps import Chunk, Pages
from engine.model import read_config
folder = Path(sys.argv[1])
pages = Pages("native", folder, read_config(folder), kind="fp8", threads=2)
logits = pages.step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits
print(hashlib.blake2b(logits.tobytes()).hexdigest(), pages.backend.numerics_id)
"""


def test_another_process_reads_the_same_file(model: tuple[Path, ModelConfig]) -> None:
    pages = Pages("native", *model, kind="fp8", threads=2)
    logits = pages.step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits
    assert logits is not None
    file = model[0] / "packed" / "fp8.packed"
    stamp = file.stat().st_mtime_ns
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    others = [
        subprocess.Popen(
            [sys.executable, "-c", OTHER, str(model[0])],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        for _ in range(2)
    ]
    expected = f"{hashlib.blake2b(logits.tobytes()).hexdigest()} {pages.backend.numerics_id}\n"
    assert [other.communicate(timeout=120)[0] for other in others] == [expected] * 2
    assert file.stat().st_mtime_ns == stamp  # nobody packed it again


def test_a_forked_child_opens_its_own(model: tuple[Path, ModelConfig]) -> None:
    """A child has none of its parent's helpers, but the file and the variants are there for it."""
    pages = Pages("native", *model, kind="fp8", threads=2)
    expected = pages.step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits
    child = os.fork()
    if not child:
        code = 1
        try:
            fresh = Pages("native", *model, kind="fp8", threads=2)
            made = fresh.step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits
            code = 0 if np.array_equal(made, expected) else 2  # type: ignore[arg-type]
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(pages.step([Chunk(1, 0, [1, 2, 3, 4], "all")]).logits, expected)  # type: ignore[arg-type]


def test_the_interpreter_goes_on_during_a_step(model: tuple[Path, ModelConfig]) -> None:
    """Another Python thread runs in the middle of a step, which with the lock held none could."""
    pages = Pages("native", *model, kind="fp8", variant=VARIANTS[-1])
    log = random_logs(1, 400, 213, seed=1)[0]
    times: dict[str, float] = {}

    def work() -> None:
        rows = pages.rows([Chunk(0, 0, log, "none")])
        times["began"] = time.perf_counter()
        pages.backend.step(rows)
        times["ended"] = time.perf_counter()

    # a busy machine may keep us from running for as long as a step takes
    for _ in range(20):
        times.clear()
        worker = threading.Thread(target=work)
        worker.start()
        seen = []
        while worker.is_alive():
            seen.append(time.perf_counter())
        worker.join()
        margin = (times["ended"] - times["began"]) / 4
        if any(times["began"] + margin < moment < times["ended"] - margin for moment in seen):
            return
    pytest.fail("no other thread ran in the middle of a step")


def test_phases_are_the_time_inside(model: tuple[Path, ModelConfig]) -> None:
    pages = Pages("native", *model, kind="fp8", threads=2)
    backend: Any = pages.backend
    names = ["embed", "norm", "qkv", "attention", "output", "ffn", "head", "sample"]
    assert backend.phase_seconds() == dict.fromkeys(names, 0.0)
    rows = pages.rows([Chunk(i, 0, [1, 2, 3, 4] * 10) for i in range(8)])
    began = time.perf_counter()
    backend.step(rows)
    outside = time.perf_counter() - began
    first = backend.phase_seconds()
    assert sorted(first) == sorted(names)
    assert all(seconds > 0 for seconds in first.values())
    assert sum(first.values()) <= outside
    backend.step(rows)
    assert all(second > first[name] for name, second in backend.phase_seconds().items())


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are not pinned here")
def test_pinned_threads_have_the_same_bits(model: tuple[Path, ModelConfig]) -> None:
    from kernels.cpu.backend import NativeBackend

    expected = Pages("native", *model).step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits
    pages = Pages("native", *model)
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    for cores in ([core], [core, core], [core, core, core], [10_000, 10_001]):
        pages.backend = NativeBackend(model[0], pages.pool, pages.shape, 2, cores=cores)
        assert np.array_equal(pages.step([Chunk(0, 0, [1, 2, 3, 4], "all")]).logits, expected)  # type: ignore[arg-type]
    assert os.sched_getaffinity(0) == before
