"""Write and read safetensors files, and commit a complete directory by one rename.

A data file has the safetensors format: 8 bytes of header length (little-endian), a JSON header with dtype, shape and
byte range of every tensor, then the bytes. This module writes it without the safetensors package. Only one tensor at a
time is then on the CPU, its CRC-32 is computed in the same pass, and views of one flat buffer need no clones. Reads use
the safetensors package, which maps the file and returns slices.

Commit: all files are written to ``<path>.tmp-<token>`` and flushed to disk, the manifest last. One rename then moves
the directory to ``path``. A crash at any moment leaves either no directory at ``path`` or a complete one.
"""

import contextlib
import ctypes
import glob
import json
import logging
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from .._errors import CheckpointError
from .boxes import Box
from .dtypes import ITEM_BYTES, SAFETENSORS_CODES, dtype_name
from .manifest import MANIFEST_NAME, Piece

logger = logging.getLogger("vescale.ckpt")

MAX_FILE_BYTES = 4 * 1024**3
_CRC_CHUNK_ELEMENTS = 1 << 24


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


def pack_files(sizes: Sequence[int], *, max_bytes: int = MAX_FILE_BYTES) -> list[range]:
    """Split items of these sizes, in order, into runs of at most ``max_bytes`` (or one item)."""
    runs, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > max_bytes:
            runs.append(range(first, index))
            first, total = index, 0
        total += size
    return [*runs, range(first, len(sizes))] if sizes else []


def write_data_file(path: Path, entries: Sequence[Entry]) -> list[tuple[str, Piece]]:
    """Write tensors to one safetensors file, flushed to disk, and return a piece for each."""
    # Wide elements first: every tensor then starts at a multiple of its element size.
    entries = sorted(entries, key=lambda entry: -entry.view.element_size())
    pieces = []
    with open(path, "xb") as file:
        file.write(_header_of(entries))
        for entry in entries:
            values = entry.view.detach().cpu().contiguous()
            data = _bytes_of(values)
            file.write(data)
            pieces.append((entry.name, Piece(entry.box, path.name, entry.key, zlib.crc32(data))))
        file.flush()
        os.fsync(file.fileno())
    return pieces


def checksum(values: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's values in row-major order; the copy on the CPU is bounded."""
    crc = 0
    for chunk in values.detach().reshape(-1).split(_CRC_CHUNK_ELEMENTS):
        host = chunk.cpu().contiguous()
        crc = zlib.crc32(_bytes_of(host), crc)
    return crc


class DataFile:
    """An open data file of a checkpoint."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file

    def read(self, piece: Piece, box: Box, *, name: str, dtype: str) -> torch.Tensor:
        """Return the values of ``box``, a part of ``piece``; the checksum is compared if ``box`` is the full piece.

        Raises:
            CheckpointError: the file does not match the manifest; the text has the tensor and the file.
        """
        try:
            stored = self._file.get_slice(piece.key)
            found = (stored.get_dtype(), tuple(stored.get_shape()))
            if found != (SAFETENSORS_CODES[dtype], piece.box.sizes):
                raise CheckpointError(f"expected {dtype} {piece.box.sizes} by the manifest, got {found} in the file")
            if box != piece.box:
                part: torch.Tensor = stored[box.slices(inside=piece.box)]
                return part
            values: torch.Tensor = self._file.get_tensor(piece.key)
            crc = checksum(values)
            if crc != piece.crc32:
                raise CheckpointError(f"expected checksum {piece.crc32:08x}, got {crc:08x}: bytes were changed or lost")
        except Exception as error:
            raise CheckpointError(f"tensor {name!r} {piece.box} in {self._path}: {error}") from error
        return values


@contextlib.contextmanager
def open_data_file(path: Path) -> Iterator[DataFile]:
    """Open a data file for reading."""
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except Exception as error:
        raise CheckpointError(
            f"{path}: expected a readable safetensors file, got {error}; restore it from a copy of the checkpoint"
        ) from error
    with opened as file:
        yield DataFile(path, file)


def prepare_directory(path: Path, *, overwrite: bool) -> Path:
    """Create the temporary directory of a save to ``path`` and return it.

    Raises:
        CheckpointError: ``path`` exists, or nothing can be written there.
    """
    if _is_taken(path):
        if not overwrite:
            raise CheckpointError(
                f"{path}: expected a path that does not exist, got an existing one; save to another path, or pass "
                "overwrite=True to replace a checkpoint"
            )
        if not (path / MANIFEST_NAME).is_file():
            raise CheckpointError(
                f"{path}: expected a checkpoint to overwrite, got no {MANIFEST_NAME}; save to another path"
            )
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob(f"{glob.escape(path.name)}.tmp-*"):
            logger.warning("%s is left over from a save that did not finish, or is still running", other)
        temporary.mkdir()
    except OSError as error:
        raise CheckpointError(
            f"{path}: expected a writable path, got {type(error).__name__}: {error}; save to another path"
        ) from error
    return temporary


def write_manifest(directory: Path, text: str) -> None:
    """Write the manifest, flushed to disk together with the directory."""
    with open(directory / MANIFEST_NAME, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(directory)


def commit_directory(temporary: Path, path: Path) -> None:
    """Rename a complete directory to ``path``, and remove the previous version."""
    old = None
    if _is_taken(path):
        old = path.with_name(f"{path.name}.old-{secrets.token_hex(4)}")
        path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        if old is not None:
            old.rename(path)
        raise
    _sync_directory(path.parent)
    if old is not None:
        shutil.rmtree(old)


def discard_directory(temporary: Path) -> None:
    """Remove the temporary directory of a failed save."""
    shutil.rmtree(temporary, ignore_errors=True)


def find_old_versions(path: Path) -> list[Path]:
    """Return the previous versions left beside ``path`` by a save that was killed between its two renames."""
    return sorted(path.parent.glob(f"{glob.escape(path.name)}.old-*")) if path.parent.is_dir() else []


def _is_taken(path: Path) -> bool:
    """Return whether ``path`` exists and is not an empty directory."""
    return os.path.lexists(path) and not (path.is_dir() and not any(path.iterdir()))


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot flush a directory
            os.fsync(handle)
    finally:
        os.close(handle)


def _header_of(entries: Iterable[Entry]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        if entry.key in header:
            raise CheckpointError(f"expected distinct keys in a file, got {entry.key!r} twice; rename {entry.name!r}")
        start, end = end, end + entry.num_bytes
        code = SAFETENSORS_CODES[dtype_name(entry.view.dtype)]
        header[entry.key] = {"dtype": code, "shape": list(entry.view.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % max(ITEM_BYTES.values()))
    return len(text).to_bytes(8, "little") + text


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy; keep the tensor alive while they are used."""
    return memoryview((ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr()))
