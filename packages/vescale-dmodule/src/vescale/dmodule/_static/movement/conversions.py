"""Differentiable changes of layout on plain local tensors: what ``_boundary.bring`` does to DTensors.

A conversion is data: where a value is when it arrives, where it shall be when it leaves, and where its gradient will
be. From that, :func:`compile_conversion` makes a function once; a call runs collectives and nothing else::

    forward    source   ------------------------>  target
    backward   source without Partial  <---------  target without Partial  <---------  gradient

The backward stops at the target, as a boundary does in eager mode, where the value was Partial or has not moved;
otherwise it goes to the source in one movement. (The gradient of a Partial value is the same on all ranks.)

A backward that is one large reduction lets this rank work while it is under way: a node of the graph that hands its
gradient to the boundary may leave :class:`Later` work there (see ``_overlap``). The boundary launches its collective,
runs what was left, and then waits.

Guarantee: values and gradients are those of eager mode, bit for bit, in the same strides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ... import _torch
from .collectives import Local, chain, run_step, through_dtensor
from .interleaved import View, view_of
from .steps import Reduce, ReduceScatter, Step, plan_steps, without_partials

__all__ = ["Conversion", "Later", "boundary_before", "compile_conversion", "identity"]

# Elements on a rank below which a reduction takes less time than hiding work behind it costs. It is a number of the
# whole mesh: ranks that decided differently would launch collectives in different orders.
MIN_REDUCED = 1 << 18


@dataclass(frozen=True)
class Conversion:
    """What happens to one tensor at a boundary.

    Attributes:
        shape: global shape.
        source: placements of the value that arrives, one per mesh axis.
        target: placements of the value that leaves.
        gradient: placements of the gradient that arrives from where the value went; None if there is none.
    """

    shape: tuple[int, ...]
    source: tuple[Placement, ...]
    target: tuple[Placement, ...]
    gradient: tuple[Placement, ...] | None = None

    @property
    def backward(self) -> tuple[tuple[tuple[Placement, ...], tuple[Placement, ...]], ...]:
        """The movements of the gradient, in order, as pairs of placements."""
        if self.gradient is None:
            return ()
        back = without_partials(self.source)
        if self.source != self.target and back == self.source:
            return ((self.gradient, back),)
        pinned = without_partials(self.target)
        return ((self.gradient, pinned), (pinned, back))


def identity(tensor: Tensor) -> Tensor:
    """Return the tensor itself: the conversion where nothing is to be done in either direction."""
    return tensor


def compile_conversion(conversion: Conversion, mesh: DeviceMesh) -> Local:
    """Return a function from this rank's local tensor in ``source`` to that in ``target``, differentiable once.

    All ranks of the mesh must call this together, and call the result together. The result is a plain function without
    state, with its data as attribute ``conversion``; a compiler can trace it, unless the layouts are ragged or
    strided. It is :func:`identity` itself where nothing is to be done.

    Raises:
        ValueError: the gradient's shards are others than the value's, which no local gradient can have.
        RuntimeError: (the function's backward) a gradient arrives though the conversion has none, or a second
            derivative is asked for.

    Example:
        >>> gathered = Conversion((8, 6), (Shard(0),), (Replicate(),), (Partial(),))
        >>> convert = compile_conversion(gathered, mesh)                # doctest: +SKIP
        >>> convert(torch.zeros(4, 6)).shape                            # doctest: +SKIP
        torch.Size([8, 6])
    """
    _check_gradient(conversion, mesh)
    forward = _movement(conversion.shape, conversion.source, conversion.target, mesh)
    moves = [_movement(conversion.shape, old, new, mesh) for old, new in conversion.backward]
    backward = chain([move for move in moves if move is not None])
    if forward is None and backward is None:
        return identity
    if conversion.gradient is None:
        backward = _refuse(conversion)
    num_reduced = _num_reduced(conversion, mesh)
    backward_of = _Reduction(backward, num_reduced) if num_reduced >= MIN_REDUCED else backward
    record = _convert_and_work if num_reduced >= MIN_REDUCED else _convert

    def convert(tensor: Tensor) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                return _Convert.apply(tensor, forward, backward)
            return record(tensor, forward, backward_of)
        return tensor if forward is None else forward(tensor)

    convert.conversion = conversion
    return convert


def _check_gradient(conversion: Conversion, mesh: DeviceMesh) -> None:
    for axis, (value, gradient) in enumerate(zip(conversion.target, conversion.gradient or (), strict=False)):
        if mesh.size(axis) > 1 and without_partials((value,)) != without_partials((gradient,)):
            raise ValueError(
                f"the value leaves as {conversion.target}, but its gradient comes as {conversion.gradient}: on mesh "
                f"axis {axis} the gradient of a local tensor in {value!r} is nothing else, except Partial for "
                f"Replicate; bring the value to {gradient!r} by a boundary in the plan, where it is used like that"
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


def _plan(
    shape: tuple[int, ...], source: tuple[Placement, ...], target: tuple[Placement, ...], mesh: DeviceMesh
) -> tuple[View | None, tuple[Step, ...] | None]:
    """Return the view in which a movement is steps, and the steps; None for them where ``DTensor`` must do it."""
    view = view_of(tuple(shape), tuple(source), tuple(target))
    if view is None or not _ascending(mesh):
        return view, None
    layouts = view.placements(tuple(source)), view.placements(tuple(target))
    return view, plan_steps(view.shape(tuple(shape)), tuple(mesh.shape), tuple(mesh.get_coordinate()), *layouts)


def _num_reduced(conversion: Conversion, mesh: DeviceMesh) -> int:
    """Return how many elements a rank reduces in the backward if that is one collective, else 0; alike on all ranks."""
    if mesh.get_coordinate() is None or conversion.gradient is None:
        return 0
    plans = [_plan(conversion.shape, old, new, mesh) for old, new in conversion.backward if old != new]
    if any(steps is None or view != View() for view, steps in plans):
        return 0
    if [type(step) in (Reduce, ReduceScatter) for _, steps in plans for step in steps] != [True]:
        return 0
    num_parts = math.prod(mesh.size(axis) for axis, p in enumerate(conversion.gradient) if not _is_whole(p))
    return math.prod(conversion.shape) // num_parts


def _is_whole(placement: Placement) -> bool:
    return placement.is_replicate() or placement.is_partial()


def _ascending(mesh: DeviceMesh) -> bool:
    """Tell whether ranks ascend along every axis, so that their order in its process group is that of coordinates."""
    return all(bool((mesh.mesh.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim))


def _refuse(conversion: Conversion) -> Local:
    def refuse(_gradient: Tensor) -> Tensor:
        raise RuntimeError(
            f"a gradient arrived at the boundary {conversion}, where none came when the module was tried in eager "
            "mode, so its placements are not known; run the first backward from the same outputs as later ones, or "
            'use mode="eager"'
        )

    return refuse


class _Convert(torch.autograd.Function):
    """Run one function forward and another backward; None stands for no change."""

    @staticmethod
    def forward(ctx, tensor: Tensor, forward: Local | None, backward: Local | None) -> Tensor:
        ctx.convert = backward
        return tensor.view_as(tensor) if forward is None else forward(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_derivative()
        return gradient if ctx.convert is None else ctx.convert(gradient), None, None


_convert = _torch.direct_apply(_Convert)


# ------------------------------------------------------------------------------------------------- work meanwhile


@dataclass
class Later:
    """What is left to do while a reduction is under way.

    Attributes:
        number: of the backward pass, in torch's count. What a pass that failed has left is not done by another.
        tasks: in the order in which they were left.
    """

    number: int
    tasks: list[Callable[[], None]] = field(default_factory=list)

    def run(self) -> None:
        """Do everything."""
        for task in self.tasks:
            task()


class _Reduction(NamedTuple):
    """A backward that is one reduction.

    Attributes:
        run: the collective; what is done meanwhile is its second argument.
        num_elements: that a rank brings.
    """

    run: Callable[..., Tensor]
    num_elements: int


class _ConvertAndWork(torch.autograd.Function):
    """As :class:`_Convert`, for a backward that is one reduction.

    Its node has the :class:`Later` work as ``later``, and the size of the reduction as ``num_elements``.
    """

    @staticmethod
    def forward(ctx, tensor: Tensor, forward: Local | None, backward: _Reduction) -> Tensor:
        (ctx.convert, ctx.num_elements), ctx.later = backward, None
        return tensor.view_as(tensor) if forward is None else forward(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        _refuse_second_derivative()
        later, ctx.later = ctx.later, None
        if later is None or later.number != _torch.backward_number():
            return ctx.convert(gradient), None, None
        return ctx.convert(gradient, later.run), None, None


_convert_and_work = _torch.direct_apply(_ConvertAndWork)
_NODE = _torch.node_class(_ConvertAndWork)
_VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")


def boundary_before(tensor: Tensor) -> object | None:
    """Return the node of the boundary that made a tensor, through views, if its backward is a large reduction.

    What is left as ``later`` at that node, by nodes that make its gradient, is done in the same backward pass.
    """
    node = tensor.grad_fn
    while type(node) is not _NODE:
        if node is None or node.name() not in _VIEWS:
            return None
        node = node.next_functions[0][0]
    return node


def _refuse_second_derivative() -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "a second derivative (create_graph=True) was asked for through a boundary of a module in static "
            'mode; use mode="eager"'
        )
