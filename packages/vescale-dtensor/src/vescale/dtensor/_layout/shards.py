"""Which elements of the global tensor a rank holds, as boxes, for every placement.

Along each dim a rank holds **runs** ``(start, length)`` of the global indices, in the order of its shard. Placements
divide those runs from left to right, as in torch; boxes are the products of the runs of all dims::

    n = 12 on mesh (2, 2), coordinate (1, 0)          runs
                                                      (0, 12)
    InterleavedShard(0, 2): second half of each part  (3, 3) (9, 3)
    Shard(0): first chunk of the six indices left     (3, 3)

Strided shards are applied from left to right, too, like in ``distribute_tensor`` and in the offsets of torch's
checkpoints. For even shards this equals the other interpretation (FSDP2 over tensor parallel).

A `RaggedShard` on any axis is applied last. It holds a flat range of the leading dims of the tensor that the other
placements give, which is divided into rectangles.

Guarantee: the boxes of one rank are disjoint, in the order of its local tensor, and their views cover the local tensor
exactly. The boxes of all ranks cover the global tensor, once for each copy of it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from .._placements.types import BlockShard, InterleavedShard, RaggedShard
from .._torch.placements import StridedShard
from ..errors import UnsupportedPlacement
from .boxes import Box, chunk, flat_range_boxes, index_from

__all__ = ["Piece", "check", "local_shape", "local_views", "pieces"]

Ints = tuple[int, ...]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor, and its position in a shard.

    Attributes:
        box: ``(offsets, sizes)`` in the global tensor.
        origin: index of its first element in the local tensor, after ``rows`` are unflattened.
        rows: None, or ``(start, sizes)``: dim 0 of the local tensor from ``start`` on, viewed as ``sizes``.
    """

    box: Box
    origin: tuple[int, ...]
    rows: tuple[int, tuple[int, ...]] | None = None

    def view(self, local: Tensor) -> Tensor:
        """Return the view of ``local`` that stores the box; its shape is the box's sizes."""
        if self.rows is not None:
            start, sizes = self.rows
            local = local.narrow(0, start, math.prod(sizes)).unflatten(0, sizes)
        return local[index_from((0,) * len(self.origin), (self.origin, self.box[1]))]


def local_views(
    local: Tensor, shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> list[tuple[Box, Tensor]]:
    """List the boxes of a tensor of global ``shape`` that this rank holds, each with the view of ``local`` storing it.

    The views are writable and have the boxes' sizes; together they cover ``local`` exactly. The list is empty outside
    the mesh and for an empty shard.

    Raises:
        UnsupportedPlacement: a placement is `Partial`, so that no rank holds elements of the tensor.
        ValueError: a placement does not fit the shape or the mesh.

    Example:
        >>> for box, view in local_views(local, (6, 4), mesh, [Shard(0)]):          # doctest: +SKIP
        ...     view.copy_(whole[tuple(slice(o, o + s) for o, s in zip(*box))])
    """
    coord = mesh.get_coordinate()
    found = pieces(tuple(shape), tuple(mesh.shape), None if coord is None else tuple(coord), tuple(placements))
    return [(piece.box, piece.view(local)) for piece in found]


@functools.lru_cache(maxsize=4096)
def pieces(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coord: tuple[int, ...] | None,
    placements: tuple[Placement, ...],
) -> tuple[Piece, ...]:
    """Return the pieces of a tensor of ``shape`` at ``coord`` of a mesh; the coordinate None is outside the mesh.

    Integers only: no process group and no tensor is needed.

    Raises:
        UnsupportedPlacement: a placement is `Partial`.
        ValueError: a placement does not fit the shape or the mesh.

    Example:
        >>> [piece.box for piece in pieces((12,), (2,), (1,), (InterleavedShard(0, 2),))]
        [((3,), (3,)), ((9,), (3,))]
        >>> [piece.box for piece in pieces((3, 4), (2,), (0,), (RaggedShard((0, 1), (1, 1)),))]
        [((0, 0), (1, 4)), ((1, 0), (1, 2))]
    """
    check(shape, mesh_shape, placements)
    if coord is None:
        return ()
    runs, ragged = _runs(shape, mesh_shape, coord, placements)
    if ragged is None:
        return tuple(Piece(box, origin) for box, origin in _product(runs))
    return tuple(_ragged_pieces(runs, *ragged))


def local_shape(shape: Ints, mesh_shape: Ints, coord: Ints, placements: tuple[Placement, ...]) -> Ints:
    """Return the shape of the local tensor of the rank at ``coord``.

    Example:
        >>> local_shape((5, 3), (2,), (1,), (Shard(0),))
        (2, 3)
        >>> local_shape((4, 3), (2,), (1,), (RaggedShard((0, 1), (1, 3)),))
        (9,)
    """
    runs, ragged = _runs(shape, mesh_shape, coord, placements)
    sizes = tuple(sum(length for _, length in run) for run in runs)
    if ragged is None:
        return sizes
    num_dims, _, count = ragged
    return (count, *sizes[num_dims:])


@functools.lru_cache(maxsize=4096)
def check(shape: Ints, mesh_shape: Ints, placements: tuple[Placement, ...]) -> None:
    """Raise the same error on every rank if the placements do not fit the shape at some coordinate of the mesh.

    Raises:
        UnsupportedPlacement: a placement is `Partial`.
        ValueError: a placement does not fit the shape or the mesh.
    """
    uneven = any(
        isinstance(placement, RaggedShard) for placement in placements
    )  # the only placement that depends on the others
    coords = itertools.product(*map(range, mesh_shape)) if uneven else [(0,) * len(mesh_shape)]
    for coord in coords:
        _runs(shape, mesh_shape, coord, placements)


def _runs(
    shape: Ints, mesh_shape: Ints, coord: Ints, placements: tuple[Placement, ...]
) -> tuple[list[Runs], tuple[int, int, int] | None]:
    """Return the runs of every dim, and ``(number of leading dims, first row, number of rows)`` of a ragged shard."""
    if len(placements) != len(mesh_shape):
        raise ValueError(f"expected one placement for each axis of a mesh of shape {mesh_shape}, got {placements}")
    runs: list[Runs] = [((0, size),) for size in shape]
    ragged = None
    for placement, size, index in zip(placements, mesh_shape, coord, strict=True):
        if isinstance(placement, RaggedShard):
            if ragged is not None:
                raise ValueError(f"expected at most one RaggedShard, got placements {placements}")
            ragged = placement, size, index
        elif isinstance(placement, (Shard, StridedShard, BlockShard)):
            _check_dim(placement, shape)
            runs[placement.dim] = _cut(runs[placement.dim], placement, size, index)
        elif not placement.is_replicate():
            raise UnsupportedPlacement(
                f"{placement!r} of a tensor of shape {shape}, placements {placements}, mesh {mesh_shape}: no rank "
                "holds its elements; redistribute to Replicate or Shard first"
            )
    if ragged is None:
        return runs, None
    placement, size, index = ragged
    sizes = [sum(length for _, length in run) for run in runs]
    placement.check(sizes, size)
    num_dims = len(placement.dims)
    return runs, (num_dims, *placement.rows(math.prod(sizes[:num_dims]), index))


def _check_dim(placement: Placement, shape: tuple[int, ...]) -> None:
    if not 0 <= placement.dim < len(shape):
        raise ValueError(
            f"{placement!r} names dim {placement.dim} of a tensor of shape {shape}, which has {len(shape)} dims"
        )
    if isinstance(placement, InterleavedShard) and shape[placement.dim] % placement.k:
        raise ValueError(
            f"{placement!r} needs a dim made of {placement.k} equal parts; dim {placement.dim} of shape {shape} has "
            f"size {shape[placement.dim]}, which {placement.k} does not divide"
        )
    if isinstance(placement, BlockShard) and shape[placement.dim] % placement.block:
        raise ValueError(
            f"{placement!r} needs a dim of whole blocks; dim {placement.dim} of shape {shape} has size "
            f"{shape[placement.dim]}, which {placement.block} does not divide"
        )


def _cut(runs: Runs, placement: Placement, size: int, index: int) -> Runs:
    """Return the part of one dim's runs that the rank at ``index`` of an axis of ``size`` holds."""
    total = sum(length for _, length in runs)
    num_parts = placement.split_factor if isinstance(placement, StridedShard) else 1
    block = placement.block if isinstance(placement, BlockShard) else 1
    kept = []
    for part in range(num_parts):
        first, count = chunk(total, num_parts, part)
        start, length = chunk(count // block, size, index)
        kept += _select(runs, first + start * block, length * block)
    return _merge(kept)


def _select(runs: Runs, start: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the indices ``[start, start + length)`` of the concatenation of the runs, as runs."""
    for first, count in runs:
        skipped = min(start, count)
        taken = min(count - skipped, length)
        if taken:
            yield first + skipped, taken
        start -= skipped
        length -= taken


def _merge(runs: list[tuple[int, int]]) -> Runs:
    merged: list[tuple[int, int]] = []
    for start, length in runs:
        if merged and sum(merged[-1]) == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + length)
        else:
            merged.append((start, length))
    return tuple(merged)


def _product(runs: Sequence[Runs]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """Yield ``(box, origin in the local tensor)`` for every combination of non-empty runs."""
    placed = [list(_with_positions(run)) for run in runs]
    for combination in itertools.product(*placed):
        offsets = tuple(start for start, _, _ in combination)
        sizes = tuple(length for _, length, _ in combination)
        yield (offsets, sizes), tuple(position for _, _, position in combination)


def _with_positions(runs: Runs) -> Iterator[tuple[int, int, int]]:
    position = 0
    for start, length in runs:
        if length:
            yield start, length, position
        position += length


def _ragged_pieces(runs: list[Runs], num_dims: int, start: int, count: int) -> Iterator[Piece]:
    sizes = tuple(sum(length for _, length in run) for run in runs)
    row = 0
    for offsets, lengths in flat_range_boxes(sizes[:num_dims], start, start + count):
        cut = [_merge(list(_select(*each))) for each in zip(runs, offsets, lengths, strict=False)]
        for box, origin in _product([*cut, *runs[num_dims:]]):
            yield Piece(box, origin, (row, lengths))
        row += math.prod(lengths)
