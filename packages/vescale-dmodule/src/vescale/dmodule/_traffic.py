"""What a conversion communicates, without running it: pure functions over layouts.

    step (see ``_static/_steps``)   collective       bytes on this rank: what goes in or comes out, whichever is more
    Reduce                          all_reduce       the local tensor
    Gather                          all_gather       the gathered dim, padded to a multiple of the ranks
    ReduceScatter                   reduce_scatter   the scattered dim, padded to a multiple of the ranks
    Exchange                        all_to_all       both dims, padded
    Split                           none

These are the numbers of ``vescale.dtensor.debug.comm_log`` for a module in static mode. They serve where nothing can be
measured, which is inside a compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ._static._steps import Exchange, Gather, Reduce, ReduceScatter, Split, Step, plan_steps

__all__ = ["Collective", "predict"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Collective:
    """One collective of this rank.

    Attributes:
        operator: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``.
        axis: name of the mesh axis; several are joined by ``" x "``.
        num_bytes: of what goes in or comes out, whichever is more; of all calls together.
        count: number of calls.
    """

    operator: str
    axis: str
    num_bytes: int
    count: int = 1


def predict(
    shape: Sequence[int], dtype: torch.dtype, moves: Iterable[tuple[Placements, Placements]], mesh: DeviceMesh
) -> tuple[Collective, ...] | None:
    """Return the collectives that take a tensor through ``moves``.

    Args:
        shape: global shape.
        dtype: of the tensor.
        moves: pairs of the placements before and after, one placement per mesh axis.
        mesh: the mesh, with this rank on it.

    Returns:
        None if a layout is not one of torch's own, or a sum one that torch may merge: then it depends on the values.

    Example:
        >>> predict((8, 6), torch.float32, [((Shard(0),), (Replicate(),))], mesh)                   # doctest: +SKIP
        (Collective(operator='all_gather', axis='tp', num_bytes=192, count=1),)
    """
    found = []
    for source, target in moves:
        steps = plan_steps(tuple(shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), source, target)
        if steps is None:
            return None
        found += [_collective(step, mesh, dtype.itemsize) for step in steps if not isinstance(step, Split)]
    return tuple(found)


def _collective(step: Step, mesh: DeviceMesh, itemsize: int) -> Collective:
    num = math.prod(mesh.size(axis) for axis in step.axes)
    shape = list(step.local)
    match step:
        case Reduce():
            operator = "all_reduce"
        case Gather():
            operator = "all_gather"
            shape[step.dim] = _padded(step.size, num)
        case ReduceScatter():
            operator = "reduce_scatter"
            shape[step.dim] = _padded(shape[step.dim], num)
        case Exchange():
            operator = "all_to_all"
            shape[step.dim] = _padded(step.size, num) // num
            shape[step.new_dim] = _padded(shape[step.new_dim], num)
    axes = " x ".join(mesh.mesh_dim_names[axis] for axis in step.axes)
    return Collective(operator, axes, math.prod(shape) * itemsize)


def _padded(size: int, num: int) -> int:
    return -(-size // num) * num
