"""The one call that makes tokens: `Backend.step(rows)`.

A decode step, a prefill chunk and the verification of drafted tokens are all the same call on
rows; a step may mix them freely. Everything a later kernel needs is in the signature already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from engine.sampling import SamplingParams, TokenLogprobs
    from engine.shapes import PageShape


@dataclass(frozen=True, slots=True)
class TokenLog:
    """The tokens of a sequence, for the penalties of `engine.sampling`."""

    tokens: NDArray[np.int32]
    """[n] from position 0 at least through the sequence's last row; what is behind it is not looked at."""
    prompt_length: int
    """Tokens from this position on were generated."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One step's work: R rows, each one token of one of S sequences.

    Rows of one sequence are consecutive and ascend in position without a gap. A row writes the
    keys and values of its position into the sequence's pages, then attends to positions
    0 … position. The caller guarantees that positions below the sequence's first row are filled
    and that the block table covers the sequence's last row.
    """

    sequence: NDArray[np.int32]
    """[R] index into `block_tables` and `sampling`."""
    position: NDArray[np.int32]
    """[R] absolute position of the row's token in the sequence's log."""
    token: NDArray[np.int32]
    """[R] the token that the row consumes."""
    is_draft: NDArray[np.bool_]
    """[R] the token was drafted, not committed."""
    needs_logits: NDArray[np.bool_]
    """[R] sample the token that follows this row."""
    masks: tuple[NDArray[np.uint32] | None, ...]
    """One a row: allowed vocabulary ids as bits (id v is bit v % 32 of word v // 32), or None."""
    block_tables: tuple[NDArray[np.int32], ...]
    """One a sequence: page indexes, block b holding positions b*tokens … (b+1)*tokens - 1."""
    sampling: tuple[SamplingParams, ...]
    """One a sequence."""
    logs: tuple[TokenLog | None, ...] = ()
    """One a sequence, or empty when none needs its log (`SamplingParams.needs_log`), which is the rule."""
    logprobs: tuple[int | None, ...] = ()
    """One a sequence: how many of the likeliest ids to tell with the sampled one's logprob; None for no
    logprob at all. Empty when no sequence wants any, which is the rule."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step made. L is the number of rows that need logits, in row order."""

    tokens: NDArray[np.int32]
    """[L] the sampled token that follows each row; its log position is the row's plus one.

    -1 (`kernels.sampling.NO_TOKEN`) for a row that has none: its logits are not all finite, or its mask
    allows no id. Such a row must end its request with an error; the other rows are as good as without it.
    """
    logits: NDArray[np.float32] | None = None
    """[L, vocab_size] before any filter, only when asked for."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """[L] where `Rows.logprobs` asks for them and there is a token; empty when no sequence does."""


@dataclass(frozen=True, slots=True)
class WriterSlots:
    """Where threads that write pages hold robust mutexes, so that others can tell when the last is gone."""

    records: NDArray[np.uint8]
    """[slots * 64] of shared memory, as transport/writers.py lays it out: the slot of the main thread, which
    holds it already, of who calls `step`, and of each thread that helps it."""
    epoch: int
    """The process's own, to be written beside each mutex."""


class Backend(Protocol):
    """A model with its weights over a pool of KV pages."""

    config: ModelConfig
    page_shape: PageShape
    numerics_id: str
    """Kernel version, ISA rule, weight format and content, KV dtype, tensor-parallel degree: workers
    of equal id give equal tokens."""
    body_bytes: int
    """Of the matrices that every step reads: as it reads them, each once."""
    head_bytes: int
    """Of the LM head, which steps read that sample."""
    writer_slots: int
    """How many of its `WriterSlots` the threads hold that write pages, the main thread's included; 0 when
    some write without holding any."""

    def step(self, rows: Rows, *, return_logits: bool = False) -> StepResult:
        """Fill the rows' positions and sample where asked. One caller at a time; releases the GIL."""
        ...

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase of a step since it was opened; empty when it does not tell them apart."""
        ...
