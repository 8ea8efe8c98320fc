"""Operators that read memory to which they write.

On one device ``x.add_(x[:1])`` reads elements that it has just written: what it computes depends on the kernel, and
where both views are dense torch refuses it. A shard of few elements may be dense where the whole is not, so that some
ranks would refuse it and others wait. And what is redistributed is read before anything is written. Here it is refused
on all ranks: when the operator runs for the first time on such operands, and whenever it redistributes one
(`overlaps.py`).

What an operator does to elements that share memory, as in ``x.unfold(0, 3, 1).mul_(2)``, also depends on the kernel,
and is refused but for fills.

``torch.sum(x, 0, out=x)`` reads its operand before it writes, and is an operator on a copy. ``torch.mm(x, y, out=x)``
reads it while it writes, and is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import map_leaves
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .operands import dtensors, has_shared_elements, written_arguments
from .overlaps import refuse_overlaps

__all__ = ["apart", "check_written"]


def apart(op: dispatch.Op, args: tuple, kwargs: dict, _schema: object) -> object:
    """Run an operator on copies of operands that are its results, too; else return NotImplemented.

    Raises:
        UnsupportedOperator: it reads elements to which it writes, or writes to elements that share memory.
    """
    if not dispatch.schema(op).is_mutable:
        return NotImplemented
    written = [tensor for tensor in written_arguments(op, args, kwargs) if isinstance(tensor, DTensor)]
    places = {id(tensor) for tensor in written}
    check_written(op, args, kwargs)
    names = {name for _, name in dispatch.written_arguments(op)}
    given = {name: value for name, value in kwargs.items() if name in names}
    is_read = any(id(tensor) in places for tensor in dtensors(args, {}))
    if not given or not is_read or torch.Tag.pointwise in op.tags:
        return NotImplemented
    copies = map_leaves(lambda tensor: tensor.clone() if id(tensor) in places else tensor, args, Tensor)
    return op(*copies, **kwargs)


def check_written(op: dispatch.Op, args: tuple, kwargs: dict) -> None:
    """Refuse a write after which the values depend on the kernel.

    Raises:
        UnsupportedOperator: it writes to elements that share memory, not one value to all of them; it reads some of
            these elements, too, through another view; or it is a product that writes to its own factor.
    """
    written = [tensor for tensor in written_arguments(op, args, kwargs) if isinstance(tensor, DTensor)]
    refuse_overlaps(op, written, dtensors(args, kwargs))
    name = op.overloadpacket.__name__
    if name not in FILLS and any(map(has_shared_elements, written)):
        way_out = "it writes to elements that share memory, as those of an expanded tensor do: clone() it first"
        raise UnsupportedOperator.for_operands(op, written, way_out)
    first = READ_WHILE_WRITING.get(name.removesuffix("_"))
    factors = [] if first is None else [factor for factor in args[first:] if isinstance(factor, DTensor)]
    if any(factor is tensor or _are_same(factor, tensor) for factor in factors for tensor in written):
        way_out = "it writes to a tensor while it reads it: use the form that returns a result"
        raise UnsupportedOperator.for_operands(op, written, way_out)


FILLS = frozenset({"_foreach_zero_", "fill_", "zero_"})
"""Operators that write one value to all elements."""

READ_WHILE_WRITING = {"mm": 0, "bmm": 0, "mv": 0, "masked_scatter": 1} | dict.fromkeys(
    ("_addmm_activation", "addbmm", "addmm", "addmv", "baddbmm"), 1
)
"""Operators that read their operands, from a position on, after they have begun to write."""


def _are_same(tensor: DTensor, other: DTensor) -> bool:
    first, second = dispatch.local_tensor(tensor), dispatch.local_tensor(other)
    return dispatch.storage_key(first) == dispatch.storage_key(second) and tensor.numel() > 0
