"""The steps of one save: what each rank does, what ranks send, and what the first rank decides.

The plan of a save (what all ranks hold, and what this one writes) is kept for the next save of the same ranks. If all
ranks hold the same then, by digests, ranks do not send boxes, and the first rank does not plan.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .._control import Control
from .._errors import CheckpointError, as_text, require_same
from .._format.boxes import Box
from .._format.data_files import Entry, pack_files, write_data_file
from .._format.layouts import Layout
from .._format.manifest import Manifest, StoredFile, StoredTensor, key_of, manifest_to_text
from .._format.series import remove_earlier, series_of
from .._format.storage import is_remote, place_of
from .._format.versions import NewVersion
from .._state.flat import FlatState, flatten, leaves_as_text
from .._state.objects import Objects
from .fingerprints import fingerprint
from .holdings import Boxes, Held, Holding, Inventory, Table, check_kinds, digest_of, merge_held, merge_plain, split
from .shares import RankPlan, shares
from .written import Rows

logger = logging.getLogger("vescale.ckpt")

Copies = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Options:
    """The arguments of a save; ``save`` describes them."""

    path: str | os.PathLike
    metadata: Mapping[str, Any] | None
    overwrite: bool
    keep_last: int | None
    check_replicas: bool
    is_async: bool


@dataclass(frozen=True)
class Given:
    """What a rank was given, and digests of what it holds.

    Attributes:
        path: it must agree between ranks.
        metadata: likewise.
        is_async: likewise.
        on_cpu: whether all its tensors are on the CPU.
        table: digest of its table.
        held: digest of its tensors and boxes.
        plan: digest of the plan that it has kept; empty if none.
    """

    path: str
    metadata: str
    is_async: bool
    on_cpu: bool
    table: str
    held: str
    plan: str


@dataclass(frozen=True)
class Asked:
    """What the first rank needs of a rank, and whether all tensors of all ranks are on the CPU."""

    table: bool
    boxes: bool
    on_cpu: bool


@dataclass(frozen=True)
class Offer:
    """What a rank holds; the table comes from one rank of each digest, and boxes if there is no plan yet."""

    table: Table | None
    boxes: Boxes | None


@dataclass(frozen=True)
class Share:
    """The folder for data files, the plan, and what all ranks hold; None if all have kept this plan."""

    folder: str
    plan: str
    held: Held | None


@dataclass(frozen=True)
class Written:
    """What a rank has written.

    Attributes:
        files: by name.
        pieces: in its files, as `Rows`; None if all ranks have kept the plan.
        replicas: their fingerprints, as `Rows`.
    """

    files: Mapping[str, StoredFile]
    pieces: str | None
    replicas: str


@dataclass
class _Plan:
    """A plan, kept between saves.

    Attributes:
        digest: of what all ranks hold.
        held: what they hold.
        own: what this rank writes.
        layouts: of all tensors, on the first rank, when a save with this plan has been completed.
    """

    digest: str
    held: Held
    own: RankPlan
    layouts: dict[str, Layout] | None = None


_plans: dict[tuple[int, ...], _Plan] = {}  # the last one of the ranks that saved


class Saving:
    """One save, step by step; ``choose``, ``plan``, ``commit`` and ``discard`` are for the first rank."""

    def __init__(self, options: Options, state: dict[str, Any], control: Control) -> None:
        self.path = Path()  # of the checkpoint
        self._options, self._state = options, state
        self._rank, self._ranks = control.rank, control.ranks
        self._version: NewVersion | None = None
        self._known = _plans.get(self._ranks)
        self._flat = FlatState()
        self._start = time.perf_counter()
        # of rank 0
        self._table_of: list[int] = []
        self._leaves: Mapping[str, str] = {}
        self._optimizers: Mapping[str, str] = {}

    # --- round 1 ---

    def begin(self) -> Given:
        """Create the folder, and list what this rank holds."""
        options = self._options
        self.path = place_of(options.path)
        if options.keep_last is not None and series_of(self.path.name) is None:
            raise CheckpointError(
                f"{self.path}: expected a name with a number at its end for keep_last, such as 'step-100', got "
                f"{self.path.name!r}; checkpoints of one name and other numbers are removed"
            )
        if self._rank == 0:
            self._version = NewVersion(self.path, overwrite=options.overwrite)
        objects = Objects(self._state, self._rank, len(self._ranks))
        self._flat = flatten(self._state, open_object=objects.open)
        tensors = {
            name: Holding(held.meta, tuple(box for box, _ in held.boxes)) for name, held in self._flat.tensors.items()
        }
        leaves = leaves_as_text(self._flat.leaves)
        self._table, self._boxes = split(Inventory(tensors, leaves, objects.optimizers, frozenset(self._flat.own)))
        self._metadata = _metadata_text(options.metadata)
        plan = self._known.digest if self._known and (self._known.layouts or self._rank) else ""
        held = self._table.digest_with(self._boxes)
        views = [view for each in self._flat.tensors.values() for _, view in each.boxes]
        on_cpu = all(view.device.type == "cpu" for view in views)
        return Given(as_text(self.path), self._metadata, options.is_async, on_cpu, self._table.digest(), held, plan)

    def choose(self, given: Sequence[Given]) -> list[Asked]:
        """Ask for tables, and for boxes unless all ranks have kept the plan of what they hold."""
        require_same("path", [each.path for each in given])
        require_same("metadata", [each.metadata for each in given])
        require_same("async_", [str(each.is_async) for each in given])
        digests = [each.table for each in given]
        index = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
        self._table_of = [index[digest] for digest in digests]
        self._digest = digest_of([each.held for each in given])
        is_new = {each.plan for each in given} != {self._digest}
        on_cpu = all(each.on_cpu for each in given)
        return [Asked(self._table_of.index(table) == rank, is_new, on_cpu) for rank, table in enumerate(self._table_of)]

    # --- round 2 ---

    def offer(self, asked: Asked) -> Offer:
        """Return what the first rank needs."""
        self._on_cpu = asked.on_cpu
        return Offer(self._table if asked.table else None, self._boxes if asked.boxes else None)

    def plan(self, offers: Sequence[Offer]) -> list[Share]:
        """Put together what all ranks hold."""
        assert self._version is not None, "rank 0 makes the folder when it begins"
        tables = [offer.table for offer in offers if offer.table is not None]
        boxes = [offer.boxes for offer in offers if offer.boxes is not None]
        self._leaves, self._optimizers = merge_plain(tables, self._table_of)
        held = merge_held(tables, self._table_of, boxes) if boxes else None
        check_kinds(held or self._plan.held, self._leaves)
        return [Share(self._version.folder.name, self._digest, held)] * len(offers)

    # --- round 3 ---

    def take(self, share: Share, copies: Copies = list) -> None:
        """Take what this rank writes, and the fingerprints of its replicas, out of the state."""
        self._folder, self._is_new = self.path / share.folder, share.held is not None
        if not (is_remote(self.path) or self._folder.is_dir()):
            raise CheckpointError(
                f"rank {self._rank}: expected the folder {self._folder} of rank 0, got no such folder; save to a file "
                "system shared by all ranks"
            )
        if share.held is not None:
            own = shares(share.held, [self._rank])[self._rank]
            self._known = _plans[self._ranks] = _Plan(share.plan, share.held, own)
        plan = self._plan
        views = {(name, box): view for name, held in self._flat.tensors.items() for box, view in held.boxes}
        writes = plan.own.writes
        taken = copies([views[each.name, each.held][each.box.slices(inside=each.held)] for each in writes])
        shapes = {name: held.meta.shape for name, held in self._flat.tensors.items()}
        self._entries = [
            Entry(each.name, key_of(each.name, each.box, shapes[each.name]), each.box, view)
            for each, view in zip(writes, taken, strict=True)
        ]
        replicas = plan.own.replicas if self._options.check_replicas else ()
        rows = ((name, fingerprint(views[name, box], on_cpu=self._on_cpu), box) for name, box in replicas)
        self._replicas = Rows(plan.held).packed(rows)
        self._flat, self._state = FlatState(), {}  # the state may change from now on

    @property
    def _plan(self) -> _Plan:
        assert self._known is not None, "boxes are asked for if there is no plan"
        return self._known

    def write(self) -> Written:
        """Write the files of this rank."""
        files: dict[str, StoredFile] = {}
        pieces: list[tuple[str, int, Box]] = []
        for number, run in enumerate(pack_files([entry.num_bytes for entry in self._entries])):
            file = f"data-{self._rank}-{number}.safetensors"
            written = write_data_file(self._folder / file, self._entries[run.start : run.stop])
            files[file] = written.file
            pieces += [(name, number, piece.box) for name, piece in written.pieces]
        return Written(files, Rows(self._plan.held).packed(pieces) if self._is_new else None, self._replicas)

    def commit(self, written: Sequence[Written]) -> list[None]:
        """Compare replicas, and let the new version be the checkpoint."""
        assert self._version is not None, "rank 0 makes the folder when it begins"
        plan = self._plan
        rows = Rows(plan.held)
        if torn := rows.torn([own.replicas for own in written]):
            raise CheckpointError(torn)
        if plan.layouts is None:
            pieces = [own.pieces or "" for own in written]
            plan.layouts = rows.layouts(pieces, [len(own.files) for own in written])
        layouts = plan.layouts
        manifest = Manifest(
            world_size=len(written),
            saved_at=time.time(),
            metadata=json.loads(self._metadata),
            leaves={name: json.loads(text) for name, text in self._leaves.items()},
            folder=self._version.folder.name,
            files={name: file for own in written for name, file in own.files.items()},
            tensors={name: StoredTensor(meta, layouts[name]) for name, meta in plan.held.tensors().items()},
            optimizers=self._optimizers,
        )
        self._version.commit(manifest_to_text(manifest))
        self._version = None
        self._log(manifest)
        if self._options.keep_last is not None:
            remove_earlier(self.path, keep=self._options.keep_last)
        return [None] * len(written)

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
