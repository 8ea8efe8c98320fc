"""Plan a load: compare what the ranks ask for with what a checkpoint has, then list what each rank reads.

``find_mismatch`` sees the requests of all ranks at once, because only together they tell whether a checkpoint fits: a
pipeline stage asks for its own names, and a stored name is left over only if no rank asks for it. ``plan_load`` is each
rank's own business: for every box that it holds, the overlaps with stored pieces, grouped by file.

Pure functions; nothing is read or written here.
"""

import difflib
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ._boxes import Box
from ._errors import format_ranks, format_some
from ._manifest import Manifest, Piece, TensorMeta

NUM_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Request:
    """What one rank asks for.

    Attributes:
        tensors: dtype and global shape by name.
        leaves: names of JSON values.
        num_param_groups: length of every ``param_groups`` list, by name.
    """

    tensors: Mapping[str, TensorMeta]
    leaves: frozenset[str]
    num_param_groups: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Read:
    """Fill ``box`` of the target's box ``into`` from a stored piece.

    Attributes:
        name: the tensor's name.
        into: a box that this rank holds.
        box: the part of it that the piece has.
        piece: where the values are.
    """

    name: str
    into: Box
    box: Box
    piece: Piece

    @property
    def is_whole_piece(self) -> bool:
        """Tell whether all of the piece is read, so that its checksum can be compared."""
        return self.box == self.piece.box


@dataclass(frozen=True)
class LoadPlan:
    """What one rank reads, by data file."""

    reads: Mapping[str, tuple[Read, ...]]


def plan_load(boxes: Mapping[str, Sequence[Box]], manifest: Manifest) -> LoadPlan:
    """List the reads that fill ``boxes``.

    Args:
        boxes: what this rank holds, by tensor name; names that the manifest lacks are left alone.
        manifest: of the checkpoint.
    """
    reads: dict[str, list[Read]] = defaultdict(list)
    for name, targets in boxes.items():
        if name not in manifest.tensors:
            continue
        for into in targets:
            for piece in manifest.tensors[name].pieces:
                if (common := into.intersect(piece.box)) is not None:
                    reads[piece.file].append(Read(name, into, common, piece))
    return LoadPlan({file: tuple(reads[file]) for file in sorted(reads)})


def find_mismatch(
    requests: Sequence[Request],
    manifest: Manifest,
    *,
    strict: bool = True,
    ignore: Collection[str] = (),
    allow_dtype_cast: bool = False,
) -> str | None:
    """Say in what a checkpoint does not fit the state that the ranks ask to load, or return None when it fits.

    Args:
        requests: one per rank.
        manifest: of the checkpoint.
        strict: whether a name on one side only is a mismatch.
        ignore: stored names, or leading path components of names, that may be left over.
        allow_dtype_cast: whether stored values may be cast to another dtype.
    """
    names = {name: _ranks_with(requests, name) for r in requests for name in (*r.tensors, *r.leaves)}
    stored = manifest.tensors.keys() | manifest.leaves.keys()
    missing = [name for name in names if name not in stored]
    left = sorted(name for name in stored - names.keys() if not _is_under(name, ignore))
    faults = _find_kind_faults(requests, manifest)
    faults += _find_meta_faults(requests, manifest, "shape", "global shape")
    if not allow_dtype_cast:
        faults += _find_meta_faults(requests, manifest, "dtype", "dtype", fix="pass allow_dtype_cast=True to convert")
    faults += _find_group_faults(requests, manifest)
    if strict:
        faults = [*_tell_missing(missing, names, left or sorted(stored)), *_tell_left(left, missing), *faults]
    if not faults:
        return None
    return "the checkpoint does not fit the state:\n" + "\n".join(f"  - {fault}" for fault in faults)


def _ranks_with(requests: Sequence[Request], name: str) -> list[int]:
    return [rank for rank, request in enumerate(requests) if name in request.tensors or name in request.leaves]


def _is_under(name: str, prefixes: Collection[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}/") for prefix in prefixes)


def _tell_missing(missing: Sequence[str], names: Mapping[str, list[int]], candidates: Sequence[str]) -> list[str]:
    if not missing:
        return []
    shown = []
    for name in missing[:NUM_NAMES_SHOWN]:
        near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
        shown.append(f"{name!r} on {format_ranks(names[name])}" + (f" (nearest stored: {near[0]!r})" if near else ""))
    more = f" and {len(missing) - len(shown)} more" if len(missing) > len(shown) else ""
    return [f"{len(missing)} asked for and not stored: {', '.join(shown)}{more}; strict=False leaves them as they are"]


def _tell_left(left: Sequence[str], missing: Sequence[str]) -> list[str]:
    if not left:
        return []
    roots = sorted({name.split("/", 1)[0] for name in left})
    hint = "" if missing else f"; to leave them out on purpose pass ignore={roots!r} or strict=False"
    return [f"{len(left)} stored and asked for by no rank: {format_some(map(repr, left), limit=NUM_NAMES_SHOWN)}{hint}"]


def _find_kind_faults(requests: Sequence[Request], manifest: Manifest) -> list[str]:
    faults = {}
    for request in requests:
        for name in request.tensors.keys() & manifest.leaves.keys():
            faults[name] = f"{name!r} is a plain value in the checkpoint and a tensor here"
        for name in request.leaves & manifest.tensors.keys():
            faults[name] = f"{name!r} is a tensor in the checkpoint and a plain value here"
    return [faults[name] for name in sorted(faults)]


def _find_meta_faults(
    requests: Sequence[Request], manifest: Manifest, attribute: str, title: str, *, fix: str = ""
) -> list[str]:
    get: Callable[[TensorMeta], object] = lambda meta: getattr(meta, attribute)  # noqa: E731
    ranks_of: dict[tuple[str, object], list[int]] = defaultdict(list)
    for rank, request in enumerate(requests):
        for name, meta in request.tensors.items():
            stored = manifest.tensors.get(name)
            if stored is not None and get(meta) not in (get(stored.meta), ""):
                ranks_of[name, get(meta)].append(rank)
    differing = [
        f"{name!r} has {title} {get(manifest.tensors[name].meta)} in the checkpoint, {asked} on {format_ranks(ranks)}"
        for (name, asked), ranks in ranks_of.items()
    ]
    if not differing:
        return []
    return [f"{len(differing)} differ in {title}: {format_some(differing)}" + (f"; {fix}" if fix else "")]


def _find_group_faults(requests: Sequence[Request], manifest: Manifest) -> list[str]:
    faults = {}
    for request in requests:
        for name, asked in request.num_param_groups.items():
            stored = manifest.leaves.get(name)
            if isinstance(stored, list) and len(stored) != asked:
                faults[name] = f"{name!r} has {len(stored)} groups in the checkpoint, {asked} here"
    return [faults[name] for name in sorted(faults)]
