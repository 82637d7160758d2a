"""What tests of the native kernels share: the variants that run here, and covering sets of cases."""

from __future__ import annotations

import importlib.util
import os
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kernels.cpu import NAME, PATH_VARIABLE, native

if TYPE_CHECKING:
    from types import ModuleType

INSTALLED = PATH_VARIABLE in os.environ or importlib.util.find_spec(NAME) is not None
"""Only where there is no extension at all are its tests left out: `python -m tools.native` says whether that
is right. One that does not load is an error."""

needs_native = pytest.mark.skipif(not INSTALLED, reason="the native kernels are not installed")


def kernels() -> ModuleType:
    """The extension; skips the test, or the module that is being collected, where there is none."""
    if not INSTALLED:
        pytest.skip("the native kernels are not installed", allow_module_level=True)
    return native()


def pairwise(axes: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Cases in which every value of an axis meets every value of every other axis at least once."""
    names = list(axes)
    pairs = {
        (one, a, other, b)
        for one, other in combinations(names, 2)
        for a, b in product(range(len(axes[one])), range(len(axes[other])))
    }

    def meeting(case: dict[str, int]) -> set[tuple[str, int, str, int]]:
        return {(one, case[one], other, case[other]) for one, other in combinations(names, 2)}

    random = np.random.default_rng(0)
    cases = []
    while pairs:
        drawn = [{name: int(random.integers(len(axes[name]))) for name in names} for _ in range(300)]
        for case, (one, a, other, b) in zip(drawn, sorted(pairs), strict=False):
            case |= {one: a, other: b}
        counts = [len(pairs & meeting(case)) for case in drawn]
        best = drawn[counts.index(max(counts))]
        pairs -= meeting(best)
        cases.append({name: axes[name][best[name]] for name in names})
    return cases
