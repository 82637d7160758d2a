"""Opening a backend by its name in the topology."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.errors import StartError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from engine.shapes import PageShape
    from kernels.backend import Backend
    from kernels.formats import WeightFormat

NAMES = ("native", "torch", "reference")


def open_backend(
    name: str,
    model_folder: Path,
    pool: NDArray[np.uint8],
    page_shape: PageShape,
    threads: int,
    weights: WeightFormat | None = None,
) -> Backend:
    """Open the backend `name` over a prepared model folder and a pool of KV pages.

    pool: 1-D contiguous writable uint8, a whole number of pages of `page_shape`, e.g.
    `np.frombuffer(mmap, np.uint8)`; the backend keeps the array, and so the map, alive. `threads` is the
    number of cores of one step; the reference uses one. `weights`: how the native backend keeps the matrices
    (None: as `kernels.weights.default_format` says); the others compute with what is stored. StartError: unknown name, or a pool or page shape
    that does not fit the model. ModelError: the folder cannot be served.
    """
    if name == "native":
        from kernels.cpu.backend import NativeBackend

        return NativeBackend(model_folder, pool, page_shape, threads, weights)
    if name == "torch":
        # Torch's threads spin at every barrier unless told not to before torch is loaded. On cores shared
        # with other processes one spins away the time that the other waits for: steps took 60 s, not 0.6.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        # torch costs 1.6 s to import: only for those who ask for it
        from kernels.torch_cpu import TorchBackend

        return TorchBackend(model_folder, pool, page_shape, threads)
    if name == "reference":
        from kernels.reference import ReferenceBackend

        return ReferenceBackend(model_folder, pool, page_shape)
    raise StartError(f"unknown backend {name!r}; known are {', '.join(NAMES)}")
