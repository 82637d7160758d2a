"""The numbers of a model's files: check them, then write them as float32 safetensors.

Checking is a cheap first pass over the quantised bytes (each number is finite exactly when its
block's scales are), so that a damaged file is refused before the slow second pass begins.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.errors import ModelError
from kernels.quantize import E4M3_NAN
from kernels.safetensors_file import safetensors_header
from kernels.source import E4M3
from kernels.weights import StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from pathlib import Path

    from kernels.source import TensorInfo, TensorPlan

    Array = np.ndarray[Any, Any]

CHUNK_ELEMENTS = 1 << 21
CHECK_BYTES = 1 << 20
"""A piece that stays in the cache between the hash and the look for NaN."""
WORKERS = 4

_HALF = (np.uint16, 0x7C00)
"""All exponent bits of a float16: set in Inf and NaN only."""
_SCALES: dict[str, tuple[tuple[type[np.generic], int], tuple[int, ...]]] = {
    # type: (words and their exponent bits, byte offsets in a block of the words that may be non-finite)
    "F32": ((np.uint32, 0x7F800000), (0,)),
    "F16": (_HALF, (0,)),
    "BF16": ((np.uint16, 0x7F80), (0,)),
    "Q8_0": (_HALF, (0,)),
    "Q4_0": (_HALF, (0,)),
    "Q4_1": (_HALF, (0, 2)),
    "Q4_K": (_HALF, (0, 2)),
    "Q6_K": (_HALF, (208,)),
    E4M3: ((np.uint8, E4M3_NAN), (0,)),
}


GGUF_TYPES = tuple(kind for kind in _SCALES if kind != E4M3)


def check_types(plans: list[TensorPlan], known: Collection[str] = GGUF_TYPES) -> None:
    """ModelError naming the first tensor whose type is not one of the `known` ones."""
    for plan in plans:
        if plan.source.type not in known:
            raise ModelError(
                f"{plan.source.path}: tensor {plan.source.name} has the type {plan.source.type}; "
                f"convert the model to one of {', '.join(known)}"
            )


def check_numbers(plans: list[TensorPlan], advance: Callable[[int], object]) -> str:
    """Refuse NaN and Inf anywhere, and scales that are not positive; the content hash of all weights (32
    hexadecimal digits).

    ModelError names the tensor. Reads every byte once, in small pieces; `advance(numbers)` is called as
    numbers are checked.
    """

    def digest(plan: TensorPlan) -> bytes:
        tensor = plan.source
        (word, mask), offsets = _SCALES[tensor.type]
        block_bytes = 1 if tensor.type == E4M3 else GGML_QUANT_SIZES[GGMLQuantizationType[tensor.type]][1]
        content = hashlib.blake2b()
        step = CHECK_BYTES // block_bytes * block_bytes
        for start in range(0, tensor.size, step):
            data = tensor.read(start, min(step, tensor.size - start))
            content.update(data.data)
            blocks = data.reshape(-1, block_bytes)
            for offset in offsets:
                words = blocks[:, offset : offset + np.dtype(word).itemsize]
                bits = np.ascontiguousarray(words).view(word)
                if ((bits & np.array(mask, word)) == mask).any():
                    raise ModelError(
                        f"{tensor.path}: tensor {tensor.name} holds NaN or Inf; fetch the file again"
                    )
        if plan.scales is not None:
            content.update(StoredTensor(plan.name, tensor, plan.scales).block_scales().data)
        label = f"{plan.name} {tensor.type} {tensor.shape} ".encode()
        return hashlib.blake2b(label + content.digest()).digest()

    total = hashlib.blake2b(digest_size=16)
    with worker_pool() as pool:
        for plan, part in zip(plans, pool.map(digest, plans), strict=True):
            total.update(part)
            advance(plan.source.elements)
    return total.hexdigest()


def same_numbers(one: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors of one shape and type are equal to the bit. Needs a few MiB of memory."""
    return one.size == other.size and all(
        np.array_equal(one.read(start, size), other.read(start, size))
        for start in range(0, one.size, CHUNK_ELEMENTS)
        if (size := min(CHUNK_ELEMENTS, one.size - start))
    )


def write_safetensors(plans: list[TensorPlan], path: Path, advance: Callable[[int], object]) -> None:
    """Convert all tensors to float32 and write them (format: https://github.com/huggingface/safetensors).

    `advance(numbers)` is called as numbers are written. Needs a few chunks of memory, whatever
    the model's size. OSError when the disk is full.
    """
    header, starts = safetensors_header({plan.name: ("F32", plan.source.shape) for plan in plans})
    with path.open("wb") as out, worker_pool() as pool:
        out.write(header)
        out.flush()
        number = out.fileno()

        def convert(plan: TensorPlan, rows: slice, position: int) -> int:
            numbers = _rows(plan, rows)
            write_at(number, numbers.data.cast("B"), position)
            return numbers.size

        pending: deque[Future[int]] = deque()
        for plan in plans:
            for rows in _chunks(plan):
                position = starts[plan.name] + 4 * rows.start * plan.source.shape[-1]
                pending.append(pool.submit(convert, plan, rows, position))
        while pending:
            advance(pending.popleft().result())


def _chunks(plan: TensorPlan) -> Iterator[slice]:
    """Slices of rows, each of about CHUNK_ELEMENTS numbers and, for Q and K, of whole heads."""
    rows, width = math.prod(plan.source.shape[:-1]), plan.source.shape[-1]
    unit = rows // plan.heads if plan.heads else 1
    step = max(1, CHUNK_ELEMENTS // (unit * width)) * unit
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _rows(plan: TensorPlan, rows: slice) -> Array:
    """The given rows of the tensor as contiguous float32 [rows][width], Q and K in Hugging Face's order."""
    tensor = plan.source
    row_bytes = tensor.size // math.prod(tensor.shape[:-1])
    data = tensor.read(rows.start * row_bytes, (rows.stop - rows.start) * row_bytes)
    data = data.reshape(-1, row_bytes)
    if plan.heads:
        # llama.cpp interleaves the two halves of each head for its RoPE. The rows move as bytes,
        # before they grow to float32.
        half = math.prod(tensor.shape[:-1]) // plan.heads // 2
        data = np.ascontiguousarray(data.reshape(-1, half, 2, row_bytes).swapaxes(1, 2)).reshape(
            -1, row_bytes
        )
    return np.ascontiguousarray(gguf.dequantize(data, GGMLQuantizationType[tensor.type]), dtype="<f4")


def write_at(number: int, data: memoryview, position: int) -> None:
    """Write all of `data` at `position` of the file with that descriptor; OSError when the disk is full."""
    while data:
        written = os.pwrite(number, data, position)
        data, position = data[written:], position + written


@contextlib.contextmanager
def worker_pool() -> Iterator[ThreadPoolExecutor]:
    """Threads (numpy and blake2b release the interpreter lock on chunks of this size).

    A failure or an interrupt drops the work that has not begun.
    """
    pool = ThreadPoolExecutor(min(WORKERS, len(os.sched_getaffinity(0))), thread_name_prefix="prepare")
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
