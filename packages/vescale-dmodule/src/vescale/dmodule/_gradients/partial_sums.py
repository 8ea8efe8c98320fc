"""Partial gradients of many parameters, summed over the ranks: one collective per mesh axis and dtype.

    parameters, last of the module first     head.bias   norm.weight   up.weight   ...
    partial over                                tp         dp and tp      dp
    all-reduce over dp                                   [ norm.weight  up.weight ]
    all-reduce over tp                       [ head.bias   norm.weight ]

A flat buffer lays gradients out in an order of the module alone, so that all ranks agree on it, in every mode, whatever
order gradients arrive in. This matters for bits, too: the order of additions inside of a collective may depend on the
place of an element in its buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement

from vescale.dtensor.extension import name_group, waits_of

from .. import _torch

__all__ = ["MeshAxis", "PartialGradient", "has_partial", "partial_dims", "sum_over_ranks"]


def partial_dims(gradient: Sequence[Placement], parameter: Sequence[Placement]) -> tuple[int, ...] | None:
    """Return the mesh dims over which a gradient must be summed to have the placements of its parameter.

    None if that takes anything else than sums, such as a reduce-scatter or an all-gather.

    Example:
        >>> partial_dims([Partial(), Shard(0)], [Replicate(), Shard(0)])
        (0,)
        >>> partial_dims([Shard(0)], [Replicate()]) is None
        True
    """
    dims = []
    for dim, (has, wants) in enumerate(zip(gradient, parameter, strict=True)):
        if has == wants:
            continue
        if type(has) is not Partial or has.reduce_op != "sum" or not wants.is_replicate():
            return None
        dims.append(dim)
    return tuple(dims)


def has_partial(tensor: Tensor | None) -> bool:
    """Return whether a gradient is a sum over ranks that has not been carried out."""
    return isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements)


class MeshAxis:
    """One axis of a mesh, and how to add tensors over its ranks.

    Attributes:
        order: sort key; all ranks reduce over their axes in this order.
        size: number of ranks.
    """

    def __init__(self, mesh: DeviceMesh, dim: int):
        self.order, self.size = (tuple(mesh.mesh_dim_names or ()), dim), mesh.size(dim)
        group = mesh.get_group(dim)
        self._sum, self._waits = _torch.sum_later(group), waits_of(group)
        name_group(group, mesh, (dim,))

    def start_sum(self, flat: Tensor) -> dist.Work | None:
        """Launch the sum of a flat tensor over the ranks, in place."""
        return self._sum(flat)

    def finish(self, work: dist.Work | None, flat: Tensor) -> None:
        """Wait for a sum; an error names lost ranks."""
        self._waits.wait(work, "all-reduce of partial gradients", flat)


class PartialGradient(NamedTuple):
    """This rank's part of a gradient, and the axes over which the parts must be added."""

    local: Tensor
    axes: tuple[MeshAxis, ...]


def sum_over_ranks(gradients: Sequence[PartialGradient]) -> list[Tensor]:
    """Return the local tensors of the summed gradients; each owns its memory.

    Args:
        gradients: in an order that is the same on all ranks of their axes.
    """
    totals = [gradient.local for gradient in gradients]
    axes = {axis: None for gradient in gradients for axis in gradient.axes if axis.size > 1}
    for axis in sorted(axes, key=lambda axis: axis.order):
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, gradient in enumerate(gradients):
            if axis in gradient.axes:
                by_dtype.setdefault(totals[index].dtype, []).append(index)
        _sum_over_axis(axis, totals, list(by_dtype.values()))
    return totals


def _sum_over_axis(axis: MeshAxis, totals: list[Tensor], groups: Sequence[Sequence[int]]) -> None:
    """Replace the totals of each group, by index, by their sums; the collectives of the groups overlap."""
    running = []
    for indices in groups:
        flat = torch.cat([totals[index].reshape(-1) for index in indices])
        # Empty on all ranks or on none: along an axis of the sum every shard has the same shape.
        running.append((indices, flat, axis.start_sum(flat) if flat.numel() else None))
    for indices, flat, work in running:
        axis.finish(work, flat)
        sizes = [totals[index].numel() for index in indices]
        pieces = [flat] if len(sizes) == 1 else torch.split_with_sizes_copy(flat, sizes)
        for index, piece in zip(indices, pieces, strict=True):
            totals[index] = piece.view(totals[index].shape)
