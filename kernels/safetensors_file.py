"""The header of a safetensors file: which tensors it holds and where they lie.

Format: https://github.com/huggingface/safetensors#format. The package's own reader allocates what a header
claims and says neither the file nor the tensor in its errors. This one checks every length against
the bytes there are before it reads them, that the tensors fill the file without gap or overlap, and fails
by a ModelError only.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from engine.errors import ModelError
from kernels.facts import shown
from kernels.source import E4M3, TensorInfo

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
MAX_DIMENSIONS = 8
ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, E4M3: 1}

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class _Entry(msgspec.Struct, frozen=True):
    dtype: Annotated[str, msgspec.Meta(pattern=r"^[A-Z0-9_]{1,16}\Z")]
    shape: Annotated[tuple[_Count, ...], msgspec.Meta(max_length=MAX_DIMENSIONS)]
    data_offsets: tuple[_Count, _Count]


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """Everything but the tensors' bytes."""

    path: Path
    changed_ns: int
    """Modification time when the header was read."""
    tensors: dict[str, TensorInfo]

    @property
    def mappable(self) -> bool:
        """Whether all tensors are float32 and can be mapped as such."""
        return all(tensor.type == "F32" and tensor.offset % 4 == 0 for tensor in self.tensors.values())


def read_safetensors(path: Path, remedy: str = "fetch the file again") -> SafetensorsFile:
    """Read the header, and check that the tensors are just what the rest of the file is.

    ModelError when anything is wrong; its line ends with `remedy`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelError(f"{path}: not a regular file; {remedy}")
        with path.open("rb") as file:
            facts = os.fstat(file.fileno())
            length = int.from_bytes(file.read(8), "little")
            if facts.st_size < 8 or length > facts.st_size - 8 or length > MAX_HEADER_BYTES:
                raise ModelError(
                    f"{path}: truncated or corrupt: a header of {length} bytes in a file of {facts.st_size}; "
                    f"{remedy}"
                )
            header = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}; {remedy}") from None
    try:
        tensors = _tensors(path, header)
        _check_places(tensors, 8 + length, facts.st_size)
    except _DamagedError as error:
        raise ModelError(f"{path}: {error}; {remedy}") from None
    return SafetensorsFile(path, facts.st_mtime_ns, tensors)


def safetensors_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file that shall hold these, {name: (type, shape)}; where in the file each begins.

    Types of more bytes come first, else the order stays, and the first tensor begins on a multiple of 64
    bytes: all of them can be mapped as they are.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (kind, shape) in sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0]]):
        start, end = end, end + ITEM_BYTES[kind] * math.prod(shape)
        table[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-(8 + len(text)) % 64)
    base = 8 + len(text)
    starts = {name: base + entry["data_offsets"][0] for name, entry in table.items() if name in tensors}
    return struct.pack("<Q", len(text)) + text, starts


class _DamagedError(Exception):
    """What is wrong with the header, without the file's name."""


def _tensors(path: Path, header: bytes) -> dict[str, TensorInfo]:
    name = "__metadata__"
    tensors: dict[str, TensorInfo] = {}
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop(name, None)
        for name, text in raw.items():
            entry = msgspec.json.decode(text, type=_Entry)
            first, end = entry.data_offsets
            if first > end or math.prod(entry.shape) * ITEM_BYTES.get(entry.dtype, 0) not in (0, end - first):
                raise _DamagedError(
                    f"corrupt: tensor {shown(name)}, {entry.dtype} {list(entry.shape)}, has the offsets "
                    f"{[first, end]}"
                )
            offset = 8 + len(header) + first
            tensors[name] = TensorInfo(path, name, entry.dtype, entry.shape, offset, end - first)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _DamagedError(f"corrupt header, at tensor {shown(name)}: {error}") from None
    return tensors


def _check_places(tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """_DamagedError unless the tensors follow each other from `start` to `size` without gap or overlap."""
    ordered = sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.size))
    for tensor in ordered:
        if tensor.offset + tensor.size > size:
            raise _DamagedError(
                f"truncated: tensor {shown(tensor.name)} ends at byte {tensor.offset + tensor.size}, the "
                f"file at {size}"
            )
    position = start
    for tensor in ordered:
        if tensor.offset != position:
            what = "overlaps the one before it" if tensor.offset < position else "lies behind a gap"
            raise _DamagedError(f"corrupt: tensor {shown(tensor.name)} {what}")
        position += tensor.size
    if position != size:
        raise _DamagedError(f"corrupt: {size - position} bytes behind the last tensor")
