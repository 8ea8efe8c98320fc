"""Operators in autograd's formulas that stock DTensor gets wrong or refuses.

**Gradients of slices.** The backward of ``x.select(dim, i)`` and ``x[start:stop]`` pads the gradient with zeros to the
shape of ``x``. The operator gets the global shape of ``x``. Stock DTensor computes the local shape as if all shards had
equal size. This module takes it from the local gradient, which has the size of the shard in every dim but the sliced
one.

**Plain operands.** Autograd writes the gradient of ``slice_scatter`` as ``slice_scatter(grad, zeros(...))``. The zeros
are a plain tensor, equal on all ranks. Stock DTensor refuses it beside the gradient although every tensor of the
program is a DTensor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._containers import map_leaves
from .._torch import dispatch
from .gather import gather_axes
from .operands import is_sharded, mesh_of

__all__ = ["accept_plain", "zeros_around"]


def zeros_around(op: dispatch.Op, args: tuple, kwargs: dict) -> DTensor:
    """Run ``select_backward`` or ``slice_backward`` on the shards of the gradient."""
    grad, sizes, dim, *rest = args
    is_select = op.overloadpacket is torch.ops.aten.select_backward
    if not is_select:
        cut = tuple(axis for axis, p in enumerate(grad.placements) if is_sharded(p) and p.dim == dim)
        grad = gather_axes(op, grad, cut) if cut else grad
    local = dispatch.local_tensor(grad)
    shape = list(local.shape)
    shape[dim : dim if is_select else dim + 1] = [sizes[dim]]
    result = op(local, shape, dim, *rest, **kwargs)
    moved = [dispatch.shifted(p, dim) if is_select else p for p in grad.placements]
    like = torch.empty(sizes, dtype=result.dtype, device="meta")
    return dispatch.wrap(result, grad.device_mesh, moved, like)


def accept_plain(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule; during backward, plain operands count as replicated."""
    if not dispatch.in_backward():
        return dispatch.stock_dispatch(op, args, kwargs)
    mesh = mesh_of(op, args, kwargs)

    def bring(tensor: Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        return dispatch.wrap(tensor, mesh, [Replicate()] * mesh.ndim, tensor)

    return dispatch.stock_dispatch(op, map_leaves(bring, args, Tensor), map_leaves(bring, kwargs, Tensor))
