"""Read a GGUF file's header: metadata and where the tensors lie.

The `gguf` package's own reader builds four small arrays for every string, two seconds for a
vocabulary of 49k, and trusts the counts it reads. This one reads the same format (GGUF 2 and 3,
little-endian; https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) in 0.1 s, checks every
count against the bytes that are left before it allocates anything, and fails by a ModelError only.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGMLQuantizationType,
    GGUFValueType,
)

from engine.errors import ModelError
from kernels.facts import shown
from kernels.source import TensorInfo

if TYPE_CHECKING:
    from pathlib import Path

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_STRINGS = 1 << 22
"""Entries of one array of strings: ten times the largest vocabulary or merge table in use."""
MAX_DIMENSIONS = 4

_SCALARS: dict[GGUFValueType, str] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING_BYTES = _U64.size
_PAIR_BYTES = _STRING_BYTES + _U32.size + 1
_INFO_BYTES = _STRING_BYTES + 2 * _U32.size + _U64.size


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything but the tensors' bytes."""

    path: Path
    metadata: dict[str, Any]
    """str, int, float, bool, list[str], or a one-dimensional numpy array of numbers."""
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Read the header and check that all tensors lie inside the file; ModelError when anything is wrong."""
    try:
        with path.open("rb") as file:
            return _Cursor(path, file).header()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; name a GGUF file or a prepared model folder") from None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None


class _Cursor:
    """The read position in the header. Invariant: position ≤ size, and nothing is read beyond size."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._size = os.fstat(file.fileno()).st_size
        self._position = 0

    def header(self) -> GGUFHeader:
        if self._size < len(MAGIC) or self._take(len(MAGIC)) != MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file; name a GGUF file or a prepared model folder")
        version = self._u32()
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            kind = "big-endian GGUF" if swapped else f"GGUF version {version}"
            raise ModelError(f"{self._path}: {kind} is not supported; convert it to little-endian GGUF 3")
        tensor_count, pair_count = self._u64(), self._u64()
        self._room(pair_count, _PAIR_BYTES, "metadata entries")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = self._string("a metadata key")
            if key in metadata:
                raise self._corrupt(f"metadata key {shown(key)} occurs twice")
            metadata[key] = self._value(key)
        self._room(tensor_count, _INFO_BYTES, "tensors")
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        return GGUFHeader(self._path, metadata, self._place(entries, self._data_start(metadata)))

    def _data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment!r}, not a power of two")
        return -(-self._position // alignment) * alignment

    def _place(
        self, entries: list[tuple[str, GGMLQuantizationType, tuple[int, ...], int]], start: int
    ) -> dict[str, TensorInfo]:
        tensors: dict[str, TensorInfo] = {}
        for name, kind, shape, offset in entries:
            block, block_bytes = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise self._corrupt(
                    f"tensor {shown(name)}: rows of {shape[-1]} are not whole {kind.name} blocks of {block}"
                )
            size = math.prod(shape) // block * block_bytes
            if start + offset + size > self._size:
                raise ModelError(
                    f"{self._path}: truncated: tensor {shown(name)} ends at byte {start + offset + size}, "
                    f"the file at {self._size}; fetch the file again"
                )
            if name in tensors:
                raise self._corrupt(f"tensor {shown(name)} occurs twice")
            tensors[name] = TensorInfo(self._path, name, kind.name, shape, start + offset, size)
        return tensors

    def _tensor_entry(self) -> tuple[str, GGMLQuantizationType, tuple[int, ...], int]:
        name = self._string("a tensor name")
        dimensions = self._u32()
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {shown(name)} has {dimensions} dimensions")
        shape = tuple(self._u64() for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._corrupt(f"tensor {shown(name)} has the empty shape {shape}")
        number, offset = self._u32(), self._u64()
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise ModelError(f"{self._path}: tensor {shown(name)} has the unknown type {number}") from None
        return name, kind, shape, offset

    def _value(self, key: str) -> Any:
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            return self._string(key)
        if kind is not GGUFValueType.ARRAY:
            return _scalar(self._numbers(kind, 1, key))
        kind, count = self._kind(key), self._u64()
        if kind is GGUFValueType.ARRAY:
            raise self._corrupt(f"metadata {shown(key)} is an array of arrays")
        if kind is not GGUFValueType.STRING:
            return self._numbers(kind, count, key)
        self._room(count, _STRING_BYTES, f"strings in {shown(key)}")
        if count > MAX_STRINGS:
            raise self._corrupt(f"metadata {shown(key)} claims {count} strings")
        return [self._string(key) for _ in range(count)]

    def _kind(self, key: str) -> GGUFValueType:
        number = self._u32()
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._corrupt(f"metadata {shown(key)} has the unknown type {number}") from None

    def _numbers(self, kind: GGUFValueType, count: int, key: str) -> np.ndarray[Any, Any]:
        dtype = np.dtype(_SCALARS[kind])
        self._room(count, dtype.itemsize, f"numbers in {shown(key)}")
        # A bool that is neither 0 nor 1 must not become a numpy bool: compare the bytes instead.
        raw = self._take(count * dtype.itemsize)
        return np.frombuffer(raw, np.uint8) != 0 if dtype == np.bool_ else np.frombuffer(raw, dtype)

    def _string(self, what: str) -> str:
        length = self._u64()
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"{shown(what)} holds a string that is not UTF-8") from None

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _u64(self) -> int:
        return int(_U64.unpack(self._take(8))[0])

    def _take(self, count: int) -> bytes:
        if count > self._size - self._position:
            raise self._truncated()
        data = self._file.read(count)
        if len(data) != count:
            raise self._truncated()  # the file shrank while we read it
        self._position += count
        return data

    def _room(self, count: int, least: int, what: str) -> None:
        """Refuse a count that the rest of the file cannot hold."""
        if count * least > self._size - self._position:
            raise ModelError(
                f"{self._path}: truncated or corrupt: claims {count} {what} with "
                f"{self._size - self._position} bytes left; fetch the file again"
            )

    def _truncated(self) -> ModelError:
        return ModelError(
            f"{self._path}: truncated in its header at byte {self._position}; fetch the file again"
        )

    def _corrupt(self, reason: str) -> ModelError:
        return ModelError(f"{self._path}: corrupt: {reason}; fetch the file again")


def _scalar(array: np.ndarray[Any, Any]) -> int | float | bool:
    value = array[0]
    if isinstance(value, np.float32):
        # The shortest decimal that rounds to these 32 bits is what the model's author wrote: 1e-05.
        return float(str(value))
    return value.item()  # type: ignore[no-any-return]
