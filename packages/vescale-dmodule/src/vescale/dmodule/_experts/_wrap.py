"""Between DTensors and the local tensors of an experts' region, differentiably."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .._boundary import as_dtensor
from ._axes import is_cut

__all__ = ["from_local", "layout_of_tokens", "to_local"]

Placements = tuple[Placement, ...]


def layout_of_tokens(hidden: Tensor, mesh: DeviceMesh) -> Placements:
    """Return how the tokens of ``hidden``, (..., hidden), lie: as they are, but replicated where only that makes sense.

    That is, where the hidden dim is sharded or values are partial sums; there :func:`to_local` communicates. A plain
    tensor is equal on all ranks.
    """
    if not isinstance(hidden, DTensor):
        return (Replicate(),) * mesh.ndim
    last = hidden.ndim - 1
    return tuple(p if is_cut(p) and getattr(p, "dim", last) < last else Replicate() for p in hidden.placements)


def to_local(value: Tensor, tokens: Placements, mesh: DeviceMesh) -> Tensor:
    """Return this rank's part of ``value`` in the layout ``tokens``. Its gradient comes in that layout."""
    tensor = value if isinstance(value, DTensor) else as_dtensor(value, mesh)
    if tuple(tensor.placements) != tokens:
        tensor = tensor.redistribute(placements=tokens)
    return _ToLocal.apply(tensor)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: DTensor) -> Tensor:
        ctx.layout = _layout(tensor)
        return tensor.to_local()

    @staticmethod
    def backward(ctx, grad: Tensor) -> DTensor:
        return _dtensor(grad, *ctx.layout)


def from_local(
    hidden: Tensor, placements: Placements, grad_placements: Placements, mesh: DeviceMesh
) -> Callable[[Tensor], DTensor]:
    """Return a function that makes a DTensor of an output, whose tokens are those of ``hidden``."""
    layouts = placements, grad_placements
    return lambda output: _FromLocal.apply(output, mesh, *layouts, (*hidden.shape[:-1], output.shape[-1]))


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, output: Tensor, mesh: DeviceMesh, placements: Placements, grads: Placements, shape: tuple[int, ...]
    ) -> DTensor:
        ctx.placements = grads
        stride = torch.empty(shape, device="meta").stride()
        return _dtensor(output, mesh, placements, shape, stride)

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[Tensor | None, ...]:
        if tuple(grad.placements) != ctx.placements:
            grad = grad.redistribute(placements=ctx.placements)
        return grad.to_local(), None, None, None, None


def _layout(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride()


def _dtensor(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: Any, stride: Any) -> DTensor:
    return DTensor.from_local(local.contiguous(), mesh, placements, run_check=False, shape=shape, stride=stride)
