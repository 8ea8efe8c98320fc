"""Operators whose gradient formula makes a plain tensor.

Autograd writes the gradient of ``slice_scatter`` as ``slice_scatter(grad, zeros(...))``. The zeros are a plain tensor,
equal on all ranks, and stock DTensor refuses it beside the gradient although every tensor of the program is a DTensor.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._containers import map_leaves
from .._torch import dispatch as _torch
from .operands import mesh_of

__all__ = ["accept_plain"]


def accept_plain(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule; during backward, plain operands count as replicated."""
    if not _torch.in_backward():
        return _torch.stock_dispatch(op, args, kwargs)
    mesh = mesh_of(op, args, kwargs)

    def bring(tensor: Tensor) -> DTensor:
        if isinstance(tensor, DTensor):
            return tensor
        return _torch.wrap(tensor, mesh, [Replicate()] * mesh.ndim, tensor)

    return _torch.stock_dispatch(op, map_leaves(bring, args, Tensor), map_leaves(bring, kwargs, Tensor))
