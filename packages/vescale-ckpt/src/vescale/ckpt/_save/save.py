"""Save a state from any number of ranks.

Two rounds (see ``_control.py``):

    1. every rank lists its boxes            rank 0 creates the folder and plans
    2. every rank writes its share           rank 0 compares replicas, writes the manifest and commits

A failure in either round leaves ``path`` unchanged.
"""

import functools
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
from .._format.layouts import Layout
from .._format.manifest import Manifest, Piece, StoredFile, StoredTensor, key_of, manifest_to_text
from .._format.series import remove_earlier, series_of
from .._format.versions import NewVersion
from .._state.flat import FlatState, flatten, leaves_as_text
from .._state.objects import Objects
from .balance import Write
from .plan import Holding, Inventory, SavePlan, find_torn_replicas, plan_save

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
            share = control.run_round(saving.offer, saving.plan, result=_Offer, share=_Share, on_failure=saving.discard)
            control.run_round(lambda: saving.write(share), saving.commit, result=_Written, on_failure=saving.discard)
        except BaseException:  # an interrupt or a lost peer, which is not an error of all ranks
            saving.discard()
            raise


@dataclass(frozen=True)
class _Offer:
    """The input of one rank to the plan: values that must agree between ranks, and the rank's inventory."""

    path: str
    metadata: str
    inventory: Inventory


@dataclass(frozen=True)
class _Replica:
    """A box that other ranks hold, too, and the checksums of its values, once they are known."""

    name: str
    box: Box
    crc32: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Share:
    """What a rank writes, to the folder of this name, and which replicas it compares."""

    folder: str
    writes: tuple[Write, ...]
    replicas: tuple[_Replica, ...]


@dataclass(frozen=True)
class _Stored:
    """A piece that was written."""

    name: str
    piece: Piece


@dataclass(frozen=True)
class _Written:
    """The pieces and files written by one rank, and the checksums of its replicas."""

    pieces: tuple[_Stored, ...]
    files: Mapping[str, StoredFile]
    replicas: tuple[_Replica, ...]


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
        self._plan: SavePlan | None = None
        self._start = time.perf_counter()

    def offer(self) -> _Offer:
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
        inventory = Inventory(tensors, leaves_as_text(self._flat.leaves), objects.optimizers)
        return _Offer(as_text(self._path), _metadata_text(self._metadata), inventory)

    def plan(self, offers: Sequence[_Offer]) -> list[_Share]:
        require_same("path", [offer.path for offer in offers])
        require_same("metadata", [offer.metadata for offer in offers])
        assert self._version is not None, "rank 0 makes the folder when it offers"
        self._plan = plan_save([offer.inventory for offer in offers])
        return [
            _Share(self._version.folder.name, own.writes, tuple(_Replica(name, box) for name, box in own.replicas))
            for own in self._plan.ranks
        ]

    def write(self, share: _Share) -> _Written:
        folder = self._path / share.folder
        if not folder.is_dir():
            raise CheckpointError(
                f"rank {self.rank}: expected the folder {folder} of rank 0, got no such folder; save to a file system "
                "shared by all ranks"
            )
        views = {(name, box): view for name, held in self._flat.tensors.items() for box, view in held.boxes}
        entries = []
        for item in share.writes:
            view = views[item.name, item.held][item.box.slices(inside=item.held)]
            key = key_of(item.name, item.box, self._flat.tensors[item.name].meta.shape)
            entries.append(Entry(item.name, key, item.box, view))
        pieces: list[_Stored] = []
        files = {}
        sums: dict[tuple[str, Box], Checksums] = {}
        for number, run in enumerate(pack_files([entry.num_bytes for entry in entries])):
            file = f"data-{self.rank}-{number}.safetensors"
            written = write_data_file(folder / file, entries[run.start : run.stop])
            files[file] = written.file
            pieces += [_Stored(name, piece) for name, piece, _ in written.pieces]
            sums |= {(name, piece.box): own for name, piece, own in written.pieces}
        if not self._check_replicas:
            return _Written(tuple(pieces), files, ())
        replicas = []
        for each in share.replicas:
            place = each.name, each.box
            replicas.append(_Replica(*place, sums[place] if place in sums else checksums(views[place])))
        return _Written(tuple(pieces), files, tuple(replicas))

    def commit(self, written: Sequence[_Written]) -> list[None]:
        sums = [{(each.name, each.box): each.crc32 for each in own.replicas} for own in written]
        if torn := find_torn_replicas(sums):
            raise CheckpointError(torn)
        assert self._plan is not None and self._version is not None, "the plan comes before the commit"  # noqa: PT018
        files = {name: file for own in written for name, file in own.files.items()}
        index = {name: number for number, name in enumerate(files)}
        pieces: dict[str, list[tuple[int, Box]]] = {name: [] for name in self._plan.tensors}
        for own in written:
            for each in own.pieces:
                pieces[each.name].append((index[each.piece.file], each.piece.box))
        layout_of = functools.cache(Layout.of)  # many tensors have the same
        manifest = Manifest(
            world_size=len(written),
            saved_at=time.time(),
            metadata=json.loads(_metadata_text(self._metadata)),
            leaves={name: json.loads(text) for name, text in self._plan.leaves.items()},
            folder=self._version.folder.name,
            files=files,
            tensors={
                name: StoredTensor(meta, layout_of(meta.shape, tuple(pieces[name])))
                for name, meta in self._plan.tensors.items()
            },
            optimizers=self._plan.optimizers,
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
