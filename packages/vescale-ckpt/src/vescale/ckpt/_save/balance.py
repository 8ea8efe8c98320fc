"""Distribute replicated boxes over the ranks that hold them, so that all ranks write the same number of bytes.

Boxes with one holder are that rank's fixed load. The others form groups with the same holders, taken in order of the
number of holders. For each group the loads of its holders are raised to a common level (water filling), which gives
every holder a quota. The group's boxes, laid end to end, are cut at the quotas (McNaughton's wrap-around rule):

    loads before   quotas        boxes of the group on one line
    r0 ####        r0 ..         |---- A ----|-- B --|---- C ----|
    r1 ##          r1 ....       |r0 |   r1   |      r2          |
    r2             r2 ......          ^ A is cut here, by rows; B and C are not cut

The balance does not depend on the sizes of single tensors (an embedding as large as ten layers is cut), and there is at
most one cut per holder and group. A greedy assignment of full tensors to the least loaded rank has no such bound. Cuts
fall between rows of a dim, and no part is smaller than ``min_cut_bytes``.

Source: R. McNaughton, "Scheduling with deadlines and loss functions", Management Science 6(1), 1959.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from .._format.boxes import Box

MIN_CUT_BYTES = 16 * 1024
# Maximum fraction of a quota in one row; larger rows move the cut to a later dim with smaller rows.
ROW_FRACTION = 1 / 200


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a rank: ``box``, a part or all of the box ``held``."""

    name: str
    held: Box
    box: Box


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a box, for one of its holders.

    Attributes:
        holder: index of the holder in its group.
        dim: along which the box is cut; None if the part is all of it.
        first: first row of the part along this dim, in the box.
        last: the row after its last one.
    """

    holder: int
    dim: int | None = None
    first: int = 0
    last: int = 0


@dataclass(frozen=True)
class Assignment:
    """How a group shares out its boxes: the parts of each box, and the bytes of each holder."""

    parts: list[list[Part]]
    num_bytes: list[float]


def share_group(
    boxes: Sequence[tuple[tuple[int, ...], int]], loads: Sequence[float], *, min_cut_bytes: int = MIN_CUT_BYTES
) -> Assignment:
    """Assign the boxes of a group, or parts of them, to its holders.

    Args:
        boxes: sizes, and bytes of an element, of each box, in order.
        loads: bytes that each holder writes otherwise.
        min_cut_bytes: minimum bytes of a part of a box.
    """
    quotas = _fill(loads, sum(prod(sizes) * item_bytes for sizes, item_bytes in boxes))
    line, added = _Line(tuple(accumulate(quotas)), min_cut_bytes), [0.0] * len(loads)
    parts = []
    for sizes, item_bytes in boxes:
        own = line.assign(sizes, prod(sizes) * item_bytes)
        parts.append([part for part, _ in own])
        for part, num_bytes in own:
            added[part.holder] += num_bytes
    return Assignment(parts, added)


def _fill(loads: Sequence[float], amount: float) -> list[float]:
    """Return the share of ``amount`` that raises each load to a common level."""
    lowest_first = sorted(loads)
    total, level = amount, 0.0
    for count, load in enumerate(lowest_first, 1):
        total += load
        level = total / count
        if count == len(loads) or level <= lowest_first[count]:
            break
    return [max(0.0, level - load) for load in loads]


class _Line:
    """The boxes of one group, laid end to end and cut at the ends of the holders' quotas."""

    def __init__(self, ends: Sequence[float], min_cut_bytes: int) -> None:
        self._ends = ends
        self._min_cut_bytes = min_cut_bytes
        self._position = 0.0

    def assign(self, sizes: tuple[int, ...], num_bytes: int) -> list[tuple[Part, float]]:
        """Assign the next box and return its parts, with the bytes of each."""
        start, self._position = self._position, self._position + num_bytes
        dim = self._dim_to_cut(sizes, num_bytes)
        if dim is None:
            return [(Part(self._holder_at(start + num_bytes / 2)), num_bytes)]
        num_rows = sizes[dim]
        row_bytes = num_bytes / num_rows
        cuts = [0, *self._rows_to_cut(start, num_rows, row_bytes), num_rows]
        parts = []
        for first, last in pairwise(cuts):
            middle = start + (first + last) / 2 * row_bytes
            parts.append((Part(self._holder_at(middle), dim, first, last), (last - first) * row_bytes))
        return parts

    def _holder_at(self, position: float) -> int:
        return min(bisect_right(self._ends, position), len(self._ends) - 1)

    def _dim_to_cut(self, sizes: tuple[int, ...], num_bytes: int) -> int | None:
        """Return the first dim with small enough rows, else the longest dim; None if the box is not cut."""
        if len(self._ends) == 1 or num_bytes < 2 * self._min_cut_bytes:
            return None
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        fine = max(ROW_FRACTION * self._ends[-1] / len(self._ends), self._min_cut_bytes)
        for dim in dims:
            if num_bytes / sizes[dim] <= fine:
                return dim
        return max(dims, key=lambda d: sizes[d], default=None)

    def _rows_to_cut(self, start: float, num_rows: int, row_bytes: float) -> list[int]:
        cuts: list[int] = []
        smallest = self._min_cut_bytes / row_bytes
        for end in self._ends[:-1]:
            row = round((end - start) / row_bytes)
            if row - (cuts[-1] if cuts else 0) >= smallest and num_rows - row >= smallest:
                cuts.append(row)
        return cuts
