"""Operators in autograd's formulas that stock DTensor gets wrong or refuses.

**Gradients of slices.** The backward of ``x.select(dim, i)`` and ``x[start:stop]`` pads the gradient with zeros to the
shape of ``x``. The operator gets the global shape of ``x``. Stock DTensor computes the local shape as if all shards had
equal size. This module takes it from the local gradient, which has the size of the shard in every dim but the sliced
one.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from .._torch import dispatch
from .gather import gather_axes
from .operands import is_sharded

__all__ = ["zeros_around"]


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
