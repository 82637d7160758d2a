"""The reference backend: Llama in float64 numpy, one row at a time. Slow, plain, what others must equal.

Sources: Touvron et al., "LLaMA" (2023) for the architecture; Zhang & Sennrich (2019) for RMSNorm; Su et
al., "RoFormer" (2021) for rotary positions, in the half-split form of Hugging Face Llama; Shazeer (2020)
for SwiGLU; Ainslie et al. (2023) for grouped-query attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.model import read_config
from kernels.backend import StepResult
from kernels.quantize import E4M3_MAX, LEAST_MAXIMUM, decode_e4m3, encode_e4m3
from kernels.rows import check_pool, check_rows
from kernels.sampling import logprobs_step, sample_step
from kernels.weights import EMBEDDING, FINAL_NORM, Weights, float32_bytes

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from numpy.typing import NDArray

    from engine.shapes import KVDtype, PageShape
    from kernels.backend import Rows

    Floats = NDArray[np.float64]

STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16, "float8": np.uint8}
"""numpy has no bfloat16 and no float8: their bits are kept."""


def to_page(values: Floats, dtype: KVDtype) -> NDArray[Any]:
    """Round to a page dtype without scales (nearest, ties to even); bfloat16 as its bits in uint16."""
    if dtype != "bfloat16":
        return values.astype(STORED[dtype])
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded.astype(np.uint16))


def from_page(stored: NDArray[Any], dtype: KVDtype) -> Floats:
    """The exact value of what a page stores."""
    if dtype != "bfloat16":
        return stored.astype(np.float64)
    return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def to_float8(heads: Floats) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """The e4m3fn codes and the scales [...] of numbers [..., head_dim]: the greatest becomes ±448."""
    numbers = heads.astype(np.float32)
    greatest = np.abs(numbers).max(axis=-1)
    scales: NDArray[np.float32] = np.maximum(greatest, LEAST_MAXIMUM) / np.float32(E4M3_MAX)
    return encode_e4m3(numbers / scales[..., None]), scales


class PageArrays:
    """The numbers of a pool of pages, as engine.shapes lays them out."""

    def __init__(self, pool: NDArray[np.uint8], shape: PageShape) -> None:
        fields = [("numbers", STORED[shape.dtype], (shape.tokens, shape.head_dim))]
        scales = [("scales", np.float32, (shape.tokens,))] if shape.dtype == "float8" else []
        heads = pool.view(np.dtype(fields + scales)).reshape(-1, shape.layers, 2, shape.kv_heads)
        self._dtype = shape.dtype
        self._numbers = heads["numbers"]
        self._scales = heads["scales"] if scales else None

    def write(self, page: int, layer: int, which: int, slot: int, heads: Floats) -> None:
        """Store one token's keys (`which` 0) or values (1) [kv_heads, head_dim]."""
        if self._scales is None:
            self._numbers[page, layer, which, :, slot] = to_page(heads, self._dtype)
        else:
            codes, scales = to_float8(heads)
            self._numbers[page, layer, which, :, slot] = codes
            self._scales[page, layer, which, :, slot] = scales

    def read(self, pages: NDArray[np.int32], layer: int, slots: NDArray[Any]) -> Floats:
        """The exact keys and values [n, 2, kv_heads, head_dim] of n tokens in their pages' slots."""
        stored = self._numbers[pages, layer, :, :, slots]
        if self._scales is None:
            return from_page(stored, self._dtype)
        scales = self._scales[pages, layer, :, :, slots].astype(np.float64)
        return decode_e4m3(stored).astype(np.float64) * scales[..., None]


class ReferenceBackend:
    """The Backend protocol in float64 over pages of the pool; keys and values are read back from pages."""

    def __init__(self, model_folder: Path, pool: NDArray[np.uint8], page_shape: PageShape) -> None:
        self.config = read_config(model_folder)
        self.page_shape = page_shape
        self.pages = check_pool(pool, page_shape, self.config)
        self.weights = Weights(model_folder, self.config)
        self._pool = PageArrays(pool, page_shape)
        self.body_bytes, self.head_bytes = float32_bytes(self.config)
        self.writer_slots = 0  # whoever calls a step writes
        self.numerics_id = f"reference-fp64-1:fp32:{self.config.weights_id}:kv-{page_shape.dtype}:tp1"

    def phase_seconds(self) -> dict[str, float]:
        """Nothing: the phases are not timed."""
        return {}

    def step(self, rows: Rows, *, return_logits: bool = False) -> StepResult:
        """Fill the rows' positions and sample where asked; ValueError for rows that do not fit."""
        check_rows(rows, self.config, self.page_shape, self.pages)
        wanted = np.flatnonzero(rows.needs_logits).tolist()
        logits = np.zeros((len(wanted), self.config.vocab_size), np.float32)
        for row in range(len(rows.token)):
            table = rows.block_tables[rows.sequence[row]]
            hidden = self._row(int(rows.token[row]), int(rows.position[row]), table)
            if rows.needs_logits[row]:
                logits[wanted.index(row)] = self.weights.head().astype(np.float64) @ hidden
        tokens = sample_step(rows, logits)
        logprobs = logprobs_step(rows, tokens, logits)
        return StepResult(tokens, logits if return_logits else None, logprobs)

    def _row(self, token: int, position: int, table: NDArray[np.int32]) -> Floats:
        """The last hidden state, normalised, of one token."""
        x = self.weights[EMBEDDING][token].astype(np.float64)
        for layer in range(self.config.layers):
            x = x + self._attention(layer, x, position, table)
            x = x + self._ffn(layer, x)
        return self._norm(x, self.weights[FINAL_NORM])

    def _linear(self, layer: int, name: str, x: Floats) -> Floats:
        result: Floats = self.weights.layer(layer, f"{name}.weight").astype(np.float64) @ x
        return result

    def _norm(self, x: Floats, weight: NDArray[np.float32]) -> Floats:
        normed: Floats = x / np.sqrt(np.mean(x * x) + self.config.rms_eps) * weight.astype(np.float64)
        return normed

    def _rotate(self, heads: Floats, position: int) -> Floats:
        """Rotate pairs (i, i + head_dim / 2) of each head [heads, head_dim] by position * theta**(-2i/d)."""
        half = self.config.head_dim // 2
        angle = position * self.config.rope_theta ** (-np.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        return np.concatenate(
            [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)],
            axis=1,
        )

    def _seen(self, layer: int, position: int) -> NDArray[np.intp]:
        """The positions that a layer's query at `position` attends to."""
        return np.arange(position + 1)

    def _attention(self, layer: int, x: Floats, position: int, table: NDArray[np.int32]) -> Floats:
        config, tokens = self.config, self.page_shape.tokens
        h = self._norm(x, self.weights.layer(layer, "input_layernorm.weight"))
        q = self._linear(layer, "self_attn.q_proj", h).reshape(config.heads, config.head_dim)
        k = self._linear(layer, "self_attn.k_proj", h).reshape(config.kv_heads, config.head_dim)
        v = self._linear(layer, "self_attn.v_proj", h).reshape(config.kv_heads, config.head_dim)
        q, k = self._rotate(q, position), self._rotate(k, position)
        page, slot = table[position // tokens], position % tokens
        self._pool.write(page, layer, 0, slot, k)
        self._pool.write(page, layer, 1, slot, v)
        seen = self._seen(layer, position)
        keys_values = self._pool.read(table[seen // tokens], layer, seen % tokens)
        out = np.empty((config.heads, config.head_dim))
        for head in range(config.heads):
            group = head // (config.heads // config.kv_heads)
            scores = keys_values[:, 0, group] @ q[head] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ keys_values[:, 1, group]
        return self._linear(layer, "self_attn.o_proj", out.reshape(-1))

    def _ffn(self, layer: int, x: Floats) -> Floats:
        h = self._norm(x, self.weights.layer(layer, "post_attention_layernorm.weight"))
        gate, up = self._linear(layer, "mlp.gate_proj", h), self._linear(layer, "mlp.up_proj", h)
        return self._linear(layer, "mlp.down_proj", gate / (1.0 + np.exp(-gate)) * up)
