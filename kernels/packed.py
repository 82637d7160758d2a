"""The packed file: a model's matrices in the order in which the kernels walk them, mapped by all workers.

Made of a prepared folder, once for each weight format. Integers and numbers are in the machine's byte order:

    8 bytes    magic
    5 × uint32 layout version; 0x01020304; bytes of the table; CRC-32 of the table; 0
    table      JSON (`_Table`): whose weights, which format, and where each tensor lies
    vectors    float32, and the scales of matrices, each on a multiple of 64 bytes
    matrices   each on a multiple of 4096 bytes

A matrix [outputs, inputs] lies as strips of 64 outputs, the last one filled up with zeros. fp32 is
[ceil(outputs / 64)][inputs][64]. Smaller items lie in pairs of inputs, an odd number of inputs filled up
with a zero: [ceil(outputs / 64)][ceil(inputs / 2)][64][2], of a pair the second input first, so that a word's
upper half is the even input: what bf16 dot products take first. Scales are float32
[ceil(outputs / 64)][ceil(inputs / 128)]: of the block in which the strip lies.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import struct
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from engine.errors import ModelError, StartError
from engine.model import read_config
from kernels.formats import BLOCK, ITEM_BYTES, WeightFormat, WeightKind
from kernels.quantize import Quantized, decode_bf16, decode_e4m3, quantize, round_bf16
from kernels.source import E4M3
from kernels.weights import EMBEDDING, HEAD, STORED_KINDS, head_name, read_stored, scales_shape, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from engine.model import ModelConfig
    from kernels.weights import StoredTensor

    Floats = NDArray[np.float32]

LAYOUT = 2
"""To be raised whenever the same weights would be packed in another way."""
STRIP = 64
"""Outputs of a strip."""
MAGIC = b"\x89estafet"
BYTE_ORDER = 0x01020304
MATRIX_ALIGNMENT = 4096
VECTOR_ALIGNMENT = 64
CHUNK_ELEMENTS = 1 << 20
"""Numbers of a matrix that are packed at a time."""
PARTIAL = ".partial-"
SPARE_BYTES = 64 << 20
REMEDY = "delete it, it is made again at the next start"
MAX_TABLE_BYTES = 64 << 20

_PREFIX = struct.Struct("=8s5I")


class _Place(msgspec.Struct, frozen=True):
    """Some bytes of the file."""

    offset: int
    size: int
    checksum: int = 0
    """CRC-32."""


class _Entry(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    kind: WeightKind
    data: _Place
    scales: _Place


class _Table(msgspec.Struct, frozen=True):
    weights_id: str
    format: WeightFormat
    size: int
    """Of the whole file, in bytes."""
    tensors: dict[str, _Entry]


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix in strips: read-only views of the mapped file."""

    kind: WeightKind
    outputs: int
    inputs: int
    data: NDArray[np.uint8]
    """1-D, the strips one after the other; begins on a page of 4096 bytes."""
    scales: Floats
    """[strips, ceil(inputs / 128)]; empty, [0, 0], for bf16 and fp32."""

    @property
    def strips(self) -> int:
        """Strips of 64 outputs."""
        return -(-self.outputs // STRIP)

    @property
    def bytes(self) -> int:
        """Of codes and scales."""
        return self.data.nbytes + self.scales.nbytes

    def values(self) -> Floats:
        """The matrix that it stands for, float32 [outputs, inputs]: what kernels must compute with."""
        items = from_strips(self.data.view(_ITEMS[self.kind]), self.outputs, self.inputs)
        if self.kind == "fp32":
            return items
        if self.kind == "bf16":
            return decode_bf16(items)
        codes = items.astype(np.float32) if self.kind == "int8" else decode_e4m3(items)
        scales = np.repeat(np.repeat(self.scales, STRIP, axis=0), BLOCK, axis=1)
        return cast("Floats", codes * scales[: self.outputs, : self.inputs])


_ITEMS: dict[WeightKind, type[np.generic]] = {
    "fp32": np.float32,
    "bf16": np.uint16,
    "fp8": np.uint8,
    "fp8-per-tensor": np.uint8,
    "int8": np.int8,
}


def to_strips(items: NDArray[Any]) -> NDArray[Any]:
    """A matrix of items [outputs, inputs] in strips: [strips, inputs, 64] of float32, else
    [strips, pairs of inputs, 64, 2]."""
    outputs, inputs = items.shape
    pairs = items.dtype != np.float32
    missing = (-outputs % STRIP, inputs % 2 if pairs else 0)
    if any(missing):
        items = np.pad(items, ((0, missing[0]), (0, missing[1])))
    if not pairs:
        return np.ascontiguousarray(items.reshape(-1, STRIP, inputs).swapaxes(1, 2))
    halves = items.reshape(-1, STRIP, items.shape[1] // 2, 2)
    return np.ascontiguousarray(halves.swapaxes(1, 2)[..., ::-1])


def from_strips(items: NDArray[Any], outputs: int, inputs: int) -> NDArray[Any]:
    """The matrix [outputs, inputs] of items that lie in strips."""
    if items.dtype == np.float32:
        rows = items.reshape(-1, inputs, STRIP).swapaxes(1, 2).reshape(-1, inputs)
    else:
        pairs = -(-inputs // 2)
        halves = items.reshape(-1, pairs, STRIP, 2)[..., ::-1]
        rows = halves.swapaxes(1, 2).reshape(-1, 2 * pairs)
    return np.ascontiguousarray(rows[:outputs, :inputs])


# ── reading ───────────────────────────────────────────────────────────────────────────────────


class PackedWeights:
    """The tensors of a packed file, mapped read-only.

    ModelError, naming the file or the tensor, when it is cut short, damaged in its table, of another
    version, byte order, model or format. The numbers themselves are not read: `pack` checks them.
    """

    def __init__(self, path: Path, config: ModelConfig, weight_format: WeightFormat) -> None:
        self.path = path
        table, self._map = _open(path, config, weight_format)
        self._tied = config.tied_embeddings
        self._matrices: dict[str, PackedMatrix] = {}
        self._vectors: dict[str, Floats] = {}
        for name, entry in table.tensors.items():
            if len(entry.shape) == 1:
                self._vectors[name] = self._view(entry.data, np.float32)
                continue
            outputs, inputs = entry.shape
            scales = self._view(entry.scales, np.float32)
            across = -(-inputs // BLOCK) if len(scales) else 0
            self._matrices[name] = PackedMatrix(
                entry.kind,
                outputs,
                inputs,
                self._view(entry.data, np.uint8),
                scales.reshape(-(-outputs // STRIP) if across else 0, across),
            )

    def matrix(self, name: str) -> PackedMatrix:
        """A matrix by its name in the checkpoint; the LM head of a tied model is its embedding.

        Its kind is the format's, but an FP8 checkpoint's layers may have matrices that are not FP8: look.
        """
        return self._matrices[EMBEDDING if self._tied and name == HEAD else name]

    def vector(self, name: str) -> Floats:
        """A norm's weight, float32."""
        return self._vectors[name]

    def _view(self, place: _Place, dtype: type[np.generic]) -> NDArray[Any]:
        # frombuffer keeps the map alive; of nothing it would be an error.
        if not place.size:
            return np.empty(0, dtype)
        return np.frombuffer(self._map, dtype, place.size // np.dtype(dtype).itemsize, place.offset)


class _StaleError(ModelError):
    """The file is not what this program would pack, or not whole."""


def _open(path: Path, config: ModelConfig, weight_format: WeightFormat) -> tuple[_Table, mmap.mmap]:
    """The table, checked, and the map of the file; _StaleError when it does not fit."""

    def wrong(reason: str) -> _StaleError:
        return _StaleError(f"{path}: {reason}; {REMEDY}")

    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _PREFIX.size:
                raise wrong(f"cut short: {size} bytes")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise _StaleError(f"{path}: no such packed weights; make them with kernels.packed.pack") from None
    except (OSError, ValueError) as error:
        raise wrong(f"cannot be mapped: {error}") from None
    magic, layout, order, length, checksum, _ = _PREFIX.unpack_from(mapped)
    if magic != MAGIC:
        raise wrong("not a file of packed weights")
    if order != BYTE_ORDER:
        raise wrong("packed on a machine of another byte order")
    if layout != LAYOUT:
        raise wrong(f"packed by another version (layout {layout}, this is {LAYOUT})")
    text = mapped[_PREFIX.size : _PREFIX.size + min(length, MAX_TABLE_BYTES)]
    if len(text) != length:
        raise wrong(f"cut short in its table: {size} bytes")
    if zlib.crc32(text) != checksum:
        raise wrong("damaged in its table")
    try:
        table = msgspec.json.decode(text, type=_Table)
    except msgspec.DecodeError as error:
        raise wrong(f"corrupt: {error}") from None
    if table.weights_id != config.weights_id:
        raise wrong(f"packed of the weights {table.weights_id}, not of {config.name}'s {config.weights_id}")
    if table.format != weight_format:
        raise wrong(f"packed as {table.format}, not as {weight_format}")
    if table.size != size:
        raise wrong(f"cut short or too long: {size} bytes, its table says {table.size}")
    _check_places(table, config, wrong)
    return table, mapped


def _check_places(table: _Table, config: ModelConfig, wrong: Callable[[str], ModelError]) -> None:
    """ModelError unless the table has just the model's tensors, each of its size, in its place."""
    shapes = tensor_shapes(config)
    for name, shape in shapes.items():
        entry = table.tensors.get(name)
        if entry is None or entry.shape != shape:
            raise wrong(f"tensor {name} {list(shape)} is missing")
        data, scales = _sizes(shape, entry.kind)
        alignment = MATRIX_ALIGNMENT if len(shape) == 2 else VECTOR_ALIGNMENT
        for place, size, boundary in (
            (entry.data, data, alignment),
            (entry.scales, scales, VECTOR_ALIGNMENT),
        ):
            if place.size != size or place.offset % boundary or not 0 <= place.offset <= table.size - size:
                raise wrong(f"corrupt: tensor {name} has {place.size} bytes at {place.offset}")
    if len(table.tensors) != len(shapes):
        raise wrong("corrupt: tensors that are not the model's")


def _sizes(shape: tuple[int, ...], kind: WeightKind) -> tuple[int, int]:
    """Bytes of a tensor's data and of its scales."""
    if len(shape) == 1:
        return 4 * shape[0], 0
    outputs, inputs = shape
    strips = -(-outputs // STRIP)
    scales = 0 if kind in ("fp32", "bf16") else 4 * strips * -(-inputs // BLOCK)
    wide = inputs if kind == "fp32" else inputs + inputs % 2
    return strips * STRIP * wide * ITEM_BYTES[kind], scales


# ── packing ───────────────────────────────────────────────────────────────────────────────────


def packed_file(folder: Path, config: ModelConfig, weight_format: WeightFormat) -> Path:
    """Where the packed weights of a prepared folder lie, whether or not they are there yet.

    In the folder, under `packed/`; in the cache directory when the folder cannot be written.
    """
    path = folder / "packed" / f"{weight_format}.packed"
    if path.exists() or os.access(path.parent if path.parent.exists() else folder, os.W_OK):
        return path
    from kernels.prepare import cache_dir

    return cache_dir() / "packed" / f"{config.weights_id}-{weight_format}.packed"


def pack(folder: Path, weight_format: WeightFormat, progress: bool = False, verify: bool = True) -> Path:
    """The packed weights of a prepared folder: found, or made once and put in their place whole.

    A file that is there is read through and its checksums are compared, unless `verify` is False; one that
    does not fit or is damaged is made again, which a line on stderr says. Shows a progress bar on stderr if
    `progress`. ModelError when the folder's weights are damaged, StartError when there is no room.
    """
    config = read_config(folder)
    path = packed_file(folder, config, weight_format)
    if (why := _unfit(path, config, weight_format, verify)) is None:
        return path
    if why:
        print(f"estafet: {why}; packing anew", file=sys.stderr)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent):
            # Unless somebody else packed it while we waited.
            if _unfit(path, config, weight_format, verify) is not None:
                with tempfile.NamedTemporaryFile(prefix=PARTIAL, dir=path.parent, delete=False) as file:
                    partial = Path(file.name)
                    try:
                        _write(file.fileno(), path, folder, config, weight_format, progress)
                        partial.chmod(0o644)
                        partial.replace(path)
                    except BaseException:
                        partial.unlink(missing_ok=True)
                        raise
    except OSError as error:
        raise StartError(
            f"{path.parent}: cannot hold the packed weights: {error.strerror or error}; set ESTAFET_CACHE to "
            "a directory with room"
        ) from error
    return path


def _unfit(path: Path, config: ModelConfig, weight_format: WeightFormat, verify: bool) -> str | None:
    """None when the file is what it should be; else what is wrong with it, nothing when it is not there."""
    if not path.exists():
        return ""
    try:
        table, mapped = _open(path, config, weight_format)
        mapped.close()
        if verify:
            _verify(path, table)
    except _StaleError as error:
        return str(error).removesuffix(f"; {REMEDY}")
    return None


def _verify(path: Path, table: _Table) -> None:
    """_StaleError, naming the tensor, when a checksum is not that of the bytes."""
    from kernels.convert import worker_pool

    def check(item: tuple[str, _Place]) -> None:
        name, place = item
        with path.open("rb") as file:
            checksum, end = 0, place.offset + place.size
            for start in range(place.offset, end, CHUNK_ELEMENTS):
                checksum = zlib.crc32(
                    os.pread(file.fileno(), min(CHUNK_ELEMENTS, end - start), start), checksum
                )
        if checksum != place.checksum:
            raise _StaleError(f"{path}: damaged in tensor {name}; {REMEDY}")

    places = [(name, place) for name, entry in table.tensors.items() for place in (entry.data, entry.scales)]
    with worker_pool() as pool:
        for _ in pool.map(check, places):
            pass


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, and sweep what a killed packing left: under the lock nobody packs."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.glob(PARTIAL + "*"):
            leftover.unlink(missing_ok=True)
        yield


def _write(
    number: int,
    path: Path,
    folder: Path,
    config: ModelConfig,
    weight_format: WeightFormat,
    progress: bool,
) -> None:
    """Write everything into the empty file with the descriptor `number`."""
    from tqdm import tqdm

    from kernels.convert import worker_pool, write_at

    stored = read_stored(folder, config)
    table = _plan(stored, config, weight_format)
    free = shutil.disk_usage(path.parent).free
    if free < table.size + SPARE_BYTES:
        raise StartError(
            f"{path.parent}: {table.size >> 20} MiB needed to pack {config.name} as {weight_format}, "
            f"{free >> 20} MiB free; set ESTAFET_CACHE to a directory with room"
        )
    os.posix_fallocate(number, 0, table.size)

    def write(name: str) -> _Entry:
        entry, tensor = table.tensors[name], stored[name]
        if len(entry.shape) == 1:
            values = tensor.values()
            if not np.isfinite(values).all():
                raise tensor.wrong("holds NaN or Inf")
            parts: Iterator[Quantized] = iter([Quantized(values, np.empty((0, 0), np.float32))])
        else:
            parts = _packed_parts(tensor, entry.kind)
        position, checksum = entry.data.offset, 0
        all_scales = []
        for items, scales in parts:
            data = items.reshape(-1).view(np.uint8).data
            write_at(number, data, position)
            checksum, position = zlib.crc32(data, checksum), position + len(data)
            all_scales.append(scales)
        scales = np.concatenate(all_scales).reshape(-1).view(np.uint8)
        write_at(number, scales.data, entry.scales.offset)
        return _Entry(
            entry.shape,
            entry.kind,
            msgspec.structs.replace(entry.data, checksum=checksum),
            msgspec.structs.replace(entry.scales, checksum=zlib.crc32(scales.data)),
        )

    bar = tqdm(
        total=sum(tensor.info.elements for tensor in stored.values()),
        desc=f"packing {config.name} as {weight_format}",
        unit="w",
        unit_scale=True,
        disable=None if progress else True,  # None: on a terminal only
    )
    entries: dict[str, _Entry] = {}
    with bar, worker_pool() as pool:
        for name, entry in zip(table.tensors, pool.map(write, table.tensors), strict=True):
            entries[name] = entry
            bar.update(stored[name].info.elements)
    text = msgspec.json.encode(msgspec.structs.replace(table, tensors=entries))
    prefix = _PREFIX.pack(MAGIC, LAYOUT, BYTE_ORDER, len(text), zlib.crc32(text), 0)
    write_at(number, memoryview(prefix + text), 0)


def _plan(stored: dict[str, StoredTensor], config: ModelConfig, weight_format: WeightFormat) -> _Table:
    """Where everything will lie; checksums are 0 yet."""
    kinds = {name: kind_of(tensor, config, weight_format) for name, tensor in stored.items()}
    # The table grows with the checksums: ten digits each at most. What it leaves is never read.
    end = _PREFIX.size + sum(len(name) + 256 for name in stored) + 1024

    def place(size: int, alignment: int) -> _Place:
        nonlocal end
        start = -(-end // alignment) * alignment
        end = start + size
        return _Place(start, size)

    small: dict[str, tuple[_Place | None, _Place]] = {}
    for name, tensor in stored.items():
        data, scales = _sizes(tensor.info.shape, kinds[name])
        vector = place(data, VECTOR_ALIGNMENT) if len(tensor.info.shape) == 1 else None
        small[name] = vector, place(scales, VECTOR_ALIGNMENT)
    tensors = {}
    for name, tensor in stored.items():
        vector, scales_place = small[name]
        shape = tensor.info.shape
        data_place = vector or place(_sizes(shape, kinds[name])[0], MATRIX_ALIGNMENT)
        tensors[name] = _Entry(shape, kinds[name], data_place, scales_place)
    return _Table(config.weights_id, weight_format, end, tensors)


def kind_of(tensor: StoredTensor, config: ModelConfig, weight_format: WeightFormat) -> WeightKind:
    """How a tensor is packed: as the format says, with two exceptions.

    Norms are float32. And what the makers of an FP8 checkpoint kept out of FP8 stays as they stored it, but
    for the LM head, whose kind people choose.
    """
    if len(tensor.info.shape) == 1:
        return "fp32"
    kind = weight_format.head if tensor.name in (EMBEDDING, HEAD) else weight_format.layers
    left_out = config.stored == E4M3 != tensor.info.type and tensor.name != head_name(config)
    return STORED_KINDS[tensor.info.type] if kind == "fp8" and left_out else kind


def row_chunks(outputs: int, inputs: int) -> list[tuple[int, int]]:
    """(first row, row after the last) of each part of a matrix that is worked on at a time: whole blocks."""
    step = max(1, CHUNK_ELEMENTS // (BLOCK * inputs)) * BLOCK
    return [(start, min(start + step, outputs)) for start in range(0, outputs, step)]


def _packed_parts(tensor: StoredTensor, kind: WeightKind) -> Iterator[Quantized]:
    """(items in strips, scales [strips, k-blocks]) of some rows of a matrix after the other."""
    outputs, inputs = tensor.info.shape
    chunks = row_chunks(outputs, inputs)
    maximum = None
    if kind == "fp8-per-tensor":
        maximum = max(float(np.abs(_finite(tensor, *chunk)).max()) for chunk in chunks)
    for start, stop in chunks:
        items, scales = items_of(tensor, kind, start, stop, maximum)
        strips = -(-(stop - start) // STRIP)
        yield Quantized(to_strips(items), np.repeat(scales, BLOCK // STRIP, axis=0)[:strips])


def items_of(
    tensor: StoredTensor, kind: WeightKind, start: int, stop: int, maximum: float | None
) -> tuple[NDArray[Any], Floats]:
    """Some rows, from `row_chunks`, as items of the kind, and the scales of their blocks (none: empty).

    Codes that are stored are taken as they are. `maximum`: for `quantize`. ModelError, naming the tensor, for
    numbers that cannot be computed with.
    """
    none = np.empty(scales_shape((stop - start, 0)), np.float32)
    if kind == "fp8" and tensor.info.type == E4M3:
        return tensor.codes(start, stop), tensor.block_scales()[start // BLOCK : -(-stop // BLOCK)]
    values = _finite(tensor, start, stop)
    if kind == "fp32":
        return values, none
    if kind == "bf16":
        bits = round_bf16(values)
        if ((bits & 0x7FFF) == 0x7F80).any():
            raise tensor.wrong("holds a number beyond bfloat16", "it has to stay in fp32")
        return bits, none
    return quantize(values, kind, maximum)


def _finite(tensor: StoredTensor, start: int, stop: int) -> Floats:
    values = tensor.rows(start, stop)
    if not np.isfinite(values).all():
        raise tensor.wrong("holds NaN or Inf")
    return values
