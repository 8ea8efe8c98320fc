"""Folders of Hugging Face: which tensors they have, and reads of a part of one.

A folder has one ``model.safetensors``, or ``model.safetensors.index.json``, which says in which file each tensor is:

    {"metadata": {"total_size": 16}, "weight_map": {"norm.weight": "model-00001-of-00002.safetensors", ...}}

Files have no checksums, so a changed value is not found. Every header is compared with the size of its file before
anything is allocated. Links are refused but those of the hub's cache, where a snapshot links to the files beside it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError, format_some
from .._format.boxes import Box
from .._format.data_files import BLOCK_BYTES, bytes_of
from .._format.manifest import Piece
from .._format.safetensors_file import DTYPES, open_regular, parse_header, read_at, read_header
from .._format.strided import Part, fill_part
from .._typed_json import JsonReader, Size

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FIX = "download it again"
_MAX_INDEX_BYTES = 1_000_000_000


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file: torch's name of its dtype, its shape, and its first byte in the file."""

    dtype: str
    shape: tuple[Size, ...]
    start: Size


@dataclass(frozen=True)
class ListedFile:
    """A file of a folder, by what its header says.

    Attributes:
        num_bytes: its size.
        tensors: those that belong to the folder, by name.
    """

    num_bytes: Size
    tensors: Mapping[str, FileTensor]


@dataclass(frozen=True)
class Region:
    """Where in a file the values of a box are: the byte of its first value, and the stride of each dim, in elements."""

    start: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class _Index:
    """The keys of an index that are read."""

    weight_map: Mapping[str, str]
    metadata: Mapping[str, Any] = field(default_factory=dict)


def list_folder(folder: Path) -> dict[str, ListedFile]:
    """Return the files of a folder by name, from the headers; not a collective.

    Raises:
        CheckpointError: the folder is not complete, or a file is damaged; the text has its name.
    """
    if not (os.path.lexists(folder / SINGLE) or os.path.lexists(folder / INDEX)):
        raise CheckpointError(
            f"{folder}: expected {SINGLE} or {INDEX}, got neither; pass a folder of safetensors files of Hugging Face"
        )
    if os.path.lexists(folder / SINGLE):  # as transformers chooses
        return {SINGLE: _listed(folder, SINGLE, None)}
    files: dict[str, list[str]] = {}
    for key, name in _read_index(folder).weight_map.items():
        files.setdefault(name, []).append(key)
    if odd := [name for name in files if not re.fullmatch(r"[\w-][\w.-]*", name)]:
        raise CheckpointError(
            f"{folder / INDEX}: expected names of files in the folder, got {format_some(map(repr, odd))}; {_FIX}"
        )
    return {name: _listed(folder, name, files[name]) for name in sorted(files)}


def real_path(folder: Path, name: str) -> Path:
    """Return the path of a file of a folder: in a snapshot of the hub's cache, that of the file that it links to.

    Raises:
        CheckpointError: it is a link to somewhere else.
    """
    path = folder / name
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if folder.parent.name != "snapshots" or target.parent != Path(os.path.realpath(folder.parent.parent / "blobs")):
        raise CheckpointError(f"{path}: expected a regular file, got a symbolic link; copy the file to where it is")
    return target


class OpenFile:
    """A file to read parts of its tensors from; use it as a context.

    Args:
        path: of the file.
        num_bytes: its size when its header was read.
        regions: where the boxes of pieces are, by the keys of the pieces.

    Raises:
        CheckpointError: it is no regular file, or has another size by now.
    """

    def __init__(self, path: Path, num_bytes: int, regions: Mapping[str, Region]) -> None:
        self._path, self._regions = path, regions
        fault = _fault_of(path)
        self._file, found = open_regular(path, fault)
        if found != num_bytes:
            self._file.close()
            raise fault(f"{num_bytes} bytes as when its header was read, got {found}")
        self._buffer = torch.empty(BLOCK_BYTES, dtype=torch.uint8)

    def __enter__(self) -> OpenFile:
        """Return the file."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()

    def fill(self, target: torch.Tensor, piece: Piece, box: Box, *, name: str, dtype: str) -> None:
        """Read the values of ``box``, a part of ``piece``, and copy them to ``target``; memory is bounded.

        Raises:
            CheckpointError: the file has become shorter.
        """
        region, kind = self._regions[piece.key], getattr(torch, dtype)
        starts = tuple(a - b for a, b in zip(box.offsets, piece.box.offsets, strict=True))
        limit = BLOCK_BYTES // kind.itemsize

        def read_run(first: int, length: int, into: torch.Tensor | None) -> Iterator[tuple[int, torch.Tensor]]:
            for at in range(0, length, limit if into is None else length):
                size = min(limit, length - at) if into is None else length
                block = self._buffer[: size * kind.itemsize] if into is None else into.view(torch.uint8)
                start = region.start + (first + at) * kind.itemsize
                if read_at(self._file, start, bytes_of(block)) != block.numel():
                    raise _fault_of(self._path)(f"{start + block.numel()} bytes with tensor {name!r}, got fewer")
                if into is None:
                    yield at, block.view(kind)

        fill_part(target, Part(starts, box.sizes, region.strides), kind, limit, read_run)


def _read_index(folder: Path) -> _Index:
    path = real_path(folder, INDEX)
    file, num_bytes = open_regular(path, _fault_of(path))
    with contextlib.closing(file):
        if num_bytes > _MAX_INDEX_BYTES:
            raise _fault_of(path)(f"at most {_MAX_INDEX_BYTES} bytes, got {num_bytes}")
        text = file.read(num_bytes) or b""
    reader = JsonReader(str(path), _FIX, CheckpointError)
    try:
        tree = reader.parse(text.decode())
    except UnicodeDecodeError as error:
        raise _fault_of(path)(f"UTF-8 text, got {error}") from None
    if isinstance(tree, dict):
        tree = {key: value for key, value in tree.items() if key in ("weight_map", "metadata")}
    return reader.read(tree, _Index)


def _listed(folder: Path, name: str, expected: Sequence[str] | None) -> ListedFile:
    """Return a file with the tensors that the index expects in it, or all."""
    path = real_path(folder, name)
    fault = _fault_of(path)
    file, num_bytes = open_regular(path, fault)
    with contextlib.closing(file):
        header = read_header(file, num_bytes, fault)
    reader = JsonReader(f"{path}: header", _FIX, CheckpointError)
    _, found = parse_header(header, num_bytes, reader, fault)
    keys = list(found) if expected is None else expected
    if missing := [key for key in keys if key not in found]:
        raise fault(f"the tensors of {INDEX}, got a file without {format_some(map(repr, missing))}")
    rows = {key: FileTensor(DTYPES[found[key].code], found[key].shape, found[key].start) for key in keys}
    return ListedFile(num_bytes, rows)


def _fault_of(path: Path) -> Any:
    return lambda text: CheckpointError(f"{path}: expected {text}; {_FIX}")
