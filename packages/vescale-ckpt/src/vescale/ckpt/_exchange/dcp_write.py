"""Write the files of ``torch.distributed.checkpoint`` (DCP) by its public writer.

    step-100/
      __0_1f0c22ab_0.distcp    of rank 0, in a save with this token
      .metadata                written last, and renamed: without it there is no checkpoint

The token is in the names of the files, so that a save that replaces another one leaves its files alone until it is
complete.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from .._errors import CheckpointError
from .._format.boxes import Box
from .._format.manifest import TensorMeta
from .._format.storage import flush_names
from .._torch import distcp_place, distcp_prefix
from .._typed_json import Size
from .dcp_metadata import METADATA_NAME

_OWN = re.compile(rf"__\d+_.*\.distcp|{re.escape(METADATA_NAME)}(\.tmp)?")


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor to write."""

    key: str
    box: Box
    meta: TensorMeta
    view: torch.Tensor


@dataclass(frozen=True)
class Written:
    """What a rank has written: its file, and offset and length of each chunk and of each value, in their order."""

    file: str
    num_bytes: Size
    chunks: tuple[tuple[Size, ...], ...]
    values: tuple[tuple[Size, ...], ...]


class NewFolder:
    """A DCP folder that is not complete yet.

    Args:
        path: of the folder.
        overwrite: whether there may be a complete one.

    Attributes:
        token: a part of the names of its files.

    Raises:
        CheckpointError: there is something else at ``path``, or nothing can be written there.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self._path, self._overwrite, self.token = path, overwrite, secrets.token_hex(4)
        self._is_new = not os.path.lexists(path)
        if not self._is_new:
            self._check_place()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._before = [name for name in os.listdir(path) if name.endswith(".distcp")]
        except OSError as error:
            raise CheckpointError(
                f"{path}: expected a writable path, got {type(error).__name__}: {error}; save to another path"
            ) from error

    def commit(self, metadata: Metadata, results: Sequence[WriteResult], files: Mapping[str, int]) -> None:
        """Write the metadata, by which the folder becomes complete, and remove the files of the one before.

        Raises:
            CheckpointError: a file of another rank is not there.
        """
        for file, num_bytes in files.items():
            found = (self._path / file).stat().st_size if (self._path / file).exists() else None
            if found != num_bytes:
                raise CheckpointError(
                    f"{self._path}: expected {num_bytes} bytes in {file!r} of another rank, got {found}; save to a "
                    "file system shared by all ranks"
                )
        if not self._overwrite:
            self._check_place()
        flush_names(self._path)
        writer = FileSystemWriter(self._path)
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        writer.finish(metadata, [list(results)])
        flush_names(self._path)
        for name in set(self._before).difference(files) if self._overwrite else ():
            with contextlib.suppress(OSError):
                (self._path / name).unlink()

    def discard(self) -> None:
        """Remove what there is of this save, unless it is the checkpoint already."""
        if self._is_committed():
            return
        for file in self._path.glob(f"__*_{self.token}_*.distcp"):
            with contextlib.suppress(OSError):
                file.unlink()
        if self._is_new:
            with contextlib.suppress(OSError):  # another save may have come
                (self._path / f"{METADATA_NAME}.tmp").unlink(missing_ok=True)
                self._path.rmdir()

    def _is_committed(self) -> bool:
        """Return whether the metadata in place names the files of this save."""
        try:
            return self.token.encode() in (self._path / METADATA_NAME).read_bytes()
        except OSError:
            return False

    def _check_place(self) -> None:
        names = set(os.listdir(self._path)) if self._path.is_dir() else {""}
        is_foreign = not all(_OWN.fullmatch(name) for name in names)
        if METADATA_NAME in names and not self._overwrite:
            raise CheckpointError(
                f"{self._path}: expected a path that does not exist, got a complete DCP folder; save to another path, "
                "or pass overwrite=True to replace it"
            )
        if is_foreign and METADATA_NAME not in names:
            raise CheckpointError(
                f"{self._path}: expected a DCP folder or no such path, got something else; save to another path"
            )


def write_file(
    path: Path, rank: int, token: str, chunks: Sequence[Chunk], values: Sequence[tuple[str, Any]]
) -> Written:
    """Write the file of a rank, flushed to disk: chunks of tensors, and values by their keys."""
    chunk_items = [_chunk_item(chunk) for chunk in chunks]
    value_items = [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key, _ in values]
    known = dict(zip((item.index for item in chunk_items), (chunk.view for chunk in chunks), strict=True))
    known |= dict(zip((item.index for item in value_items), (value for _, value in values), strict=True))
    writer = FileSystemWriter(path)
    writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
    plan = SavePlan([*chunk_items, *value_items], storage_data=distcp_prefix(f"__{rank}_{token}_"))
    done = writer.write_data(plan, _Planner(known))
    done.wait()
    places = {result.index: result.storage_data for result in done.value()}
    file = f"__{rank}_{token}_0.distcp"  # by the name that the writer gives to the only file of a rank
    if other := {place.relative_path for place in places.values()} - {file}:
        raise CheckpointError(
            f"{path}: expected the writer of torch to write {file!r}, got {other}; use a tested torch"
        )
    sizes = [
        [(places[item.index].offset, places[item.index].length) for item in own] for own in (chunk_items, value_items)
    ]
    return Written(file, (path / file).stat().st_size, tuple(sizes[0]), tuple(sizes[1]))


def metadata_of(
    tensors: Mapping[str, tuple[TensorMeta, Iterable[Box]]], values: Collection[str], paths: Mapping[str, Any]
) -> Metadata:
    """Return the metadata of a folder, by keys: tensors with their chunks, other values, and the path of each."""
    stored: dict[str, Any] = {
        key: TensorStorageMetadata(_properties(meta), torch.Size(meta.shape), [_chunk(box) for box in boxes])
        for key, (meta, boxes) in tensors.items()
    }
    stored.update({key: BytesStorageMetadata() for key in values})
    return Metadata(stored, planner_data=dict(paths))


def result_of(key: str, box: Box | None, file: str, offset: int, length: int) -> WriteResult:
    """Return the place of a chunk, or of another value."""
    index = MetadataIndex(key, None if box is None else torch.Size(box.offsets))
    return WriteResult(index, length, distcp_place(file, offset, length))


class _Planner(DefaultSavePlanner):
    """Gives the writer its values."""

    def __init__(self, values: Mapping[MetadataIndex, Any]) -> None:
        super().__init__()
        self._values = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return a value, or a chunk of a tensor without gaps."""
        value = self._values[index]
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().resolve_conj().resolve_neg().contiguous()


def _chunk_item(chunk: Chunk) -> WriteItem:
    data = TensorWriteData(_chunk(chunk.box), _properties(chunk.meta), torch.Size(chunk.meta.shape))
    index = MetadataIndex(chunk.key, torch.Size(chunk.box.offsets))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def _properties(meta: TensorMeta) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, meta.dtype))
