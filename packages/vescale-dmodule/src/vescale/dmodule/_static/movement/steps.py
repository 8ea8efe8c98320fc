"""Which collectives bring a local tensor from one layout to another: pure functions over integers.

Problem. A value of global ``shape`` lies on a mesh as ``source`` says and shall lie as ``target`` says. ``DTensor``
decides at every call what to communicate; here it is decided once, so that a call does nothing but communicate. Sums
must be those of ``DTensor.redistribute`` bit for bit, so the steps are its own, in its order, with its padding::

    source            target            steps
    [Partial, Partial] [Replicate] * 2  one reduction over both axes
    [Shard(0), Shard(1)] [R, Shard(0)]  gather dim 1 over axis 1, gather dim 0 over axis 0, split dim 0 over axis 1

An axis is cleared before axes on its left where the axes that cut its new dim before it are others than now, because a
shard of a shard cannot be exchanged for another. Elsewhere axes are taken from left to right.

Guarantee: all ranks derive the same kinds of steps; only sizes differ. ``None`` stands for layouts that are not torch's
own (ragged, interleaved, strided) or whose reductions torch may merge: those are left to ``DTensor``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

__all__ = ["Exchange", "Gather", "Reduce", "ReduceScatter", "Split", "Step", "chunk", "plan_steps", "without_partials"]

Placements = tuple[Placement, ...]
Ints = tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One collective, or a cut.

    Attributes:
        axes: mesh axes that it goes over.
        local: shape of the local tensor before it.
    """

    axes: Ints
    local: Ints


@dataclass(frozen=True)
class Reduce(Step):
    """Partial values become complete on all ranks; ``ops`` are those of the axes, alike or sums and averages."""

    ops: tuple[str, ...]


@dataclass(frozen=True)
class ReduceScatter(Step):
    """Partial values become complete, each rank keeping its shard of ``dim``."""

    dim: int
    op: str


@dataclass(frozen=True)
class Gather(Step):
    """Shards of ``dim`` become the whole, of ``size``."""

    dim: int
    size: int


@dataclass(frozen=True)
class Split(Step):
    """Each rank keeps its shard of ``dim``."""

    dim: int


@dataclass(frozen=True)
class Exchange(Step):
    """Shards of ``dim``, whole of ``size``, become shards of ``new_dim``."""

    dim: int
    size: int
    new_dim: int


def chunk(size: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return offset and length of a shard, cut as ``torch.chunk`` does.

    Example:
        >>> [chunk(5, 4, index) for index in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    full = -(-size // num_chunks)
    start = min(full * index, size)
    return start, min(full, size - start)


def without_partials(placements: Sequence[Placement]) -> Placements:
    """Return the placements with Replicate for Partial: those of a gradient."""
    return tuple(Replicate() if p.is_partial() else p for p in placements)


def plan_steps(
    shape: Ints, mesh_shape: Ints, coord: Ints, source: Placements, target: Placements
) -> tuple[Step, ...] | None:
    """Return the steps of the rank at ``coord``, or None where the layouts must be left to ``DTensor``.

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
    """Return the axes that are reduced to Replicate in one collective; None where torch must decide about reductions.

    Torch merges reductions over several axes into one where the user has made a mesh for that; then sums have another
    order than here.
    """
    leaving = [axis for axis, p in enumerate(source) if p.is_partial() and p != target[axis] and mesh_shape[axis] > 1]
    whole = [axis for axis in leaving if target[axis].is_replicate()]
    kinds = {source[axis].reduce_op for axis in leaving}
    if not kinds <= {"sum", "avg", "min", "max"} or (len(kinds) > 1 and kinds != {"sum", "avg"}):
        return None
    return None if len(leaving) - len(whole) > 1 else whole


def _aligned(axis: int, source: Placements, target: Placements) -> bool:
    if not target[axis].is_shard():
        return True
    dim = target[axis].dim
    return all(source[left].is_shard(dim) == target[left].is_shard(dim) for left in range(axis))


class _Walk:
    """The layout between steps, and the steps so far."""

    def __init__(self, shape: Ints, mesh_shape: Ints, coord: Ints, placements: list[Placement]):
        self.mesh_shape, self.coord, self.placements = mesh_shape, coord, placements
        self.steps: list[Step] = []
        local, self.logical = list(shape), []  # shape of what each axis cuts
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
