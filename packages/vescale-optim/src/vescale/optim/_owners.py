"""Which rank orthogonalizes which matrix, and which elements travel for it.

Every matrix has one owner among the coords of the data-parallel axis. Its elements lie on the coords as ZeRO has cut
the flat buckets, without regard to matrices; each coord sends the owner what it holds, and gets the result back along
the same way:

    held by       coord 0 | coord 1 | coord 2            coord 1 owns B, coord 2 owns A
    matrices      A A A A   A A B B   B B B .
    sent          A: 0 -> 2, 1 -> 2      B: 1 -> 1, 2 -> 1

Everything here is integers: no tensors and no process group.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Holding", "Matrix", "Span", "assign_owners", "cut_spans", "holdings", "matrix_cost"]


@dataclass(frozen=True)
class Matrix:
    """A matrix of the model, as far as this rank's tensor-parallel group is concerned.

    Attributes:
        tensor: Number of the tensor that it is in.
        index: Its position in a stack of matrices; 0 for a matrix alone.
        start: Its elements are ``[start, stop)`` of the tensor's flat local part.
        stop: See ``start``.
        owner: Coord that orthogonalizes it.
    """

    tensor: int
    index: int
    start: int
    stop: int
    owner: int


@dataclass(frozen=True)
class Holding:
    """Elements ``[start, stop)`` of a tensor's flat local part, which are with ``coord``."""

    coord: int
    start: int
    stop: int


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of a tensor's flat local part: those of one matrix that are with one coord.

    Attributes:
        matrix: Number of the matrix.
        holder: Coord that has them.
        start: See above.
        stop: See above.
    """

    matrix: int
    holder: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def matrix_cost(rows: int, cols: int) -> int:
    """Return the floating-point operations of one Newton-Schulz iteration: with n <= m, about 4 n^2 m + 2 n^3."""
    n, m = sorted((rows, cols))
    return 4 * n * n * m + 2 * n**3


def assign_owners(costs: Sequence[int], num_owners: int) -> tuple[int, ...]:
    """Balance jobs: the most expensive first, each to the owner with the least to do; ties to the lowest number.

    The largest sum is at most 4/3 - 1/(3 num_owners) times the best possible.

    Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Raises:
        ValueError: If ``num_owners`` is not positive or a cost is negative.

    Example:
        >>> assign_owners([1, 5, 4, 3], num_owners=2)
        (0, 0, 1, 1)
    """
    if num_owners < 1 or any(cost < 0 for cost in costs):
        raise ValueError(f"num_owners must be positive and costs not negative, got {num_owners} and {list(costs)}")
    loads = [
        (0, 0, owner) for owner in range(num_owners)
    ]  # operations, then number of jobs: for jobs that cost nothing
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        load, num_jobs, owner = loads[0]
        owners[job] = owner
        heapq.heapreplace(loads, (load + costs[job], num_jobs + 1, owner))
    return tuple(owners)


def holdings(start: int, numel: int, shard_numel: int) -> list[Holding]:
    """Return who holds what of a tensor at ``[start, start + numel)`` of a buffer that is cut into equal shards.

    Example:
        >>> holdings(3, 6, shard_numel=4)
        [Holding(coord=0, start=0, stop=1), Holding(coord=1, start=1, stop=5), Holding(coord=2, start=5, stop=6)]
    """
    if numel == 0:
        return []
    coords = range(start // shard_numel, (start + numel - 1) // shard_numel + 1)
    cuts = [0, *(coord * shard_numel - start for coord in coords[1:]), numel]
    return [Holding(coord, a, b) for coord, (a, b) in zip(coords, itertools.pairwise(cuts), strict=True)]


def cut_spans(matrices: Sequence[Matrix], holdings: Sequence[Sequence[Holding]]) -> list[Span]:
    """Cut every matrix where one coord's part ends and the next begins, in order of matrix and holder.

    Args:
        matrices: Matrices, in increasing order of tensor and position.
        holdings: For each tensor the parts that are not empty, in increasing order.

    Raises:
        ValueError: If the holdings do not cover a matrix.
    """
    spans = []
    for number, matrix in enumerate(matrices):
        parts = holdings[matrix.tensor]
        covered = matrix.start
        for part in parts[bisect.bisect_right(parts, matrix.start, key=lambda part: part.stop) :]:
            if part.start > covered or covered >= matrix.stop:
                break
            stop = min(part.stop, matrix.stop)
            spans.append(Span(number, part.coord, covered, stop))
            covered = stop
        if covered < matrix.stop:
            raise ValueError(f"the parts {list(holdings[matrix.tensor])} do not cover {matrix}")
    return spans
