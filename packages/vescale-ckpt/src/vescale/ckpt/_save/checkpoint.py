"""The files of a checkpoint of this package, as one rank writes them in a save."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from .._errors import CheckpointError, as_text
from .._format.boxes import Box
from .._format.data_files import Entry, pack_files, write_data_file
from .._format.manifest import Manifest, StoredFile, StoredTensor, key_of, manifest_to_text
from .._format.series import remove_earlier, series_of
from .._format.storage import place_of
from .._format.versions import NewVersion, require_folder
from .._progress import Progress
from .._state.flat import FlatState
from .._state.objects import Objects
from .holdings import Held
from .saving import Merged, Plan, Taken
from .written import Rows

logger = logging.getLogger("vescale.ckpt")


@dataclass(frozen=True)
class Options:
    """The arguments of a save; ``save`` describes them."""

    path: str | os.PathLike
    metadata: Mapping[str, Any] | None
    overwrite: bool
    keep_last: int | None
    is_async: bool


@dataclass(frozen=True)
class Files:
    """The files of a rank by name, and their pieces as `Rows`; None if all ranks have kept the plan."""

    files: Mapping[str, StoredFile]
    pieces: str | None


class CheckpointWriter:
    """Writes a checkpoint; see `Writer`."""

    names: Any = NoneType
    shared: Any = str  # the folder of the data files
    wrote: Any = Files

    def __init__(self, options: Options, rank: int, progress: Progress) -> None:
        self.path = Path()  # of the checkpoint
        self._options, self._rank, self._progress = options, rank, progress
        self._version: NewVersion | None = None
        self._start = time.perf_counter()

    def arguments(self) -> Mapping[str, str]:
        """Return what must agree between ranks, by argument."""
        options = self._options
        self.path = place_of(options.path)
        if options.keep_last is not None and series_of(self.path.name) is None:
            raise CheckpointError(
                f"{self.path}: expected a name with a number at its end for keep_last, such as 'step-100', got "
                f"{self.path.name!r}; checkpoints of one name and other numbers are removed"
            )
        self._metadata = _metadata_text(options.metadata)
        return {"path": as_text(self.path), "metadata": self._metadata, "async_": str(options.is_async)}

    def create(self) -> None:
        """Make the folder of a new version."""
        self._version = NewVersion(self.path, overwrite=self._options.overwrite)

    def describe(self, _flat: FlatState, _objects: Objects) -> None:
        """Tell nothing beside tables."""

    def plan(self, _held: Held, merged: Merged) -> str:
        """Return the name of the folder for data files."""
        assert self._version is not None, "rank 0 makes the folder when it begins"
        self._merged = merged
        return self._version.folder.name

    def accept(self, folder: str) -> None:
        """Take the name of the folder."""
        self._folder = self.path / folder
        require_folder(self._folder, self._rank)

    def write(self, plan: Plan, taken: Sequence[Taken]) -> Files:
        """Write the data files of this rank."""
        metas = plan.held.tensors()
        entries = [
            Entry(each.name, key_of(each.name, each.box, metas[each.name].shape), each.box, each.view) for each in taken
        ]
        sizes = [entry.num_bytes for entry in entries]
        files: dict[str, StoredFile] = {}
        pieces: list[tuple[str, int, Box]] = []
        with self._progress as progress:
            progress.of(0, sum(sizes))
            for number, run in enumerate(pack_files(sizes)):
                file = f"data-{self._rank}-{number}.safetensors"
                written = write_data_file(self._folder / file, entries[run.start : run.stop], progress)
                files[file] = written.file
                pieces += [(name, number, piece.box) for name, piece in written.pieces]
        return Files(files, None if plan.is_complete else Rows(plan.held).packed(pieces))

    def commit(self, plan: Plan, wrote: Sequence[Files]) -> None:
        """Let the new version be the checkpoint."""
        assert self._version is not None, "rank 0 makes the folder when it begins"
        if plan.layouts is None:
            pieces, counts = [own.pieces or "" for own in wrote], [len(own.files) for own in wrote]
            plan.layouts = Rows(plan.held).layouts(pieces, counts)
        layouts = plan.layouts
        manifest = Manifest(
            world_size=len(wrote),
            saved_at=time.time(),
            metadata=json.loads(self._metadata),
            leaves={name: json.loads(text) for name, text in self._merged.leaves.items()},
            folder=self._version.folder.name,
            files={name: file for own in wrote for name, file in own.files.items()},
            tensors={name: StoredTensor(meta, layouts[name]) for name, meta in plan.held.tensors().items()},
            optimizers=self._merged.optimizers,
        )
        self._version.commit(manifest_to_text(manifest))
        self._version = None
        self._log(manifest)
        if self._options.keep_last is not None:
            remove_earlier(self.path, keep=self._options.keep_last)

    def discard(self) -> None:
        """Remove what there is of the new version, unless it is the checkpoint already."""
        if self._version is not None:
            self._version.discard()
            self._version = None

    def _log(self, manifest: Manifest) -> None:
        seconds = time.perf_counter() - self._start
        gigabytes = sum(file.num_bytes for file in manifest.files.values()) / 1e9
        logger.info(
            "saved %s: %d tensors, %.3f GB from %d ranks in %.2f s",
            self.path, len(manifest.tensors), gigabytes, manifest.world_size, seconds,
        )  # fmt: skip


def _metadata_text(metadata: Mapping[str, Any] | None) -> str:
    try:
        text = json.dumps(dict(metadata or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"expected metadata to be a JSON object with str keys, got {error}; convert it") from None
    return text
