"""Plan a load: compare the request of each rank with the checkpoint, then list the rank's reads.

A checkpoint fits if it fits the requests of all ranks together. A stage of a pipeline requests its own names only, so
a stored name is left over only if no rank requests it. Each rank compares its own request (``compare``) and sends a
small result: one byte per stored name, and its faults. One rank merges the results (``find_mismatch``). ``plan_load``
is local: for every box of the rank, it lists the overlaps with stored pieces, by file.

Pure functions; nothing is read or written here.
"""

import difflib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .._errors import format_ranks, format_some
from .._format.boxes import Box
from .._format.manifest import Manifest, Piece, TensorMeta


@dataclass(frozen=True)
class Request:
    """The names that one rank loads.

    Attributes:
        tensors: dtype and global shape by name.
        leaves: current JSON values by name.
        optimizers: class names of optimizers by path.
    """

    tensors: Mapping[str, TensorMeta]
    leaves: Mapping[str, object]
    optimizers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """One rank's request against a manifest.

    Attributes:
        asked: byte i is 1 if the i-th stored name, in name order, is requested, else 0.
        missing: requested names that are not stored.
        faults: ``(kind, text)`` of each difference under the same name.
        other_optimizers: ``(path, text)`` of each optimizer of another class than the stored one.
    """

    asked: bytes
    missing: tuple[str, ...]
    faults: tuple[tuple[str, str], ...]
    other_optimizers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Fill a part of the target's box ``into`` from a stored piece.

    Attributes:
        name: the tensor's name.
        into: a box that this rank holds.
        box: the intersection of ``into`` and the piece.
        piece: the stored piece.
    """

    name: str
    into: Box
    box: Box
    piece: Piece


def plan_load(boxes: Mapping[str, Sequence[Box]], manifest: Manifest) -> dict[str, tuple[Read, ...]]:
    """Return the reads that fill ``boxes``, by data file.

    Args:
        boxes: boxes of this rank, by tensor name; names that are not in the manifest are skipped.
        manifest: the checkpoint's manifest.
    """
    reads: dict[str, list[Read]] = defaultdict(list)
    for name, targets in boxes.items():
        if name not in manifest.tensors:
            continue
        for into in targets:
            for piece in manifest.pieces(name, box=into):
                common = into.intersect(piece.box)
                assert common is not None
                reads[piece.file].append(Read(name, into, common, piece))
    return {file: tuple(reads[file]) for file in sorted(reads)}


def compare(request: Request, manifest: Manifest, *, allow_dtype_cast: bool = False) -> Comparison:
    """Compare one rank's request with a checkpoint.

    Args:
        request: the rank's request.
        manifest: the checkpoint's manifest.
        allow_dtype_cast: whether a stored dtype may differ.
    """
    names = request.tensors.keys() | request.leaves.keys()
    asked = bytes(name in names for name in _stored_names(manifest))
    missing = tuple(sorted(name for name in names if name not in manifest.tensors and name not in manifest.leaves))
    faults = [*_tensor_faults(request, manifest, allow_dtype_cast), *_leaf_faults(request, manifest)]
    others = [
        (path, f"{path!r}: expected {own}, got the state of {manifest.optimizers[path]} in the checkpoint")
        for path, own in request.optimizers.items()
        if manifest.optimizers.get(path, own) != own
    ]
    return Comparison(asked, missing, tuple(faults), tuple(others))


def find_mismatch(
    comparisons: Sequence[Comparison], manifest: Manifest, *, strict: bool = True, ignore: Collection[str] = ()
) -> str | None:
    """Return the text of all mismatches between a checkpoint and the requests of all ranks, or None if it fits.

    Args:
        comparisons: one per rank.
        manifest: the checkpoint's manifest.
        strict: whether a name on one side only is a mismatch.
        ignore: stored names, or leading path components of names, that no rank needs to request.
    """
    missing = _by_ranks((rank, name) for rank, own in enumerate(comparisons) for name in own.missing)
    left = left_over(comparisons, manifest, ignore=ignore)
    lines = []
    if strict:
        lines += _optimizer_lines(comparisons)
        lines += _missing_lines(missing, left or _stored_names(manifest))
        kept = {name.split("/", 1)[0] for name in set(_stored_names(manifest)).difference(left)}
        lines += _left_over_lines(left, roots_in_use=kept)
    lines += _fault_lines(comparisons)
    if not lines:
        return None
    return "expected a checkpoint that fits the state, got\n" + "\n".join(f"  - {line}" for line in lines)


def left_over(comparisons: Sequence[Comparison], manifest: Manifest, *, ignore: Collection[str] = ()) -> list[str]:
    """Return the stored names that no rank requests and ``ignore`` does not cover."""
    stored = _stored_names(manifest)
    asked = 0
    for own in comparisons:
        asked |= int.from_bytes(own.asked)
    return [
        name
        for name, by_any in zip(stored, asked.to_bytes(len(stored)), strict=True)
        if not (by_any or is_under(name, ignore))
    ]


def _stored_names(manifest: Manifest) -> list[str]:
    return sorted([*manifest.tensors, *manifest.leaves])


def _tensor_faults(request: Request, manifest: Manifest, allow_dtype_cast: bool) -> Iterable[tuple[str, str]]:
    for name, meta in request.tensors.items():
        if name in manifest.leaves:
            yield "kind", f"{name!r}: expected a tensor, got a plain value in the checkpoint"
        if name not in manifest.tensors:
            continue
        stored = manifest.tensors[name].meta
        if meta.shape != stored.shape:
            yield "global shape", f"{name!r}: expected {meta.shape}, got {stored.shape} in the checkpoint"
        if meta.dtype not in ("", stored.dtype) and not allow_dtype_cast:
            yield "dtype", f"{name!r}: expected {meta.dtype}, got {stored.dtype} in the checkpoint"


def _leaf_faults(request: Request, manifest: Manifest) -> Iterable[tuple[str, str]]:
    for name, value in request.leaves.items():
        if name in manifest.tensors:
            yield "kind", f"{name!r}: expected a plain value, got a tensor in the checkpoint"
        stored = manifest.leaves.get(name)
        # Groups are matched by index, so another number of them would give parameters the wrong hyperparameters.
        if not isinstance(stored, list) or not isinstance(value, list):
            continue
        if name.endswith("/param_groups") and len(stored) != len(value):
            yield "number of groups", f"{name!r}: expected {len(value)}, got {len(stored)} in the checkpoint"


def _by_ranks(found: Iterable[tuple[int, str]]) -> dict[str, list[int]]:
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank, item in found:
        ranks_of[item].append(rank)
    return ranks_of


def is_under(name: str, prefixes: Collection[str]) -> bool:
    """Return whether a name is one of some paths, or under one of them."""
    return any(name == prefix or name.startswith(f"{prefix}/") for prefix in prefixes)


def _missing_lines(missing: Mapping[str, list[int]], candidates: Sequence[str]) -> list[str]:
    if not missing:
        return []
    texts = []
    for index, (name, ranks) in enumerate(missing.items()):
        # The search for the nearest name is slow: only for names that are shown.
        near = difflib.get_close_matches(name, candidates, n=1) if index < 5 else []
        texts.append(f"{name!r} ({format_ranks(ranks)})" + (f" (nearest stored: {near[0]!r})" if near else ""))
    return [f"requested and not stored ({len(texts)}): {format_some(texts)}; strict=False leaves such values unchanged"]


def _left_over_lines(left: Sequence[str], *, roots_in_use: Collection[str]) -> list[str]:
    if not left:
        return []
    roots = sorted({name.split("/", 1)[0] for name in left}.difference(roots_in_use))
    hint = f"; to skip names that no rank requests, pass ignore={roots!r}" if roots else ""
    return [f"stored and requested by no rank ({len(left)}): {format_some(map(repr, left))}{hint}"]


def _optimizer_lines(comparisons: Sequence[Comparison]) -> list[str]:
    texts = dict(other for own in comparisons for other in own.other_optimizers)
    if not texts:
        return []
    return [
        f"different optimizer ({len(texts)}): {format_some(texts.values())}; build the stored optimizer, or leave "
        f"yours out of the state and pass ignore={sorted(texts)!r}; strict=False loads what the two share"
    ]


def _fault_lines(comparisons: Sequence[Comparison]) -> list[str]:
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
