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

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from .._format.boxes import Box

MIN_CUT_BYTES = 16 * 1024
# Maximum fraction of a quota in one row; larger rows move the cut to a later dim with smaller rows.
ROW_FRACTION = 1 / 200


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of one tensor and the ranks that hold it.

    Attributes:
        name: the tensor's name.
        box: the box in the global tensor.
        num_bytes: size of the box in bytes.
        holders: ranks, ascending.
    """

    name: str
    box: Box
    num_bytes: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Write:
    """One write of a rank: ``box``, a part or all of the box ``held``."""

    name: str
    held: Box
    box: Box


def share_out(
    held: Sequence[HeldBox], *, world_size: int, min_cut_bytes: int = MIN_CUT_BYTES
) -> tuple[tuple[Write, ...], ...]:
    """Assign every box, or its parts, to its holders, and return the writes of each rank."""
    writes: list[list[Write]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    for holders, group in _by_holders(held).items():
        quotas = _fill([loads[rank] for rank in holders], sum(item.num_bytes for item in group))
        line = _Line(tuple(accumulate(quotas)), min_cut_bytes)
        for item in group:
            for index, box, num_bytes in line.assign(item):
                writes[holders[index]].append(Write(item.name, item.box, box))
                loads[holders[index]] += num_bytes
    return tuple(map(tuple, writes))


def _by_holders(held: Sequence[HeldBox]) -> Mapping[tuple[int, ...], list[HeldBox]]:
    groups: dict[tuple[int, ...], list[HeldBox]] = {}
    for item in held:
        groups.setdefault(item.holders, []).append(item)
    return dict(sorted(groups.items(), key=lambda entry: (len(entry[0]), entry[0])))


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

    def assign(self, item: HeldBox) -> list[tuple[int, Box, float]]:
        """Assign the next box and return its parts as ``(index of the holder, box, bytes)``."""
        start, self._position = self._position, self._position + item.num_bytes
        dim = self._dim_to_cut(item)
        if dim is None:
            return [(self._holder_at(start + item.num_bytes / 2), item.box, item.num_bytes)]
        num_rows = item.box.sizes[dim]
        row_bytes = item.num_bytes / num_rows
        cuts = [0, *self._rows_to_cut(start, num_rows, row_bytes), num_rows]
        parts = []
        for first, last in pairwise(cuts):
            middle = start + (first + last) / 2 * row_bytes
            parts.append((self._holder_at(middle), item.box.rows(dim, first, last), (last - first) * row_bytes))
        return parts

    def _holder_at(self, position: float) -> int:
        return min(bisect_right(self._ends, position), len(self._ends) - 1)

    def _dim_to_cut(self, item: HeldBox) -> int | None:
        """Return the first dim with small enough rows, else the longest dim; None if the box is not cut."""
        if len(self._ends) == 1 or item.num_bytes < 2 * self._min_cut_bytes:
            return None
        dims = [dim for dim, size in enumerate(item.box.sizes) if size > 1]
        fine = max(ROW_FRACTION * self._ends[-1] / len(self._ends), self._min_cut_bytes)
        for dim in dims:
            if item.num_bytes / item.box.sizes[dim] <= fine:
                return dim
        return max(dims, key=lambda d: item.box.sizes[d], default=None)

    def _rows_to_cut(self, start: float, num_rows: int, row_bytes: float) -> list[int]:
        cuts: list[int] = []
        smallest = self._min_cut_bytes / row_bytes
        for end in self._ends[:-1]:
            row = round((end - start) / row_bytes)
            if row - (cuts[-1] if cuts else 0) >= smallest and num_rows - row >= smallest:
                cuts.append(row)
        return cuts
