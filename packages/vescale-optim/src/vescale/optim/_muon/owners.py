"""Balance the matrices of a model over ranks by what they cost: integers only."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["assign_owners", "matrix_cost"]


def matrix_cost(rows: int, cols: int) -> int:
    """Return the floating-point operations of one Newton-Schulz iteration: with n <= m, about 4 n^2 m + 2 n^3."""
    n, m = sorted((rows, cols))
    return 4 * n * n * m + 2 * n**3


def assign_owners(costs: Sequence[int], num_owners: int, loads: Sequence[int] | None = None) -> tuple[int, ...]:
    """Balance jobs: the most expensive first, each to the owner with the least to do; ties to the lowest number.

    The largest sum is at most 4/3 - 1/(3 num_owners) times the best possible, if nobody has anything to do yet.

    Args:
        costs: What each job costs.
        num_owners: Number of owners.
        loads: What each of them has to do already.

    Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Raises:
        ValueError: If ``num_owners`` is not positive or a cost is negative.

    Example:
        >>> assign_owners([1, 5, 4, 3], num_owners=2)
        (0, 0, 1, 1)
    """
    if num_owners < 1 or any(cost < 0 for cost in costs):
        raise ValueError(f"num_owners must be positive and costs not negative, got {num_owners} and {list(costs)}")
    # Operations, then number of jobs: for jobs that cost nothing.
    heap = [(load, 0, owner) for owner, load in enumerate(loads or [0] * num_owners)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        load, num_jobs, owner = heap[0]
        owners[job] = owner
        heapq.heapreplace(heap, (load + costs[job], num_jobs + 1, owner))
    return tuple(owners)
