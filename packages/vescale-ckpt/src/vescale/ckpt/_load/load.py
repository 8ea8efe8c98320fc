"""Load a checkpoint into a state under any layout.

Four rounds (see ``_control.py``); the state is not modified before the third:

    1. rank 0 reads the manifest                       and sends it to all ranks
    2. every rank compares its state with it           rank 0 merges the comparisons and accepts or refuses
    3. every rank reads the boxes it holds, in place     replicas read each box once (``shared.py``)
    4. every rank passes the filled state dicts to ``load_state_dict``
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist

from .._background import settle
from .._checked import CheckedInside, FilePath, checked
from .._control import Control, control_of, open_control, own_group
from .._errors import CheckpointError, format_some, require_same
from .._format.boxes import Box
from .._format.data_files import DataFile
from .._format.inspect import checked_manifest, read_manifest_text
from .._format.manifest import Manifest, Piece, manifest_from_text
from .._format.storage import is_remote, place_of
from .._format.versions import was_replaced
from .._progress import Listener, Progress
from .._state.flat import FlatState, flatten, restore
from .._state.objects import Objects
from .plan import Comparison, Read, Request, compare, find_mismatch, left_over, plan_load
from .shared import SharedRead, digests, find_replicas, first_name, make_chunks, num_bytes

logger = logging.getLogger("vescale.ckpt")


@checked
def load(
    path: FilePath,
    state: CheckedInside[dict[str, Any]],
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
    rename: Mapping[str, str] | None = None,
    allow_dtype_cast: bool = False,
    progress: bool | Callable[[int, int], object] = False,
    process_group: CheckedInside[dist.ProcessGroup | None] = None,
) -> Manifest:
    """Load a checkpoint into a state under any layout.

    A collective: all ranks of the group call it. Tensors are filled in place, and each rank reads only the boxes that
    it holds. JSON values are replaced, in ``state`` and in the state dicts of its objects.

    Args:
        path: directory of a checkpoint.
        state: as for ``save``, with the objects to load into. Tensors must have storage (not on the meta device).
        strict: refuse requested names that are not stored, stored names that no rank requests, and an optimizer of
            another class than the stored one. If False, such names are skipped. Different shapes and dtypes are always
            refused.
        ignore: stored names that no rank needs to request; a leading part such as ``"optimizer"`` covers all names
            under it.
        rename: beginnings of stored names, and what replaces them, such as ``{"model/backbone.": "encoder/"}`` to load
            a part of a model. Of several that fit, the longest counts. ``ignore`` and errors have the new names.
        allow_dtype_cast: convert stored values to the dtype of the state's tensor instead of refusing them.
        progress: show on the terminal of the first rank how far it is, or call this function there with the bytes that
            are read, tensor by tensor, and all that the rank reads. An error in it fails the load.
        process_group: as for ``save``.

    Returns:
        The checkpoint's manifest, with the ``metadata`` of ``save``.

    Raises:
        CheckpointError: with the same text on all ranks. If the checkpoint does not fit, the state is unmodified. If
            stored bytes are damaged, tensors are partly filled, and the text says so. Every byte that is read is
            compared with a checksum; ``verify`` compares all.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> save("runs/step-10", {"model": model, "step": 10}, overwrite=True)
        >>> state = {"model": torch.nn.Linear(4, 2), "step": 0}
        >>> _ = load("runs/step-10", state)
        >>> state["step"]
        10
    """
    with open_control(process_group) as control, torch.no_grad():
        where, manifest = _share_manifest(control, path, rename or {})
        source = Source(where, manifest, lambda file: DataFile(where / manifest.folder / file, manifest.files[file]))
        load_from(
            source,
            state,
            control,
            strict=strict,
            ignore=ignore,
            allow_dtype_cast=allow_dtype_cast,
            progress=progress,
        )
    return manifest


class Reader(Protocol):
    """An open data file."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    def fill(self, target: torch.Tensor, piece: Piece, box: Box, *, name: str, dtype: str) -> None:
        """Read the values of ``box``, a part of ``piece``, and copy them to ``target``."""


@dataclass(frozen=True)
class Source:
    """What a load reads, of any format.

    Attributes:
        where: its path.
        manifest: what there is, by our names and boxes.
        open_file: opens one of the manifest's files.
    """

    where: Path
    manifest: Manifest
    open_file: Callable[[str], Reader]


def load_from(
    source: Source,
    state: dict[str, Any],
    control: Control,
    *,
    strict: bool,
    ignore: Collection[str],
    allow_dtype_cast: bool,
    progress: bool | Listener = False,
) -> None:
    """Load a source, which all ranks know, into a state: rounds 2 to 4."""
    where, manifest = source.where, source.manifest
    objects = Objects(state, control.rank, control.size, manifest=manifest)
    flat = FlatState()

    def examine() -> _Compared:
        nonlocal flat
        flat = flatten(state, open_object=objects.open)
        metas = {name: held.meta for name, held in flat.tensors.items()}
        request = Request(metas, flat.leaves, objects.optimizers)
        comparison = compare(request, manifest, allow_dtype_cast=allow_dtype_cast)
        boxes = {
            name: [box for box, _ in held.boxes] for name, held in flat.tensors.items() if name in manifest.tensors
        }
        return _Compared.of(comparison, digests(boxes, manifest))

    def accept(compared: list[_Compared]) -> list[_Accepted]:
        comparisons = [each.comparison() for each in compared]
        mismatch = find_mismatch(comparisons, manifest, strict=strict, ignore=ignore)
        if mismatch is not None:
            raise CheckpointError(f"{where}: {mismatch}")
        _log_partial(where, comparisons, left_over(comparisons, manifest, ignore=ignore))
        hosts = [str(rank) if is_remote(where) else each.host for rank, each in enumerate(compared)]
        found = find_replicas([each.held for each in compared], hosts)
        have_groups = any(len(ranks) < control.size for own in found for ranks in own.values())
        return [_Accepted(replicas, have_groups) for replicas in found]

    accepted = control.run_round(examine, accept, result=_Compared, share=_Accepted)
    groups = _groups_of(accepted, control)
    shown = Progress.asked("loaded", progress, control.rank)
    control.run_round(lambda: _fill(source, flat, groups, shown), control.no_shares)
    control.run_round(lambda: restore(state, flat, manifest.leaves, close_object=objects.close), control.no_shares)


@dataclass(frozen=True)
class _Given:
    """What a rank was given for ``rename``, and the text of the manifest on the first one."""

    rename: str
    manifest: str | None


@dataclass(frozen=True)
class _Compared:
    """A `Comparison` between ranks, digests of what a rank holds, by first names, and its host."""

    asked: str
    missing: tuple[str, ...]
    faults: tuple[tuple[str, ...], ...]
    other_optimizers: tuple[tuple[str, ...], ...]
    held: Mapping[str, str]
    host: str

    @classmethod
    def of(cls, comparison: Comparison, held: Mapping[str, str]) -> _Compared:
        found = comparison.missing, comparison.faults, comparison.other_optimizers
        return cls(comparison.asked.hex(), *found, held, socket.gethostname())

    def comparison(self) -> Comparison:
        faults, others = ([(a, b) for a, b in pairs] for pairs in (self.faults, self.other_optimizers))
        return Comparison(bytes.fromhex(self.asked), self.missing, tuple(faults), tuple(others))


@dataclass(frozen=True)
class _Accepted:
    """The ranks of the group that hold what this one holds, by first names; whether any rank has some but not all."""

    replicas: Mapping[str, tuple[int, ...]]
    have_groups: bool


def _share_manifest(control: Control, path: FilePath, rename: Mapping[str, str]) -> tuple[Path, Manifest]:
    """Read the manifest and compare it with the files on rank 0, and parse the same text on all ranks."""
    where = Path()

    def read() -> _Given:
        nonlocal where
        settle()
        where = place_of(path)
        given = json.dumps(dict(rename), sort_keys=True)
        if control.rank != 0:
            return _Given(given, None)
        text = read_manifest_text(where)
        try:
            checked_manifest(where, text).renamed(rename)
        except CheckpointError as error:
            raise error if str(where) in str(error) else CheckpointError(f"{where}: {error}") from None
        return _Given(given, text)

    def decide(found: list[_Given]) -> list[str | None]:
        require_same("rename", [each.rename for each in found])
        return [found[0].manifest] * control.size

    text = control.run_round(read, decide, result=_Given, share=str)
    return where, manifest_from_text(text, where=str(where)).renamed(rename)


def _groups_of(accepted: _Accepted, control: Control) -> list[tuple[list[str], Control]]:
    """Return the process groups of replicas, each with the first names that it reads together."""
    names: dict[tuple[int, ...], list[str]] = {}
    for first, ranks in accepted.replicas.items():
        names.setdefault(tuple(control.ranks[rank] for rank in ranks), []).append(first)
    ordered = sorted(names)
    if accepted.have_groups:
        control.make_groups([(ranks, "replicas") for ranks in ordered if ranks != control.ranks])
    return [
        (names[ranks], control if ranks == control.ranks else control_of(own_group(ranks, "replicas"), name="replicas"))
        for ranks in ordered
    ]


def _fill(
    source: Source, flat: FlatState, groups: Sequence[tuple[Collection[str], Control]], progress: Progress
) -> None:
    """Read the boxes of this rank, file by file, in place; what replicas hold alike, together with them."""
    manifest = source.manifest
    views = {(name, box): view for name, held in flat.tensors.items() for box, view in held.boxes}
    boxes = {name: [box for box, _ in held.boxes] for name, held in flat.tensors.items()}
    shared = {first for names, _ in groups for first in names}
    own = plan_load({name: each for name, each in boxes.items() if first_name(name) not in shared}, manifest)
    together = []
    for names, replicas in groups:
        alike = {name: each for name, each in boxes.items() if first_name(name) in names}
        together.append((replicas, make_chunks(plan_load(alike, manifest), manifest)))
    every = [each for reads in own.values() for each in reads]
    every += [each for _, chunks in together for chunk in chunks for _, each in chunk]
    with _Files(source) as files, progress:
        progress.of(0, sum(num_bytes(each, manifest) for each in every))

        def values(read: Read) -> torch.Tensor:
            return views[read.name, read.into][read.box.slices(inside=read.into)]

        try:
            for file, reads in own.items():
                for read in reads:
                    files.read(file, read, values(read))
                    progress(num_bytes(read, manifest))
            for replicas, chunks in together:
                SharedRead(replicas, values, files.read, manifest, progress).run(chunks)
        except CheckpointError as error:
            is_replaced = was_replaced(source.where, manifest)
            why = "; a save has replaced the checkpoint while it was read" if is_replaced else ""
            raise CheckpointError(
                f"{error}{why}; the tensors of the state are partly filled, so load another checkpoint before using "
                "them"
            ) from error


class _Files:
    """The files of a source, one of them open at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._name, self._opened = "", contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, file: str, read: Read, target: torch.Tensor) -> None:
        """Read the values of a read into ``target``."""
        if file != self._name:
            self._opened.close()
            self._name = ""
            self._reader = self._opened.enter_context(self._source.open_file(file))
            self._name = file
        dtype = self._source.manifest.tensors[read.name].meta.dtype
        self._reader.fill(target, read.piece, read.box, name=read.name, dtype=dtype)


def _log_partial(where: Path, comparisons: list[Comparison], left: list[str]) -> None:
    """Log the names that a load with strict=False skips."""
    missing = sorted({name for own in comparisons for name in own.missing})
    for problem, names in (("not stored, left unchanged", missing), ("stored, not loaded", left)):
        if names:
            logger.warning("%s: %d names %s: %s", where, len(names), problem, format_some(names))
