"""Python values of sharded tensors: ``x.sum().item()``, ``if mask.any():``, ``torch.equal(x, y)``, ``x.tolist()``.

Stock DTensor reads this rank's local number. For a partial sum that is only a part of the value, so ranks silently take
different branches. Here the value is reduced first. That is an implicit redistribution, refused where those are
refused. Two tensors are compared shard by shard, and the ranks of their mesh reduce the answer. (Stock DTensor reduces
over all ranks of the program, which hangs on a sub-mesh, and it cannot compare tensors of different shapes.)

Stock refuses ``x.tolist()``, as of every subclass of `Tensor`; here it is the list of all values, on every rank.

On a rank outside the mesh these operators are refused: it holds no values and takes part in no collective of the mesh.

Complex numbers beside sharded tensors: some operators take them as tensors (``x * 1j``), others as numbers
(``x ** 1j``), and stock's cache of sharding decisions cannot hold a complex number. There it becomes a tensor: in the
method of a DTensor, or in a handler, which costs time at every call; so ``torch.pow(x, 1j)`` has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.overrides import handle_torch_function, has_torch_function

from .._torch import dispatch
from ..errors import UnsupportedOperator
from .gather import gather
from .operands import check_operands

__all__ = ["TAKING_NUMBERS", "as_lists", "of_number", "scalar_handlers", "taking_complex_numbers"]

TAKING_NUMBERS = ("__eq__", "__ne__", "__pow__", "__rpow__", "__rsub__", "eq", "float_power", "ne", "pow", "pow_")
"""Methods that pass a number to an operator as it is."""

OF_NUMBERS = (
    *("eq.Scalar", "eq_.Scalar", "ne.Scalar", "ne_.Scalar", "pow.Scalar", "rsub.Scalar", "lerp.Scalar", "lerp_.Scalar"),
    *("masked_fill.Scalar", "masked_fill_.Scalar", "scatter.value", "scatter_.value", "new_full"),
    *("index_fill.int_Scalar", "index_fill_.int_Scalar"),
)
"""Operators that take a number as it is, and are called otherwise than by those methods."""


def scalar_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of ``item()``, of ``torch.equal``, and of products with numbers that torch itself forms.

    ``bool()``, ``int()`` and ``float()`` call ``item()``.
    """
    aten = torch.ops.aten
    taking = {op: of_number for name in OF_NUMBERS if (op := dispatch.overload(name)) is not None}
    special = {aten._local_scalar_dense.default: _item, aten.equal.default: _equal, aten.mul.Scalar: _times_number}
    return taking | special


def taking_complex_numbers(stock: Callable) -> Callable:
    """Return the method of a DTensor with a complex number as a 0-dim tensor of the dtype of the result."""

    @functools.wraps(stock)
    def method(self: DTensor, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and type(args[0]) is complex:
            args = (_as_tensor(args[0], self, torch.complex128 if stock.__name__ == "float_power" else None),)
        return stock(self, *args, **kwargs)

    return method


def as_lists(stock: Callable) -> Callable:
    """Return the method ``tolist`` of a DTensor: the global values as a number or as nested lists."""

    @functools.wraps(stock)
    def tolist(self: DTensor) -> object:
        if has_torch_function((self,)):
            return handle_torch_function(DTensor.tolist, (self,), self)
        _refuse_outside(torch.ops.aten._local_scalar_dense.default, self)
        return dispatch.redistributed(self, [Replicate()] * self.device_mesh.ndim, for_op="tolist").tolist()

    return tolist


def _as_tensor(number: complex, operand: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a number as a 0-dim tensor, of the dtype that it gives the result of an operator with ``operand``."""
    return torch.tensor(number, dtype=dtype or torch.result_type(operand, number), device=operand.device)


def of_number(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator with a complex number as the one with a tensor in its place, or on full operands."""
    if not any(isinstance(arg, complex) for arg in args):
        return dispatch.stock_dispatch(op, args, kwargs)
    form = dispatch.form_with_tensors(op)
    if form is None:
        return gather(op, args, kwargs)
    operand = next(arg for arg in args if isinstance(arg, DTensor))
    return form(*(_as_tensor(arg, operand) if isinstance(arg, complex) else arg for arg in args), **kwargs)


def _times_number(_op: dispatch.Op, args: tuple, _kwargs: dict) -> object:
    """Multiply by a number as torch does: a real one is not rounded to the dtype of the tensor before.

    Torch's formulas of gradients and its complex convolutions call this operator.
    """
    tensor, number = args
    return torch.ops.aten.mul.Tensor(tensor, _as_tensor(number, tensor) if isinstance(number, complex) else number)


def _item(op: dispatch.Op, args: tuple, kwargs: dict) -> float | int | bool | complex:
    (tensor,) = args
    _refuse_outside(op, tensor)
    return op(dispatch.redistributed(tensor, [Replicate()] * tensor.device_mesh.ndim, for_op=op), **kwargs)


def _equal(op: dispatch.Op, args: tuple, kwargs: dict) -> bool:
    known = next(tensor for tensor in args if isinstance(tensor, DTensor))
    mesh = known.device_mesh
    check_operands(op, args, kwargs)
    _refuse_outside(op, known)
    if args[0].shape != args[1].shape:
        return False
    whole = [Replicate()] * mesh.ndim
    first, second = (t if isinstance(t, DTensor) else dispatch.wrap(t, mesh, whole, t) for t in args)
    placements = [Replicate() if p.is_partial() else p for p in first.placements]
    parts = [dispatch.redistributed(tensor, placements, for_op=op) for tensor in (first, second)]
    same = torch.tensor(int(op(*parts)), device=parts[0].device)
    votes = dispatch.wrap(same, mesh, [Partial("min")] * mesh.ndim, same)
    return bool(dispatch.redistributed(votes, whole, for_op=None).item())


def _refuse_outside(op: dispatch.Op, tensor: DTensor) -> None:
    if tensor.device_mesh.get_coordinate() is None:
        reason = "this rank is not in its mesh, so that it cannot know the value: ask for it inside only"
        raise UnsupportedOperator.for_operands(op, (tensor,), reason)
