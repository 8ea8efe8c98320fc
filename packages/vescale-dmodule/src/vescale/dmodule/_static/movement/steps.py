"""The collectives that convert a local tensor from one layout to another: pure functions over integers.

Problem: a tensor of global ``shape`` has placements ``source`` on a mesh and needs placements ``target``. ``DTensor``
plans its collectives at every call. Here they are planned once, so that a call only communicates. Sums must equal those
of ``DTensor.redistribute`` bit for bit, so the steps are the same, in the same order, with the same padding::

    source            target            steps
    [Partial, Partial] [Replicate] * 2  one reduction over both axes
    [Shard(0), Shard(1)] [R, Shard(0)]  gather dim 1 over axis 1, gather dim 0 over axis 0, split dim 0 over axis 1

Algorithm: first a pass from right to left replicates every axis whose new dim is cut by other axes on its left than
before, because a shard of a shard cannot be exchanged directly. Then a pass from left to right converts every axis.

Guarantee: all ranks derive the same kinds of steps; only sizes differ. The result is ``None`` for layouts that are not
torch's own (ragged, interleaved, strided) and for reductions that torch may merge. ``DTensor`` converts those.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from vescale.dtensor.extension import chunk

__all__ = ["Exchange", "Gather", "Reduce", "ReduceScatter", "Split", "Step", "plan_steps", "without_partials"]

Placements = tuple[Placement, ...]
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One collective, or a local split.

    Attributes:
        axes: mesh axes of the collective.
        local: shape of the local tensor before the step.
    """

    axes: Ints
    local: Ints


@dataclass(frozen=True)
class Reduce(Step):
    """All-reduce partial values; ``ops`` has one operator per axis, all equal or sums mixed with averages."""

    ops: tuple[str, ...]


@dataclass(frozen=True)
class ReduceScatter(Step):
    """Reduce-scatter partial values; each rank keeps its shard of ``dim``."""

    dim: int
    op: str


@dataclass(frozen=True)
class Gather(Step):
    """All-gather the shards of ``dim`` to its full ``size``."""

    dim: int
    size: int


@dataclass(frozen=True)
class Split(Step):
    """Keep this rank's shard of ``dim``; local."""

    dim: int


@dataclass(frozen=True)
class Exchange(Step):
    """All-to-all: shards of ``dim``, of full ``size``, become shards of ``new_dim``."""

    dim: int
    size: int
    new_dim: int


def without_partials(placements: Sequence[Placement]) -> Placements:
    """Return the placements with Replicate instead of Partial, as a gradient has them."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def plan_steps(
    shape: Ints, mesh_shape: Ints, coord: Ints, source: Placements, target: Placements
) -> tuple[Step, ...] | None:
    """Return the steps of the rank at ``coord``, or None if ``DTensor`` must convert between the layouts.

    Example:
        >>> plan_steps((4, 6), (2,), (0,), (Shard(0),), (Replicate(),))
        (Gather(axes=(0,), local=(2, 6), dim=0, size=4),)
        >>> plan_steps((4, 6), (1,), (0,), (Shard(0),), (Replicate(),))
        ()
    """
    if not {type(p) for p in (*source, *target)} <= {Shard, Replicate, Partial}:
        return None
    walk = _Walk(shape, mesh_shape, coord, list(source))
    together = _reduced_together(mesh_shape, source, target)
    if together is None:
        return None
    if len(together) > 1:
        walk.reduce(together)
    source = tuple(walk.placements)
    if math.prod(mesh_shape[axis] for axis, p in enumerate(source) if p.is_shard()) > 1:
        for axis in reversed(range(len(source))):
            walk.go(axis, target[axis] if _aligned(axis, source, target) else Replicate())
    for axis in range(len(source)):
        walk.go(axis, target[axis])
    return tuple(walk.steps)


def _reduced_together(mesh_shape: Ints, source: Placements, target: Placements) -> list[int] | None:
    """Return the axes that one collective reduces to Replicate; None if torch must plan the reductions.

    Torch merges reductions over several axes if the user has flattened these axes into a mesh. Its order of additions
    then differs from the order here.
    """
    leaving = [axis for axis, p in enumerate(source) if p.is_partial() and p != target[axis] and mesh_shape[axis] > 1]
    replicated = [axis for axis in leaving if target[axis].is_replicate()]
    kinds = {source[axis].reduce_op for axis in leaving}
    if not kinds <= {"sum", "avg", "min", "max"} or (len(kinds) > 1 and kinds != {"sum", "avg"}):
        return None
    return None if len(leaving) - len(replicated) > 1 else replicated


def _aligned(axis: int, source: Placements, target: Placements) -> bool:
    if not target[axis].is_shard():
        return True
    dim = target[axis].dim
    return all(source[left].is_shard(dim) == target[left].is_shard(dim) for left in range(axis))


class _Walk:
    """The current layout and the steps that led to it."""

    def __init__(self, shape: Ints, mesh_shape: Ints, coord: Ints, placements: list[Placement]):
        self.mesh_shape, self.coord, self.placements = mesh_shape, coord, placements
        self.steps: list[Step] = []
        local, self.logical = list(shape), []  # shape of the tensor that each axis cuts
        for axis, placement in enumerate(placements):
            self.logical.append(tuple(local))
            if isinstance(placement, Shard):
                local[placement.dim] = self._length(axis, local[placement.dim])
        self.local = local

    def _length(self, axis: int, size: int) -> int:
        return chunk(size, self.mesh_shape[axis], self.coord[axis])[1]

    def reduce(self, axes: list[int]) -> None:
        self.steps.append(Reduce(tuple(axes), tuple(self.local), tuple(self.placements[a].reduce_op for a in axes)))
        for axis in axes:
            self.placements[axis] = Replicate()

    def go(self, axis: int, new: Placement) -> None:
        old, local = self.placements[axis], tuple(self.local)
        self.placements[axis] = new
        if old == new or self.mesh_shape[axis] == 1:
            return
        if old.is_partial() and not new.is_shard():
            self.steps.append(Reduce((axis,), local, (old.reduce_op,)))
        elif old.is_partial():
            self.steps.append(ReduceScatter((axis,), local, new.dim, old.reduce_op))
        elif not old.is_shard():
            self.steps.append(Split((axis,), local, new.dim))
        elif new.is_shard():
            self.steps.append(Exchange((axis,), local, old.dim, self.logical[axis][old.dim], new.dim))
        else:
            self.steps.append(Gather((axis,), local, old.dim, self.logical[axis][old.dim]))
        if old.is_shard():
            self.local[old.dim] = self.logical[axis][old.dim]
        if new.is_shard():
            self.local[new.dim] = self._length(axis, self.local[new.dim])
