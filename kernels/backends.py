"""Opening a backend by its name in the topology."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from engine.errors import StartError
from engine.model import read_config

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from engine.shapes import PageShape
    from engine.topology import ModelTable
    from kernels.backend import Backend, WriterSlots
    from kernels.formats import Activations, WeightFormat

NAMES = ("native", "torch", "reference")


def resolve(name: str) -> str:
    """The backend that "auto" stands for on this machine: native, or torch when that was not built."""
    if name != "auto":
        return name
    from kernels.cpu import native

    try:
        native()
    except StartError:
        return "torch"
    return "native"


def format_for(model: ModelTable, folder: Path) -> WeightFormat:
    """How a topology wants the matrices of its prepared model kept; ModelError when it is damaged."""
    from kernels.formats import WeightFormat
    from kernels.weights import default_format

    own = default_format(folder, read_config(folder))
    if model.weights != "auto":
        own = WeightFormat(model.weights, model.weights)
    return own if model.head == "auto" else WeightFormat(own.layers, model.head)


def open_backend(
    name: str,
    model_folder: Path,
    pool: NDArray[np.uint8],
    page_shape: PageShape,
    threads: int,
    weights: WeightFormat | None = None,
    activations: Activations | None = None,
    cores: Sequence[int] = (),
    writers: WriterSlots | None = None,
) -> Backend:
    """Open the backend `name` over a prepared model folder and a pool of KV pages.

    pool: 1-D contiguous writable uint8, a whole number of pages of `page_shape`, e.g.
    `np.frombuffer(mmap, np.uint8)`; the backend keeps the array, and so the map, alive. `threads` is the
    number of cores of one step; the reference uses one.

    Of the native backend only: `weights`, how it keeps the matrices (None: as
    `kernels.weights.default_format` says), `activations`, what their inputs are rounded to (None: as
    `kernels.formats.activations_for` says), `cores`, where its threads are pinned, and `writers`, what they
    hold (`Backend.writer_slots` says whether they do). The others compute with what is stored, and hold
    nothing.

    StartError: unknown name, or a pool or page shape that does not fit the model. ModelError: the folder
    cannot be served.
    """
    if name == "native":
        from kernels.cpu.backend import NativeBackend

        return NativeBackend(
            model_folder,
            pool,
            page_shape,
            threads,
            weights,
            activations=activations,
            cores=cores,
            writers=writers,
        )
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
