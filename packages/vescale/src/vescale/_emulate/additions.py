"""The order in which gloo adds: its all-reduce is a ring.

A flat tensor is cut into segments, equally many for each rank; the last ones may be short or empty::

    segment bytes    so that there are at least two for each rank, of at most 1 MiB
    part of rank r   segments [r * n, (r + 1) * n)

The part of rank ``r`` begins as the values of rank ``r - 1``, goes to ``r - 2``, which adds its own, and so on until
rank ``r`` adds its own last. Then the ranks pass the finished parts around.

A reduction to one rank is alike, but the segments of a long tensor are of 1 MiB.

Source: https://github.com/facebookincubator/gloo, ``gloo/allreduce.cc`` and ``gloo/reduce.cc``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["parts_of_ring", "ring"]

MAX_SEGMENT_BYTES = 2**20


def parts_of_ring(
    numel: int, element_size: int, num_ranks: int, *, full_segments: bool = False
) -> list[tuple[int, int]]:
    """Return ``(first, last + 1)`` of the elements of each rank's part.

    With ``full_segments`` all but the last segments of a long tensor are as long as they may be.
    """
    num_bytes = numel * element_size
    longest = MAX_SEGMENT_BYTES // element_size * element_size
    count = _up(max(-(-num_bytes // longest), 2 * num_ranks), num_ranks)
    is_long = -(-num_bytes // longest) > 2 * num_ranks
    segment = longest if full_segments and is_long else _up(-(-num_bytes // count), element_size)
    length = count // num_ranks * segment // element_size
    return [(min(rank * length, numel), min((rank + 1) * length, numel)) for rank in range(num_ranks)]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def ring(values: Sequence[Tensor], combine: Callable[[Tensor, Tensor], Tensor], *, to_one: bool = False) -> Tensor:
    """Return the reduction of flat tensors, one of each rank, as gloo makes it, for all ranks or ``to_one``."""
    size = len(values)
    out = torch.empty_like(values[0])
    parts = parts_of_ring(out.numel(), out.element_size(), size, full_segments=to_one)
    for rank, (first, last) in enumerate(parts):
        part = values[(rank - 1) % size][first:last]
        for step in range(2, size + 1):
            part = combine(values[(rank - step) % size][first:last], part)
        out[first:last] = part
    return out
