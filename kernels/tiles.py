"""Matrix products whose rows do not depend on their neighbours: fixed tiles, checked when opened.

A product of R rows is cut into tiles of fixed sizes. BLAS picks its kernel, and so its order of
summation, by the shape of a call, and cuts the inner dimension among threads where it sees fit; so the
sizes that may be used are not assumed but measured at start: `row_exact_tiles` keeps those whose rows
equal, to the bit, the ones made by tiles of 16 on one thread.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.errors import StartError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

TILE = 16
"""Rows of the smallest tile; every row count is padded to a multiple of it."""

WIDE_TILES = (128, 32)
"""Larger tiles, tried first where they hold: fewer passes over the weights for long prefill chunks."""

STRIP = 64
"""Outputs of one matrix of the batched product. The batch gives threads whole strips to work on, so
that they have no reason to cut the inner dimension."""

PROBE_STRIPS = 64
"""Strips of a matrix that the probe multiplies at most: more only repeats them, and an LM head has 768."""


class Linear:
    """y = x Wᵀ for x of [rows, inputs] fp32, rows a multiple of TILE; each row's bits are its own.

    weight: [outputs, inputs] fp32, used in place when outputs is a multiple of STRIP, else in a padded
    private copy. Raises StartError when this machine's BLAS has no tile that holds.
    """

    def __init__(self, weight: NDArray[np.float32], plan: TilePlan | None, threads: int) -> None:
        self.outputs, inputs = weight.shape
        strips = -(-self.outputs // STRIP)
        if self.outputs % STRIP:
            weight = np.concatenate([weight, np.zeros((strips * STRIP - self.outputs, inputs), np.float32)])
        self._strips = read_only_tensor(weight).view(strips, STRIP, inputs)
        self.plan = plan or self._probe(threads)

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, inputs] -> [rows, outputs]."""
        with self.plan.threads_held():
            parts = [_product(self._strips, x[start:end]) for start, end in self.plan.cut(len(x))]
        y = parts[0] if len(parts) == 1 else torch.cat(parts)
        return y[:, : self.outputs]

    def _probe(self, threads: int) -> TilePlan:
        strips = self._strips[:PROBE_STRIPS]
        return row_exact_tiles(lambda x: _product(strips, x), _probe_rows(self._strips.shape[2]), threads)


def _product(strips: Tensor, x: Tensor) -> Tensor:
    """[rows, inputs] times [strips, STRIP, inputs] transposed: [rows, strips * STRIP]."""
    y = torch.bmm(strips, x.T.expand(len(strips), x.shape[1], len(x)))
    return y.view(-1, len(x)).T.contiguous()


class TilePlan:
    """Which tile sizes hold for one shape of product, and whether it must run on one thread."""

    def __init__(self, sizes: tuple[int, ...], threads: int, alone: bool, bits: bytes) -> None:
        self.sizes = sizes
        """Descending; the last is TILE."""
        self.alone = alone
        """No size holds on several threads: run on one."""
        self.bits = bits
        """What the probe came out as: workers of equal bits compute alike."""
        self._threads = threads

    def cut(self, rows: int) -> Iterator[tuple[int, int]]:
        """Cut a multiple of TILE rows into tiles, largest first."""
        start = 0
        for size in self.sizes:
            while rows - start >= size:
                yield start, start + size
                start += size

    @contextmanager
    def threads_held(self) -> Iterator[None]:
        """Run the block on one thread if this plan needs it."""
        if self.alone:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if self.alone:
                torch.set_num_threads(self._threads)


def row_exact_tiles(product: Callable[[Tensor], Tensor], rows: Tensor, threads: int) -> TilePlan:
    """Find the tile sizes at which `product` maps each row to the bits that a tile of 16 gives it.

    rows: [128, inputs] of random numbers, so that two orders of summation cannot agree by chance in all
    outputs. Leaves the number of intra-op threads at `threads`. StartError when even a tile of 16 on one
    thread depends on the place of a row within it.
    """

    def run(size: int, x: Tensor) -> Tensor:
        return torch.cat([product(x[start : start + size]) for start in range(0, len(x), size)])

    torch.set_num_threads(1)
    expected = run(TILE, rows)
    moved = run(TILE, rows.roll(5, 0)).roll(-5, 0)
    if not same_bits(moved, expected):
        torch.set_num_threads(threads)
        raise StartError("this machine's matrix product depends on the place of a row in its tile")
    bits = expected.numpy().tobytes()
    for count in (threads, 1):
        torch.set_num_threads(count)
        sizes = tuple(size for size in (*WIDE_TILES, TILE) if same_bits(run(size, rows), expected))
        if TILE in sizes:
            break
    torch.set_num_threads(threads)
    return TilePlan(sizes, threads, alone=count != threads, bits=bits)


def padded(rows: int) -> int:
    """The row count rounded up to whole tiles."""
    return -(-rows // TILE) * TILE


def fold(x: Tensor, dim: int, combine: Callable[[Tensor, Tensor], Tensor] = torch.add) -> Tensor:
    """Sum over `dim` by halves, halves of halves and so on; the dimension is dropped.

    The order is fixed by the dimension's length alone: other dimensions, memory layout and threads do not
    enter, which torch's own reductions do not promise. `combine` may be torch.maximum instead.
    """
    while (length := x.shape[dim]) > 1:
        half = length // 2
        folded = combine(x.narrow(dim, 0, half), x.narrow(dim, half, half))
        if length % 2:
            first = folded.narrow(dim, 0, 1)
            first.copy_(combine(first, x.narrow(dim, length - 1, 1)))
        x = folded
    return x.select(dim, 0)


def fold_blocks(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by pairs of neighbours, pairs of pairs and so on; the dimension is dropped.

    As `fold`, and moreover zeros appended at the end change nothing but the sign of a zero, which the
    last line levels: a sequence's blocks may be padded to those of a longer one.
    """
    while (length := x.shape[dim]) > 1:
        pairs = torch.unflatten(x.narrow(dim, 0, length - length % 2), dim, (length // 2, 2))
        summed = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
        x = torch.cat([summed, x.narrow(dim, length - 1, 1)], dim) if length % 2 else summed
    return x.select(dim, 0) + 0.0


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two fp32 tensors are equal bit for bit."""
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def read_only_tensor(array: NDArray[np.float32]) -> Tensor:
    """A tensor over the memory of an array that may be a read-only map; it keeps the map alive."""
    return torch.from_numpy(np.asarray(_Writable(array)))


class _Writable:
    """Says that a read-only array is writable, as torch warns of any other; nothing here writes weights."""

    def __init__(self, array: NDArray[np.float32]) -> None:
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}
        self._keeps = array


def _probe_rows(inputs: int) -> Tensor:
    random = np.random.Generator(np.random.Philox(key=[0, inputs]))
    return torch.from_numpy(random.standard_normal((WIDE_TILES[0], inputs), np.float32))
