"""Checks before anything is touched: that a pool fits a model, and that rows fit both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from engine.errors import StartError
from kernels.sampling import mask_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from engine.sampling import SamplingParams
    from engine.shapes import PageShape
    from kernels.backend import Rows, TokenLog


@dataclass(frozen=True, slots=True)
class Span:
    """The consecutive rows of one sequence: rows first … first + count - 1, at ascending positions."""

    sequence: int
    first: int
    count: int
    position: int
    """Position of the first row."""

    @property
    def end(self) -> int:
        """The position after the last row."""
        return self.position + self.count


def check_pool(pool: NDArray[np.uint8], page_shape: PageShape, config: ModelConfig) -> int:
    """The number of pages in the pool; StartError when pool, page shape and model do not fit."""
    if config.architecture != "llama":
        raise StartError(f"architecture {config.architecture!r} is not served; 'llama' is")
    if page_shape != config.page_shape(page_shape.tokens, page_shape.dtype):
        raise StartError(f"page shape {page_shape} is not one of model {config.name}")
    if pool.dtype != np.uint8 or pool.ndim != 1 or not pool.flags.c_contiguous or not pool.flags.writeable:
        raise StartError("the KV pool must be a contiguous writable 1-D uint8 array")
    pages, rest = divmod(pool.size, page_shape.page_bytes)
    if rest or not pages:
        raise StartError(
            f"the KV pool's {pool.size} bytes are not some pages of {page_shape.page_bytes} bytes"
        )
    if pool.ctypes.data % page_shape.item_bytes:
        raise StartError(f"the KV pool does not lie on a multiple of {page_shape.item_bytes} bytes")
    return pages


def check_rows(rows: Rows, config: ModelConfig, page_shape: PageShape, pages: int) -> list[Span]:
    """The sequences' spans of rows; ValueError when a row could read or write what is not its own.

    Checks lengths, token ids, positions, the order of rows, that block tables cover the rows and name
    pages of the pool, that no page is written by two sequences, mask widths and sampling parameters.
    """
    count = len(rows.token)
    columns = (rows.sequence, rows.position, rows.is_draft, rows.needs_logits, rows.masks)
    if any(len(column) != count for column in columns):
        raise ValueError("the columns of rows differ in length")
    if len(rows.block_tables) != len(rows.sampling):
        raise ValueError("block tables and sampling parameters differ in number")
    if rows.logs and len(rows.logs) != len(rows.sampling):
        raise ValueError("logs and sampling parameters differ in number")
    if rows.logprobs and len(rows.logprobs) != len(rows.sampling):
        raise ValueError("logprobs and sampling parameters differ in number")
    if any(count is not None and count < 0 for count in rows.logprobs):
        raise ValueError("a negative number of logprobs")
    _check_range("token", rows.token, config.vocab_size)
    _check_range("position", rows.position, config.context_length)
    _check_range("sequence", rows.sequence, len(rows.block_tables))
    words = mask_words(config.vocab_size)
    for row, mask in enumerate(rows.masks):
        if mask is not None and (mask.dtype != np.uint32 or mask.shape != (words,)):
            raise ValueError(f"row {row}: a mask has {words} uint32 words")
    spans = list(_spans(rows))
    writers: dict[int, int] = {}
    for span in spans:
        table = rows.block_tables[span.sequence]
        if len(table) < page_shape.pages_for(span.end):
            raise ValueError(f"sequence {span.sequence}: its block table ends before position {span.end - 1}")
        _check_range(f"sequence {span.sequence}: page", table, pages)
        written = table[span.position // page_shape.tokens : page_shape.pages_for(span.end)]
        for page in written.tolist():
            if writers.setdefault(page, span.sequence) != span.sequence:
                raise ValueError(f"page {page} is written by two sequences")
        params = rows.sampling[span.sequence]
        check_sampling(span.sequence, params, config.vocab_size)
        if params.needs_log:
            _check_log(span, rows.logs[span.sequence] if rows.logs else None, config.vocab_size)
    return spans


def _check_log(span: Span, log: TokenLog | None, vocab_size: int) -> None:
    if log is None:
        raise ValueError(f"sequence {span.sequence}: its penalties need its log")
    if len(log.tokens) < span.end or log.prompt_length < 0:
        raise ValueError(f"sequence {span.sequence}: its log ends before position {span.end - 1}")
    _check_range(f"sequence {span.sequence}: log token", log.tokens, vocab_size)


def check_sampling(sequence: int, params: SamplingParams, vocab_size: int) -> None:
    """ValueError when a sampling parameter is out of its range."""
    if not (math.isfinite(params.temperature) and params.temperature >= 0.0):
        raise ValueError(f"sequence {sequence}: temperature {params.temperature} is not 0 or more")
    if not 0.0 < params.top_p <= 1.0:
        raise ValueError(f"sequence {sequence}: top_p {params.top_p} is not above 0 and up to 1")
    if not 0.0 <= params.min_p <= 1.0:
        raise ValueError(f"sequence {sequence}: min_p {params.min_p} is not from 0 to 1")
    if params.top_k < 0:
        raise ValueError(f"sequence {sequence}: top_k {params.top_k} is negative")
    if not (0 <= params.seed < 1 << 64 and 0 <= params.choice < 1 << 64):
        raise ValueError(f"sequence {sequence}: seed and choice are unsigned 64-bit numbers")
    if not (-2.0 <= params.presence_penalty <= 2.0 and -2.0 <= params.frequency_penalty <= 2.0):
        raise ValueError(f"sequence {sequence}: presence and frequency penalties go from -2 to 2")
    if not 0.01 <= params.repetition_penalty <= 100.0:
        raise ValueError(f"sequence {sequence}: the repetition penalty goes from 0.01 to 100")
    for token, bias in params.logit_bias:
        if not (0 <= token < vocab_size and -100.0 <= bias <= 100.0):
            raise ValueError(f"sequence {sequence}: a bias of {bias} for token {token} of {vocab_size}")
    if len(dict(params.logit_bias)) != len(params.logit_bias):
        raise ValueError(f"sequence {sequence}: a token has two biases")


def _check_range(what: str, values: NDArray[np.int32], limit: int) -> None:
    outside = np.flatnonzero((values < 0) | (values >= limit))
    if outside.size:
        row = int(outside[0])
        raise ValueError(f"{what} {int(values[row])} (entry {row}) is not below {limit}")


def _spans(rows: Rows) -> Iterator[Span]:
    """Cut the rows where the sequence changes; each sequence once, its positions without a gap."""
    if not len(rows.sequence):
        return
    cuts = [0, *(np.flatnonzero(np.diff(rows.sequence)) + 1).tolist(), len(rows.sequence)]
    seen: set[int] = set()
    for first, end in pairwise(cuts):
        sequence, position = int(rows.sequence[first]), int(rows.position[first])
        if sequence in seen:
            raise ValueError(f"sequence {sequence}: its rows are not consecutive")
        if not np.array_equal(rows.position[first:end], np.arange(position, position + end - first)):
            raise ValueError(f"sequence {sequence}: its positions do not ascend one by one")
        seen.add(sequence)
        yield Span(sequence, first, end - first, position)
