"""Save a module, sharded in any way, as a folder of Hugging Face.

Four rounds (see ``_control.py``):

    1. every rank lists its names           rank 0 says which of them are ties, to leave out
    2. every rank digests its table         rank 0 asks one rank of each digest for it
    3. every rank sends its boxes           rank 0 plans the files, makes them with headers, and tells all what is where
    4. every rank writes its share          rank 0 compares replicas, and gives the files their names
       at its place in the files
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from .._checked import CheckedInside, Count, FilePath, checked
from .._control import open_control
from .._errors import CheckpointError, as_text, require_same
from .._format.boxes import Box
from .._format.manifest import TensorMeta
from .._save.fingerprints import fingerprint
from .._save.holdings import Boxes, Held, Holding, Inventory, Table, merge_held, split
from .._save.shares import shares
from .._save.written import Rows
from .._state.flat import FlatState, flatten
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
    saving = _Saving(Path(os.path.abspath(folder)), module, rules, max_shard_bytes, overwrite)
    with open_control(process_group) as control, torch.no_grad():
        saving.rank, discard = control.rank, saving.discard
        try:
            dropped: _Dropped = control.run_round(
                saving.begin, saving.drop, result=_Given, share=_Dropped, on_failure=discard
            )
            is_sent = control.run_round(
                lambda: saving.digest(dropped), saving.choose, result=str, share=bool, on_failure=discard
            )
            share: _Share = control.run_round(
                lambda: saving.offer(with_table=is_sent), saving.plan, result=_Offer, share=_Share, on_failure=discard
            )
            control.run_round(lambda: saving.write(share), saving.commit, result=_REPLICAS, on_failure=discard)
        except BaseException:  # an interrupt or a lost peer, which is not an error of all ranks
            saving.discard()
            raise


@dataclass(frozen=True)
class _Given:
    """What must agree between ranks, and which names of a rank share a tensor."""

    folder: str
    max_shard_bytes: str
    ties: Ties


@dataclass(frozen=True)
class _Dropped:
    """The names that are not stored, as files have their tensors under another name."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class _Offer:
    """What a rank holds; the table comes from one rank of each digest."""

    boxes: Boxes
    table: Table | None


@dataclass(frozen=True)
class _Share:
    """Where the files are, what all ranks hold, and what is where in the files."""

    token: str
    held: Held
    content: Content


_REPLICAS = str  # rows of checksums


class _Saving:
    """The steps of one save, in order; ``drop``, ``choose``, ``plan``, ``commit`` and ``discard`` act on rank 0."""

    rank: int
    _flat: FlatState
    _table: Table
    _boxes: Boxes

    def __init__(
        self,
        path: Path,
        module: torch.nn.Module,
        rules: Sequence[WeightRule] | None,
        max_shard_bytes: int,
        overwrite: bool,
    ) -> None:
        self._path, self._module, self._rules = path, module, rules
        self._max_shard_bytes, self._overwrite = max_shard_bytes, overwrite
        self._folder: NewFolder | None = None
        self._held: Held | None = None
        self._names: list[str] = []  # of the files, in order

    def begin(self) -> _Given:
        self._state = ModuleState.of(self._module)
        if self.rank == 0:
            self._folder = NewFolder(self._path, overwrite=self._overwrite)
        return _Given(as_text(self._path), str(self._max_shard_bytes), self._state.ties())

    def drop(self, given: Sequence[_Given]) -> list[_Dropped]:
        require_same("folder", [each.folder for each in given])
        require_same("max_shard_bytes", [each.max_shard_bytes for each in given])
        ties = merged_ties([group for each in given for group in each.ties])
        dropped = _Dropped((*names_to_drop(ties, tied_names(self._module)), *sorted(unsaved_names(self._module))))
        return [dropped] * len(given)

    def digest(self, dropped: _Dropped) -> str:
        stored = {name: value for name, value in self._state.tensors.items() if name not in dropped.names}
        self._flat = flatten(stored, open_object=lambda item, _path: item)
        tensors = {
            name: Holding(held.meta, tuple(box for box, _ in held.boxes)) for name, held in self._flat.tensors.items()
        }
        self._table, self._boxes = split(Inventory(tensors, {}))
        return self._table.digest()

    def choose(self, digests: Sequence[str]) -> list[bool]:
        index = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        self._table_of = [index[digest] for digest in digests]
        return [self._table_of.index(table) == rank for rank, table in enumerate(self._table_of)]

    def offer(self, *, with_table: bool) -> _Offer:
        return _Offer(self._boxes, self._table if with_table else None)

    def plan(self, offers: Sequence[_Offer]) -> list[_Share]:
        assert self._folder is not None, "rank 0 makes the folder when it begins"
        tables = [offer.table for offer in offers if offer.table is not None]
        self._held = merge_held(tables, self._table_of, [offer.boxes for offer in offers])
        names = names_to_save(self._module, self._rules)
        content, files, index = files_of(self._held.tensors(), names, self._max_shard_bytes)
        self._names = final_names(files)
        self._folder.create(files, index)
        return [_Share(self._folder.token, self._held, content)] * len(offers)

    def write(self, share: _Share) -> str:
        own = shares(share.held, [self.rank])[self.rank]
        views = {(name, box): view for name, held in self._flat.tensors.items() for box, view in held.boxes}
        with FileWriter(self._path, share.token, share.content) as writer:
            for item in own.writes:
                writer.write(item.name, item.box, views[item.name, item.held][item.box.slices(inside=item.held)])
        replicas = [(name, fingerprint(views[name, box], on_cpu=False), box) for name, box in own.replicas]
        return Rows(share.held).packed(replicas)

    def commit(self, replicas: Sequence[str]) -> list[None]:
        assert self._held is not None and self._folder is not None, "the plan comes before the commit"  # noqa: PT018
        if torn := Rows(self._held).torn(replicas):
            raise CheckpointError(torn.replace(", or pass check_replicas=False to store one of them", ""))
        self._folder.commit(self._names, lambda path: write_config(self._module, path))
        self._folder = None
        return [None] * len(replicas)

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
