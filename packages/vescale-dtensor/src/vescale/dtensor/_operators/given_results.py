"""Operators that read memory to which they write.

On one device ``x.add_(x[:1])`` reads elements that it has just written: what it computes depends on the kernel, and
where both views are dense torch refuses it. A shard of few elements may be dense where the whole is not, so that some
ranks would refuse it and others wait. Here it is refused on all ranks, when the operator runs for the first time.

What an operator does to elements that share memory, as in ``x.unfold(0, 3, 1).mul_(2)``, also depends on the kernel,
and is refused but for fills.

``torch.sum(x, 0, out=x)`` reads its operand before it writes, and is an operator on a copy. ``torch.mm(x, y, out=x)``
reads it while it writes, and is refused.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import map_leaves
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .operands import dtensors, has_shared_elements, written_arguments

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
    read = [tensor for tensor in dtensors(args, kwargs) if id(tensor) not in places]
    for tensor, other in ((w, r) for w in written for r in read if _share_elements(w, r)):
        way_out = "it reads elements of the tensor that it writes to, through a view: clone() the view first"
        raise UnsupportedOperator.for_operands(op, (tensor, other), way_out)
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
        UnsupportedOperator: it writes to elements that share memory, not one value to all of them; or it is a product
            that writes to its own factor.
    """
    written = [tensor for tensor in written_arguments(op, args, kwargs) if isinstance(tensor, DTensor)]
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


def _share_elements(written: DTensor, read: DTensor) -> bool:
    """Return whether two different views have common elements. All ranks find the same, also where a shard is empty.

    The strides of an empty shard are those of a shard of one element.
    """
    if dispatch.storage_key(dispatch.local_tensor(written)) != dispatch.storage_key(dispatch.local_tensor(read)):
        return False
    first, second = map(_Place.of_view, (dispatch.local_tensor(written), dispatch.local_tensor(read)))
    if first == second or not written.numel() or not read.numel():
        return False
    if first.end <= second.begin or second.end <= first.begin:
        return False
    if first.itemsize != second.itemsize:
        return True
    marks = torch.zeros(max(first.end, second.end) // first.itemsize, dtype=torch.bool)
    first.elements(marks).fill_(True)
    return bool(second.elements(marks).any())


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where the elements of a view are in its memory; a dim of size 0 counts as one of size 1."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    @classmethod
    def of_view(cls, local: Tensor) -> _Place:
        shape = tuple(max(1, size) for size in local.shape)
        return cls(shape, tuple(local.stride()), local.storage_offset(), local.itemsize)

    @property
    def begin(self) -> int:
        """The position of the first byte."""
        return self.itemsize * self.offset

    @property
    def end(self) -> int:
        """The position after the last byte."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))
        return self.itemsize * (self.offset + reach + 1)

    def elements(self, memory: Tensor) -> Tensor:
        """Return the elements of other memory at this place."""
        return memory.as_strided(self.shape, self.strides, self.offset)
