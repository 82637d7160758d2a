"""Paged attention in blocks of 64 positions at absolute boundaries: bits that no batch can change.

A query's scores over a block, their exponentials and the block's weighted sum of values are products of
fixed shape; blocks are then added pairwise by their number. So neither page size, placement, chunk nor
batch enters, and positions after the query add exact zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kernels.tiles import fold, fold_blocks, padded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from engine.shapes import PageShape
    from kernels.rows import Span

BLOCK = 64
"""Positions of one block: part of the numerics, never to be changed without a new numerics_id."""

QUERY_TILES = (1, 4, 16, 64)
"""Rows of one sequence that are attended to at once; a count is filled up by repeating its first row."""

GROUP_BLOCKS = 512
"""Blocks of keys in one batched product at most: bounds the memory that a group of sequences gathers."""

TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


HIDE = 1e30
"""Taken off the score of a position that a query must not see."""

LEAST_EXPONENT = -80.0
"""Scores this far below the greatest count as this far: exp(-80) is 1e-35, no fp32 sum beside 1 can tell,
and exp of what underflows takes a path that is a hundred times slower."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Rows [B, n] of B sequences that attend to the first `blocks` blocks of what was gathered."""

    rows: Tensor
    blocks: int
    visible: Tensor
    """[B, 1, blocks, 64, columns] fp32: 1 where the position is not after the column's query, else 0."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose keys and values are gathered together, padded to the longest."""

    slots: Tensor
    """[B, kv_heads, blocks * 64] slot of layer 0's key of each position; see PagePool. Positions that are
    not filled stand for position 0: their weight is exactly 0, but 0 times a NaN found there is not."""
    blocks: int
    tiles: tuple[QueryTile, ...]


class PagePool:
    """The pool of KV pages as tensors: scatter of new rows, gather of whole sequences.

    A *slot* is the number of a head_dim-long line of the pool, lines in the order
    [pages][layers][2][kv_heads][tokens].
    """

    def __init__(self, pool: NDArray[np.uint8], shape: PageShape) -> None:
        self.shape = shape
        self._lines = torch.from_numpy(pool).view(TORCH_DTYPES[shape.dtype]).view(-1, shape.head_dim)
        self._heads = torch.arange(shape.kv_heads)[:, None] * shape.tokens
        self._stride = shape.kv_heads * shape.tokens

    def slots(self, table: NDArray[np.int32], positions: Tensor) -> Tensor:
        """[kv_heads, n] slots of layer 0's keys of n positions int64 by a block table."""
        pages = torch.from_numpy(table)[positions // self.shape.tokens].long()
        return pages * (self.shape.layers * 2 * self._stride) + positions % self.shape.tokens + self._heads

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows of a layer: keys and values [R, kv_heads, head_dim] at `slots` [R, kv_heads]."""
        for which, numbers in ((0, keys), (1, values)):
            self._lines[slots + (layer * 2 + which) * self._stride] = numbers.to(self._lines.dtype)

    def gather(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, blocks, 64, head_dim] fp32 of a layer."""
        count, heads, _ = group.slots.shape
        slots, size = group.slots.flatten(), self.shape.head_dim
        keys, values = (
            self._lines.index_select(0, slots + (layer * 2 + which) * self._stride)
            .float()
            .view(count, heads, group.blocks, BLOCK, size)
            for which in (0, 1)
        )
        return keys, values


def attend(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attention of queries [B, n, heads, head_dim], already scaled, over gathered blocks of keys.

    keys, values: [B, kv_heads, blocks, 64, head_dim]; visible: [B, 1, blocks, 64, columns], columns being
    n * heads / kv_heads padded to a multiple of 16. Returns [B, n, heads * head_dim].
    """
    count, n, heads, size = queries.shape
    _, kv_heads, blocks, _, _ = keys.shape
    share = heads // kv_heads
    columns = visible.shape[-1]
    turned = queries.new_zeros(count, kv_heads, size, columns)
    turned[..., : n * share] = queries.view(count, n, kv_heads, share, size).permute(0, 2, 4, 1, 3).flatten(3)
    spread = turned[:, :, None].expand(-1, -1, blocks, -1, -1)
    scores = torch.bmm(keys.reshape(-1, BLOCK, size), spread.reshape(-1, size, columns))
    scores = scores.view(count, kv_heads, blocks, BLOCK, columns) + (visible - 1.0) * HIDE
    greatest = fold(fold(scores, 3, torch.maximum), 2, torch.maximum)
    weights = scores.sub_(greatest[:, :, None, None]).clamp_min_(LEAST_EXPONENT).exp_().mul_(visible)
    total = fold_blocks(fold(weights, 3), 2)
    sums = torch.bmm(values.reshape(-1, BLOCK, size).transpose(1, 2), weights.view(-1, BLOCK, columns))
    mixed = fold_blocks(sums.view(count, kv_heads, blocks, size, columns), 2) / total[:, :, None]
    mixed = mixed[..., : n * share].view(count, kv_heads, size, n, share)
    return mixed.permute(0, 3, 1, 4, 2).reshape(count, n, heads * size)


def visible_mask(positions: Tensor, blocks: int, share: int) -> Tensor:
    """The `visible` of `attend` for query positions [B, n]; padding columns see position 0 only."""
    count, n = positions.shape
    seen = positions.new_zeros(count, padded(n * share))
    seen[:, : n * share] = positions.repeat_interleave(share, 1)
    return (torch.arange(blocks * BLOCK).view(1, 1, blocks, BLOCK, 1) <= seen[:, None, None, None]).float()


def plan_groups(
    spans: Iterable[Span], block_tables: tuple[NDArray[np.int32], ...], pool: PagePool, share: int
) -> list[Group]:
    """Group the sequences of a step by size so that little of what is gathered is padding."""
    short: dict[int, list[Span]] = {}
    groups = []
    for span in spans:
        if span.count > QUERY_TILES[-1]:
            groups.append(_group([span], block_tables, pool, share))
        else:
            short.setdefault(_query_tile(span.count), []).append(span)
    for members in short.values():
        members.sort(key=lambda span: span.end)
        groups.extend(_group(part, block_tables, pool, share) for part in _alike(members))
    return groups


def _query_tile(count: int) -> int:
    return next((tile for tile in QUERY_TILES if tile >= count), QUERY_TILES[-1])


def _blocks(end: int) -> int:
    return -(-end // BLOCK)


def _alike(members: list[Span]) -> Iterator[list[Span]]:
    """Cut spans in ascending order of length where the longest has over twice the blocks of the first."""
    part: list[Span] = []
    for span in members:
        blocks = _blocks(span.end)
        if part and (blocks > 2 * _blocks(part[0].end) or blocks * (len(part) + 1) > GROUP_BLOCKS):
            yield part
            part = []
        part.append(span)
    if part:
        yield part


def _group(
    members: list[Span], block_tables: tuple[NDArray[np.int32], ...], pool: PagePool, share: int
) -> Group:
    blocks = _blocks(max(span.end for span in members))
    positions = torch.arange(blocks * BLOCK)
    slots = [
        pool.slots(block_tables[span.sequence], torch.where(positions < span.end, positions, 0))
        for span in members
    ]
    return Group(torch.stack(slots), blocks, tuple(_tiles(members, share)))


def _tiles(members: list[Span], share: int) -> Iterator[QueryTile]:
    """Tiles of query rows: one for short spans, consecutive ones for a single long span."""
    longest = max(span.count for span in members)
    size = _query_tile(longest)
    for start in range(0, longest, size):
        steps = [[i if i < span.count else start for i in range(start, start + size)] for span in members]
        offsets = torch.tensor(steps)
        positions = offsets + torch.tensor([[span.position] for span in members])
        blocks = _blocks(int(positions.max()) + 1)
        rows = offsets + torch.tensor([[span.first] for span in members])
        yield QueryTile(rows, blocks, visible_mask(positions, blocks, share))
