"""``gather`` along a sharded dim: log-probabilities of the targets, values of the chosen actions.

Every rank looks up the indices of its own shard and has zeros for the others, so the sum over ranks is the lookup of
one device, bit for bit::

    tensor axis   Shard(dim)     Shard(other), or index Shard(other)    else
    indices       Replicate      Shard(other)                           as they are over dim
    result        Partial(sum)   Shard(other)                           as the indices

Stock DTensor gives the result a placement whose mask is dropped at the first use: an operator that changes the result's
shape fails, and so does a second use, on some ranks only. No such placement leaves an operator here.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._torch import dispatch
from .vocabulary import local_index, operand

__all__ = ["look_up"]


def look_up(op: dispatch.Op, args: tuple, kwargs: dict) -> DTensor:
    """Run ``gather`` on the shards; the sizes of tensor and index are equal in all dims but ``dim``."""
    tensor, dim, index = args
    mesh, whole = tensor.device_mesh, (Replicate(),) * tensor.device_mesh.ndim
    given = index.placements if isinstance(index, DTensor) else whole
    axes = [_placements_on_axis(t, i, dim) for t, i in zip(tensor.placements, given, strict=True)]
    of_tensor, of_index, of_result = zip(*axes, strict=True)
    indices = operand(op, index, mesh, of_index)
    local = dispatch.redistributed(tensor, of_tensor, for_op=op)
    offsets, sizes = dispatch.local_box(tensor.shape, mesh, of_tensor)
    if not sizes[dim]:  # something to look up, so that this rank refuses the indices that other ranks refuse
        local = local.new_zeros([1 if d == dim else size for d, size in enumerate(local.shape)])
    positions, held = local_index(indices, offsets[dim], sizes[dim], tensor.shape[dim])
    values = op(local, dim, positions, **kwargs).masked_fill_(held.logical_not(), 0)
    return dispatch.wrap(values, mesh, of_result, torch.empty(index.shape, device="meta"))


def _placements_on_axis(tensor: Placement, index: Placement, dim: int) -> tuple[Placement, Placement, Placement]:
    """Return the placements of tensor, index and result on one mesh axis."""
    if tensor == Shard(dim):
        return tensor, Replicate(), Partial()
    if type(index) is Shard:
        return Replicate() if index.dim == dim else index, index, index
    if type(tensor) is Shard:
        return tensor, tensor, tensor
    return Replicate(), Replicate(), Replicate()
