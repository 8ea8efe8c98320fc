"""Edges between code on DTensors and code on local tensors, differentiable and without communication.

    ``wrapped``         a local tensor becomes the shard of a DTensor
    ``unwrapped``       a DTensor becomes its shard
    ``local_shards``    parameters become their shards, all in one autograd node
    ``depend_on``       an output depends on operands that this rank did not use

A shard keeps its memory and changes its type. The caller gives the placements of the gradients.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _torch

__all__ = ["aligned", "as_summand", "averaged", "depend_on", "local_shards", "unwrapped", "wrapped", "wrapper"]

Placements = tuple[Placement, ...]

NUM_LAYOUTS = 1024  # in the cache


@_torch.unseen
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
    return _wrap(_torch.awaited(local), wrapper(*layout), gradient, averaged(mesh, placements))


@_torch.unseen
def unwrapped(tensor: DTensor, gradient: Placements | None) -> Tensor:
    """Return the shard of a DTensor; its gradient is read as one of layout ``gradient``.

    Raises:
        RuntimeError: in backward, if a gradient comes although ``gradient`` is None.
    """
    return _unwrap(tensor, gradient)


def averaged(mesh: DeviceMesh, placements: Placements) -> int:
    """Return the number of local values of which a value in ``placements`` is the mean.

    The gradient of each local value is the gradient of the mean, divided by that number.
    """
    sizes = (mesh.size(axis) for axis, placement in enumerate(placements) if placement.is_partial("avg"))
    return math.prod(sizes)


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, local: Tensor, wrap: Callable[[Tensor], DTensor], gradient: Placements | None, num_averaged: int
    ) -> DTensor:
        ctx.gradient, ctx.num_averaged = gradient, num_averaged
        return wrap(local.detach())

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if isinstance(grad, DTensor):
            if grad.requires_grad:
                grad = _part_of_gradient(grad, ctx.gradient or grad.placements)
            else:
                grad = _torch.local_of(grad) if ctx.gradient is None else as_summand(grad, ctx.gradient)
        return grad if ctx.num_averaged == 1 else grad / ctx.num_averaged, None, None, None


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: DTensor, gradient: Placements | None) -> Tensor:
        ctx.mesh, ctx.shape, ctx.gradient = tensor.device_mesh, tensor.shape, gradient
        ctx.num_averaged = averaged(tensor.device_mesh, tensor.placements)
        return _torch.local_of(tensor).detach()  # no view for autograd: the program may change it in place

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[DTensor, None]:
        if ctx.gradient is None:
            raise RuntimeError(
                f"expected no gradient for a value of shape {tuple(ctx.shape)}, which had none when the static program "
                "was recorded, got one; run the module in mode 'eager'"
            )
        grad = grad if ctx.num_averaged == 1 else grad * ctx.num_averaged
        if grad.requires_grad:
            grad = grad if _is_dense(grad.shape, grad.stride()) else grad.contiguous()
            return _from_local(grad, ctx.mesh, ctx.gradient, ctx.shape), None
        return wrapper(ctx.mesh, ctx.gradient, ctx.shape, grad.shape, grad.stride(), grad.dtype)(grad), None


def as_summand(grad: DTensor, placements: Placements) -> Tensor:
    """Return the shard of a gradient in ``placements``; of a whole one that becomes partial, the first rank has all."""
    axes = [
        a for a, (p, old) in enumerate(zip(placements, grad.placements, strict=True)) if p.is_partial() and p != old
    ]
    whole = tuple(Replicate() if axis in axes else p for axis, p in enumerate(placements))
    local = _torch.local_of(grad if grad.placements == whole else grad.redistribute(placements=whole))
    is_first = all(grad.device_mesh.get_local_rank(axis) == 0 for axis in axes)
    return local if is_first else torch.full_like(local, -0.0)  # x + -0.0 is x


def _part_of_gradient(grad: DTensor, placements: Placements) -> Tensor:
    """Return the shard of a gradient of which gradients are taken.

    Raises:
        NotImplementedError: ranks have summands of it, whose gradients are unknown.
    """
    if any(p.is_partial() for p in placements):
        raise NotImplementedError(
            "expected that gradients of gradients are taken of values of which each rank has a part, got one of shape "
            f"{tuple(grad.shape)}, which all ranks have, used by an operator on DTensors; take them of inputs, or "
            'run the model on DTensors (mode="eager"), or with per_rank=True'
        )
    grad = grad if grad.placements == placements else grad.redistribute(placements=placements)
    return unwrapped(grad, placements)


_wrap, _unwrap = _torch.direct_apply(_Wrap), _torch.direct_apply(_Unwrap)


@functools.lru_cache(maxsize=NUM_LAYOUTS)
def wrapper(
    mesh: DeviceMesh,
    placements: Placements,
    shape: torch.Size,
    local_shape: torch.Size,
    local_stride: tuple[int, ...],
    dtype: torch.dtype,
) -> Callable[[Tensor], DTensor]:
    """Return a function that makes DTensors of one layout, without autograd. To describe a layout is the slow part.

    The strides of a DTensor are those of a dense tensor, so the shard of an expanded tensor, or of a slice, is a copy.
    """
    is_dense, dense = _is_dense(local_shape, local_stride), _global_stride(local_stride, local_shape)
    local = torch.empty_strided(local_shape, local_stride if is_dense else dense, dtype=dtype, device="meta")
    wrap = _torch.wrapper_like(_from_local(local, mesh, placements, shape))
    return wrap if is_dense else lambda tensor: wrap(tensor.new_empty_strided(local_shape, dense).copy_(tensor))


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    triples = zip(shape, stride, _global_stride(stride, shape), strict=True)
    return 0 in shape or all(size == 1 or own == dense for size, own, dense in triples)


def _from_local(local: Tensor, mesh: DeviceMesh, placements: Placements, shape: torch.Size) -> DTensor:
    stride = _global_stride(local.stride(), shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _global_stride(local_stride: Sequence[int], shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a dense tensor of ``shape`` whose dims lie in memory in the order of the shard's."""
    stride, size = [0] * len(shape), 1
    # of equal strides (a dim of one element) the last is the innermost
    for dim in sorted(range(len(shape)), key=lambda dim: (local_stride[dim], -dim)):
        stride[dim], size = size, size * max(shape[dim], 1)
    return tuple(stride)


# ------------------------------------------------------------------------------------------------- parameters


def aligned(gradient: DTensor, placements: Placements) -> DTensor:
    """Return the gradient of a parameter in the placements of the parameter, or partial where these replicate."""
    pairs = zip(gradient.placements, placements, strict=True)
    return gradient.redistribute(
        placements=[here if here.is_partial() and own.is_replicate() else own for here, own in pairs]
    )


def local_shards(
    parameters: Sequence[Tensor],
    gradients: Sequence[Placements | None],
    silent: Sequence[bool] | None = None,
) -> list[Tensor]:
    """Return this rank's shards of parameters. If one of them gets a gradient, unused ones get zeros.

    Args:
        parameters: DTensors or local shards; the gradient of each is of the same type.
        gradients: placements of the gradients of the DTensors.
        silent: which of them are shown as negative zeros (``x + -0.0`` is ``x`` for every ``x``). Their gradient is
            that of the values. For parameters that are added once over the axes that cut inner dims: the gradient is
            that of the output, equal on all ranks of these axes.
    """
    silent = silent or [False] * len(parameters)
    shown = [_shown(*pair) for pair in zip(parameters, silent, strict=True)]
    trained = [i for i, p in enumerate(parameters) if p.requires_grad] if torch.is_grad_enabled() else []
    if trained:
        chosen = [parameters[i] for i in trained]
        outputs = _LocalShards.apply([shown[i] for i in trained], [gradients[i] for i in trained], *chosen)
        for i, output in zip(trained, outputs, strict=True):
            shown[i] = output
    return shown


def _shown(parameter: Tensor, silent: bool) -> Tensor:
    local = _torch.local_of(parameter) if isinstance(parameter, DTensor) else parameter.detach()
    return torch.full_like(local, -0.0) if silent else local


class _LocalShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, shown: list[Tensor], gradients: list[Placements | None], *parameters: Tensor) -> tuple:
        pairs = zip(parameters, gradients, strict=True)
        ctx.layouts = [
            (p.device_mesh, placements, p.shape, p.stride()) if isinstance(p, DTensor) else None
            for p, placements in pairs
        ]
        return tuple(local.view_as(local) for local in shown)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *(_global_gradient(*pair) for pair in zip(grads, ctx.layouts, strict=True))


def _global_gradient(grad: Tensor, layout: tuple | None) -> Tensor:
    if layout is None:
        return grad
    mesh, placements, shape, stride = layout
    return DTensor.from_local(grad, mesh, placements, run_check=False, shape=shape, stride=stride)


# ------------------------------------------------------------------------------------------------- dependence


def depend_on(output: Tensor, *operands: Tensor) -> Tensor:
    """Return ``output`` so that it depends on all ``operands``, with no gradient.

    A rank whose experts got no token does not use them. Without this, the backward of its inputs would not run there,
    while the other ranks wait in its communication; and its parameters would have no gradient, where on one device the
    tensor of all experts has one that is zero for these, and the optimizer updates them.
    """
    return _DependOn.apply(output, *operands)


class _DependOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, *operands: Tensor) -> Tensor:
        ctx.num_operands = len(operands)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.num_operands)
