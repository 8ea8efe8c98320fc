"""Save a module, sharded in any way, as a folder of Hugging Face.

A round before the steps of ``save``: every rank lists its ties, and rank 0 says which names to leave out. Then rank 0
plans the files, and makes them with headers; every rank writes its share at its place in them; and rank 0 gives the
files their names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch
import torch.distributed as dist

from .._checked import CheckedInside, Count, FilePath, checked
from .._control import open_control
from .._errors import CheckpointError, as_text
from .._format.boxes import Box
from .._format.manifest import TensorMeta
from .._save.holdings import Held
from .._save.saving import Merged, Plan, Saving, Taken
from .._state.flat import FlatState
from .._state.objects import Objects
from .hf_content import Content
from .hf_folder import NewFolder, temporary
from .hf_links import Names, links_to_save
from .hf_rules import WeightRule
from .hf_state import ModuleState, Ties, merged_ties, names_to_drop
from .hf_transformers import names_to_save, tied_names, unsaved_names, write_config
from .hf_write import NewFile, final_names, plan_files, write_box


@checked
def save_hf(
    folder: FilePath,
    module: torch.nn.Module,
    *,
    rules: Sequence[WeightRule] | None = None,
    max_shard_bytes: Count = 5 * 10**9,
    overwrite: bool = False,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> None:
    """Save the weights of a module as a Hugging Face folder, from any number of ranks and without a gather.

    A collective: all ranks of the group call it. Each element is written once, by one of the ranks that hold it, at its
    place in the files. The folder is complete when everything is on disk; before, ``load_hf`` and ``from_pretrained``
    refuse it. If the module has a ``config`` with ``save_pretrained``, that is written, too.

    Args:
        folder: to create, on a file system shared by all ranks; it may exist if it is empty.
        module: to save; of a pipeline, the stage of this rank.
        rules: as for ``load_hf``.
        max_shard_bytes: of the tensors in a file, unless it has a single one.
        overwrite: replace the weights in a folder; its other files stay. The old weights are removed when all new ones
            are on disk.
        process_group: as for ``save``.

    Raises:
        CheckpointError: with the same text on all ranks: values cannot be stored, replicas differ, or the folder cannot
            be written.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save_hf("weights", model, overwrite=True)
        >>> load_hf("weights", torch.nn.Linear(4, 2))
    """
    path = Path(os.path.abspath(folder))
    with open_control(process_group) as control, torch.no_grad():
        tensors: dict[str, Any] = {}

        def list_ties() -> _Ties:
            state = ModuleState.of(module)
            tensors.update(state.tensors)
            return _Ties(state.ties())

        def drop(given: Sequence[_Ties]) -> list[_Dropped]:
            ties = merged_ties([group for each in given for group in each.ties])
            dropped = _Dropped((*names_to_drop(ties, tied_names(module)), *sorted(unsaved_names(module))))
            return [dropped] * len(given)

        dropped = control.run_round(list_ties, drop, result=_Ties, share=_Dropped)
        stored = {name: value for name, value in tensors.items() if name not in dropped.names}
        writer = _HfWriter(path, module, rules, max_shard_bytes, overwrite=overwrite)
        Saving(writer, stored, control).run()


@dataclass(frozen=True)
class _Ties:
    """The names of a rank that share a tensor."""

    ties: Ties


@dataclass(frozen=True)
class _Dropped:
    """The names that are not stored, as files have their tensors under another name."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class _Shared:
    """The token in temporary names, and what is where in the files."""

    token: str
    content: Content


class _HfWriter:
    """Writes a folder of Hugging Face; see `Writer`."""

    names: Any = NoneType
    shared: Any = _Shared
    wrote: Any = NoneType

    def __init__(
        self,
        path: Path,
        module: torch.nn.Module,
        rules: Sequence[WeightRule] | None,
        max_shard_bytes: int,
        *,
        overwrite: bool,
    ) -> None:
        self.path, self._module, self._rules = path, module, rules
        self._max_shard_bytes, self._overwrite = max_shard_bytes, overwrite
        self._folder: NewFolder | None = None
        self._files: list[str] = []  # names, in order

    def arguments(self) -> Mapping[str, str]:
        return {"folder": as_text(self.path), "max_shard_bytes": str(self._max_shard_bytes)}

    def create(self) -> None:
        self._folder = NewFolder(self.path, overwrite=self._overwrite)

    def describe(self, _flat: FlatState, _objects: Objects) -> None:
        pass

    def plan(self, held: Held, _merged: Merged) -> _Shared:
        assert self._folder is not None, "rank 0 makes the folder when it begins"
        content, files, index = files_of(
            held.tensors(), names_to_save(self._module, self._rules), self._max_shard_bytes
        )
        self._files = final_names(files)
        self._folder.create(files, index)
        return _Shared(self._folder.token, content)

    def accept(self, shared: _Shared) -> None:
        self._shared = shared

    def write(self, _plan: Plan, taken: Sequence[Taken]) -> None:
        with FileWriter(self.path, self._shared.token, self._shared.content) as writer:
            for each in taken:
                writer.write(each.name, each.box, each.view)

    def commit(self, _plan: Plan, _wrote: Sequence[None]) -> None:
        assert self._folder is not None, "rank 0 makes the folder when it begins"
        self._folder.commit(self._files, lambda path: write_config(self._module, path))
        self._folder = None

    def discard(self) -> None:
        if self._folder is not None:
            self._folder.discard()
            self._folder = None


def files_of(
    tensors: Mapping[str, TensorMeta], names: Names, max_shard_bytes: int
) -> tuple[Content, list[NewFile], str | None]:
    """Return what is where in the files of a folder, the files, and the text of the index."""
    metas, links = links_to_save(tensors, names)
    files, index = plan_files(metas, max_shard_bytes)
    places = {key: (number, start) for number, file in enumerate(files) for key, start in file.starts.items()}
    return Content.of({file.name: file.num_bytes for file in files}, tensors, links, places), files, index


class FileWriter:
    """Writes boxes of a module's tensors to their places in new files; leaving its context flushes them to disk."""

    def __init__(self, path: Path, token: str, content: Content) -> None:
        self._path, self._token = path, token
        self._manifest, self._regions = content.manifest(), content.regions()
        self._number = {name: number for number, name in enumerate(content.files)}
        self._handles: dict[str, int] = {}

    def __enter__(self) -> FileWriter:
        """Return the writer."""
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        """Flush and close the files."""
        with contextlib.ExitStack() as stack:
            for handle in self._handles.values():
                stack.callback(os.close, handle)
            if kind is None:
                for handle in self._handles.values():
                    os.fsync(handle)

    def write(self, name: str, box: Box, values: torch.Tensor) -> None:
        """Write the values of a box of a tensor."""
        for piece in self._manifest.pieces(name, box=box):
            common = piece.box.intersect(box)
            assert common is not None, "a piece of this box"
            own = values[common.slices(inside=box)]
            write_box(self._handle(piece.file), own, self._regions[piece.file][piece.key], piece.box, common)

    def _handle(self, name: str) -> int:
        if name not in self._handles:
            path = temporary(self._path, self._token, self._number[name])
            try:
                self._handles[name] = os.open(path, os.O_WRONLY)
            except FileNotFoundError:
                raise CheckpointError(
                    f"expected the file {path} of rank 0, got no such file; save to a file system shared by all ranks"
                ) from None
        return self._handles[name]
