"""Views that an operator reads and that overlap what it writes: refused, since what they hold depends on the kernel.

The first run of an operator on its kind of operands is checked by `given_results.apart`. Later runs take a cached
decision, and those that redistribute an operand are checked here: the operand is read whole before anything is written,
where one device reads and writes element by element.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import dispatch
from ..errors import UnsupportedOperator

__all__ = ["Place", "overlap", "raise_overlap", "refuse_overlaps"]


def refuse_overlaps(op: dispatch.Op, written: Iterable[DTensor], operands: Iterable[DTensor]) -> None:
    """Refuse operands that are other views of elements that an operator writes.

    Raises:
        UnsupportedOperator: there is one.
    """
    written = list(written)
    ids = {id(tensor) for tensor in written}
    read = [tensor for tensor in operands if id(tensor) not in ids]
    for tensor, other in ((w, r) for w in written for r in read if _share_elements(w, r)):
        raise_overlap(op, tensor, other)


def raise_overlap(op: dispatch.Op, written: DTensor, read: DTensor) -> None:
    """Raise the error of two views that overlap.

    Raises:
        UnsupportedOperator: always.
    """
    way_out = "it reads elements of the tensor that it writes to, through a view: clone() the view first"
    raise UnsupportedOperator.for_operands(op, (written, read), way_out)


def _share_elements(written: DTensor, read: DTensor) -> bool:
    """Return whether two different views have common elements. All ranks find the same, also where a shard is empty.

    The strides of an empty shard are those of a shard of one element.
    """
    if dispatch.storage_key(dispatch.local_tensor(written)) != dispatch.storage_key(dispatch.local_tensor(read)):
        return False
    if not written.numel() or not read.numel():
        return False
    return overlap(*map(Place.of_view, (dispatch.local_tensor(written), dispatch.local_tensor(read))))


def overlap(first: Place, second: Place) -> bool:
    """Return whether two places in one memory are different and have a common element."""
    if first == second or first.end <= second.begin or second.end <= first.begin:
        return False
    if first.itemsize != second.itemsize:
        return True
    marks = torch.zeros(max(first.end, second.end) // first.itemsize, dtype=torch.bool)
    first.elements(marks).fill_(True)
    return bool(second.elements(marks).any())


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the elements of a view are in its memory; a dim of size 0 counts as one of size 1."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    itemsize: int

    @classmethod
    def of_view(cls, local: Tensor) -> Place:
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
