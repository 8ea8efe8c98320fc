"""Differentiable changes of layout on plain local tensors: the equivalent of ``_boundary.convert.bring`` for DTensors.

A conversion is data: the layout of the arriving value, the layout of the leaving value, and the layout of its gradient.
:func:`compile_conversion` compiles it once into a function that runs nothing but collectives::

    forward    source   ------------------------>  target
    backward   source without Partial  <---------  target without Partial  <---------  gradient

If the value was Partial or did not move, the backward first brings the gradient to the target, as a boundary does in
eager mode. Otherwise it goes to the source in one movement. (The gradient of a Partial value is equal on all ranks. If
the value is a mean of the local values of N ranks, each local value gets a Nth of it.)

Guarantee: values and gradients are those of eager mode, bit for bit, in the same strides.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from vescale.dtensor.extension import in_memory_order

from ... import _torch
from ..._boundary.edges import averaged
from .collectives import Local, chain, run_step, through_dtensor
from .interleaved import View, view_of
from .steps import Step, plan_steps, without_partials

__all__ = ["Conversion", "compile_conversion", "identity"]


@dataclass(frozen=True)
class Conversion:
    """The change of layout of one tensor at a boundary.

    Attributes:
        shape: global shape.
        source: placements of the value that arrives, one per mesh axis.
        target: placements of the value that leaves.
        gradient: placements of the gradient that arrives in backward; None if there is none.
        order: dims of the value from the slowest to the fastest in memory; None if they are in order.
    """

    shape: tuple[int, ...]
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    gradient: tuple[Placement, ...] | None = None
    order: tuple[int, ...] | None = None

    @property
    def backward(self) -> tuple[tuple[tuple[Placement, ...], tuple[Placement, ...]], ...]:
        """The movements of the gradient, in order, as pairs of old and new placements."""
        if self.gradient is None:
            return ()
        back = without_partials(self.source)
        if self.source != self.target and back == self.source:
            return ((self.gradient, back),)
        pinned = without_partials(self.target)
        return ((self.gradient, pinned), (pinned, back))


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the conversion that changes neither the value nor the gradient."""
    return tensor


def compile_conversion(conversion: Conversion, mesh: DeviceMesh, *, is_changed: bool = False) -> Local:
    """Return a function from this rank's local tensor in ``source`` to that in ``target``, differentiable once.

    All ranks of the mesh must call this together, and call the result together. The result is a stateless function with
    the conversion as attribute ``conversion``. A compiler can trace it, unless the layouts are ragged or strided. The
    result is :func:`identity` if neither the value nor the gradient moves.

    Args:
        conversion: the change of layout.
        mesh: of the layouts.
        is_changed: whether the value is changed in place later. If it does not move, it then stays the same object,
            and the gradient of all its uses moves. Otherwise the function returns an alias, which cannot be changed in
            place, and only the gradient of the alias moves.

    Raises:
        ValueError: the gradient is sharded differently from the value, which a local gradient cannot be.
        RuntimeError: raised by the function's backward: a gradient arrives but the conversion has none, or a second
            derivative is requested.

    Example:
        >>> gathered = Conversion((8, 6), (Shard(0),), (Replicate(),), (Partial(),))
        >>> convert = compile_conversion(gathered, mesh)                # doctest: +SKIP
        >>> convert(torch.zeros(4, 6)).shape                            # doctest: +SKIP
        torch.Size([8, 6])
    """
    _check_gradient(conversion, mesh)
    forward = _movement(conversion.shape, conversion.source, conversion.target, mesh)
    if forward is not None and conversion.order is not None:
        forward = _in_order(forward, conversion.order)
    moves = [_movement(conversion.shape, old, new, mesh) for old, new in conversion.backward]
    scale = averaged(mesh, conversion.target) / averaged(mesh, conversion.source)
    moves += [] if scale == 1 or conversion.gradient is None else [functools.partial(torch.mul, other=scale)]
    backward = chain([move for move in moves if move is not None])
    if forward is None and backward is None:
        return identity
    if conversion.gradient is None:
        backward = _refuse(conversion)

    @_torch.unseen
    def convert(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                return _Convert.apply(tensor, forward, backward)
            if forward is None and is_changed and not tensor.is_leaf:
                _torch.hook_first(tensor, functools.partial(_convert_gradient, backward))
                return tensor
            return _convert(tensor, forward, backward)
        return tensor if forward is None else forward(tensor)

    convert.conversion = conversion
    return convert


def _check_gradient(conversion: Conversion, mesh: DeviceMesh) -> None:
    for axis, (value, gradient) in enumerate(zip(conversion.target, conversion.gradient or (), strict=False)):
        if mesh.size(axis) > 1 and without_partials((value,)) != without_partials((gradient,)):
            raise ValueError(
                f"expected a gradient placed as its value, {conversion.target}, or Partial for Replicate, because "
                f"local code computes no other, got {conversion.gradient} (mesh axis {axis}); bring the value to "
                f"{gradient!r} by a boundary in the plan at the module that uses it"
            )


def _movement(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: DeviceMesh
) -> Local | None:
    if mesh.get_coordinate() is None or source == target:
        return None
    view, steps = _plan(shape, source, target, mesh)
    if steps is None:
        return through_dtensor(tuple(shape), mesh, source, target)
    return view.through(chain([run_step(step, mesh) for step in steps]))


def _in_order(move: Local, order: tuple[int, ...]) -> Local:
    """Return a movement whose results have their dims in memory in an order: dropout draws along it."""
    return lambda tensor: in_memory_order(move(tensor), order)


def _plan(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: DeviceMesh
) -> tuple[View | None, tuple[Step, ...] | None]:
    """Return a view and the steps of a movement in that view; None for steps if ``DTensor`` must redistribute."""
    view = view_of(tuple(shape), tuple(source), tuple(target))
    if view is None or not _ascending(mesh):
        return view, None
    layouts = view.placements(tuple(source)), view.placements(tuple(target))
    return view, plan_steps(view.shape(tuple(shape)), tuple(mesh.shape), tuple(mesh.get_coordinate()), *layouts)


def _ascending(mesh: DeviceMesh) -> bool:
    """Return whether ranks ascend along every axis, so that each process group has the order of the coordinates."""
    return all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))


def _refuse(conversion: Conversion) -> Local:
    def refuse(_gradient: Tensor) -> Tensor:
        raise RuntimeError(
            f"expected no gradient at the boundary {conversion}, as in the recording, but got one, whose placements "
            'are unknown; run the first backward from the same outputs as later ones, or use mode="eager"'
        )

    return refuse


class _Convert(torch.autograd.Function):
    """Run one function in forward and another in backward; None means no change."""

    @staticmethod
    def forward(ctx, tensor: Tensor, forward: Local | None, backward: Local | None) -> Tensor:
        ctx.convert = backward
        return tensor.view_as(tensor) if forward is None else forward(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _convert_gradient(ctx.convert, gradient), None, None


_convert = _torch.direct_apply(_Convert)


def _convert_gradient(backward: Local | None, gradient: Tensor) -> Tensor:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "a second derivative (create_graph=True) was asked for through a boundary of a module in static "
            'mode; use mode="eager"'
        )
    return gradient if backward is None else backward(gradient)
