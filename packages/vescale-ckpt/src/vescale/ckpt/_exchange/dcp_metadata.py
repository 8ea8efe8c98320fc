"""Read the ``.metadata`` of a folder that ``torch.distributed.checkpoint.save`` (DCP) wrote.

    step-100/
      .metadata      a pickle of the class ``Metadata``, written last
      __0_0.distcp   files of torch.save, one after the other: one for each chunk of a tensor, one for any other value

A pickle runs what it names. This reader looks names up in a table of its own: the classes of DCP's metadata become
`_Record`, which holds what it was given and does nothing, and any other name is an error. So no code of the pickle
runs, and no class of torch is made. What was read is then compared with the types and with the sizes of the files.
"""

from __future__ import annotations

import io
import pickle
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError, format_some
from .._format.boxes import Box

METADATA_NAME = ".metadata"
_MAX_INT = 2**63 - 1
_MAX_STEPS = 100  # in a path, which is followed by recursion
_METADATA = "torch.distributed.checkpoint.metadata"
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"  # before torch 2.3
# The names that a pickle of DCP's metadata has; dtypes of torch are allowed, too.
ALLOWED = {
    **{
        (_METADATA, name): name
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (_SHARDED_TENSOR, "TensorProperties"): "TensorProperties",
    (_SHARDED_TENSOR, "MEM_FORMAT_ENCODING"): "_MEM_FORMAT_ENCODING",
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): "_StorageInfo",
    ("torch.serialization", "_get_layout"): "layout",
    ("torch", "Size"): "Size",
    **{(module, name): "path" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")},
}


@dataclass(frozen=True)
class Place:
    """Where a file of torch.save is in a data file: the bytes from ``offset`` on."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Item:
    """What is stored under one key.

    Attributes:
        key: of the flattened state dict, such as ``"model.embed.weight"``.
        path: the keys and indices that lead to it in the state dict, such as ``("model", "embed.weight")``.
        dtype: of a tensor; None for any other value.
        shape: global shape of a tensor.
        chunks: boxes of a tensor, and the place of each.
        place: of any other value.
    """

    key: str
    path: tuple[str | int, ...]
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    chunks: tuple[tuple[Box, Place], ...] = ()
    place: Place | None = None


@dataclass(frozen=True)
class Contents:
    """What a folder has: its items, the sizes of its data files, and when ``.metadata`` was written."""

    items: tuple[Item, ...]
    files: dict[str, int] = field(default_factory=dict)
    saved_at: float = 0.0


def read_contents(where: Path) -> Contents:
    """Return what a DCP folder has; every place lies in its file, and no two overlap.

    Raises:
        CheckpointError: the folder is not complete, its metadata names another class, or does not fit the files.
    """
    found = _stat_of(where, METADATA_NAME, "write it again, or check the path: DCP writes this file last")
    try:
        root = _Unpickler(io.BytesIO((where / METADATA_NAME).read_bytes())).load()
    except _RefusedError as error:
        text = f"only classes of DCP's metadata in {METADATA_NAME}, got {error}; do not open this folder"
        raise _fault(where, text) from None
    except Exception as error:  # a pickle that was changed raises almost anything
        raise _fault(where, f"a pickle in {METADATA_NAME}, got {type(error).__name__}: {error}; {_OTHER}") from None
    try:
        items = tuple(_items(root))
    except _ShapeError as error:
        raise _fault(where, f"{error}; {_OTHER}") from None
    places = [place for item in items for place in (*(own for _, own in item.chunks), item.place) if place is not None]
    files = {}
    for file in sorted({place.file for place in places}):
        if not re.fullmatch(r"[\w-][\w.-]*", file):
            raise _fault(where, f"names of files in the folder, got {file!r} in {METADATA_NAME}; {_OTHER}")
        files[file] = _stat_of(where, file, "restore it, or use another checkpoint").st_size
    _check_places(where, places, files)
    return Contents(items, files, found.st_mtime)


# --- the pickle ---

_OTHER = "use another checkpoint"


class _RefusedError(Exception):
    """A name that is not in the table."""


class _ShapeError(Exception):
    """A record of another type than DCP writes; "expected" is left out of the text."""


class _Record:
    """An object of the pickle: what it was called with, and its state."""

    kind = ""
    args: tuple[Any, ...] = ()
    state: Any = None

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDS = {kind: type(kind, (_Record,), {"kind": kind}) for kind in set(ALLOWED.values()) - {"Size"}}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        kind = ALLOWED.get((module, name))
        if kind is not None:
            return tuple if kind == "Size" else _RECORDS[kind]
        found = vars(torch).get(name) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        raise _RefusedError(f"{module}.{name}")


# --- from records to items ---


def _items(root: Any) -> Iterator[Item]:
    fields = _fields(root, "Metadata")
    stored = _typed(fields.get("state_dict_metadata"), dict, "a dict as state_dict_metadata")
    paths = _typed(fields.get("planner_data") or {}, dict, "a dict as planner_data")
    places: dict[tuple[str, Any], Place] = {}
    for index, info in _typed(fields.get("storage_data"), dict, "a dict as storage_data").items():
        own = _fields(index, "MetadataIndex")
        offset = own.get("offset")
        key = _typed(own.get("fqn"), str, "a string as fqn"), None if offset is None else _ints(offset)
        places[key] = _place(_fields(info, "_StorageInfo"))
    for key, record in stored.items():
        path = paths.get(_typed(key, str, "strings as keys"), (key,))
        if not (isinstance(path, tuple | list) and path and all(type(step) in (str, int) for step in path)):
            raise _ShapeError(f"keys and indices as path of {key!r}, got {path!r}")
        if len(path) > _MAX_STEPS:
            raise _ShapeError(f"a path of {key!r} with at most {_MAX_STEPS} steps, got {len(path)}")
        if getattr(record, "kind", None) == "BytesStorageMetadata":
            if (key, None) not in places:
                raise _ShapeError(f"the place of {key!r}, got none")
            yield Item(key, tuple(path), place=places[key, None])
        else:
            yield _tensor(key, tuple(path), _fields(record, "TensorStorageMetadata"), places)


def _tensor(key: str, path: tuple[str | int, ...], fields: dict, places: dict[tuple[str, Any], Place]) -> Item:
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, _Record) and properties.kind == "TensorProperties" else None
    if not (isinstance(state, tuple) and state and isinstance(state[0], torch.dtype)):
        raise _ShapeError(f"properties with a dtype of tensor {key!r}, got {type(properties).__name__}")
    shape, chunks = _ints(fields.get("size")), []
    for record in _typed(fields.get("chunks"), list, f"a list of chunks of tensor {key!r}"):
        own = _fields(record, "ChunkStorageMetadata")
        box = Box(_ints(own.get("offsets")), _ints(own.get("sizes")))
        if {len(box.offsets), len(box.sizes)} != {len(shape)}:
            raise _ShapeError(f"chunks of {len(shape)} dims of tensor {key!r}, got {box}")
        if not box.num_elements:
            continue  # of an empty shard
        place = places.get((key, box.offsets))
        if place is None:
            raise _ShapeError(f"the place of chunk {box} of tensor {key!r}, got none")
        if place.length < box.num_elements * state[0].itemsize:
            raise _ShapeError(f"{box.num_elements} elements in chunk {box} of tensor {key!r}, got {place.length} bytes")
        chunks.append((box, place))
    return Item(key, path, state[0], shape, tuple(chunks))


def _place(fields: dict) -> Place:
    if fields.get("transform_descriptors"):
        raise _ShapeError(f"data as torch.save writes it, got data changed by {fields['transform_descriptors']!r}")
    file = _typed(fields.get("relative_path"), str, "a string as relative_path")
    offset, length = _ints((fields.get("offset"), fields.get("length")))
    return Place(file, offset, length)


def _fields(record: Any, kind: str) -> dict:
    if not isinstance(record, _Record) or record.kind != kind:
        raise _ShapeError(f"a {kind} in {METADATA_NAME}, got {getattr(record, 'kind', type(record).__name__)}")
    fields: dict = _typed({} if record.state is None else record.state, dict, f"a dict as state of {kind}")
    return fields


def _typed(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise _ShapeError(f"{what} in {METADATA_NAME}, got {type(value).__name__}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(type(value) is int and 0 <= value <= _MAX_INT for value in values):
        raise _ShapeError(f"integers of 0 or more as shapes and offsets in {METADATA_NAME}, got {values!r}")
    return values


# --- files ---


def _stat_of(where: Path, file: str, fix: str) -> Any:
    try:
        found = (where / file).lstat()
    except (OSError, ValueError) as error:
        raise _fault(
            where, f"the file {file!r} in a DCP folder, got {getattr(error, 'strerror', None) or error}; {fix}"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "another kind of file"
        raise _fault(where, f"a regular file {file!r}, got {kind}; copy it to where it is")
    return found


def _check_places(where: Path, places: Iterable[Place], files: dict[str, int]) -> None:
    ordered = sorted(places, key=lambda place: (place.file, place.offset, place.length))
    for place in ordered:
        if place.offset + place.length > files[place.file]:
            raise _fault(
                where,
                f"{place.offset + place.length} bytes or more in data file {place.file!r}, got {files[place.file]}; "
                "restore it, or use another checkpoint",
            )
    overlaps = [
        f"bytes {one.offset} to {one.offset + one.length} and from {other.offset} on of {one.file!r}"
        for one, other in pairwise(ordered)
        if one.file == other.file and one.offset + one.length > other.offset
    ]
    if overlaps:
        raise _fault(where, f"values in places of their own, got some that overlap: {format_some(overlaps)}; {_OTHER}")


def _fault(where: Path, text: str) -> CheckpointError:
    return CheckpointError(f"{where}: expected {text}")
