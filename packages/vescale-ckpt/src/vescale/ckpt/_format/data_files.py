"""Write and read data files: safetensors files with a checksum for every 4 MiB.

A data file has the safetensors format: 8 bytes of header length (little-endian), a JSON header with dtype, shape and
byte range of every tensor, then the bytes. Every tensor is cut into blocks of 4 MiB, the last one shorter, and the
header's ``__metadata__`` has their CRC-32 in hexadecimal:

    {"__metadata__": {"format": "pt", "block_bytes": "4194304", "crc32": "{\"w\": \"0a1b2c3d4e5f6071\"}"},
     "w": {"dtype": "F32", "shape": [1536, 1024], "data_offsets": [0, 6291456]}}

The manifest has the CRC-32 of the header. So whatever a load reads of a file is compared with a checksum, also where it
reads a part of a tensor: it reads the blocks around that part. Memory is bounded by a few blocks.

The safetensors package reads these files, but offers no reads of blocks, and writes what is a copy on the CPU already.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError
from .._typed_json import JsonReader
from .boxes import Box
from .crc32 import crc32
from .dtypes import ITEM_BYTES, dtype_name, stored_form
from .manifest import Piece, StoredFile
from .safetensors_file import METADATA, InFile, open_regular, parse_header, read_at, read_header
from .storage import is_remote, new_file
from .strided import Part, fill_part, row_major

BLOCK_BYTES = 4 * 1024**2
MAX_FILE_BYTES = 4 * 1024**3

#: The CRC-32 of each block of a tensor.
Checksums = tuple[int, ...]


@dataclass(frozen=True)
class Entry:
    """A tensor to write: its name, its key in the file, its box in the global tensor and its values."""

    name: str
    key: str
    box: Box
    view: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """Count the bytes."""
        return self.view.numel() * self.view.element_size()


@dataclass(frozen=True)
class Written:
    """What a rank has written to a file: its row of the manifest, and its pieces by the names of their tensors."""

    file: StoredFile
    pieces: list[tuple[str, Piece]]


def pack_files(sizes: Sequence[int], *, max_bytes: int = MAX_FILE_BYTES) -> list[range]:
    """Split items of these sizes, in order, into runs of at most ``max_bytes`` (or one item)."""
    runs, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > max_bytes:
            runs.append(range(first, index))
            first, total = index, 0
        total += size
    return [*runs, range(first, len(sizes))] if sizes else []


def write_data_file(path: Path, entries: Sequence[Entry], progress: Callable[[int], None] | None = None) -> Written:
    """Write tensors to one file, flushed to disk; ``progress`` is told of the bytes of each block."""
    # Wide elements first: every tensor then starts at a multiple of its element size.
    entries = sorted(entries, key=lambda entry: -entry.view.element_size())
    sums: dict[str, Checksums] = {entry.key: (0,) * _num_blocks(entry.num_bytes) for entry in entries}
    if is_remote(path):  # which is written from its begin to its end
        sums = {entry.key: checksums(entry.view) for entry in entries}
    with new_file(path) as file:
        header = _header_of(entries, sums)  # of the same length as the one that replaces it
        file.write(header)
        for entry in entries:
            values = resolved(entry.view).cpu().contiguous()
            blocks = []
            for block in _written(file, bytes_of(values)):
                blocks.append(crc32(block))
                if progress is not None:
                    progress(len(block))
            sums[entry.key] = tuple(blocks)
        size = file.tell()
        if not is_remote(path):
            header = _header_of(entries, sums)
            file.seek(0)
            file.write(header)
    pieces = [(entry.name, Piece(entry.box, path.name, entry.key)) for entry in entries]
    return Written(StoredFile(size, crc32(header)), pieces)


def checksums(view: torch.Tensor) -> Checksums:
    """Return the CRC-32 of each block of a tensor's values in row-major order."""
    values = resolved(view).cpu().contiguous()
    data = bytes_of(values)
    return tuple(crc32(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES))


class DataFile:
    """An open data file of a checkpoint, whose header has been checked. Use it as a context.

    Args:
        path: of the file.
        stored: its row of the manifest.

    Raises:
        CheckpointError: it is no regular file, or not the one of the manifest, or has no valid header.
    """

    def __init__(self, path: Path, stored: StoredFile) -> None:
        self._path = path
        self._file, num_bytes = open_regular(path, self._fault)
        try:
            self._tensors = self._read_header(stored, num_bytes)
        except BaseException:
            self._file.close()
            raise
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)  # pages of new memory cost as much as checksums
        self._latest: tuple[int, int] | None = None  # the block in the buffer: where its tensor begins, its number

    def __enter__(self) -> DataFile:
        """Return the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()

    def fill(self, target: torch.Tensor, piece: Piece, box: Box, *, name: str, dtype: str) -> None:
        """Read the values of ``box``, a part of ``piece``, and copy them to ``target``; memory is bounded.

        Raises:
            CheckpointError: the file does not match the manifest, or bytes were changed; the text has the tensor.
        """
        source = self._source_of(piece, name, dtype)
        starts = tuple(a - b for a, b in zip(box.offsets, piece.box.offsets, strict=True))
        part = Part(starts, box.sizes, row_major(piece.box.sizes))
        fill_part(target, part, source.dtype, source.block_length, lambda *run: self._values(source, *run))

    def check(self, piece: Piece, *, name: str, dtype: str) -> None:
        """Compare all bytes of a piece with their checksums.

        Raises:
            CheckpointError: as for ``fill``.
        """
        for _ in self._values(self._source_of(piece, name, dtype), 0, piece.box.num_elements, None):
            pass

    # --- blocks ---

    def _values(
        self, source: _Source, first: int, length: int, into: torch.Tensor | None
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Read the elements from ``first`` on, block by block, in place where a full block goes to ``into``.

        Yields:
            what was not read in place, with its place among the elements; until the next.
        """
        end, blocks = first + length, source.stored.crc32
        for number in range(first // source.block_length, -(-end // source.block_length)):
            start = number * source.block_length
            size = min(BLOCK_BYTES, source.stored.end - source.stored.start - number * BLOCK_BYTES)
            last = start + size // source.dtype.itemsize
            if into is not None and first <= start and last <= end:
                self._read_block(source, number, into[start - first : last - first].view(torch.uint8), blocks[number])
                continue
            block = self._buffer[:size]
            if self._latest != (source.stored.start, number):
                self._latest = None
                self._read_block(source, number, block, blocks[number])
                self._latest = source.stored.start, number
            yield max(start - first, 0), block.view(source.dtype)[max(first - start, 0) : end - start]

    def _read_block(self, source: _Source, number: int, block: torch.Tensor, expected: int) -> None:
        """Read the bytes of a block, which equal their checksum."""
        start = source.stored.start + number * BLOCK_BYTES
        if read_at(self._file, start, bytes_of(block)) != block.numel():
            raise self._fault(f"{source.stored.end} bytes, got fewer", source.label)
        if (found := crc32(bytes_of(block))) != expected:
            end = start + block.numel()
            what = f"checksum {expected:08x} of bytes {start} to {end}, got {found:08x}: bytes were changed or lost"
            raise self._fault(what, source.label)

    # --- the header ---

    def _read_header(self, stored: StoredFile, num_bytes: int) -> dict[str, _Tensor]:
        if num_bytes != stored.num_bytes:
            raise self._fault(f"{stored.num_bytes} bytes, got {num_bytes}")
        header = read_header(self._file, num_bytes, self._fault)
        if (crc := crc32(header)) != stored.header_crc32:
            raise self._fault(f"checksum {stored.header_crc32:08x} of the header, got {crc:08x}: bytes were changed")
        reader = JsonReader(f"{self._path}: header", "restore it, or use another checkpoint", CheckpointError)
        tree, found = parse_header(header, num_bytes, reader, self._fault)
        sums = reader.read(reader.parse(reader.read(tree, _MetadataText).crc32), _SUMS)
        tensors = {}
        for key, own in found.items():
            blocks, count = _checksums_from(sums.get(key, "")), _num_blocks(own.end - own.start)
            if len(blocks) != count:
                raise self._fault(f"checksums of {count} blocks of {key!r}, got {len(blocks)}")
            tensors[key] = _Tensor(own.code, own.shape, own.start, own.end, blocks)
        return tensors

    def _source_of(self, piece: Piece, name: str, dtype: str) -> _Source:
        stored, label = self._tensors.get(piece.key), f"tensor {name!r} {piece.box} in "
        code, shape = stored_form(dtype, piece.box.sizes)
        if stored is None or (stored.code, stored.shape) != (code, shape):
            got = "none" if stored is None else f"{stored.code} {stored.shape}"
            raise self._fault(f"{code} {shape} by the manifest, got {got} in the file", label)
        return _Source(stored, getattr(torch, dtype), label)

    def _fault(self, text: str, label: str = "") -> CheckpointError:
        return CheckpointError(f"{label}{self._path}: expected {text}; restore it, or use another checkpoint")


@dataclass(frozen=True)
class _MetadataText:
    """The ``__metadata__`` of a header."""

    format: str
    block_bytes: str
    crc32: str

    def __post_init__(self) -> None:
        if self.block_bytes != str(BLOCK_BYTES):
            raise ValueError(f"expected blocks of {BLOCK_BYTES} bytes, got {self.block_bytes}")


_SUMS: Any = Mapping[str, str]


@dataclass(frozen=True)
class _Tensor(InFile):
    """A tensor in a file, with the checksums of its blocks."""

    crc32: Checksums


@dataclass(frozen=True)
class _Source:
    """A tensor in a file by the manifest: its dtype, and how errors begin."""

    stored: _Tensor
    dtype: torch.dtype
    label: str

    @property
    def block_length(self) -> int:
        """Count the elements of a block."""
        return BLOCK_BYTES // self.dtype.itemsize


def _num_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _checksums_from(text: str) -> Checksums:
    """Return the checksums of a header; none if the text has others than hexadecimal ones."""
    is_valid = re.fullmatch("([0-9a-f]{8})*", text)
    return tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8)) if is_valid else ()


def _written(file: Any, data: memoryview) -> Iterator[memoryview]:
    """Write bytes, and yield each block while it is in the processor's cache."""
    for start in range(0, len(data), BLOCK_BYTES):
        block = data[start : start + BLOCK_BYTES]
        file.write(block)
        yield block


def _header_of(entries: Sequence[Entry], sums: dict[str, Checksums]) -> bytes:
    texts = {key: "".join(f"{crc:08x}" for crc in own) for key, own in sums.items()}
    metadata = {"format": "pt", "block_bytes": str(BLOCK_BYTES), "crc32": json.dumps(texts)}
    header: dict[str, object] = {METADATA: metadata}
    ends = itertools.accumulate((entry.num_bytes for entry in entries), initial=0)
    for entry, (start, end) in zip(entries, itertools.pairwise(ends), strict=True):
        if entry.key in header:
            raise CheckpointError(f"expected distinct keys in a file, got {entry.key!r} twice; rename {entry.name!r}")
        code, shape = stored_form(dtype_name(entry.view.dtype), tuple(entry.view.shape))
        header[entry.key] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % max(ITEM_BYTES.values()))
    return len(text).to_bytes(8, "little") + text


def resolved(values: torch.Tensor) -> torch.Tensor:
    """Return values that are in memory as they are: torch conjugates and negates some views when they are read."""
    return values.detach().resolve_conj().resolve_neg()


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy; keep the tensor alive while they are used."""
    count = values.numel() * values.element_size()
    return memoryview((ctypes.c_char * count).from_address(values.data_ptr())).cast("B")
