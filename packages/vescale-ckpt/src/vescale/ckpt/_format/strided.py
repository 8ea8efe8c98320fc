"""Parts of stored tensors: read a box of values that lie in row-major order at known strides; memory is bounded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

#: Reads the elements from a first one on, ``(first, length, into)``, block by block: in place where it can, if there is
#: a place, a contiguous tensor of them on the CPU. Yields the others, each with its place among the elements.
ReadRun = Callable[[int, int, torch.Tensor | None], Iterator[tuple[int, torch.Tensor]]]


@dataclass(frozen=True)
class Part:
    """A part of a stored tensor, and the run of its elements, in row-major order, that it lies in.

    Attributes:
        starts: first index of the part, per dim.
        sizes: of the part.
        strides: of the stored tensor.
        base: the element with index 0 in each dim.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    base: int = 0

    @property
    def first(self) -> int:
        """The first element of the run."""
        return self.base + sum(start * stride for start, stride in zip(self.starts, self.strides, strict=True))

    @property
    def length(self) -> int:
        """Count the elements of the run."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        """Whether the part is all of the run."""
        return self.length == math.prod(self.sizes)

    def halves(self) -> Iterator[tuple[Part, int, int, int]]:
        """Yield two parts of this one, each with the dim of the cut, and its start and size there."""
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        half = self.sizes[dim] // 2
        for start, size in ((0, half), (half, self.sizes[dim] - half)):
            starts, sizes = list(self.starts), list(self.sizes)
            starts[dim], sizes[dim] = starts[dim] + start, size
            yield Part(tuple(starts), tuple(sizes), self.strides, self.base), dim, start, size


def row_major(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements are in row-major order."""
    return tuple(math.prod(sizes[dim + 1 :]) for dim in range(len(sizes)))


def fill_part(target: torch.Tensor, part: Part, dtype: torch.dtype, limit: int, read_run: ReadRun) -> None:
    """Copy a part to a tensor of its sizes; what is not read in place has at most ``limit`` elements at a time."""
    for each, into in parts(part, target, limit):
        is_direct = each.is_run and into.is_contiguous()
        run = into.as_strided((into.numel(),), (1,)) if is_direct else None  # dims of size 1 may have any stride
        for at, values in read_run(each.first, each.length, run if _has_form(into, dtype) else None):
            if run is None and values.numel() == each.length:  # all of it
                into.copy_(values.as_strided(each.sizes, each.strides))
                break
            if run is None:
                run = torch.empty(each.length, dtype=dtype)
            run[at : at + values.numel()].copy_(values)
        else:
            if run is not None and not is_direct:
                into.copy_(run.as_strided(each.sizes, each.strides))


def _has_form(target: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether the memory of a tensor is that of values of a dtype on the CPU."""
    return target.device.type == "cpu" and target.dtype == dtype and not (target.is_conj() or target.is_neg())


def parts(part: Part, target: torch.Tensor, limit: int) -> Iterator[tuple[Part, torch.Tensor]]:
    """Cut a part, and the tensor that it goes to, until it is all of a run in both, or in one of ``limit`` elements."""
    if part.length <= limit or (part.is_run and target.is_contiguous()):
        yield part, target
        return
    for half, dim, start, size in part.halves():
        yield from parts(half, target.narrow(dim, start, size), limit)
