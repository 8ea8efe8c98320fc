"""Plan the data movement between two layouts of one tensor: pure functions over integers.

Problem. A tensor is in the placements ``source`` and shall be in the placements ``target``. A rank reads a replicated
element from the nearest copy: from the rank with the same coordinates on the axes where the source is replicated.

Crossed axes. On each dim the mesh axes that shard it form a stack, in the order of the mesh. If both layouts start with
the same axes and placements, a rank and its partners have the same coordinates on those axes::

    source  [Shard(0), Shard(0)]      dim 0: axis 0, axis 1       data crosses axis 1 only
    target  [Shard(0), Replicate]     dim 0: axis 0

Within the group of ranks that differ only on the crossed axes, every rank sends to each other rank the intersections of
its own old boxes with the other's new boxes. Both sides list them in the same order, so no sizes are exchanged.

Guarantee: all ranks of a group derive the same plan; the received parts cover the new shard exactly once.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate

from .._layout.boxes import Box, intersect
from .._layout.shards import Ints, Piece, local_shape, pieces
from .types import RaggedShard

__all__ = ["Movement", "Part", "crossed_axes", "is_axis_order", "movement", "peers", "without_partials"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Part:
    """Elements that one rank sends to another: ``box`` in the global tensor, inside one piece of each shard."""

    source: int
    target: int
    box: Box

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.box[1])


@dataclass(frozen=True)
class Movement:
    """The sends and receives of one rank.

    Attributes:
        axes: the mesh axes that data crosses; empty if every rank already holds its new shard.
        sends: the parts sent to each rank of the group, in row-major order of the ranks' coordinates on ``axes``.
        receives: the parts received from each rank of the group, in the same order.
        held: the number of elements in the old shard of each rank of the group.
        is_gather: whether every rank needs all elements that the group holds.
    """

    axes: tuple[int, ...]
    sends: tuple[tuple[Part, ...], ...]
    receives: tuple[tuple[Part, ...], ...]
    held: tuple[int, ...]
    is_gather: bool


def without_partials(placements: Sequence[Placement]) -> Placements:
    """Return placements in which a rank's unreduced value counts as its copy of the tensor.

    Example:
        >>> from torch.distributed.tensor import Partial, Shard
        >>> without_partials([Partial(), Shard(0)])
        (Replicate(), Shard(dim=0))
    """
    return tuple(Replicate() if placement.is_partial() else placement for placement in placements)


def crossed_axes(mesh_shape: Ints, source: Placements, target: Placements) -> tuple[int, ...]:
    """Return the mesh axes that data crosses between two layouts without Partial.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> crossed_axes((2, 2), (Shard(0), Shard(0)), (Shard(0), Replicate()))
        (1,)
        >>> crossed_axes((2, 2), (Replicate(), Shard(1)), (Shard(0), Shard(1)))
        ()
    """
    old, new = _stacks(source), _stacks(target)
    still: set[int] = set()
    for dim, stack in old.items():
        for ours, theirs in zip(stack, new.get(dim, []), strict=False):
            if ours != theirs:
                break
            still.add(ours[0])
    for axis, placement in enumerate(source):
        same = isinstance(placement, RaggedShard) and placement == target[axis]
        if same and all(old.get(dim) == new.get(dim) for dim in placement.dims):
            still.add(axis)
    return tuple(
        axis
        for axis, placement in enumerate(source)
        if mesh_shape[axis] > 1 and not placement.is_replicate() and axis not in still
    )


def _stacks(placements: Placements) -> dict[int, list[tuple[int, Placement]]]:
    stacks: dict[int, list[tuple[int, Placement]]] = {}
    for axis, placement in enumerate(placements):
        if hasattr(placement, "dim"):
            stacks.setdefault(placement.dim, []).append((axis, placement))
    return stacks


@functools.lru_cache(maxsize=1024)
def is_axis_order(placements: Placements, mesh_shape: Ints) -> bool:
    """Return whether strided shards only express another order of the mesh axes than from left to right.

    An axis that shards after some axes on its right has the product of their sizes as its split factor.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> from torch.distributed.tensor.placement_types import _StridedShard
        >>> is_axis_order((_StridedShard(0, split_factor=4), Shard(0)), (2, 4))
        True
        >>> is_axis_order((_StridedShard(0, split_factor=3),), (2,))
        False
    """
    for stack in _stacks(placements).values():
        order: list[int] = []
        for axis, placement in reversed(stack):
            factors = list(itertools.accumulate((mesh_shape[other] for other in order), operator.mul, initial=1))
            factor = getattr(placement, "split_factor", 1)
            if factor not in factors:
                return False
            order.insert(factors.index(factor), axis)
    return True


def peers(mesh_shape: Ints, coord: Ints, axes: Sequence[int]) -> list[Ints]:
    """Return the coordinates that differ from ``coord`` on ``axes`` only, itself included, in row-major order.

    Example:
        >>> peers((2, 3), (1, 0), (1,))
        [(1, 0), (1, 1), (1, 2)]
    """
    found = []
    for choice in itertools.product(*(range(mesh_shape[axis]) for axis in axes)):
        changed = dict(zip(axes, choice, strict=True))
        found.append(tuple(changed.get(axis, index) for axis, index in enumerate(coord)))
    return found


@functools.lru_cache(maxsize=1024)
def movement(shape: Ints, mesh_shape: Ints, coord: Ints, source: Placements, target: Placements) -> Movement:
    """Plan the sends and receives of the rank at ``coord`` between two layouts of ``shape`` without Partial.

    Raises:
        ValueError: the placements do not fit the shape or the mesh.

    Example:
        >>> plan = movement((4,), (2,), (0,), (RaggedShard((0,), (1, 3)),), (RaggedShard((0,), (2, 2)),))
        >>> plan.axes, [[part.box for part in parts] for parts in plan.receives]
        ((0,), [[((0,), (1,))], [((1,), (1,))]])
    """
    axes = crossed_axes(mesh_shape, source, target)
    group = peers(mesh_shape, coord, axes)
    old = [pieces(shape, mesh_shape, peer, source) for peer in group]
    new = [pieces(shape, mesh_shape, peer, target) for peer in group]
    me = group.index(coord)
    held = tuple(math.prod(local_shape(shape, mesh_shape, peer, source)) for peer in group)
    wanted = {math.prod(local_shape(shape, mesh_shape, peer, target)) for peer in group}
    return Movement(
        axes=axes,
        sends=tuple(_common(old[me], theirs) for theirs in new),
        receives=tuple(_common(theirs, new[me]) for theirs in old),
        held=held,
        is_gather=wanted == {sum(held)},
    )


def _common(old: Sequence[Piece], new: Sequence[Piece]) -> tuple[Part, ...]:
    found = []
    for i, source in enumerate(old):
        for j, target in enumerate(new):
            box = intersect(source.box, target.box)
            if box is not None:
                found.append(Part(i, j, box))
    return tuple(found)
