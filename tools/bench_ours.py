"""Our side of a comparison: a backend driven by hand, without actors, and what its work costs at least.

A `Driven` backend holds some sequences in a pool of its own and times what other engines are timed at:
decode of one stream, a job of many sequences, prefill, a step that verifies drafts.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.model import read_config
from engine.sampling import GREEDY
from kernels.backend import Rows
from kernels.backends import open_backend
from kernels.cpu import native
from kernels.formats import ITEM_BYTES, WeightFormat
from kernels.weights import matrix_sizes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from engine.sampling import SamplingParams
    from engine.shapes import KVDtype
    from kernels.backend import Backend
    from kernels.formats import Activations

PAGE_TOKENS = 16
MATRIX_PHASES = ("qkv", "output", "ffn", "head")
"""Phases in which a backend reads its matrices."""
VERIFIED = 5
"""Rows of a step that verifies four drafts."""
LOOKED_MIB = 256
"""Read in a look at the bandwidth: more than the caches of a core's neighbours hold."""
REPEATS = 24
"""Steps of each width in one round of `step_times`."""


class Piece(NamedTuple):
    """Consecutive rows of one sequence in a step."""

    sequence: int
    position: int
    tokens: NDArray[np.int32]
    samples: int = 1
    """So many of the last rows need logits."""


class Spent(NamedTuple):
    """What some work took."""

    wall_s: float
    tokens: int
    steps_wall_s: float
    """Inside `Backend.step`."""
    phases: Mapping[str, float] | None
    """Seconds by phase inside native code; None of a backend that does not tell."""

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.wall_s

    @property
    def outside_native(self) -> float | None:
        """The share of the time in steps that was not spent in native code."""
        if self.phases is None:
            return None
        return 1.0 - sum(self.phases.values()) / self.steps_wall_s

    @property
    def matrices_s(self) -> float | None:
        """Seconds in the phases that read matrices."""
        return None if self.phases is None else sum(self.phases[name] for name in MATRIX_PHASES)


class Streamed(NamedTuple):
    """Some steps, and what the machine could do just before or after them, whichever was more."""

    spent: Spent
    looked: float


@dataclass(slots=True)
class Job:
    """What a job of several sequences took, in its two parts."""

    prefill: Spent
    decode: Spent

    @property
    def rate(self) -> float:
        """All tokens, of prompts and answers, a second."""
        return (self.prefill.tokens + self.decode.tokens) / (self.prefill.wall_s + self.decode.wall_s)


class Driven:
    """A backend over a pool that holds `sequences` sequences of `context` tokens.

    `weights` and `activations` are for a backend that has several formats. StartError or ModelError as
    `open_backend`.
    """

    def __init__(
        self,
        backend: str,
        folder: Path,
        sequences: int,
        context: int,
        *,
        threads: int,
        kv: KVDtype,
        weights: WeightFormat | None = None,
        activations: Activations | None = None,
        seed: int = 0,
    ) -> None:
        self.config = read_config(folder)
        self.sequences = sequences
        shape = self.config.page_shape(PAGE_TOKENS, kv)
        pages = shape.pages_for(context)
        # As the launcher's: shared memory, on a page boundary. An array of numpy's own begins 16 bytes
        # behind one, and every key would lie in one cache line more.
        pool = np.frombuffer(mmap.mmap(-1, sequences * pages * shape.page_bytes), np.uint8)
        pool.fill(0)  # so that no step is the first to touch a page of it
        self.backend: Backend = open_backend(backend, folder, pool, shape, threads, weights, activations)
        self._tables = [
            np.arange(first, first + pages, dtype=np.int32) for first in range(0, sequences * pages, pages)
        ]
        self._random = np.random.default_rng(seed)
        self._begin()

    def prompt(self, tokens: int) -> NDArray[np.int32]:
        """[tokens] drawn ids."""
        return self._random.integers(0, self.config.vocab_size, tokens, dtype=np.int32)

    def decode(self, tokens: int) -> Spent:
        """One stream from an empty context, each token fed back: as `llama-bench -p 0 -n TOKENS`."""
        self._step([Piece(0, 0, self.prompt(1))])  # warms up, as llama-bench does
        self._begin()
        self._continue(self.prompt(1), 0, tokens)
        return self._end(tokens)

    def decode_beside(self, look: Callable[[], float], slices: int, tokens: int) -> list[Streamed]:
        """One stream from an empty context in slices, and what `look` found just before and after each.

        What memory gives may change from one second to the next, where a hypervisor moves us about.
        """
        token, before, streamed = self.prompt(1), look(), []
        for number in range(slices):
            self._begin()
            token = self._continue(token, number * tokens, tokens)
            spent, after = self._end(tokens), look()
            streamed.append(Streamed(spent, max(before, after)))
            before = after
        return streamed

    def prefill(self, tokens: int) -> Spent:
        """A prompt in one step, whose last row is sampled: as `llama-bench -p TOKENS -n 0`."""
        prompt = self.prompt(tokens)
        self._begin()
        self._step([Piece(0, 0, prompt)])
        return self._end(tokens)

    def decode_steps(
        self,
        batch: int,
        context: int,
        steps: int,
        params: SamplingParams = GREEDY,
        took: Callable[[], object] = lambda: None,
    ) -> list[Spent]:
        """What each of so many decode steps of `batch` sequences took, from `context` tokens on.

        One step before them warms up. `took()` is called after each.
        """
        for number in range(batch):
            self._step([Piece(number, 0, self.prompt(context))])
        spent = []
        for position in range(context, context + steps + 1):
            self._begin()
            self._step([Piece(number, position, self.prompt(1)) for number in range(batch)], params)
            spent.append(self._end(batch))
            took()
        return spent[1:]

    def job(self, prompt: int, generated: int, prefill_rows: int) -> Job:
        """All sequences: first the prompts, in steps of so many rows, then decode of all together.

        The last row of each prompt is sampled and `generated` decode steps follow, as llama-batched-bench
        has it; that is one step more than is needed for so many new tokens.
        """
        self._begin()
        tokens = np.empty(self.sequences, np.int32)
        left = [Piece(number, 0, self.prompt(prompt)) for number in range(self.sequences)]
        while left:
            now, left = first_rows(left, prefill_rows)
            sampled = [piece.sequence for piece in now if piece.samples]
            tokens[sampled] = self._step(now)
        prefilled = self._end(self.sequences * prompt)
        self._begin()
        for position in range(prompt, prompt + generated):
            tokens = self._step(
                [Piece(number, position, tokens[number : number + 1]) for number in range(self.sequences)]
            )
        return Job(prefilled, self._end(self.sequences * generated))

    def step_times(self, context: int) -> tuple[float, float]:
        """Median seconds of a step of one row, and of one of VERIFIED, each sampled, behind so many tokens.

        They take turns, so that both meet the same machine.
        """
        self._step([Piece(0, 0, self.prompt(context))])
        times: dict[int, list[float]] = {1: [], VERIFIED: []}
        for _ in range(REPEATS):
            for rows, spent in times.items():
                self._begin()
                self._step([Piece(0, context, self.prompt(rows), rows)])
                spent.append(self._steps_wall)
        return float(np.median(times[1])), float(np.median(times[VERIFIED]))

    def _continue(self, token: NDArray[np.int32], first: int, tokens: int) -> NDArray[np.int32]:
        """So many steps of one stream from position `first` on, each token fed back; the last one."""
        for position in range(first, first + tokens):
            token = self._step([Piece(0, position, token)])
        return token

    def _begin(self) -> None:
        self._steps_wall = 0.0
        self._phases_before = phases(self.backend)
        self._began = time.perf_counter()

    def _end(self, tokens: int) -> Spent:
        wall = time.perf_counter() - self._began
        after, before = phases(self.backend), self._phases_before
        grown = None
        if after is not None and before is not None:
            grown = {name: seconds - before.get(name, 0.0) for name, seconds in after.items()}
        return Spent(wall, tokens, self._steps_wall, grown)

    def _step(self, pieces: Sequence[Piece], params: SamplingParams = GREEDY) -> NDArray[np.int32]:
        """One step; the sampled tokens."""
        rows = self._rows(pieces, params)
        started = time.perf_counter()
        result = self.backend.step(rows)
        self._steps_wall += time.perf_counter() - started
        return result.tokens

    def _rows(self, pieces: Sequence[Piece], params: SamplingParams) -> Rows:
        counts = [len(piece.tokens) for piece in pieces]
        total = sum(counts)
        needs = np.zeros(total, np.bool_)
        drafts = np.zeros(total, np.bool_)
        positions = np.empty(total, np.int32)
        end = 0
        for piece, count in zip(pieces, counts, strict=True):
            positions[end : end + count] = np.arange(piece.position, piece.position + count)
            end += count
            needs[end - piece.samples : end] = True
            if piece.samples > 1:  # the first of them is committed, the others are drafts
                drafts[end - piece.samples + 1 : end] = True
        return Rows(
            sequence=np.repeat(np.arange(len(pieces), dtype=np.int32), counts),
            position=positions,
            token=np.concatenate([piece.tokens for piece in pieces]),
            is_draft=drafts,
            needs_logits=needs,
            masks=(None,) * total,
            block_tables=tuple(self._tables[piece.sequence] for piece in pieces),
            sampling=(params,) * len(pieces),
        )


def first_rows(pieces: Sequence[Piece], most: int) -> tuple[list[Piece], list[Piece]]:
    """The pieces' first `most` rows, and what is left; a piece that is cut is sampled at its end only."""
    now: list[Piece] = []
    for index, piece in enumerate(pieces):
        if most >= len(piece.tokens):
            now.append(piece)
            most -= len(piece.tokens)
            continue
        rest = list(pieces[index + 1 :])
        if most:
            now.append(piece._replace(tokens=piece.tokens[:most], samples=0))
            piece = piece._replace(position=piece.position + most, tokens=piece.tokens[most:])  # noqa: PLW2901
        return now, [piece, *rest]
    return now, []


def phases(backend: Backend) -> Mapping[str, float] | None:
    """Seconds by phase since the backend was opened; None when it does not tell."""
    return dict(backend.phase_seconds()) or None


# ── the least that work costs ─────────────────────────────────────────────────────────────────


def matrix_bytes(config: ModelConfig, weights: WeightFormat) -> int:
    """Bytes of the weights that a step reads, each once; their scales (below 0.1 %) are not counted."""
    layers, head = matrix_sizes(config)
    return layers * ITEM_BYTES[weights.layers] + head * ITEM_BYTES[weights.head]


def job_flops(config: ModelConfig, sequences: int, prompt: int, generated: int) -> int:
    """Floating-point operations of `Driven.job`, two for a multiply-add.

    Every row passes all layers' matrices and attends to the positions up to its own; but of the last layer
    those of a prompt before its last one need keys and values only (and have queries, as the three are
    one product). The LM head is for the last row of a prompt and the decoded rows.
    """
    rows, unread = prompt + generated, prompt - 1
    width = 2 * config.heads * config.head_dim
    attention = width * (config.layers * rows * (rows + 1) // 2 - unread * (unread + 1) // 2)
    layers, head = matrix_sizes(config)
    qkv = config.hidden_size * (config.heads + 2 * config.kv_heads) * config.head_dim
    products = rows * layers - unread * (layers // config.layers - qkv) + (generated + 1) * head
    return 2 * sequences * (products + attention)


class Floor(NamedTuple):
    """What the machine can do."""

    bytes_s: float
    """Read from memory."""
    flop_s: float
    """Fused multiply-adds in fp32, two operations each."""


def read_bandwidth(threads: int) -> float:
    """Bytes a second that can be read from memory now: a quick look; StartError without native module."""
    return float(native().read_bandwidth(threads, LOOKED_MIB))


def machine_floor(threads: int) -> Floor:
    """Measured now by the native module; StartError when there is none."""
    module = native()
    return Floor(module.read_bandwidth(threads), module.fma_rate(threads))
