"""Save a state from any number of ranks.

Three rounds (see ``_control.py``):

    1. every rank lists what it holds        rank 0 creates the folder, and asks one rank for each table of names
    2. every rank sends its boxes            rank 0 puts them together, and tells all what they hold
    3. every rank derives and writes its     rank 0 compares replicas, writes the manifest and commits
       share

A failure in any round leaves ``path`` unchanged.
"""

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .._checked import CheckedInside, Count, FilePath, checked
from .._control import open_control
from .._errors import CheckpointError, as_text, require_same
from .._format.boxes import Box
from .._format.data_files import Checksums, Entry, checksums, pack_files, write_data_file
from .._format.manifest import Manifest, StoredFile, StoredTensor, key_of, manifest_to_text
from .._format.series import remove_earlier, series_of
from .._format.versions import NewVersion
from .._state.flat import FlatState, flatten, leaves_as_text
from .._state.objects import Objects
from .holdings import Boxes, Held, Holding, Inventory, Merged, Table, merge, split
from .shares import shares
from .written import Rows, checksum_of

logger = logging.getLogger("vescale.ckpt")


@checked
def save(
    path: FilePath,
    state: CheckedInside[dict[str, Any]],
    *,
    metadata: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    keep_last: Count | None = None,
    check_replicas: bool = True,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> None:
    """Save a state as a checkpoint that loads under any other layout.

    A collective: all ranks of the group call it with the same path. Each element is stored once, by one of the ranks
    that hold it, balanced by bytes. The checkpoint appears at ``path`` when it is complete and on disk, or not at all.

    Args:
        path: directory to create, on a file system shared by all ranks. Its parents are created.
        state: nested dict (or list) of objects with ``state_dict`` and ``load_state_dict`` (models, optimizers,
            schedulers), tensors, DTensors, arrays of numpy, values with ``__global_shape__`` and ``__boxes__()``,
            bytes, JSON values, and `PerRank` for what every rank has its own of. An optimizer of ``torch.optim`` is
            stored by parameter names and needs its model in the same state.
        metadata: a JSON object to store in the manifest.
        overwrite: replace a checkpoint at ``path``; it stays in place until the new one is complete.
        keep_last: when the checkpoint is complete, remove those that are named like it apart from the number at the end
            of the name, in the same directory, but the last ``keep_last`` that were saved.
        check_replicas: compare checksums of replicas between ranks, and refuse to save if they differ. The cost is one
            pass over the replicated bytes of each rank. If False and replicas differ, the stored tensor may mix parts
            of several ranks.
        process_group: the ranks that save, with a CPU backend such as gloo for small collectives. Default: all
            ranks, with a temporary gloo group if the default group has no CPU backend.

    Raises:
        CheckpointError: the state cannot be stored or the path cannot be written; the text is the same on all ranks.
        RuntimeError: a rank has ended during the save; the text names it. A checkpoint at ``path`` is unchanged then.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save("runs/step-10", {"model": model, "step": 10}, overwrite=True, keep_last=3)
    """
    saving = _Saving(Path(os.path.abspath(path)), state, metadata, overwrite, keep_last, check_replicas)
    with open_control(process_group) as control, torch.no_grad():
        saving.rank, saving.size = control.rank, control.size
        try:
            discard = saving.discard
            is_sent = control.run_round(saving.begin, saving.choose, result=_Given, share=bool, on_failure=discard)
            share = control.run_round(
                lambda: saving.offer(with_table=is_sent), saving.plan, result=_Offer, share=_Share, on_failure=discard
            )
            control.run_round(lambda: saving.write(share), saving.commit, result=_Written, on_failure=discard)
        except BaseException:  # an interrupt or a lost peer, which is not an error of all ranks
            saving.discard()
            raise


@dataclass(frozen=True)
class _Given:
    """What must agree between ranks, and the digest of a rank's table."""

    path: str
    metadata: str
    digest: str


@dataclass(frozen=True)
class _Offer:
    """What a rank holds; the table comes from one rank of each digest."""

    boxes: Boxes
    table: Table | None


@dataclass(frozen=True)
class _Share:
    """The folder for data files, and what all ranks hold, from which each derives what it writes."""

    folder: str
    held: Held


@dataclass(frozen=True)
class _Written:
    """The files of a rank, its pieces in them, and the checksums of its replicas, both as `Rows`."""

    files: Mapping[str, StoredFile]
    pieces: str
    replicas: str


class _Saving:
    """The steps of one save, in order; ``plan``, ``commit`` and ``discard`` act on rank 0."""

    def __init__(
        self,
        path: Path,
        state: dict[str, Any],
        metadata: Mapping[str, Any] | None,
        overwrite: bool,
        keep_last: int | None,
        check: bool,
    ) -> None:
        self.rank, self.size = 0, 1
        self._path = path
        self._state = state
        self._metadata = metadata
        self._overwrite = overwrite
        self._keep_last = keep_last
        self._check_replicas = check
        self._flat = FlatState()
        self._version: NewVersion | None = None
        self._table: Table | None = None
        self._boxes: Boxes
        self._table_of: list[int] = []
        self._merged: Merged | None = None
        self._start = time.perf_counter()

    def begin(self) -> _Given:
        if self._keep_last is not None and series_of(self._path.name) is None:
            raise CheckpointError(
                f"{self._path}: expected a name with a number at its end for keep_last, such as 'step-100', got "
                f"{self._path.name!r}; checkpoints of one name and other numbers are removed"
            )
        if self.rank == 0:
            self._version = NewVersion(self._path, overwrite=self._overwrite)
        objects = Objects(self._state, self.rank, self.size)
        self._flat = flatten(self._state, open_object=objects.open)
        tensors = {
            name: Holding(held.meta, tuple(box for box, _ in held.boxes)) for name, held in self._flat.tensors.items()
        }
        leaves = leaves_as_text(self._flat.leaves)
        self._table, self._boxes = split(Inventory(tensors, leaves, objects.optimizers, frozenset(self._flat.own)))
        return _Given(as_text(self._path), _metadata_text(self._metadata), self._table.digest())

    def choose(self, given: Sequence[_Given]) -> list[bool]:
        require_same("path", [each.path for each in given])
        require_same("metadata", [each.metadata for each in given])
        digests = [each.digest for each in given]
        index = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        self._table_of = [index[digest] for digest in digests]
        return [self._table_of.index(table) == rank for rank, table in enumerate(self._table_of)]

    def offer(self, *, with_table: bool) -> _Offer:
        return _Offer(self._boxes, self._table if with_table else None)

    def plan(self, offers: Sequence[_Offer]) -> list[_Share]:
        assert self._version is not None, "rank 0 makes the folder when it begins"
        tables = [offer.table for offer in offers if offer.table is not None]
        self._merged = merge(tables, self._table_of, [offer.boxes for offer in offers])
        return [_Share(self._version.folder.name, self._merged.held)] * len(offers)

    def write(self, share: _Share) -> _Written:
        folder = self._path / share.folder
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {self.rank}: expected the folder {folder} of rank 0, got no such folder; save to a file system "
                "shared by all ranks"
            )
        own = shares(share.held, [self.rank])[self.rank]
        views = {(name, box): view for name, held in self._flat.tensors.items() for box, view in held.boxes}
        entries = []
        for item in own.writes:
            view = views[item.name, item.held][item.box.slices(inside=item.held)]
            key = key_of(item.name, item.box, self._flat.tensors[item.name].meta.shape)
            entries.append(Entry(item.name, key, item.box, view))
        rows, files = Rows(share.held), {}
        pieces: list[tuple[str, int, Box]] = []
        sums: dict[tuple[str, Box], Checksums] = {}
        for number, run in enumerate(pack_files([entry.num_bytes for entry in entries])):
            file = f"data-{self.rank}-{number}.safetensors"
            written = write_data_file(folder / file, entries[run.start : run.stop])
            files[file] = written.file
            pieces += [(name, number, piece.box) for name, piece, _ in written.pieces]
            sums |= {(name, piece.box): crc32 for name, piece, crc32 in written.pieces}
        replicas = []
        for place in own.replicas if self._check_replicas else ():
            name, box = place
            replicas.append((name, checksum_of(sums[place] if place in sums else checksums(views[place])), box))
        return _Written(files, rows.packed(pieces), rows.packed(replicas))

    def commit(self, written: Sequence[_Written]) -> list[None]:
        assert self._merged is not None and self._version is not None, "the plan comes before the commit"  # noqa: PT018
        rows = Rows(self._merged.held)
        if torn := rows.torn([own.replicas for own in written]):
            raise CheckpointError(torn)
        layouts = rows.layouts([own.pieces for own in written], [len(own.files) for own in written])
        manifest = Manifest(
            world_size=len(written),
            saved_at=time.time(),
            metadata=json.loads(_metadata_text(self._metadata)),
            leaves={name: json.loads(text) for name, text in self._merged.leaves.items()},
            folder=self._version.folder.name,
            files={name: file for own in written for name, file in own.files.items()},
            tensors={name: StoredTensor(meta, layouts[name]) for name, meta in self._merged.held.tensors().items()},
            optimizers=self._merged.optimizers,
        )
        self._version.commit(manifest_to_text(manifest))
        self._version = None
        self._log(manifest)
        if self._keep_last is not None:
            remove_earlier(self._path, keep=self._keep_last)
        return [None] * len(written)

    def discard(self) -> None:
        if self._version is not None:
            self._version.discard()
            self._version = None

    def _log(self, manifest: Manifest) -> None:
        seconds = time.perf_counter() - self._start
        gigabytes = sum(file.num_bytes for file in manifest.files.values()) / 1e9
        logger.info(
            "saved %s: %d tensors, %.3f GB from %d ranks in %.2f s",
            self._path, len(manifest.tensors), gigabytes, manifest.world_size, seconds,
        )  # fmt: skip


def _metadata_text(metadata: Mapping[str, Any] | None) -> str:
    try:
        text = json.dumps(dict(metadata or {}), sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"expected metadata to be a JSON object with str keys, got {error}; convert it") from None
    return text
