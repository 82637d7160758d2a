"""The native backend: a Llama over packed weights; every step is one call into C++."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import StartError
from engine.model import read_config
from engine.sampling import TokenLogprobs
from kernels.backend import StepResult
from kernels.cpu import native
from kernels.formats import activations_for
from kernels.packed import PackedWeights, pack
from kernels.rotary import rotary_tables
from kernels.rows import check_pool, check_rows
from kernels.sampling import NO_TOKEN
from kernels.weights import EMBEDDING, FINAL_NORM, HEAD, default_format

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.sampling import SamplingParams
    from engine.shapes import PageShape
    from kernels.backend import Rows, TokenLog, WriterSlots
    from kernels.formats import Activations, WeightFormat
    from kernels.packed import PackedMatrix
    from kernels.rows import Span

NUMERICS = 2
"""To be raised whenever a kernel gives other bits than before: it is part of `numerics_id`."""

MATRICES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {"attention": "input_layernorm", "ffn": "post_attention_layernorm"}

SLOT_BYTES = 64
"""Of a writer's slot (`WriterSlots`)."""

_NO_LOGITS = np.empty(0, np.float32)
_NO_IDS = np.empty(0, np.int32)
_NO_LOGPROBS = np.empty(0, np.float64)
_NO_MASKS = np.empty((0, 1), np.uint32)


class NativeBackend:
    """The Backend protocol in C++.

    A row's tokens and logits are equal, to the bit, whatever other rows a step has, however many threads it
    runs on, and whichever variant of the kernels this processor takes.
    """

    def __init__(
        self,
        model_folder: Path,
        pool: NDArray[np.uint8],
        page_shape: PageShape,
        threads: int,
        weights: WeightFormat | None = None,
        *,
        activations: Activations | None = None,
        variant: str | None = None,
        cores: Sequence[int] = (),
        writers: WriterSlots | None = None,
    ) -> None:
        """Open the packed weights of a prepared folder, packing them first unless they are there.

        `activations`: what the inputs of FP8 matrices are rounded to, by default what
        `kernels.formats.activations_for` says. `variant`: one of `native().variants()`, by default the
        fastest. `cores`: where the threads are pinned, one each; none: nowhere. `writers`: what the threads
        hold while they can write, the helpers for life and who calls `step` during it (RuntimeError when that
        is another living thread's, or the main thread does not hold its own); when there are fewer slots than
        threads they hold none.
        """
        module = native()
        if threads < 1:
            raise StartError(f"{threads} threads: a step needs at least one")
        self.config = read_config(model_folder)
        self.page_shape = page_shape
        self.pages = check_pool(pool, page_shape, self.config)
        self.format = weights or default_format(model_folder, self.config)
        self.activations = activations or activations_for(self.format)
        self.variant = variant or module.variants()[0]
        path = pack(model_folder, self.format, verify=False)
        self._weights = PackedWeights(path, self.config, self.format)
        self._cos, self._sin = rotary_tables(self.config)
        config = self.config
        self._model = module.Model(
            self.variant,
            [
                config.vocab_size,
                config.hidden_size,
                config.layers,
                config.heads,
                config.kv_heads,
                config.head_dim,
                config.ffn_size,
                config.context_length,
            ],
            config.rms_eps,
            pool,
            page_shape.dtype,
            page_shape.tokens,
            self._cos,
            self._sin,
            threads,
            list(cores),
        )
        # The native model has addresses only: what they point to lives as long as this object.
        self._keeps = pool, writers
        self.writer_slots = 0
        if writers is not None and len(writers.records) >= SLOT_BYTES * (threads + 1):
            self._model.hold(writers.records, writers.epoch)
            self.writer_slots = threads + 1
        for layer in range(config.layers):
            for name, long_name in MATRICES.items():
                self._set_matrix(layer, name, f"model.layers.{layer}.{long_name}.weight")
            for name, long_name in NORMS.items():
                self._model.set_norm(
                    layer, name, self._weights.vector(f"model.layers.{layer}.{long_name}.weight")
                )
        self._set_matrix(0, "embedding", EMBEDDING)
        self._set_matrix(0, "head", HEAD)
        self._model.set_norm(0, "final", self._weights.vector(FINAL_NORM))
        self._model.set_rounds(self.activations == "bf16")
        tables = hashlib.blake2b(self._cos.tobytes() + self._sin.tobytes(), digest_size=4).hexdigest()
        self.numerics_id = (
            f"native-{NUMERICS}-{tables}:{self.format}-{self.activations}:{config.weights_id}"
            f":kv-{page_shape.dtype}:tp1"
        )
        *body, head = self.matrices()
        self.body_bytes = sum(matrix.bytes for matrix in body)
        self.head_bytes = head.bytes
        self._sampling = SamplingColumns(config.vocab_size)

    def _set_matrix(self, layer: int, name: str, tensor: str) -> None:
        matrix = self._weights.matrix(tensor)
        self._model.set_matrix(
            layer, name, matrix.kind, matrix.outputs, matrix.inputs, matrix.data, matrix.scales
        )

    def matrices(self) -> list[PackedMatrix]:
        """The matrices that a decode step reads, each once; the LM head last."""
        layers = range(self.config.layers)
        names = [f"model.layers.{i}.{name}.weight" for i in layers for name in MATRICES.values()]
        return [self._weights.matrix(name) for name in (*names, HEAD)]

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase since this backend was opened; their sum was spent in native code."""
        seconds: dict[str, float] = self._model.phase_seconds()
        return seconds

    def step(self, rows: Rows, *, return_logits: bool = False) -> StepResult:
        """Fill the rows' positions and sample where asked; ValueError for rows that do not fit.

        Logits are fp32 [L, vocab_size].
        """
        spans = check_rows(rows, self.config, self.page_shape, self.pages)
        wanted = np.flatnonzero(rows.needs_logits).astype(np.int32)
        count, vocab = len(wanted), self.config.vocab_size
        sampled = np.empty(count, np.int32)
        logits = np.empty((count, vocab), np.float32) if return_logits else None
        if not spans:
            return StepResult(sampled, logits)
        columns = self._sampling.of(rows, wanted)
        most = int(columns.told.max(initial=0)) if rows.logprobs else 0
        told = rows.logprobs != ()
        top_ids = np.zeros(count * most, np.int32) if told else _NO_IDS
        top_logprobs = np.zeros(count * (most + 1)) if told else _NO_LOGPROBS
        spans_table, tables = tables_of(rows, spans)
        self._model.step(
            np.ascontiguousarray(rows.token, np.int32),
            spans_table,
            tables,
            wanted,
            columns.doubles,
            columns.integers,
            columns.masks,
            columns.bias_ids,
            columns.biases,
            columns.logs,
            columns.told,
            sampled,
            _NO_LOGITS if logits is None else logits,
            top_ids,
            top_logprobs,
        )
        return StepResult(
            sampled,
            logits,
            logprobs_of(sampled, columns.told, top_ids, top_logprobs, most) if told else (),
        )


def tables_of(rows: Rows, spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """[sequences, 4] of first row, rows, position and where the block table begins; all block tables."""
    tables = [rows.block_tables[span.sequence] for span in spans]
    table = np.empty((len(spans), 4), np.int32)
    first = 0
    for index, span in enumerate(spans):
        table[index] = span.first, span.count, span.position, first
        first += len(tables[index])
    return table, np.ascontiguousarray(np.concatenate(tables), np.int32)


class SamplingColumns:
    """The sampling parameters of a step's rows as the native step takes them, made anew for each step."""

    CACHED = 4096

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._known: dict[SamplingParams, tuple[tuple[float, ...], tuple[int, int], int]] = {}

    def of(self, rows: Rows, wanted: NDArray[np.int32]) -> SamplingColumns:
        """Fill the columns for the rows `wanted` [L] of a step."""
        count = len(wanted)
        self.doubles = np.empty((count, 6))
        self.integers = np.zeros((count, 9), np.int64)
        self.told = np.full(count, -1, np.int32)
        self.masks, self.bias_ids, self.biases, self.logs = _NO_MASKS, _NO_IDS, _NO_LOGPROBS, _NO_IDS
        masks: list[NDArray[np.uint32]] = []
        biases: list[tuple[int, float]] = []
        logs: list[NDArray[np.int32]] = []
        logged = 0
        for index, row in enumerate(wanted.tolist()):
            sequence = int(rows.sequence[row])
            params = rows.sampling[sequence]
            known = self._known.get(params) or self._remember(params)
            self.doubles[index] = known[0]
            position = int(rows.position[row]) + 1
            mask, first_log, prompt = -1, -1, 0
            if rows.masks[row] is not None:
                mask = len(masks)
                masks.append(rows.masks[row])
            log: TokenLog | None = rows.logs[sequence] if rows.logs and params.needs_log else None
            if log is not None:
                first_log, prompt = logged, log.prompt_length
                # the sampled token's position may lie beyond what the log has by one
                logs.append(np.ascontiguousarray(log.tokens[:position], np.int32))
                logged += len(logs[-1])
            self.integers[index] = (
                *known[1],
                position,
                min(known[2], self._vocab_size),
                mask,
                len(biases),
                len(params.logit_bias),
                first_log,
                prompt,
            )
            biases += params.logit_bias
            if rows.logprobs:
                told = rows.logprobs[sequence]
                self.told[index] = -1 if told is None else min(told, self._vocab_size)
        if masks:
            self.masks = np.ascontiguousarray(np.stack(masks), np.uint32)
        if biases:
            self.bias_ids = np.array([token for token, _ in biases], np.int32)
            self.biases = np.array([bias for _, bias in biases])
        if logs:
            self.logs = np.concatenate(logs)
        return self

    def _remember(self, params: SamplingParams) -> tuple[tuple[float, ...], tuple[int, int], int]:
        if len(self._known) >= self.CACHED:
            self._known.clear()
        known = (
            (
                params.temperature,
                params.top_p,
                params.min_p,
                params.presence_penalty,
                params.frequency_penalty,
                params.repetition_penalty,
            ),
            (_signed(params.seed), _signed(params.choice)),
            params.top_k,
        )
        self._known[params] = known
        return known


def _signed(word: int) -> int:
    """An unsigned 64-bit number's bits as a signed one's."""
    return word - (1 << 64) if word >> 63 else word


def logprobs_of(
    sampled: NDArray[np.int32],
    told: NDArray[np.int32],
    top_ids: NDArray[np.int32],
    top_logprobs: NDArray[np.float64],
    most: int,
) -> tuple[TokenLogprobs | None, ...]:
    """The logprobs of each sampled row that asked for them and has a token."""
    result: list[TokenLogprobs | None] = []
    for index, (token, count) in enumerate(zip(sampled.tolist(), told.tolist(), strict=True)):
        if count < 0 or token == NO_TOKEN:
            result.append(None)
            continue
        ids = top_ids[index * most : index * most + count].tolist()
        first = index * (most + 1)
        values = top_logprobs[first : first + count + 1].tolist()
        result.append(TokenLogprobs(values[0], tuple(zip(ids, values[1:], strict=True))))
    return tuple(result)
