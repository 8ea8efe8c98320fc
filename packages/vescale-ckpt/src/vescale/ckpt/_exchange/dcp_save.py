"""Save a state as a folder that ``torch.distributed.checkpoint.load`` (DCP) reads.

The three rounds of ``save``, with other files: what ranks hold, what each writes of it, and the commit by rank 0.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._checked import CheckedInside, FilePath, checked
from .._control import open_control
from .._errors import CheckpointError, as_text, format_some, require_same
from .._format.boxes import Box
from .._save.fingerprints import fingerprint
from .._save.holdings import (
    Boxes,
    Held,
    Holding,
    Inventory,
    Table,
    check_kinds,
    merge_held,
    merge_plain,
    packed,
    split,
    unpacked,
)
from .._save.shares import shares
from .._save.written import Rows
from .._state.flat import FlatState, flatten, leaves_as_text
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
        saving = _Saving(Path(os.path.abspath(folder)), state, overwrite, control.rank, control.size)
        try:
            discard = saving.discard
            is_sent = control.run_round(saving.begin, saving.choose, result=_Given, share=bool, on_failure=discard)
            share = control.run_round(
                lambda: saving.offer(with_table=is_sent), saving.plan, result=_Offer, share=_Share, on_failure=discard
            )
            control.run_round(lambda: saving.write(share), saving.commit, result=_Part, on_failure=discard)
        except BaseException:  # an interrupt or a lost peer, which is not an error of all ranks
            saving.discard()
            raise


@dataclass(frozen=True)
class _Given:
    """What must agree between ranks, and the digest of what one of those with it sends."""

    folder: str
    digest: str


@dataclass(frozen=True)
class _Names:
    """A rank's table, the paths that do not follow from names, and the groups of its optimizers."""

    table: Table
    paths: Mapping[str, tuple[Step, ...]]
    optimizers: tuple[Grouped, ...]


@dataclass(frozen=True)
class _Offer:
    """What a rank holds; the names come from one rank of each digest."""

    boxes: Boxes
    names: _Names | None


@dataclass(frozen=True)
class _Share:
    """From this each rank derives what it writes; ``writers`` has the ranks of leaves that are not on rank 0."""

    token: str
    held: Held
    writers: Mapping[str, Size]
    optimizers: tuple[Grouped, ...]


@dataclass(frozen=True)
class _Part:
    """What a rank has written.

    Attributes:
        written: its file.
        pieces: the index of the tensor, and offsets and sizes, of each chunk.
        values: the path of each value.
        replicas: `Rows` of the fingerprints of replicas.
    """

    written: Written
    pieces: str
    values: tuple[tuple[Step, ...], ...]
    replicas: str


@dataclass
class _Saving:
    """The steps of one save, in order; ``choose``, ``plan``, ``commit`` and ``discard`` act on rank 0."""

    path: Path
    state: dict[str, Any]
    overwrite: bool
    rank: int
    size: int
    folder: NewFolder | None = None
    flat: FlatState = field(default_factory=FlatState)

    def begin(self) -> _Given:
        if self.rank == 0:
            self.folder = NewFolder(self.path, overwrite=self.overwrite)
        objects = Objects(self.state, self.rank, self.size)
        self.flat = flatten(self.state, open_object=objects.open)
        self.paths = paths_of(self.state, self.flat)
        tensors = {
            name: Holding(held.meta, tuple(box for box, _ in held.boxes)) for name, held in self.flat.tensors.items()
        }
        inventory = Inventory(tensors, leaves_as_text(self.flat.leaves), objects.optimizers, frozenset(self.flat.own))
        table, self.boxes = split(inventory)
        irregular = {
            name: path for name in self.flat.tensors if (path := self.paths[name][0]) != tuple(name.split("/"))
        }
        grouped = [Grouped(self.paths[name][0], groups) for name, groups in objects.groups().items()]
        self.names = _Names(table, irregular, tuple(grouped))
        content = json.dumps([irregular, [[each.path, each.groups] for each in grouped]], sort_keys=True)
        return _Given(as_text(self.path), table.digest() + hashlib.sha256(content.encode()).hexdigest())

    def choose(self, given: Sequence[_Given]) -> list[bool]:
        require_same("folder", [each.folder for each in given])
        digests = [each.digest for each in given]
        index = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        self.table_of = [index[digest] for digest in digests]
        return [self.table_of.index(table) == rank for rank, table in enumerate(self.table_of)]

    def offer(self, *, with_table: bool) -> _Offer:
        return _Offer(self.boxes, self.names if with_table else None)

    def plan(self, offers: Sequence[_Offer]) -> list[_Share]:
        assert self.folder is not None, "rank 0 makes the folder when it begins"
        names = [(rank, offer.names) for rank, offer in enumerate(offers) if offer.names is not None]
        tables = [own.table for _, own in names]
        leaves, _ = merge_plain(tables, self.table_of)
        self.held = merge_held(tables, self.table_of, [offer.boxes for offer in offers])
        check_kinds(self.held, leaves)
        self.all_paths = {name: tuple(path) for _, own in names for name, path in own.paths.items()}
        writers: dict[str, int] = {}
        for rank, own in names:
            for leaf in own.table.leaves:
                writers.setdefault(leaf, rank)
        groups = merge_groups([own.optimizers for _, own in names])
        optimizers = tuple(Grouped(path, tuple(tuple(group) for group in own)) for path, own in groups.items())
        others = {leaf: rank for leaf, rank in writers.items() if rank}
        return [_Share(self.folder.token, self.held, others, optimizers)] * len(offers)

    def write(self, share: _Share) -> _Part:
        if not self.path.is_dir():
            raise CheckpointError(
                f"rank {self.rank}: expected the folder {self.path} of rank 0, got no such folder; save to a file "
                "system shared by all ranks"
            )
        own = shares(share.held, [self.rank])[self.rank]
        views = {(name, box): view for name, held in self.flat.tensors.items() for box, view in held.boxes}
        index = {name: number for number, name in enumerate(share.held.names)}
        metas = share.held.tensors()
        chunks, pieces = [], []
        for item in own.writes:
            view = views[item.name, item.held][item.box.slices(inside=item.held)]
            key = key_of_path(self.paths[item.name][0])
            chunks.append(Chunk(key, item.box, metas[item.name], view))
            pieces += [index[item.name], *item.box.offsets, *item.box.sizes]
        values = [
            (path, value)
            for name in self.flat.leaves
            if share.writers.get(name, 0) == self.rank
            for path, value in values_of(*self.paths[name])
        ]
        if self.rank == 0:
            for each in share.optimizers:
                groups = enumerate(each.groups)
                values += [((*each.path, "param_groups", i, "params"), list(names)) for i, names in groups]
        keyed = [(key_of_path(path), value) for path, value in values]
        written = write_file(self.path, self.rank, share.token, chunks, keyed)
        replicas = [(name, fingerprint(views[name, box], on_cpu=False), box) for name, box in own.replicas]
        return _Part(written, packed(pieces), tuple(path for path, _ in values), Rows(share.held).packed(replicas))

    def commit(self, parts: Sequence[_Part]) -> list[None]:
        assert self.folder is not None, "rank 0 makes the folder when it begins"
        held = self.held
        if torn := Rows(held).torn([own.replicas for own in parts]):
            raise CheckpointError(torn)
        metas = held.tensors()
        path_of = {name: self.all_paths.get(name, tuple(name.split("/"))) for name in held.names}
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
        self.folder.commit(metadata, results, files)
        self.folder = None
        logger.info("saved %s for DCP: %d tensors from %d ranks", self.path, len(tensors), len(parts))
        return [None] * len(parts)

    def discard(self) -> None:
        if self.folder is not None:
            self.folder.discard()
            self.folder = None


def _pieces(text: str, held: Held) -> list[tuple[int, Box]]:
    """Return the index of the tensor, and the box, of each chunk."""
    numbers, metas, found, at = unpacked(text).tolist(), list(held.tensors().values()), [], 0
    while at < len(numbers):
        dims = len(metas[numbers[at]].shape)
        offsets, sizes = numbers[at + 1 : at + 1 + dims], numbers[at + 1 + dims : at + 1 + 2 * dims]
        found.append((numbers[at], Box(tuple(offsets), tuple(sizes))))
        at += 1 + 2 * dims
    return found
