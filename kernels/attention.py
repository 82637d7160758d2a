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

from kernels.tiles import fold, padded

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


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Rows [B, n] of B sequences that attend to the first `blocks` blocks of what was gathered."""

    rows: Tensor
    blocks: int
    hidden: Tensor
    """[B, 1, blocks, 64, columns] bool: the position is after the column's query."""


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences whose keys and values are gathered together, padded to the longest."""

    lines: Tensor
    """[B, kv_heads, pages] line of layer 0's keys in `PagePool.lines`."""
    ends: Tensor
    """[B] the position after the last filled one."""
    least_end: int
    blocks: int
    tiles: tuple[QueryTile, ...]


class PagePool:
    """The pool of KV pages as tensors: scatter of new rows, gather of whole sequences."""

    def __init__(self, pool: NDArray[np.uint8], shape: PageShape) -> None:
        self.shape = shape
        numbers = torch.from_numpy(pool).view(TORCH_DTYPES[shape.dtype])
        self.lines = numbers.view(-1, shape.tokens * shape.head_dim)
        """[(page, layer, key or value, kv_head), tokens * head_dim]"""
        self._slots = numbers.view(-1, shape.head_dim)
        self._heads = torch.arange(shape.kv_heads)

    def first_line(self, pages: Tensor) -> Tensor:
        """[..., pages] page numbers -> [..., kv_heads, pages] lines of the keys of layer 0."""
        page_lines = pages * (self.shape.layers * 2 * self.shape.kv_heads)
        return page_lines.unsqueeze(-2) + self._heads.unsqueeze(-1)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store rows of a layer: keys and values [R, kv_heads, head_dim] at `slots` [R, kv_heads].

        A slot is line of layer 0's key * tokens + place in the page.
        """
        for which, numbers in ((0, keys), (1, values)):
            places = slots + self._offset(layer, which) * self.shape.tokens
            self._slots[places] = numbers.to(self._slots.dtype)

    def gather(self, layer: int, group: Group) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv_heads, blocks, 64, head_dim] fp32; values at unfilled positions are 0."""
        keys, values = (self._gather(group, self._offset(layer, which)) for which in (0, 1))
        tail = torch.arange(group.least_end, group.blocks * BLOCK)
        unfilled = tail >= group.ends[:, None]
        # a weight of 0 would not silence the NaN that an unfilled slot may hold
        flat = values.flatten(2, 3)
        flat[:, :, group.least_end :].masked_fill_(unfilled[:, None, :, None], 0.0)
        return keys, values

    def _gather(self, group: Group, offset: int) -> Tensor:
        count, heads, pages = group.lines.shape
        lines = self.lines.index_select(0, (group.lines + offset).flatten()).float()
        positions = lines.view(count, heads, pages * self.shape.tokens, self.shape.head_dim)
        positions = positions[:, :, : group.blocks * BLOCK].contiguous()
        return positions.view(count, heads, group.blocks, BLOCK, self.shape.head_dim)

    def _offset(self, layer: int, which: int) -> int:
        return (layer * 2 + which) * self.shape.kv_heads


def attend(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """Attention of queries [B, n, heads, head_dim], already scaled, over gathered blocks of keys.

    keys, values: [B, kv_heads, blocks, 64, head_dim]; hidden: [B, 1, blocks, 64, columns], columns being
    n * heads / kv_heads padded to a multiple of 16. Returns [B, n, heads * head_dim].
    """
    count, n, heads, size = queries.shape
    _, kv_heads, blocks, _, _ = keys.shape
    share = heads // kv_heads
    columns = hidden.shape[-1]
    turned = queries.new_zeros(count, kv_heads, size, columns)
    turned[..., : n * share] = queries.view(count, n, kv_heads, share, size).permute(0, 2, 4, 1, 3).flatten(3)
    spread = turned[:, :, None].expand(-1, -1, blocks, -1, -1)
    scores = torch.bmm(keys.reshape(-1, BLOCK, size), spread.reshape(-1, size, columns))
    scores = scores.view(count, kv_heads, blocks, BLOCK, columns).masked_fill_(hidden, -torch.inf)
    weights = scores.sub_(scores.amax((2, 3), keepdim=True)).exp_()
    total = fold(fold(weights, 3), 2)
    sums = torch.bmm(values.reshape(-1, BLOCK, size).transpose(1, 2), weights.view(-1, BLOCK, columns))
    mixed = fold(sums.view(count, kv_heads, blocks, size, columns), 2) / total[:, :, None]
    mixed = mixed[..., : n * share].view(count, kv_heads, size, n, share)
    return mixed.permute(0, 3, 1, 4, 2).reshape(count, n, heads * size)


def hidden_mask(positions: Tensor, blocks: int, share: int) -> Tensor:
    """The `hidden` of `attend` for query positions [B, n]; padding columns see position 0 only."""
    count, n = positions.shape
    seen = positions.new_zeros(count, padded(n * share))
    seen[:, : n * share] = positions.repeat_interleave(share, 1)
    return torch.arange(blocks * BLOCK).view(1, 1, blocks, BLOCK, 1) > seen[:, None, None, None]


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
    pages = pool.shape.pages_for(blocks * BLOCK)
    table = torch.zeros(len(members), pages, dtype=torch.int64)
    for line, span in enumerate(members):
        own = torch.from_numpy(block_tables[span.sequence])[: pool.shape.pages_for(span.end)]
        table[line] = own[0]
        table[line, : len(own)] = own
    return Group(
        lines=pool.first_line(table),
        ends=torch.tensor([span.end for span in members]),
        least_end=min(span.end for span in members),
        blocks=blocks,
        tiles=tuple(_tiles(members, share)),
    )


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
        yield QueryTile(rows, blocks, hidden_mask(positions, blocks, share))
