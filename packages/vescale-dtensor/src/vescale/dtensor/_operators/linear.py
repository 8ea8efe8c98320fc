"""Sums of a partial and a whole tensor: the bias of a row-parallel linear, the residual after it.

A linear whose weight is sharded over the input dim gives partial sums. Stock DTensor adds the whole operand to them by
giving every rank ``bias / n``: the division rounds unless ``n`` is a power of two, and in low precision it rounds badly
(three thirds of a bfloat16 miss it by up to 2^-8). Here the rank at coordinate 0 of the axis adds all of it and the
others nothing::

    stock   (p0 + b/3) + (p1 + b/3) + (p2 + b/3)
    here    (p0 + b)   +  p1        +  p2            what one device adds, in another order

So the sum stays partial, which costs no communication and can still be reduce-scattered, and no result depends on
the number of ranks but by the order of additions. That holds wherever an operator takes ``Replicate`` to
``Partial("sum")``: ``addmm``, ``addmv``, ``baddbmm``, ``add`` of a residual. No other path changes: it is the
conversion itself that does, and it costs one new tensor of the operand's size, as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial

__all__ = ["add_whole_once"]


def add_whole_once(stock: Callable) -> Callable:
    """Return the conversion of a replicated tensor to a partial one that lets one rank keep all of it.

    Concerns ``Partial("sum")`` alone, not placements derived from it.
    """

    @functools.wraps(stock)
    def partition(self: Partial, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        if type(self) is Partial and self.reduce_op == "sum":
            return _whole_on_first(tensor, mesh, mesh_dim)
        return stock(self, tensor, mesh, mesh_dim)

    return partition


def _whole_on_first(tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    if mesh.get_local_rank(axis) == 0:
        return tensor.clone()  # a partial tensor may be written to in place, its source must not change
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full_like(tensor, -0.0)  # x + (-0.0) is x for every x, -0.0 included
    return torch.zeros_like(tensor)
