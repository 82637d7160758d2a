"""Drives a backend in tests: sequences with randomly placed pages, stepped in any mixture of rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from engine.sampling import GREEDY, SamplingParams
from kernels.backend import Backend, Rows, StepResult
from kernels.backends import open_backend
from kernels.formats import WeightFormat

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from kernels.formats import Activations, WeightKind

POISON = 0xFF
"""Every byte of a fresh pool: NaN in all page dtypes."""


@dataclass
class Chunk:
    """Rows of one sequence for one step: the next `len(tokens)` positions from `position` on."""

    sequence: int
    position: int
    tokens: list[int]
    logits: str = "last"
    """Which rows need logits: none, last or all."""
    drafts: int = 0
    """How many of the last rows were drafted."""
    mask: NDArray[np.uint32] | None = None
    params: SamplingParams = field(default=GREEDY)

    def rows_with_logits(self) -> list[bool]:
        count = len(self.tokens)
        if self.logits == "all":
            return [True] * count
        return [False] * (count - 1) + [self.logits == "last"]


class Pages:
    """A backend over a poisoned pool, and block tables of pages drawn at random."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: ModelConfig,
        *,
        tokens: int = 16,
        dtype: str = "float32",
        pages: int = 400,
        threads: int = 1,
        seed: int = 0,
        kind: WeightKind | None = None,
        activations: Activations | None = None,
        variant: str | None = None,
        pool: NDArray[np.uint8] | None = None,
    ) -> None:
        """`kind`, `activations` and `variant` are of the native backend; `pool`: another's."""
        self.shape = config.page_shape(tokens, dtype)
        self.pool = np.full(pages * self.shape.page_bytes, POISON, np.uint8) if pool is None else pool
        weights = None if kind is None else WeightFormat(kind, kind)
        self.backend: Backend
        if variant is None:
            self.backend = open_backend(name, folder, self.pool, self.shape, threads, weights, activations)
        else:
            from kernels.cpu.backend import NativeBackend

            self.backend = NativeBackend(
                folder, self.pool, self.shape, threads, weights, activations=activations, variant=variant
            )
        self._free = np.random.default_rng(seed).permutation(pages).astype(np.int32).tolist()
        self._tables: dict[int, list[int]] = {}

    def table(self, sequence: int, positions: int) -> NDArray[np.int32]:
        """The sequence's block table, grown to cover the given number of positions."""
        table = self._tables.setdefault(sequence, [])
        while len(table) * self.shape.tokens < positions:
            table.append(self._free.pop())
        return np.array(table, np.int32)

    def share(self, sequence: int, table: NDArray[np.int32]) -> None:
        """Let a new sequence begin with pages that are filled; they stay whose they were."""
        assert sequence not in self._tables
        self._tables[sequence] = table.tolist()

    def rows(self, chunks: list[Chunk]) -> Rows:
        """The step's rows of the given chunks, in their order."""
        counts = [len(chunk.tokens) for chunk in chunks]
        return Rows(
            sequence=np.repeat(np.arange(len(chunks), dtype=np.int32), counts),
            position=np.concatenate(
                [np.arange(c.position, c.position + len(c.tokens), dtype=np.int32) for c in chunks]
            ),
            token=np.array([token for c in chunks for token in c.tokens], np.int32),
            is_draft=np.array([i >= len(c.tokens) - c.drafts for c in chunks for i in range(len(c.tokens))]),
            needs_logits=np.array([needed for c in chunks for needed in c.rows_with_logits()]),
            masks=tuple(c.mask for c in chunks for _ in c.tokens),
            block_tables=tuple(self.table(c.sequence, c.position + len(c.tokens)) for c in chunks),
            sampling=tuple(c.params for c in chunks),
        )

    def step(self, chunks: list[Chunk]) -> StepResult:
        """One step with logits."""
        return self.backend.step(self.rows(chunks), return_logits=True)

    def run(
        self, logs: list[list[int]], *, batch: int, chunk: int, logits: str = "all"
    ) -> list[NDArray[np.float32]]:
        """Fill all logs, `batch` sequences at a time in chunks; returns each sequence's logits [n, vocab]."""
        made: list[list[NDArray[np.float32]]] = [[] for _ in logs]
        for first in range(0, len(logs), batch):
            members = range(first, min(first + batch, len(logs)))
            for start in range(0, max(len(logs[i]) for i in members), chunk):
                chunks = [
                    Chunk(i, start, logs[i][start : start + chunk], logits)
                    for i in members
                    if start < len(logs[i])
                ]
                result = self.step(chunks)
                assert result.logits is not None
                place = 0
                for part in chunks:
                    count = sum(part.rows_with_logits())
                    made[part.sequence].append(result.logits[place : place + count])
                    place += count
        return [np.concatenate(parts) for parts in made]

    def stored(self, sequence: int, positions: int) -> NDArray[np.uint8]:
        """Bytes of a sequence's keys and values, [positions, layers, 2, kv_heads, bytes of a head].

        Of float8 pages, each head's scale stands behind its codes.
        """
        shape = self.shape
        heads = self.pool.reshape(
            -1, shape.layers, 2, shape.kv_heads, self.shape.page_bytes // (shape.layers * 2 * shape.kv_heads)
        )
        at = np.arange(positions)
        pages, slots = self.table(sequence, positions)[at // shape.tokens], at % shape.tokens
        size = shape.tokens * shape.head_dim * shape.item_bytes
        parts = [
            part.reshape(*part.shape[:4], shape.tokens, -1)[pages, :, :, :, slots]
            for part in (heads[..., :size], heads[..., size:])
            if part.size
        ]
        return np.concatenate(parts, axis=-1)


def random_logs(count: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token logs of random lengths up to `longest`, the first of just that length."""
    random = np.random.default_rng(seed)
    lengths = [longest, *random.integers(1, longest + 1, count - 1).tolist()]
    return [random.integers(0, vocab_size, length).tolist() for length in lengths]
