"""Save a state as a folder that ``torch.distributed.checkpoint.load`` (DCP) reads.

The steps are those of ``save``, the files are other ones.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._checked import CheckedInside, FilePath, checked
from .._control import open_control
from .._errors import CheckpointError, as_text, format_some
from .._format.boxes import Box
from .._format.versions import require_folder
from .._save.holdings import Held, packed, unpacked
from .._save.saving import Merged, Plan, Saving, Taken
from .._state.flat import FlatState
from .._state.objects import Objects
from .._typed_json import Size
from .dcp_state import Grouped, Step, key_of_path, merge_groups, paths_of, values_of
from .dcp_write import Chunk, NewFolder, Written, metadata_of, result_of, write_file

logger = logging.getLogger("vescale.ckpt")


@checked
def save_dcp(
    folder: FilePath,
    state: CheckedInside[dict[str, Any]],
    *,
    overwrite: bool = False,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> None:
    """Save a state as a folder that ``torch.distributed.checkpoint.load`` (DCP) reads.

    A collective, with the shares of ``save``: each element is stored once, balanced by bytes, and replicas that differ
    are refused. The folder has the keys of ``{"model": model.state_dict(), ...}``, and an optimizer of ``torch.optim``
    has the form of ``get_optimizer_state_dict``, which ``set_optimizer_state_dict`` takes. DCP reads such a folder with
    pickle; ``save`` makes checkpoints without it.

    Args:
        folder: to create, on a file system shared by all ranks. DCP writes ``.metadata`` last, and so does this: a
            folder without it is not complete.
        state: as for ``save``. DCP knows no tuples of tensors: they become lists.
        overwrite: replace a DCP folder. Its files stay until the new ones are complete.
        process_group: as for ``save``.

    Raises:
        CheckpointError: as for ``save``.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> model = torch.nn.Linear(4, 2)
        >>> save_dcp("runs/dcp-10", {"model": model, "step": 10}, overwrite=True)
        >>> state = {"model": torch.nn.Linear(4, 2).state_dict(), "step": 0}
        >>> dcp.load(state, checkpoint_id="runs/dcp-10", no_dist=True)
        >>> torch.equal(state["model"]["weight"], model.weight), state["step"]
        (True, 10)
    """
    with open_control(process_group) as control, torch.no_grad():
        writer = _DcpWriter(Path(os.path.abspath(folder)), state, control.rank, overwrite=overwrite)
        Saving(writer, state, control).run()


@dataclass(frozen=True)
class _Names:
    """The paths that do not follow from the names of a rank's table, and the groups of its optimizers."""

    paths: Mapping[str, tuple[Step, ...]]
    optimizers: tuple[Grouped, ...]


@dataclass(frozen=True)
class _Shared:
    """The token in names of files, the ranks of leaves that are not on rank 0, and the groups of all optimizers."""

    token: str
    writers: Mapping[str, Size]
    optimizers: tuple[Grouped, ...]


@dataclass(frozen=True)
class _Part:
    """What a rank has written.

    Attributes:
        written: its file.
        pieces: the index of the tensor, and offsets and sizes, of each chunk.
        values: the path of each value.
    """

    written: Written
    pieces: str
    values: tuple[tuple[Step, ...], ...]


class _DcpWriter:
    """Writes a folder of DCP; see `Writer`."""

    names: Any = _Names
    shared: Any = _Shared
    wrote: Any = _Part

    def __init__(self, path: Path, state: dict[str, Any], rank: int, *, overwrite: bool) -> None:
        self.path, self._state, self._rank, self._overwrite = path, state, rank, overwrite
        self._folder: NewFolder | None = None

    def arguments(self) -> Mapping[str, str]:
        return {"folder": as_text(self.path)}

    def create(self) -> None:
        self._folder = NewFolder(self.path, overwrite=self._overwrite)

    def describe(self, flat: FlatState, objects: Objects) -> _Names:
        self._paths, self._leaves = paths_of(self._state, flat), list(flat.leaves)
        irregular = {name: path for name in flat.tensors if (path := self._paths[name][0]) != tuple(name.split("/"))}
        groups = [Grouped(self._paths[name][0], groups) for name, groups in objects.groups().items()]
        return _Names(irregular, tuple(groups))

    def plan(self, _held: Held, merged: Merged) -> _Shared:
        assert self._folder is not None, "rank 0 makes the folder when it begins"
        told: list[tuple[int, _Names]] = [(rank, names) for rank, _, names in merged.tables]
        self._all_paths = {name: tuple(path) for _, names in told for name, path in names.paths.items()}
        writers: dict[str, int] = {}
        for rank, table, _ in merged.tables:
            for leaf in table.leaves:
                writers.setdefault(leaf, rank)
        groups = merge_groups([names.optimizers for _, names in told])
        optimizers = tuple(Grouped(path, tuple(tuple(group) for group in own)) for path, own in groups.items())
        return _Shared(self._folder.token, {leaf: rank for leaf, rank in writers.items() if rank}, optimizers)

    def accept(self, shared: _Shared) -> None:
        self._shared = shared
        require_folder(self.path, self._rank)

    def write(self, plan: Plan, taken: Sequence[Taken]) -> _Part:
        index = {name: number for number, name in enumerate(plan.held.names)}
        metas = plan.held.tensors()
        chunks = [
            Chunk(key_of_path(self._paths[each.name][0]), each.box, metas[each.name], each.view) for each in taken
        ]
        pieces = [number for each in taken for number in (index[each.name], *each.box.offsets, *each.box.sizes)]
        values = self._values()
        keyed = [(key_of_path(path), value) for path, value in values]
        written = write_file(self.path, self._rank, self._shared.token, chunks, keyed)
        return _Part(written, packed(pieces), tuple(path for path, _ in values))

    def _values(self) -> list[tuple[tuple[Step, ...], Any]]:
        """Return the values that this rank stores, with their paths."""
        values = [
            (path, value)
            for name in self._leaves
            if self._shared.writers.get(name, 0) == self._rank
            for path, value in values_of(*self._paths[name])
        ]
        for each in self._shared.optimizers if self._rank == 0 else ():
            groups = enumerate(each.groups)
            values += [((*each.path, "param_groups", i, "params"), list(names)) for i, names in groups]
        return values

    def commit(self, plan: Plan, parts: Sequence[_Part]) -> None:
        assert self._folder is not None, "rank 0 makes the folder when it begins"
        held = plan.held
        metas = held.tensors()
        path_of = {name: self._all_paths.get(name, tuple(name.split("/"))) for name in held.names}
        boxes: dict[str, list[Box]] = {name: [] for name in held.names}
        results = []
        for own in parts:
            written = own.written
            for (number, box), place in zip(_pieces(own.pieces, held), written.chunks, strict=True):
                name = held.names[number]
                boxes[name].append(box)
                results.append(result_of(key_of_path(path_of[name]), box, written.file, *place))
            for path, place in zip(own.values, written.values, strict=True):
                results.append(result_of(key_of_path(path), None, written.file, *place))
        values = [path for own in parts for path in own.values]
        paths = [*path_of.values(), *values]
        keys = {key_of_path(path): path for path in paths}
        if len(keys) < len(paths):
            twice = [path for path in paths if keys[key_of_path(path)] != path]
            raise CheckpointError(
                f"expected distinct keys of DCP, which joins names by '.', got one for two values: "
                f"{format_some([repr(key_of_path(path)) for path in twice])}; rename one of them"
            )
        tensors = {key_of_path(path_of[name]): (metas[name], boxes[name]) for name in held.names}
        metadata = metadata_of(tensors, [key_of_path(path) for path in values], keys)
        files = {own.written.file: own.written.num_bytes for own in parts}
        self._folder.commit(metadata, results, files)
        self._folder = None
        logger.info("saved %s for DCP: %d tensors from %d ranks", self.path, len(tensors), len(parts))

    def discard(self) -> None:
        if self._folder is not None:
            self._folder.discard()
            self._folder = None


def _pieces(text: str, held: Held) -> list[tuple[int, Box]]:
    """Return the index of the tensor, and the box, of each chunk."""
    numbers, metas, found, at = unpacked(text).tolist(), list(held.tensors().values()), [], 0
    while at < len(numbers):
        dims = len(metas[numbers[at]].shape)
        offsets, sizes = numbers[at + 1 : at + 1 + dims], numbers[at + 1 + dims : at + 1 + 2 * dims]
        found.append((numbers[at], Box(tuple(offsets), tuple(sizes))))
        at += 1 + 2 * dims
    return found
