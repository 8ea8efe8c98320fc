"""Read the values of a ``.distcp`` file: files of torch.save, one after the other.

A file of torch.save is a zip archive, whose records are stored as they are:

    archive/data.pkl    a pickle: dtype, shape and strides of the tensor, and the number of its storage
    archive/data/0      the bytes of the storage

The reader finds the second record by the first one and then reads the rows that it needs, block by block. A tensor that
is not in row-major order is read whole. Anything else goes through ``torch.load(weights_only=True)``, one value at a
time. There are no checksums of parts in these files.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .._errors import CheckpointError
from .._format.boxes import Box
from .._format.data_files import BLOCK_BYTES, bytes_of
from .._format.dtypes import dtype_name
from .._format.manifest import Piece
from .._format.storage import open_to_read
from .._format.strided import Part, parts
from .dcp_metadata import Place

_FIX = "restore it, or use another checkpoint"
# The header of a record in a zip archive: its signature, and the lengths of its name and its extra field.
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_STORAGES = {
    "BFloat16Storage": torch.bfloat16,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ComplexDoubleStorage": torch.complex128,
    "ComplexFloatStorage": torch.complex64,
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "ShortStorage": torch.int16,
}


class DcpFile:
    """An open ``.distcp`` file, of which chunks of tensors are read. Use it as a context.

    Args:
        path: of the file.
        place_of: the place of a piece in it.

    Raises:
        CheckpointError: it cannot be opened.
    """

    def __init__(self, path: Path, place_of: Callable[[str, Box], Place]) -> None:
        self._path, self._place_of = path, place_of
        try:
            self._file, _ = open_to_read(path)
        except OSError as error:
            raise _fault(path, f"a data file, got {error.strerror}") from error
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        self._memory: np.memmap | None = None
        self._latest: tuple[Place, _Stored | torch.Tensor] | None = None

    def __enter__(self) -> DcpFile:
        """Return the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()

    def fill(self, target: torch.Tensor, piece: Piece, box: Box, *, name: str, dtype: str) -> None:
        """Read the values of ``box``, a part of ``piece``, and copy them to ``target``.

        Raises:
            CheckpointError: the file has no such tensor; the text has its name.
        """
        stored = self._checked(piece, name, dtype)
        try:
            if isinstance(stored, torch.Tensor):
                target.copy_(stored[box.slices(inside=piece.box)])
                return
            starts = tuple(a - b for a, b in zip(box.offsets, piece.box.offsets, strict=True))
            for part, into in parts(Part(starts, box.sizes, _strides(stored.shape)), target, self._limit(stored.dtype)):
                self._copy(stored, part, into)
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r} {piece.box} in {error}") from None

    def mapped(self, piece: Piece, *, name: str, dtype: str) -> torch.Tensor:
        """Return the values of a piece, which are read from the file when they are used.

        Raises:
            CheckpointError: as for ``fill``.
        """
        stored = self._checked(piece, name, dtype)
        if isinstance(stored, torch.Tensor):
            return stored
        if self._memory is None:
            self._memory = np.memmap(self._file, np.uint8, mode="c")
        end = stored.start + math.prod(stored.shape) * stored.dtype.itemsize
        # the start may be no multiple of the element size: such a tensor is only written, byte by byte
        return torch.from_numpy(self._memory[stored.start : end]).view(stored.dtype).view(stored.shape)

    def _checked(self, piece: Piece, name: str, dtype: str) -> _Stored | torch.Tensor:
        try:
            stored = self._stored(self._place_of(name, piece.box))
            found = dtype_name(stored.dtype), tuple(stored.shape)
            if found != (dtype, piece.box.sizes):
                raise _fault(self._path, f"{dtype} {piece.box.sizes} by .metadata, got {found[0]} {found[1]} in it")
        except CheckpointError as error:
            raise CheckpointError(f"tensor {name!r} {piece.box} in {error}") from None
        return stored

    def _copy(self, stored: _Stored, part: Part, into: torch.Tensor) -> None:
        """Copy a part that is a run in the file and in ``into``, or short enough for the buffer."""
        if not (part.is_run and into.is_contiguous()):
            into.copy_(self._elements(stored, part.first, part.length).as_strided(part.sizes, part.strides))
            return
        flat, limit = into.view(-1), self._limit(stored.dtype)
        for at in range(0, part.length, limit):
            own = flat[at : at + limit]
            own.copy_(self._elements(stored, part.first + at, own.numel()))

    def _limit(self, dtype: torch.dtype) -> int:
        return BLOCK_BYTES // dtype.itemsize

    def _elements(self, stored: _Stored, first: int, count: int) -> torch.Tensor:
        size = stored.dtype.itemsize
        memory = self._buffer[: count * size]
        _read(self._file, self._path, stored.start + first * size, bytes_of(memory))
        return memory.view(stored.dtype)

    def _stored(self, place: Place) -> _Stored | torch.Tensor:
        """Return where the elements of a tensor are, or the tensor, if they are in another order."""
        if self._latest is None or self._latest[0] != place:
            found = _find_elements(self._file, self._path, place)
            if found is None:
                found = _load(self._file, self._path, place)
                if type(found) is not torch.Tensor:
                    raise _fault(self._path, f"a tensor at byte {place.offset}, got {type(found).__name__}")
            self._latest = place, found
        return self._latest[1]


def read_values(path: Path, places: list[Place]) -> Iterator[Any]:
    """Yield the values at some places of a file, or in place of it the `CheckpointError` that says why it has none.

    Values are those that ``torch.load(weights_only=True)`` allows.
    """
    with open_to_read(path)[0] as file:
        for place in places:
            try:
                yield _load(file, path, place)
            except CheckpointError as error:
                yield error


@dataclass(frozen=True)
class _Stored:
    """A tensor whose elements are in row-major order from a byte of the file on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


def _find_elements(file: io.FileIO, path: Path, place: Place) -> _Stored | None:
    """Return where the elements of a tensor are; None if they are not in order, or torch must look for them."""
    records = _records(file, path, place)
    order = records.get("byteorder")
    if order is not None and _bytes_at(file, path, *order) != sys.byteorder.encode():
        return None
    try:
        form = _TensorUnpickler(io.BytesIO(_bytes_at(file, path, *records["data.pkl"]))).load()
        start, length = records[f"data/{form.storage.key}"]
        dtype, shape, strides, offset = form.checked()
    except CheckpointError:
        raise
    except Exception:  # another form than those of plain tensors, for torch.load to read or to refuse
        return None
    if any(step != own for size, step, own in zip(shape, strides, _strides(shape), strict=True) if size > 1):
        return None
    first, last = offset * dtype.itemsize, (offset + math.prod(shape)) * dtype.itemsize
    if not 0 <= first <= last <= length:
        raise _fault(path, f"{last} bytes in the storage of a tensor at byte {place.offset}, got {length}")
    return _Stored(dtype, shape, start + first)


def _load(file: io.FileIO, path: Path, place: Place) -> Any:
    """Return the value at a place, by torch."""
    _records(file, path, place)
    data = io.BytesIO(_bytes_at(file, path, place.offset, place.length))
    try:
        return torch.load(data, weights_only=True, map_location="cpu")
    except Exception as error:
        text = str(error).strip().split("\n")[0][:200]
        raise _fault(path, f"what torch.load(weights_only=True) reads at byte {place.offset}, got {text}") from None


def _records(file: io.FileIO, path: Path, place: Place) -> dict[str, tuple[int, int]]:
    """Return where the bytes of each record of a zip archive are: first byte in the file, and length."""
    found, end = {}, place.offset + place.length
    try:
        with zipfile.ZipFile(io.BufferedReader(_Window(file, place))) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, NotImplementedError, struct.error) as error:
        raise _fault(path, f"a file of torch.save at byte {place.offset}, got {error}") from None
    for info in infos:
        header = place.offset + info.header_offset
        if not place.offset <= header <= end - _LOCAL_HEADER.size:
            raise _fault(path, f"records inside of the {place.length} bytes from byte {place.offset}, got others")
        signature, *lengths = _LOCAL_HEADER.unpack(_bytes_at(file, path, header, _LOCAL_HEADER.size))
        start = header + _LOCAL_HEADER.size + sum(lengths)
        is_raw = info.compress_type == zipfile.ZIP_STORED and info.compress_size == info.file_size
        if signature != b"PK\3\4" or not is_raw or start + info.file_size > end:
            raise _fault(path, f"records of raw bytes at byte {place.offset}, got {info.filename!r} of another kind")
        found[info.filename.partition("/")[2]] = start, info.file_size
    return found


class _Window(io.RawIOBase):
    """The bytes of a place, as a file."""

    def __init__(self, file: io.FileIO, place: Place) -> None:
        super().__init__()
        self._file, self._place, self._position = file, place, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._place.length}[whence]
        if base + offset < 0:
            raise OSError("a place before the first byte")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, memory: Any, /) -> int:
        count = max(0, min(len(memory), self._place.length - self._position))
        self._file.seek(self._place.offset + self._position)
        count = self._file.readinto(memoryview(memory)[:count]) or 0
        self._position += count
        return count


# --- the pickle of a tensor ---


@dataclass(frozen=True)
class _Storage:
    """A storage that a pickle names: its dtype, and its number."""

    dtype: Any
    key: str


@dataclass(frozen=True)
class _Form:
    """A tensor by its pickle."""

    storage: Any
    offset: int
    shape: Any
    strides: Any
    requires_grad: bool
    hooks: Any
    dtype: torch.dtype | None = None

    def checked(self) -> tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]:
        """Return dtype, shape, strides and offset, all in elements."""
        dtype = self.storage.dtype if self.dtype is None else self.dtype
        numbers = (self.offset, *self.shape, *self.strides)
        if not isinstance(dtype, torch.dtype) or len(self.shape) != len(self.strides):
            raise TypeError("another tensor than a plain one")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise TypeError("another shape than one of integers")
        return dtype, tuple(self.shape), tuple(self.strides), self.offset


class _TensorUnpickler(pickle.Unpickler):
    """Reads the pickle of a plain tensor; any name that is not of one is an error."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return _Form
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        found = _STORAGES.get(name, vars(torch).get(name)) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        _, dtype, key, _, _ = pid
        return _Storage(dtype, key)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


# --- bytes ---


def _bytes_at(file: io.FileIO, path: Path, start: int, length: int) -> bytearray:
    memory = bytearray(length)
    _read(file, path, start, memoryview(memory))
    return memory


def _read(file: io.FileIO, path: Path, start: int, memory: memoryview) -> None:
    file.seek(start)
    count = 0
    while count < len(memory):
        step = file.readinto(memory[count:])
        if not step:
            raise _fault(path, f"{start + len(memory)} bytes, got {start + count}")
        count += step


def _fault(path: Path, text: str) -> CheckpointError:
    return CheckpointError(f"{path}: expected {text}; {_FIX}")
