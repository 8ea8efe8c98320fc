"""From DTensor to local tensor and back, where a program on local tensors meets one on DTensors.

Nothing moves here: a shard stays where it is and only changes its type. The layouts of gradients are those that the
rehearsal has found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .. import _torch

__all__ = ["unwrapped", "wrapped"]

Placements = tuple[Placement, ...]

NUM_LAYOUTS = 1024  # that are kept


def wrapped(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    *,
    shape: Sequence[int],
    gradient: Placements | None = None,
) -> DTensor:
    """Return a local tensor as the shard of a DTensor; its gradient is first brought to ``gradient``, if given."""
    layout = mesh, placements, torch.Size(shape), local.shape, local.stride(), local.dtype
    return _wrap(local, _wrapper(*layout), gradient)


def unwrapped(whole: DTensor, gradient: Placements | None) -> Tensor:
    """Return the shard of a DTensor; its gradient is read as one of layout ``gradient``.

    Raises:
        RuntimeError: in backward, if a gradient comes although ``gradient`` is None.
    """
    return _unwrap(whole, gradient)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, wrap: Callable[[Tensor], DTensor], gradient: Placements | None) -> DTensor:
        ctx.gradient = gradient
        return wrap(local.detach())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        if isinstance(grad, DTensor):
            if ctx.gradient is not None and grad.placements != ctx.gradient:
                grad = grad.redistribute(placements=ctx.gradient)
            grad = _torch.local_of(grad)
        return grad, None, None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: DTensor, gradient: Placements | None) -> Tensor:
        ctx.mesh, ctx.shape, ctx.gradient = whole.device_mesh, whole.shape, gradient
        local = _torch.local_of(whole)
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        if ctx.gradient is None:
            raise RuntimeError(
                f"a gradient came back to a value of shape {tuple(ctx.shape)}, which had none when the static program "
                "was recorded; run the module in mode 'eager'"
            )
        if grad.requires_grad:
            return _from_local(grad, ctx.mesh, ctx.gradient, ctx.shape), None
        return _wrapper(ctx.mesh, ctx.gradient, ctx.shape, grad.shape, grad.stride(), grad.dtype)(grad), None


_wrap, _unwrap = _torch.direct_apply(_Wrap), _torch.direct_apply(_Unwrap)


@functools.lru_cache(maxsize=NUM_LAYOUTS)
def _wrapper(
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    local_shape: torch.Size,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Callable[[Tensor], DTensor]:
    """Return what makes DTensors of one layout, without autograd: to describe a layout takes longer than all else."""
    local = torch.empty_strided(local_shape, local_stride, dtype=dtype, device="meta")
    return _torch.wrapper_like(_from_local(local, mesh, placements, shape))


def _from_local(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    stride = _whole_stride(local.stride(), shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _whole_stride(local_stride: Sequence[int], shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a dense tensor of ``shape`` whose dims lie in memory in the order of the shard's."""
    stride, size = [0] * len(shape), 1
    # of equal strides (a dim of one element) the last is the innermost
    for dim in sorted(range(len(shape)), key=lambda dim: (local_stride[dim], -dim)):
        stride[dim], size = size, size * max(shape[dim], 1)
    return tuple(stride)
