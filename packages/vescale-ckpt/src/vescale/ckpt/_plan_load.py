"""Plan a load: compare what each rank asks for with what a checkpoint has, then list what it reads.

Whether a checkpoint fits is a question about all ranks together: a stage of a pipeline asks for its own names only, and
a stored name is left over only if no rank asks for it. So each rank compares its own request (``compare``), sends a
small result (one byte per stored name, and its faults), and one rank draws them together (``find_mismatch``).
``plan_load`` is each rank's own business: for every box that it holds, the overlaps with stored pieces, by file.

Pure functions; nothing is read or written here.
"""

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ._boxes import Box
from ._errors import format_ranks, format_some
from ._manifest import Manifest, Piece, TensorMeta


@dataclass(frozen=True)
class Request:
    """What one rank asks for.

    Attributes:
        tensors: dtype and global shape by name.
        leaves: JSON values as they are now, by name.
    """

    tensors: Mapping[str, TensorMeta]
    leaves: Mapping[str, object]


@dataclass(frozen=True)
class Comparison:
    """One rank's request against a manifest.

    Attributes:
        asked: byte i is 1 if the i-th stored name, in name order, is asked for, else 0.
        missing: names asked for that are not stored.
        faults: ``(kind, text)`` of everything that differs under the same name.
    """

    asked: bytes
    missing: tuple[str, ...]
    faults: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Read:
    """Fill a part of the target's box ``into`` from a stored piece.

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


def plan_load(boxes: Mapping[str, Sequence[Box]], manifest: Manifest) -> dict[str, tuple[Read, ...]]:
    """List the reads that fill ``boxes``, by data file.

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
    return {file: tuple(reads[file]) for file in sorted(reads)}


def compare(request: Request, manifest: Manifest, *, allow_dtype_cast: bool = False) -> Comparison:
    """Compare one rank's request with a checkpoint.

    Args:
        request: what the rank asks for.
        manifest: of the checkpoint.
        allow_dtype_cast: whether a stored dtype may differ.
    """
    names = request.tensors.keys() | request.leaves.keys()
    asked = bytes(name in names for name in _stored_names(manifest))
    missing = tuple(sorted(name for name in names if name not in manifest.tensors and name not in manifest.leaves))
    faults = [*_tensor_faults(request, manifest, allow_dtype_cast), *_leaf_faults(request, manifest)]
    return Comparison(asked, missing, tuple(faults))


def find_mismatch(
    comparisons: Sequence[Comparison], manifest: Manifest, *, strict: bool = True, ignore: Collection[str] = ()
) -> str | None:
    """Say in what a checkpoint does not fit the state that the ranks ask to load, or return None when it fits.

    Args:
        comparisons: one per rank.
        manifest: of the checkpoint.
        strict: whether a name on one side only is a mismatch.
        ignore: stored names, or leading path components of names, that may be left over.
    """
    missing = _by_ranks((rank, name) for rank, own in enumerate(comparisons) for name in own.missing)
    left = left_over(comparisons, manifest, ignore=ignore)
    lines = []
    if strict:
        lines += _tell_missing(missing, left or _stored_names(manifest))
        kept = {name.split("/", 1)[0] for name in set(_stored_names(manifest)).difference(left)}
        lines += _tell_left(left, roots_in_use=kept)
    lines += _tell_faults(comparisons)
    if not lines:
        return None
    return "the checkpoint does not fit the state:\n" + "\n".join(f"  - {line}" for line in lines)


def left_over(comparisons: Sequence[Comparison], manifest: Manifest, *, ignore: Collection[str] = ()) -> list[str]:
    """List the stored names that no rank asks for and ``ignore`` does not name."""
    stored = _stored_names(manifest)
    asked = 0
    for own in comparisons:
        asked |= int.from_bytes(own.asked)
    return [
        name
        for name, by_any in zip(stored, asked.to_bytes(len(stored)), strict=True)
        if not (by_any or _is_under(name, ignore))
    ]


def _stored_names(manifest: Manifest) -> list[str]:
    return sorted([*manifest.tensors, *manifest.leaves])


def _tensor_faults(request: Request, manifest: Manifest, allow_dtype_cast: bool) -> Iterable[tuple[str, str]]:
    for name, meta in request.tensors.items():
        if name in manifest.leaves:
            yield "kind", f"{name!r} is a plain value in the checkpoint and a tensor here"
        if name not in manifest.tensors:
            continue
        stored = manifest.tensors[name].meta
        if meta.shape != stored.shape:
            yield "global shape", f"{name!r} is {stored.shape} in the checkpoint, {meta.shape} here"
        if meta.dtype not in ("", stored.dtype) and not allow_dtype_cast:
            yield "dtype", f"{name!r} is {stored.dtype} in the checkpoint, {meta.dtype} here"


def _leaf_faults(request: Request, manifest: Manifest) -> Iterable[tuple[str, str]]:
    for name, value in request.leaves.items():
        if name in manifest.tensors:
            yield "kind", f"{name!r} is a tensor in the checkpoint and a plain value here"
        stored = manifest.leaves.get(name)
        # Groups are matched by index, so another number of them would give parameters the wrong hyperparameters.
        if not isinstance(stored, list) or not isinstance(value, list):
            continue
        if name.endswith("/param_groups") and len(stored) != len(value):
            yield "number of groups", f"{name!r} is {len(stored)} in the checkpoint, {len(value)} here"


def _by_ranks(found: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, item in found:
        ranks_of[item].append(rank)
    return ranks_of


def _is_under(name: str, prefixes: Collection[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}/") for prefix in prefixes)


def _tell_missing(missing: Mapping[str, list[int]], candidates: Sequence[str]) -> list[str]:
    if not missing:
        return []
    told = []
    for index, (name, ranks) in enumerate(missing.items()):
        # Looking for the nearest name is slow: only for those that are shown.
        near = difflib.get_close_matches(name, candidates, n=1) if index < 5 else []
        told.append(f"{name!r} ({format_ranks(ranks)})" + (f" (nearest stored: {near[0]!r})" if near else ""))
    return [f"asked for and not stored ({len(told)}): {format_some(told)}; strict=False leaves such values as they are"]


def _tell_left(left: Sequence[str], *, roots_in_use: Collection[str]) -> list[str]:
    if not left:
        return []
    roots = sorted({name.split("/", 1)[0] for name in left}.difference(roots_in_use))
    hint = f"; to leave out on purpose what no rank asks for pass ignore={roots!r}" if roots else ""
    return [f"stored and asked for by no rank ({len(left)}): {format_some(map(repr, left))}{hint}"]


def _tell_faults(comparisons: Sequence[Comparison]) -> list[str]:
    by_kind: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, own in enumerate(comparisons):
        for kind, text in own.faults:
            by_kind[kind][text].append(rank)
    return [
        f"different {kind} ({len(texts)}): "
        + format_some(
            text if len(comparisons) == 1 else f"{text} ({format_ranks(ranks)})" for text, ranks in texts.items()
        )
        + ("; allow_dtype_cast=True converts" if kind == "dtype" else "")
        for kind, texts in by_kind.items()
    ]
