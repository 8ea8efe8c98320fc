"""One more mesh axis, ahead of those of a plan: the rows of data-parallel ranks.

Each data-parallel rank calls a module with its own rows and has a copy of everything else. So it runs a program on its
part of global values, and backward gives it one summand of the gradient of each value that all ranks have::

    placement on      a rank has                  its gradient on that axis
    the axis of rows
    Shard(d)          its part                    that of the part
    Replicate         the value                   a summand, whose sum over ranks is the gradient
    Partial("sum")    a summand of the value      the gradient
    Partial("avg")    a value, whose mean counts  a summand; the rank takes 1/N of the gradient of the mean

Placements of values decide those of gradients, so nothing has to be recorded in backward. All gradients count N times
on N ranks until data parallelism takes their mean.

A module with a plan has its tensors on the mesh of the plan. Operators on the rows of all ranks run on a wider mesh::

    lift     a DTensor on the mesh of the plan  ->  the same local tensor on the wider mesh
    lower    and back

Inside of ``vescale.dtensor.exact`` no rank has a summand: forms give every rank the whole gradient of a value that all
ranks have. It counts once, and data parallelism takes that of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from vescale.dtensor import UnsupportedOperator
from vescale.dtensor.extension import chunk, exact_num_blocks

from .. import _torch
from .edges import as_summand, averaged, wrapper

__all__ = [
    "OverRows",
    "gradient_outside",
    "gradient_over_rows",
    "is_over_rows",
    "lift",
    "lower",
    "part_of_rows",
    "settled",
    "whole_extremes",
]


class OverRows(NamedTuple):
    """What the axis of rows adds to the layout of a value: its placement there, and its global shape."""

    placement: Placement
    shape: torch.Size


def gradient_over_rows(placement: Placement) -> Placement:
    """Return the placement of the gradient of a value on the axis of rows.

    Example:
        >>> gradient_over_rows(Replicate())
        Partial(sum)
    """
    if placement.is_replicate() and exact_num_blocks() is None:
        return Partial()
    return Replicate() if placement.is_partial() else placement


def is_over_rows(tensor: object, mesh: DeviceMesh) -> bool:
    """Return whether a value is a DTensor on a mesh with an axis of rows ahead of those of ``mesh``."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim > mesh.ndim


def part_of_rows(tensor: DTensor) -> torch.Size:
    """Return the shape of this rank's part of a value on the wider mesh: global over all axes but that of the rows."""
    shape, placement = list(tensor.shape), tensor.placements[0]
    if placement.is_shard():
        mesh = tensor.device_mesh
        shape[placement.dim] = chunk(shape[placement.dim], mesh.size(0), mesh.get_local_rank(0))[1]
    return torch.Size(shape)


@_torch.unseen
def settled(result: object, operands: Iterable[object]) -> object:
    """Return the result of an operator on the wider mesh, replicated over the axes of the plan if all operands are.

    So it is on the mesh of the plan. DTensor may choose otherwise to move less over the axis of rows.
    """
    if any(isinstance(t, DTensor) and not all(p.is_replicate() for p in t.placements[1:]) for t in operands):
        return result

    def settle(leaf: object) -> object:
        if not isinstance(leaf, DTensor) or all(p.is_replicate() for p in leaf.placements[1:]):
            return leaf
        return leaf.redistribute(placements=(leaf.placements[0], *[Replicate()] * (leaf.device_mesh.ndim - 1)))

    return _torch.tree_map(settle, result)


@_torch.unseen
def whole_extremes(result: object) -> object:
    """Return the result of an operator with maxima, minima and products over the rows of all ranks in place of parts.

    Only one rank has the largest value, and the others no gradient: parts have no gradients of their own.
    """

    def whole(leaf: object) -> object:
        if not isinstance(leaf, DTensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        is_sum = [not p.is_partial() or p.is_partial("sum") or p.is_partial("avg") for p in leaf.placements]
        if all(is_sum):
            return leaf
        pairs = zip(leaf.placements, is_sum, strict=True)
        return leaf.redistribute(placements=[own if keeps else Replicate() for own, keeps in pairs])

    return _torch.tree_map(whole, result)


@_torch.unseen
def lift(
    tensor: DTensor, mesh: DeviceMesh, placement: Placement | None = None, *, shape: Sequence[int] | None = None
) -> DTensor:
    """Return a DTensor on the wider ``mesh``, over the same memory, differentiably.

    Args:
        tensor: on the mesh of the plan.
        mesh: the same mesh with an axis of rows ahead.
        placement: on that axis: ``Replicate()``, which is the default, if all ranks have the same values; ``Shard(d)``,
            if each has its part; ``Partial()`` if each has a summand.
        shape: global; by default all ranks have equal parts.
    """
    if placement is None or not placement.is_shard():
        placement, shape = placement or Replicate(), tensor.shape
    elif shape is None:
        shape = [size * (mesh.size(0) if dim == placement.dim else 1) for dim, size in enumerate(tensor.shape)]
    return _Lift.apply(_torch.awaited(tensor), mesh, placement, shape)


@_torch.unseen
def lower(tensor: DTensor, mesh: DeviceMesh) -> DTensor:
    """Return this rank's part of a DTensor on the wider mesh as a DTensor on ``mesh``, that of the plan; see `lift`."""
    return _Lower.apply(tensor, mesh)


def _on(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], local: Tensor) -> DTensor:
    layout = mesh, tuple(placements), torch.Size(shape), local.shape, local.stride(), local.dtype
    return wrapper(*layout)(local)


class _Lift(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: DTensor, mesh: DeviceMesh, placement: Placement, shape: Sequence[int]) -> DTensor:
        ctx.mesh, ctx.shape, ctx.gradient = tensor.device_mesh, tensor.shape, gradient_over_rows(placement)
        ctx.num_averaged = averaged(mesh, (placement,))
        ctx.source, ctx.version = tensor if tensor.is_leaf else None, tensor._version
        return _on(mesh, (placement, *tensor.placements), shape, _torch.local_of(tensor).detach())

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[DTensor, None, None, None]:
        if ctx.source is not None and ctx.source._version != ctx.version:  # autograd cannot see it behind the lift
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"parameter of shape {tuple(ctx.source.shape)} after the forward that used it; run backward before "
                "optimizer.step()"
            )
        grad = grad if ctx.num_averaged == 1 else grad / ctx.num_averaged
        if grad.requires_grad:  # a gradient of gradients: only differentiable operators
            grad = grad.redistribute(placements=(ctx.gradient, *grad.placements[1:]))
            return lower(grad, ctx.mesh), None, None, None
        placements = ctx.gradient, *grad.placements[1:]
        return _on(ctx.mesh, placements[1:], ctx.shape, as_summand(grad, placements)), None, None, None


class _Lower(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: DTensor, mesh: DeviceMesh) -> DTensor:
        own = tensor.placements[0]
        ctx.mesh, ctx.shape = tensor.device_mesh, tensor.shape
        ctx.gradient = own if own.is_partial("avg") else gradient_over_rows(own)
        ctx.num_averaged = averaged(tensor.device_mesh, tensor.placements[:1])
        return _on(mesh, tensor.placements[1:], part_of_rows(tensor), _torch.local_of(tensor).detach())

    @staticmethod
    def backward(ctx, grad: DTensor) -> tuple[DTensor, None]:
        if exact_num_blocks() is not None and ctx.gradient.is_shard():
            gradient_outside(ctx.shape)
        grad = grad if ctx.num_averaged == 1 else grad * ctx.num_averaged
        if grad.requires_grad:
            return lift(grad, ctx.mesh, ctx.gradient, shape=ctx.shape), None
        return _on(ctx.mesh, (ctx.gradient, *grad.placements), ctx.shape, _torch.local_of(grad)), None


def gradient_outside(shape: Sequence[int]) -> NoReturn:
    """Refuse a gradient that comes from a loss of this rank's rows alone, inside of ``vescale.dtensor.exact``.

    Raises:
        UnsupportedOperator: always.
    """
    raise UnsupportedOperator(
        f"a gradient for this rank's rows, of shape {tuple(shape)}, inside of vescale.dtensor.exact: expected a "
        "loss that the module computes on the rows of all ranks, got one of this rank's rows alone, whose mean is not "
        "that of one device bit for bit; compute the loss in the module's forward"
    )
