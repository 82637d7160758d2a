"""A row's bits are its own: nothing but the tokens before it, the weights and the page dtype enters them.

Not its batch, its chunk, where its pages lie and how long they are, whether the tokens before were computed
in the same step, another one or by another backend, nor threads, nor the variant of the kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from native_kernels import kernels, pairwise
from row_steps import Chunk, Pages, random_logs

from engine.model import read_config
from kernels.random_model import write_random_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from engine.model import ModelConfig

VARIANTS = kernels().variants()
# Three blocks of scales across the inputs of the down projection, two of all others; nothing but the head's
# size, which rotary positions halve, is even.
ODD: dict[str, Any] = {
    "vocab_size": 213,
    "hidden_size": 163,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 22,
    "ffn_size": 261,
}
DTYPES = ["float32", "float16", "bfloat16", "float8"]
KINDS = [("fp32", "fp32"), ("bf16", "fp32"), ("fp8", "fp32"), ("fp8", "bf16"), ("int8", "fp32")]
"""Of weights, and what the inputs of FP8 matrices are rounded to."""
LONGEST = 150
LOGS = [
    log[: 129 - 8 * i if 0 < i < 8 else 16] if i else log
    for i, log in enumerate(random_logs(32, LONGEST, ODD["vocab_size"], seed=0))
]
CASES = pairwise(
    {
        "batch": [1, 2, 7, 32],
        "chunk": [1, 16, 100, LONGEST],
        "tokens": [8, 16, 32],
        "threads": [1, 2],
        "variant": VARIANTS,
        "kind": KINDS,
        "dtype": DTYPES,
        "path": ["whole", "prefix", "drafts", "sampled"],
    }
)


def case_id(case: dict[str, Any]) -> str:
    """The values of a case, for pytest."""
    return "-".join("/".join(value) if isinstance(value, tuple) else str(value) for value in case.values())


class Alone:
    """Logits and stored bytes of every position, each sequence by itself, one token a step, on one thread."""

    def __init__(self, folder: Path, config: ModelConfig, logs: list[list[int]]) -> None:
        self.folder, self.config, self.logs = folder, config, logs
        self._made: dict[tuple[Any, str], tuple[list[np.ndarray], list[np.ndarray]]] = {}

    def of(self, kind: Any, dtype: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """[n, vocab] logits and [n, layers, 2, kv_heads, bytes] of each sequence."""
        if (kind, dtype) not in self._made:
            pages = Pages("native", self.folder, self.config, dtype=dtype, kind=kind[0], activations=kind[1])
            logits = pages.run(self.logs, batch=1, chunk=1)
            stored = [pages.stored(i, len(log)) for i, log in enumerate(self.logs)]
            assert all(np.isfinite(part).all() for part in logits)
            self._made[kind, dtype] = logits, stored
        return self._made[kind, dtype]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    folder = tmp_path_factory.mktemp("odd")
    return Alone(folder, write_random_model(folder, seed=6, **ODD), LOGS)


def in_batches(
    pages: Pages, chunks_of: list[list[Chunk]], batch: int, keep: Callable[[Chunk, np.ndarray], None]
) -> None:
    """Step through each sequence's chunks, `batch` sequences together; `keep` gets each chunk's logits."""
    for first in range(0, len(chunks_of), batch):
        members = chunks_of[first : first + batch]
        for turn in range(max(map(len, members))):
            chunks = [chunks[turn] for chunks in members if turn < len(chunks)]
            logits = pages.step(chunks).logits
            assert logits is not None
            for chunk in chunks:
                count = sum(chunk.rows_with_logits())
                keep(chunk, logits[:count])
                logits = logits[count:]


def cut(sequence: int, log: list[int], start: int, size: int) -> list[Chunk]:
    return [
        Chunk(sequence, at, log[at : min(at + size, len(log))], "all") for at in range(start, len(log), size)
    ]


def whole(pages: Pages, logs: list[list[int]], batch: int, chunk: int) -> list[dict[int, np.ndarray]]:
    """Every position, in chunks."""
    made: list[dict[int, np.ndarray]] = [{} for _ in logs]

    def keep(part: Chunk, logits: np.ndarray) -> None:
        made[part.sequence] |= {part.position + i: row for i, row in enumerate(logits)}

    in_batches(pages, [cut(i, log, 0, chunk) for i, log in enumerate(logs)], batch, keep)
    return made


def prefix(pages: Pages, logs: list[list[int]], batch: int, chunk: int) -> list[dict[int, np.ndarray]]:
    """The whole pages of the first half are filled by other sequences; then come the rest's positions."""
    made: list[dict[int, np.ndarray]] = [{} for _ in logs]
    halves = [len(log) // 2 // pages.shape.tokens * pages.shape.tokens for log in logs]
    others = [
        cut(1000 + i, log[:half], 0, chunk) for i, (log, half) in enumerate(zip(logs, halves, strict=True))
    ]
    in_batches(pages, others, batch, lambda _chunk, _logits: None)
    for i, half in enumerate(halves):
        pages.share(i, pages.table(1000 + i, half))

    def keep(part: Chunk, logits: np.ndarray) -> None:
        made[part.sequence] |= {part.position + i: row for i, row in enumerate(logits)}

    in_batches(pages, [cut(i, log, halves[i], chunk) for i, log in enumerate(logs)], batch, keep)
    return made


def drafts(pages: Pages, logs: list[list[int]], batch: int, chunk: int) -> list[dict[int, np.ndarray]]:
    """The first third in chunks, then steps that verify up to seven drafts, the last ones of them wrong."""
    random = np.random.default_rng(chunk)
    made: list[dict[int, np.ndarray]] = [{} for _ in logs]
    chunks_of = []
    right: dict[int, int] = {}
    for i, log in enumerate(logs):
        at = max(1, len(log) // 3)
        chunks = cut(i, log[:at], 0, chunk)
        while at < len(log):
            drafted = int(random.integers(0, 8))
            accepted = int(random.integers(0, drafted + 1))
            tokens = log[at : at + 1 + accepted]
            wrong = random.integers(0, ODD["vocab_size"], drafted - accepted).tolist()
            chunks.append(Chunk(i, at, tokens + wrong, "all", drafts=len(tokens) - 1 + len(wrong)))
            right[id(chunks[-1])] = len(tokens)
            at += len(tokens)
        chunks_of.append(chunks)

    def keep(part: Chunk, logits: np.ndarray) -> None:
        count = right.get(id(part), len(part.tokens))
        made[part.sequence] |= {part.position + i: row for i, row in enumerate(logits[:count])}

    in_batches(pages, chunks_of, batch, keep)
    return made


def sampled(pages: Pages, logs: list[list[int]], batch: int, chunk: int) -> list[dict[int, np.ndarray]]:
    """Of a chunk all rows are sampled, its last one, or none: others do not finish the last layer."""
    random = np.random.default_rng(batch + chunk)
    made: list[dict[int, np.ndarray]] = [{} for _ in logs]
    chunks_of = [cut(i, log, 0, chunk) for i, log in enumerate(logs)]
    for part in (part for chunks in chunks_of for part in chunks):
        part.logits = str(random.choice(["none", "last", "all"]))
    chunks_of[0][-1].logits = "last"

    def keep(part: Chunk, logits: np.ndarray) -> None:
        first = part.position + len(part.tokens) - len(logits)
        made[part.sequence] |= {first + i: row for i, row in enumerate(logits)}

    in_batches(pages, chunks_of, batch, keep)
    return made


PATHS = {"whole": whole, "prefix": prefix, "drafts": drafts, "sampled": sampled}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_logits_and_pages_of_a_random_model(alone: Alone, case: dict[str, Any]) -> None:
    batch, chunk = case["batch"], case["chunk"]
    expected, expected_bytes = alone.of(case["kind"], case["dtype"])
    # the portable kernels take a millisecond a token
    logs = LOGS if case["variant"] != "portable" or batch == 32 else LOGS[:4]
    kinds = {key: case[key] for key in ("tokens", "threads", "variant", "dtype")}
    kinds["kind"], kinds["activations"] = case["kind"]
    pages = Pages("native", alone.folder, alone.config, pages=600, seed=batch * chunk, **kinds)
    made = PATHS[case["path"]](pages, logs, batch, chunk)
    check(pages, logs, made, expected, expected_bytes, case["path"])


def check(
    pages: Pages,
    logs: list[list[int]],
    made: list[dict[int, np.ndarray]],
    expected: list[np.ndarray],
    expected_bytes: list[np.ndarray],
    path: str,
) -> None:
    """Every logit that was made, and every byte that was stored, is what was expected."""
    for i, rows in enumerate(made):
        for position, logits in rows.items():
            assert np.array_equal(logits, expected[i][position]), (i, position)
        assert np.array_equal(pages.stored(i, len(logs[i])), expected_bytes[i][: len(logs[i])]), i
    # All but the prefix, which is half of a sequence at most; some where not all are sampled.
    assert sum(map(len, made)) >= (1 if path == "sampled" else sum(map(len, logs)) // 2)


def test_another_backend_goes_on_from_sealed_pages(alone: Alone) -> None:
    """Two backends over one pool: the second's sequences begin with pages that the first filled."""
    expected, expected_bytes = alone.of(("fp8", "bf16"), "float8")
    kinds: dict[str, Any] = {"dtype": "float8", "kind": "fp8", "activations": "bf16", "tokens": 8}
    first = Pages("native", alone.folder, alone.config, **kinds)
    first.run(LOGS[:3], batch=3, chunk=40, logits="none")
    second = Pages(
        "native", alone.folder, alone.config, threads=2, variant=VARIANTS[-1], pool=first.pool, **kinds
    )
    used = {page for i in range(3) for page in first.table(i, len(LOGS[i])).tolist()}
    second._free = [page for page in second._free if page not in used]
    made = []
    for i, log in enumerate(LOGS[:3]):
        shared = (len(log) - 1) // 8 * 8
        second.share(i, first.table(i, shared))
        result = second.step([Chunk(i, shared, log[shared:], "all")])
        assert result.logits is not None
        made.append(result.logits)
        assert np.array_equal(result.logits, expected[i][shared:])
        assert np.array_equal(second.stored(i, len(log)), expected_bytes[i])
    assert sum(map(len, made)) > 3


def random_shape(random: np.random.Generator) -> dict[str, Any]:
    """Heads of every width and share, and sizes that fit no strip, block or vector."""
    kv_heads, share = int(random.integers(1, 4)), int(random.choice([1, 2, 3, 7, 17, 33]))
    return {
        "kv_heads": kv_heads,
        "heads": kv_heads * share,
        "head_dim": 2 * int(random.choice([1, 3, 8, 9, 16, 17, 32, 40] if share < 10 else [1, 3, 8])),
        "hidden_size": int(random.integers(1, 300)),
        "ffn_size": int(random.integers(1, 300)),
        "vocab_size": int(random.integers(3, 200)),
        "layers": int(random.integers(1, 3)),
        "tied": bool(random.integers(2)),
    }


SLOW = pytest.mark.slow_native


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=SLOW) for seed in range(5, 20))])
def test_models_of_any_shape(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    config = write_random_model(tmp_path, seed=seed, **random_shape(random))
    (kind, activations), dtype = KINDS[seed % 5], DTYPES[seed // 5]
    formats: dict[str, Any] = {"kind": kind, "activations": activations, "dtype": dtype}
    logs = random_logs(3, int(random.integers(60, 200)), config.vocab_size, seed=seed)
    alone = Pages("native", tmp_path, config, **formats).run(logs, batch=1, chunk=1)
    for number, variant in enumerate(VARIANTS):
        for chunk in (int(random.integers(2, 60)), 200):
            tokens = int(random.choice([1, 3, 8, 16, 100]))
            kinds = formats | {"variant": variant, "tokens": tokens, "threads": 1 + number % 2}
            pages = Pages("native", tmp_path, config, pages=700, **kinds)
            some = logs[:1] if variant == "portable" else logs
            for ours, theirs in zip(pages.run(some, batch=3, chunk=chunk), alone, strict=False):
                assert np.array_equal(ours, theirs), (variant, chunk)


def test_steps_of_many_rows_between_small_ones(alone: Alone) -> None:
    """Buffers grow under way; what larger steps left in them is not read by smaller ones."""
    expected, _ = alone.of(("fp8", "bf16"), "float16")
    kinds: dict[str, Any] = {
        "dtype": "float16",
        "kind": "fp8",
        "activations": "bf16",
        "threads": 2,
        "pages": 700,
    }
    pages = Pages("native", alone.folder, alone.config, **kinds)
    steps = [
        [Chunk(0, 0, LOGS[0][:2], "all")],
        [Chunk(i, 0, LOGS[i % 32][:20], "all") for i in range(1, 40)],
        [Chunk(0, 2, LOGS[0][2:3], "all")],
        [Chunk(0, 3, LOGS[0][3:], "all"), *(Chunk(100 + i, 0, LOGS[i % 32][:100], "all") for i in range(9))],
        [Chunk(200, 0, LOGS[5][:1], "all"), Chunk(201, 0, LOGS[6][:2], "all")],
        [Chunk(300 + i, 0, LOGS[0][:5], "none") for i in range(50)] + [Chunk(400, 0, LOGS[2], "all")],
    ]
    of = {0: 0, 200: 5, 201: 6, 400: 2}
    for chunks in steps:
        logits = pages.step(chunks).logits
        assert logits is not None
        for chunk in chunks:
            count = sum(chunk.rows_with_logits())
            log = of.get(chunk.sequence, chunk.sequence % 100 % 32)
            assert np.array_equal(logits[:count], expected[log][chunk.position :][:count]), chunk.sequence
            logits = logits[count:]


FP8, BF16 = KINDS[3], KINDS[1]
REAL_AXES = ("batch", "chunk", "tokens", "threads", "path", "variant", "kind", "dtype")
REAL = [
    dict(zip(REAL_AXES, values, strict=True))
    for values in [
        (32, 103, 16, 2, "whole", 0, FP8, "float16"),
        (7, 16, 8, 1, "whole", 1, FP8, "float16"),
        (2, 100, 32, 2, "prefix", 2, FP8, "float16"),
        (7, 16, 16, 2, "drafts", 0, FP8, "float16"),
        (2, 2, 16, 1, "drafts", -1, FP8, "float16"),
        (32, 64, 16, 2, "sampled", 0, FP8, "float16"),
        (7, 103, 8, 2, "prefix", 0, BF16, "float8"),
        (2, 1, 32, 1, "whole", 2, BF16, "float8"),
    ]
]
REAL_LENGTHS = [103, 30, 20, 5, 5, 5, 5, *(2 for _ in range(25))]


@pytest.fixture(scope="module")
def real(model_folder: Path) -> Alone:
    config = read_config(model_folder)
    logs = random_logs(32, max(REAL_LENGTHS), config.vocab_size, seed=1)
    logs = [(log * 103)[:length] for log, length in zip(logs, REAL_LENGTHS, strict=True)]
    return Alone(model_folder, config, logs)


@pytest.mark.model
@pytest.mark.parametrize("case", REAL, ids=case_id)
def test_logits_and_pages_of_the_real_model(real: Alone, case: dict[str, Any]) -> None:
    kinds: dict[str, Any] = {key: case[key] for key in ("tokens", "threads", "dtype")}
    kinds["kind"], kinds["activations"] = case["kind"]
    expected, expected_bytes = real.of(case["kind"], case["dtype"])
    variant = VARIANTS[min(case["variant"], len(VARIANTS) - 1)]
    logs = real.logs[: max(7, case["batch"])]
    if variant == "portable":  # half a second a token
        logs = [log[:3] for log in logs[:2]]
    elif case["chunk"] == 1:
        logs = [log[:20] for log in logs[:2]]
    pages = Pages("native", real.folder, real.config, pages=160, variant=variant, **kinds)
    made = PATHS[case["path"]](pages, logs, case["batch"], case["chunk"])
    check(pages, logs, made, expected, expected_bytes, case["path"])
