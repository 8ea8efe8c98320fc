"""Which rank has which indices of a dim: cuts, and how they follow a dim through views.

A cut is a tuple of runs ``(rank, length)`` along a dim. It says more than a placement, so that a shard can be followed
through code that splits, merges and slices dims::

    contiguous chunks over 2 ranks      ((0, 8), (1, 8))                          Shard
    query, key and value, merged        ((0, 4), (1, 4)) three times              InterleavedShard(k=3)
    (8 heads, 2) of the first           ((0, 4), (1, 4)) of heads: whole heads
    (3 heads, 2) of ((0, 3), (1, 3))    none: the middle head is on both ranks

Ranks of a slice are known before those of the whole dim: ``UNKNOWN`` stands for the rest. Pure functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch.distributed.tensor import Placement, Shard

from vescale.dtensor import InterleavedShard
from vescale.dtensor.extension import chunk

__all__ = [
    "UNKNOWN",
    "Cut",
    "chunked",
    "is_even",
    "is_known",
    "local_size",
    "merged",
    "part_of",
    "placement_of",
    "reshaped",
    "whole_of",
]

Cut = tuple[tuple[int, int], ...]

UNKNOWN = -1
MAX_RUNS = 1 << 16


def chunked(size: int, degree: int) -> Cut:
    """Return the cut of ``Shard``: contiguous chunks as of ``torch.chunk``.

    Example:
        >>> chunked(7, 2)
        ((0, 4), (1, 3))
    """
    return _joined((rank, chunk(size, degree, rank)[1]) for rank in range(degree))


def size_of(cut: Cut) -> int:
    """Return the size of the dim."""
    return sum(length for _, length in cut)


def local_size(cut: Cut, rank: int) -> int:
    """Return how many indices a rank has."""
    return sum(length for owner, length in cut if owner == rank)


def is_known(cut: Cut) -> bool:
    """Return whether the rank of every index is known."""
    return all(owner != UNKNOWN for owner, _ in cut)


def is_even(cut: Cut) -> bool:
    """Return whether all ranks have equally many indices."""
    return len({local_size(cut, owner) for owner, _ in cut}) == 1


def merged(one: Cut, other: Cut) -> Cut | None:
    """Return what two cuts of one dim say together; None if they contradict each other.

    Example:
        >>> merged(((0, 2), (UNKNOWN, 2)), ((UNKNOWN, 2), (1, 2)))
        ((0, 2), (1, 2))
    """
    if one == other:
        return one
    runs: list[tuple[int, int]] = []
    for start, stop in itertools.pairwise(sorted({*_ends(one), *_ends(other)})):
        owners = {_owner(one, start), _owner(other, start)} - {UNKNOWN}
        if len(owners) > 1:
            return None
        runs.append((owners.pop() if owners else UNKNOWN, stop - start))
    return _joined(runs)


def part_of(cut: Cut, start: int, stop: int) -> Cut:
    """Return the cut of a slice of the dim."""
    runs, begin = [], 0
    for owner, length in cut:
        runs.append((owner, min(stop, begin + length) - max(start, begin)))
        begin += length
    return _joined(runs)


def whole_of(part: Cut, start: int, size: int) -> Cut:
    """Return what the cut of a slice says of a dim of ``size``.

    Example:
        >>> whole_of(((0, 1), (1, 1)), 2, 6)
        ((-1, 2), (0, 1), (1, 1), (-1, 2))
    """
    return _joined([(UNKNOWN, start), *part, (UNKNOWN, size - start - size_of(part))])


def scaled(cut: Cut, times: int) -> Cut:
    """Return the cut of a dim in which every index comes ``times`` times in a row."""
    return tuple((owner, length * times) for owner, length in cut)


def unscaled(cut: Cut, times: int) -> Cut | None:
    """Return the cut of which ``cut`` is :func:`scaled`; None if there is none."""
    if any(length % times for _, length in cut):
        return None
    return tuple((owner, length // times) for owner, length in cut)


def reshaped(cut: Cut, dim: int, shape: Sequence[int], new_shape: Sequence[int]) -> tuple[int, Cut] | None:
    """Return the dim of a view, and its cut; None if no single dim of the view is cut.

    Args:
        cut: of a dim of ``shape``.
        dim: which one.
        shape: of the tensor, or of dims that the view merges and splits together.
        new_shape: of the view; as many elements.

    Example:
        >>> reshaped(((0, 8), (1, 8)), 0, (16,), (4, 4))
        (0, ((0, 2), (1, 2)))
        >>> reshaped(((0, 2), (1, 2)), 1, (3, 4), (12,))
        (0, ((0, 2), (1, 2), (0, 2), (1, 2), (0, 2), (1, 2)))
    """
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    if outer * len(cut) > MAX_RUNS:
        return None
    flat = _joined(scaled(cut, inner) * outer)
    for new_dim, size in enumerate(new_shape):
        if size > 1:
            outer, inner = math.prod(new_shape[:new_dim]), math.prod(new_shape[new_dim + 1 :])
            found = _untiled(flat, outer, size * inner)
            found = found and unscaled(found, inner)
            if found:
                return new_dim, found
    return None


def placement_of(cut: Cut, dim: int, degree: int) -> Placement | None:
    """Return the placement that gives the ranks these indices of a dim; None if there is none.

    Example:
        >>> placement_of(((0, 2), (1, 2), (0, 2), (1, 2)), 0, 2)
        InterleavedShard(dim=0, k=2)
    """
    size = size_of(cut)
    if cut == chunked(size, degree):
        return Shard(dim)
    parts = len(cut) // degree
    if parts > 1 and size % (parts * degree) == 0 and cut == chunked(size // parts, degree) * parts:
        return InterleavedShard(dim, parts)
    return None


def _untiled(cut: Cut, times: int, size: int) -> Cut | None:
    """Return the cut of the first ``size`` indices, which come ``times`` times; None if the others differ."""
    if times == 1:
        return cut
    first = part_of(cut, 0, size)
    return first if _joined(first * times) == cut else None


def _joined(runs: object) -> Cut:
    """Return runs without empty ones, and neighbors of one rank as one."""
    joined: list[tuple[int, int]] = []
    for owner, length in runs:
        if length <= 0:
            continue
        if joined and joined[-1][0] == owner:
            joined[-1] = owner, joined[-1][1] + length
        else:
            joined.append((owner, length))
    return tuple(joined)


def _ends(cut: Cut) -> list[int]:
    return [0, *itertools.accumulate(length for _, length in cut)]


def _owner(cut: Cut, index: int) -> int:
    end = 0
    for owner, length in cut:
        end += length
        if index < end:
            return owner
    return UNKNOWN
