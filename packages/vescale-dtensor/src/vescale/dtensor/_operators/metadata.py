"""Changes of a tensor's metadata in place: ``unsqueeze_``, ``squeeze_``, ``transpose_``, ``t_``, and ``x.data = y``.

The operators run as their out-of-place form, which decides the placements and gives the local tensor. The operand then
takes over the result. (Stock DTensor has a rule for ``squeeze_`` only; the tensor reports its old shape afterwards.)

Autograd makes the history of a view anew when its memory is written, or when the tensor that it views changes its
shape. For a DTensor it repeats the operators that made the view, on the new shape; on one device it takes the strides.
So a tensor with a gradient is refused, viewed or not: which views are alive may differ between ranks. A tensor without
one gets one when what is written to its memory has one; it is refused if it is a view or has views. Functions of torch,
such as ``quantile``, also change shapes of tensors that they have made: those have no views.

``x.data = y`` gives the DTensor the memory of another one. (In stock it changes nothing but the shape that the tensor
reports: the values that were put in place are lost.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import GetSetDescriptorType

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import dispatch
from .._torch.autograd import has_gradient, is_viewed
from ..errors import UnsupportedOperator
from .operands import dtensors, is_sharded

__all__ = ["CHANGES_OF_SHAPE", "assignable_data", "change_metadata", "change_of_program"]

CHANGES_OF_SHAPE = ("squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_")
"""Methods that change the shape of a tensor in place."""


class _Thread(threading.local):
    """How many of `CHANGES_OF_SHAPE` the program has called in this thread; whether on a tensor that has views."""

    num_changes = 0
    has_views = False


_here = _Thread()


def change_of_program(stock: Callable) -> Callable:
    """Return one of `CHANGES_OF_SHAPE` that tells that the program has called it, not a function of torch."""

    @functools.wraps(stock)
    def change(tensor: DTensor, *args: object, **kwargs: object) -> Tensor:
        _here.num_changes += 1
        _here.has_views = is_viewed(tensor)
        try:
            return stock(tensor, *args, **kwargs)
        finally:
            _here.num_changes -= 1

    return change


def change_metadata(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator that changes its first operand's metadata.

    Raises:
        UnsupportedOperator: it changes the storage, or has no form that returns a result; or the tensor has a gradient,
            and its views would get a wrong one.
    """
    functional = _functional(op) if torch.Tag.inplace_view in op.tags else None
    if functional is None:
        raise UnsupportedOperator.for_operands(
            op,
            tuple(dtensors(args, kwargs)),
            "it changes the tensor's shape or storage in place: use the form that returns a new tensor",
        )
    result = functional(*args, **kwargs)
    may_have_views = _here.num_changes or args[0]._is_view()
    is_changed = (result.shape, result.stride()) != (args[0].shape, args[0].stride())
    may_get_gradient = _here.num_changes and _here.has_views and torch.is_grad_enabled() and _is_differentiable(args[0])
    if is_changed and (may_get_gradient or (may_have_views and has_gradient(args[0]))):
        way_out = (
            "it changes the shape of a tensor with a gradient or views in place: use the form that returns a new tensor"
        )
        raise UnsupportedOperator.for_operands(op, args[:1], way_out)
    return dispatch.become(op, args, kwargs, result)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


@functools.cache
def _functional(op: dispatch.Op) -> dispatch.Op | None:
    """Return the out-of-place form of ``op``: ``transpose.int`` for ``transpose_``."""
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if packet is None or packet is op.overloadpacket:
        return None
    candidates = (getattr(packet, name) for name in packet.overloads())
    return next((c for c in candidates if _arguments(c) == _arguments(op) and dispatch.is_view(c)), None)


def _arguments(op: dispatch.Op) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in dispatch.schema(op).arguments]


def assignable_data(stock: GetSetDescriptorType) -> property:
    """Return the property ``data`` of DTensors: torch's own, to which a DTensor can be assigned.

    As on one device the tensors then share memory, unless the value has to be redistributed to the tensor's placements.
    A tensor of partial sums, or sharded over a dim that the value does not have, takes the value's placements, too.
    """

    def assign(tensor: DTensor, value: Tensor) -> None:
        if not isinstance(value, DTensor):
            raise TypeError(
                f"expected a DTensor to assign to `.data` of a DTensor of shape {tuple(tensor.shape)}, placements "
                f"{tensor.placements}, got {type(value).__name__}; distribute it with distribute_tensor(value, "
                "x.device_mesh, x.placements)"
            )
        if value.device_mesh != tensor.device_mesh:
            raise ValueError(
                f"expected a DTensor over the mesh {tensor.device_mesh} to assign to `.data`, got one over "
                f"{value.device_mesh}; bring it to that mesh with full_tensor() and distribute_tensor()"
            )
        given = dispatch.placements_of(tensor)
        fits = all(not p.is_partial() and not (is_sharded(p) and p.dim >= value.ndim) for p in given)
        placements = given if fits else dispatch.placements_of(value)
        local = dispatch.redistributed(value, placements, for_op="x.data = y")
        stock.__set__(tensor, value)
        dispatch.take_memory(tensor, local, dispatch.spec_like(dispatch.spec(tensor), placements, value))

    return property(stock.__get__, assign, doc=stock.__doc__)
