"""The tile rule: which sizes a probe keeps, and sums of fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from engine.errors import StartError
from kernels.tiles import TILE, Linear, fold, fold_blocks, padded, row_exact_tiles, same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(128, 5, generator=torch.Generator().manual_seed(0))


def test_a_product_without_fault_may_use_every_tile(rows: Tensor) -> None:
    plan = row_exact_tiles(lambda x: x * 2, rows, 2)
    assert plan.sizes == (128, 32, 16)
    assert not plan.alone
    assert torch.get_num_threads() == 2
    assert list(plan.cut(336)) == [(0, 128), (128, 256), (256, 288), (288, 320), (320, 336)]


@pytest.mark.parametrize(
    ("product", "sizes", "alone"),
    [
        (lambda x: x + (len(x) == 128), (32, 16), False),
        (lambda x: x + (len(x) == 32), (128, 16), False),
        (lambda x: x + (len(x) > 16) * (torch.get_num_threads() > 1), (16,), False),
        (lambda x: x + (torch.get_num_threads() > 1), (128, 32, 16), True),
    ],
)
def test_sizes_that_do_not_hold_are_left_out(
    rows: Tensor, product: Callable[[Tensor], Tensor], sizes: tuple[int, ...], alone: bool
) -> None:
    plan = row_exact_tiles(product, rows, 2)
    assert (plan.sizes, plan.alone) == (sizes, alone)
    with plan.threads_held():
        assert torch.get_num_threads() == (1 if alone else 2)
    assert torch.get_num_threads() == 2


def test_a_product_that_looks_at_the_place_of_a_row_is_refused(rows: Tensor) -> None:
    with pytest.raises(StartError, match="place of a row"):
        row_exact_tiles(lambda x: x + torch.arange(len(x))[:, None], rows, 1)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 7), (64, 64), (77, 123), (192, 576), (300, 1000)])
def test_linear_is_the_product_and_ignores_neighbours(outputs: int, inputs: int) -> None:
    random = np.random.default_rng(outputs)
    weight = random.standard_normal((outputs, inputs), np.float32)
    x = torch.from_numpy(random.standard_normal((176, inputs), np.float32))
    one, two = Linear(weight, None, 1), Linear(weight, None, 2)
    y = two(x)
    exact = x.double().numpy() @ weight.astype(np.float64).T
    assert np.abs(y.numpy() - exact).max() <= 1e-5 * np.abs(exact).max()
    order = torch.from_numpy(random.permutation(176))
    assert same_bits(two(x[order]), y[order])
    torch.set_num_threads(1)
    assert same_bits(torch.cat([one(part) for part in torch.split(x, TILE)]), y)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 52, 64, 576])
def test_folds_sum(length: int) -> None:
    x = torch.randn(3, length, 4, generator=torch.Generator().manual_seed(length))
    before = x.clone()
    for total in (fold(x, 1), fold_blocks(x, 1)):
        assert torch.allclose(total.double(), x.double().sum(1), atol=1e-5)
    assert torch.equal(fold(x, 1, torch.maximum), x.amax(1))
    assert torch.equal(x, before)
    assert same_bits(fold(x.transpose(0, 2).contiguous(), 1).T.contiguous(), fold(x, 1))


@pytest.mark.parametrize("length", range(1, 10))
def test_appended_zeros_change_no_bit_of_a_block_sum(length: int) -> None:
    x = torch.randn(length, 5, generator=torch.Generator().manual_seed(length))
    x[:, 0] = -0.0
    for more in range(9):
        assert same_bits(fold_blocks(torch.cat([x, torch.zeros(more, 5)]), 0), fold_blocks(x, 0))


def test_padded_is_whole_tiles() -> None:
    assert [padded(n) for n in (1, 16, 17, 128)] == [16, 16, 32, 128]
