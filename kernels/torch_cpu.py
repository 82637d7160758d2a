"""The torch CPU backend: Llama in fp32, every row's bits independent of its batch, chunk and pages."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.errors import StartError
from engine.model import read_config
from kernels.attention import BLOCK, QUERY_TILES, PagePool, attend, plan_groups, visible_mask
from kernels.backend import StepResult
from kernels.rotary import rotary_tables
from kernels.rows import check_pool, check_rows
from kernels.sampling import logprobs_step, sample_step
from kernels.tiles import TILE, Linear, TilePlan, fold, padded, read_only_tensor, same_bits
from kernels.weights import EMBEDDING, FINAL_NORM, Weights, float32_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from engine.shapes import PageShape
    from kernels.attention import Group
    from kernels.backend import Rows
    from kernels.rows import Span

KERNEL = f"torch-fp32-1-{torch.__version__}"


class TorchBackend:
    """The Backend protocol over torch's CPU kernels.

    Sets the process's intra-op threads to `threads`. StartError when the pool does not fit the model or
    this machine's BLAS gives rows that depend on their neighbours; ModelError for a bad folder.
    """

    def __init__(
        self, model_folder: Path, pool: NDArray[np.uint8], page_shape: PageShape, threads: int
    ) -> None:
        if threads < 1:
            raise StartError(f"threads must be 1 or more, not {threads}")
        if page_shape.dtype == "float8":
            raise StartError(
                "the torch backend has no float8 pages; take the native backend or bfloat16 pages"
            )
        self.config = read_config(model_folder)
        self.page_shape = page_shape
        self.pages = check_pool(pool, page_shape, self.config)
        weights = Weights(model_folder, self.config)
        torch.set_num_threads(threads)
        self._pool = PagePool(pool, page_shape)
        self._embedding = read_only_tensor(weights[EMBEDDING])
        self._final_norm = read_only_tensor(weights[FINAL_NORM])
        self._cos, self._sin = map(torch.from_numpy, rotary_tables(self.config))
        self._share = self.config.heads // self.config.kv_heads
        self._scale = 1.0 / math.sqrt(self.config.head_dim)
        plans: dict[tuple[int, ...], TilePlan] = {}
        with torch.inference_mode():
            self._layers = [
                _Layer(weights, index, self.config.rms_eps, plans, threads)
                for index in range(self.config.layers)
            ]
            self._head = _linear(weights.head(), plans, threads)
            bits = check_attention(self.config.head_dim, self._share, threads)
        fingerprint = hashlib.blake2b(bits, digest_size=4)
        for plan in plans.values():
            fingerprint.update(plan.bits)
        self.body_bytes, self.head_bytes = float32_bytes(self.config)
        self.writer_slots = 0  # torch's own threads write
        self.numerics_id = (
            f"{KERNEL}:{torch.backends.cpu.get_cpu_capability().lower()}-{fingerprint.hexdigest()}:fp32"
            f":{self.config.weights_id}:kv-{page_shape.dtype}:tp1"
        )

    def phase_seconds(self) -> dict[str, float]:
        """Nothing: the phases are not timed."""
        return {}

    @torch.inference_mode()
    def step(self, rows: Rows, *, return_logits: bool = False) -> StepResult:
        """Fill the rows' positions and sample where asked; ValueError for rows that do not fit.

        Logits are fp32 [L, vocab_size]. A row's tokens and logits are equal, to the bit, whatever other
        rows the step has.
        """
        spans = check_rows(rows, self.config, self.page_shape, self.pages)
        wanted = np.flatnonzero(rows.needs_logits)
        logits = np.empty((0, self.config.vocab_size), np.float32)
        if spans:
            groups = plan_groups(spans, rows.block_tables, self._pool, self._share)
            hidden = self._forward(rows, self._slots(rows, spans), groups)
            if len(wanted):
                logits = self._logits(hidden, wanted)
        tokens = sample_step(rows, logits)
        logprobs = logprobs_step(rows, tokens, logits)
        return StepResult(tokens, logits if return_logits else None, logprobs)

    def _slots(self, rows: Rows, spans: list[Span]) -> Tensor:
        """[R, kv_heads] slots of the rows' keys of layer 0."""
        parts = [
            self._pool.slots(rows.block_tables[span.sequence], torch.arange(span.position, span.end))
            for span in spans
        ]
        return torch.cat(parts, 1).T

    def _forward(self, rows: Rows, slots: Tensor, groups: list[Group]) -> Tensor:
        """Last hidden states [R padded, hidden] before the final norm; fills the pages."""
        count, config = len(rows.token), self.config
        extra = (0, padded(count) - count)
        positions = torch.from_numpy(np.pad(rows.position, extra))
        cos, sin = (table[positions].unsqueeze(1) for table in (self._cos, self._sin))
        x = self._embedding[torch.from_numpy(np.pad(rows.token, extra))]
        for index, layer in enumerate(self._layers):
            h = layer.input_norm(x)
            q = rotate(layer.q(h).view(-1, config.heads, config.head_dim), cos, sin) * self._scale
            k = rotate(layer.k(h).view(-1, config.kv_heads, config.head_dim), cos, sin)
            v = layer.v(h).view(-1, config.kv_heads, config.head_dim)
            self._pool.write(index, slots, k[:count], v[:count])
            mixed = x.new_zeros(len(x), config.heads * config.head_dim)
            for group in groups:
                keys, values = self._pool.gather(index, group)
                for tile in group.tiles:
                    seen = slice(0, tile.blocks)
                    mixed[tile.rows] = attend(
                        q[tile.rows], keys[:, :, seen], values[:, :, seen], tile.visible
                    )
            x = x + layer.o(mixed)
            x = x + layer.ffn(x)
        return x

    def _logits(self, hidden: Tensor, wanted: NDArray[np.intp]) -> NDArray[np.float32]:
        """[L, vocab_size] of the rows `wanted`; only they pass the final norm and the head."""
        count = len(wanted)
        rows = torch.from_numpy(np.pad(wanted, (0, padded(count) - count)))
        normed = rms_norm(hidden[rows], self._final_norm, self.config.rms_eps)
        result: NDArray[np.float32] = self._head(normed)[:count].numpy()
        return result


class _Layer:
    """The weights of one decoder layer and what they do to rows [R, hidden], R a multiple of TILE."""

    def __init__(
        self, weights: Weights, index: int, eps: float, plans: dict[tuple[int, ...], TilePlan], threads: int
    ) -> None:
        def linear(name: str) -> Linear:
            return _linear(weights.layer(index, f"{name}.weight"), plans, threads)

        self.q, self.k, self.v, self.o = (linear(f"self_attn.{name}_proj") for name in "qkvo")
        self._gate, self._up, self._down = (linear(f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        self._input_norm = read_only_tensor(weights.layer(index, "input_layernorm.weight"))
        self._ffn_norm = read_only_tensor(weights.layer(index, "post_attention_layernorm.weight"))
        self._eps = eps

    def input_norm(self, x: Tensor) -> Tensor:
        """The norm before attention."""
        return rms_norm(x, self._input_norm, self._eps)

    def ffn(self, x: Tensor) -> Tensor:
        """Norm and SwiGLU, without the residual."""
        h = rms_norm(x, self._ffn_norm, self._eps)
        gate = self._gate(h)
        # torch's own silu takes another exp for the last few numbers of a tensor than for the rest
        return self._down(gate / (1.0 + torch.exp(-gate)) * self._up(h))


def _linear(weight: NDArray[np.float32], plans: dict[tuple[int, ...], TilePlan], threads: int) -> Linear:
    linear = Linear(weight, plans.get(weight.shape), threads)
    plans[weight.shape] = linear.plan
    return linear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm of rows [R, hidden], summed in a fixed order."""
    mean = fold(x * x, 1) / x.shape[1]
    return x * (1.0 / torch.sqrt(mean + eps))[:, None] * weight


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + head_dim / 2) of [R, heads, head_dim]; cos, sin: [R, 1, head_dim / 2]."""
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def check_attention(head_dim: int, share: int, threads: int) -> bytes:
    """Check that attention over three blocks gives a query the same bits in every tile, batch and thread
    count in use; returns those bits. StartError when it does not."""
    random = np.random.Generator(np.random.Philox(key=[1, head_dim]))
    longest = QUERY_TILES[-1]

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(random.standard_normal(shape, np.float32))

    queries, keys, values = draw(1, longest, share, head_dim), *(draw(1, 1, 3, BLOCK, head_dim) for _ in "kv")
    positions = torch.arange(2 * BLOCK, 2 * BLOCK + longest)[None]

    def run(size: int, batch: int) -> Tensor:
        """Attention in tiles of `size` rows, `batch` of them at once."""
        q = torch.split(queries.view(-1, size, share, head_dim), batch)
        visible = [visible_mask(at, 3, share) for at in torch.split(positions.view(-1, size), batch)]
        parts = [
            attend(
                part, keys.expand(len(part), -1, -1, -1, -1), values.expand(len(part), -1, -1, -1, -1), seen
            )
            for part, seen in zip(q, visible, strict=True)
        ]
        return torch.cat(parts).view(longest, share * head_dim)

    torch.set_num_threads(1)
    expected = run(1, 1)
    torch.set_num_threads(threads)
    if not all(same_bits(run(size, batch), expected) for size in QUERY_TILES for batch in (1, 4, TILE)):
        raise StartError("this machine's batched matrix product depends on the size of its batch")
    return expected.numpy().tobytes()
