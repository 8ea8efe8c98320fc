"""Convolutions of a sharded batch stay sharded; all others run on full operands.

Each sample is convolved on its own, so an input that is sharded over the batch, on any number of mesh axes, and a
replicated weight need no communication::

    operands    batch     Shard(0) or Replicate, alike       weight, bias   Replicate
    results     batch     as the operands                    weight, bias   Partial("sum") where the batch is sharded

Stock DTensor has the same rule for one axis. Its rules for all other cases (channels, space, partial operands, several
axes) fail, fail on some ranks, or return another value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._containers import map_leaves, tensors_in
from .._torch import dispatch
from .gather import gather
from .operands import check_operands, empty_axes, mesh_of

__all__ = ["convolution", "convolution_backward"]


def convolution(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Convolve the local batch if only the batch is sharded; otherwise gather."""
    args = _with_whole(op, args)
    if not _fits(args[0], args[1:]):
        return gather(op, args, kwargs)
    result = op(*map_leaves(dispatch.local_tensor, args, DTensor), **kwargs)
    return dispatch.wrap(result, args[0].device_mesh, dispatch.placements_of(args[0]), op(*_shapes(args), **kwargs))


def convolution_backward(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Return the gradients of input, weight and bias; those of the last two are partial where the batch is sharded."""
    args = _with_whole(op, args)
    batch = args[1]
    if not _fits(batch, args[2:]):
        return gather(op, args, kwargs)
    cut, mesh = dispatch.placements_of(batch), batch.device_mesh
    parts: tuple[Placement, ...] = tuple(Replicate() if p.is_replicate() else Partial() for p in cut)
    local = (dispatch.redistributed(args[0], cut, for_op=op), *map_leaves(dispatch.local_tensor, args[1:], DTensor))
    return tuple(
        None if result is None else dispatch.wrap(result, mesh, placements, like)
        for result, like, placements in zip(
            op(*local, **kwargs), op(*_shapes(args), **kwargs), (cut, parts, parts), strict=True
        )
    )


def _with_whole(op: dispatch.Op, args: tuple) -> tuple:
    """Return the operands with plain tensors, where these are allowed, as replicated ones.

    Raises:
        UnsupportedOperator: a plain tensor is not allowed.
    """
    check_operands(op, args, {})
    mesh = mesh_of(op, args, {})

    def whole(tensor: Tensor) -> Tensor:
        is_plain = not isinstance(tensor, DTensor)
        return dispatch.wrap(tensor, mesh, [Replicate()] * mesh.ndim, tensor) if is_plain else tensor

    return map_leaves(whole, args, Tensor)


def _fits(batch: DTensor, others: tuple) -> bool:
    """Return whether every rank can convolve its part of the batch with all of the other operands."""
    return (
        all(p == Shard(0) or p.is_replicate() for p in dispatch.placements_of(batch))
        and all(p.is_replicate() for tensor in tensors_in(others) for p in dispatch.placements_of(tensor))
        and not empty_axes(batch)
        and batch.device_mesh.get_coordinate() is not None
    )


def _shapes(args: tuple) -> tuple:
    """Return the arguments with tensors that have shapes only."""

    def shape_of(tensor: Tensor) -> Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    return map_leaves(shape_of, args, Tensor)
