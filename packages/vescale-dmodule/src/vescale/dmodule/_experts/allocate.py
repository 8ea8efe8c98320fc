"""Allocate experts to ranks: allocations, and strategies that choose one.

An allocation gives every expert a slot, and a rank the slots of its block: experts ``e`` with
``slot // experts_per_rank == rank``. Every rank holds equally many, in ascending order. The router and the order in
which outputs are added use the numbers of experts, not their slots. So an allocation changes where an expert is
computed and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from vescale.dtensor.extension import NonNegative, checked

__all__ = [
    "Allocation",
    "ExpertAllocator",
    "LoadBalancingAllocator",
    "StaticAllocator",
    "check_allocation",
    "from_ranks",
    "imbalance",
    "initial_allocation",
]

Allocation = tuple[int, ...]


def initial_allocation(num_experts: int) -> Allocation:
    """Return the allocation in which experts lie in order: slot ``e`` for expert ``e``."""
    return tuple(range(num_experts))


def from_ranks(ranks: Sequence[int], num_ranks: int) -> Allocation:
    """Return the allocation that puts expert ``e`` on rank ``ranks[e]``.

    Raises:
        ValueError: ranks do not hold equally many experts.

    Example:
        >>> from_ranks([1, 0, 0, 1], 2)
        (2, 0, 1, 3)
    """
    per_rank = len(ranks) // num_ranks
    held = [[expert for expert, owner in enumerate(ranks) if owner == rank] for rank in range(num_ranks)]
    sizes = [len(experts) for experts in held]
    if len(ranks) % num_ranks or sizes != [per_rank] * num_ranks:
        raise ValueError(f"expected {len(ranks)} / {num_ranks} experts on every rank, got {sizes}; use equal numbers")
    slots = {expert: slot for slot, expert in enumerate(expert for experts in held for expert in experts)}
    return tuple(slots[expert] for expert in range(len(ranks)))


def check_allocation(allocation: Sequence[int], num_experts: int, num_ranks: int) -> Allocation:
    """Return ``allocation`` as a tuple.

    Raises:
        ValueError: it is no permutation of the slots, or the experts of a rank are not in ascending order.
    """
    if sorted(allocation) != list(range(num_experts)):
        raise ValueError(
            f"expected a permutation of the slots of {num_experts} experts, got {allocation}; use each slot once"
        )
    per_rank = num_experts // num_ranks
    if from_ranks([slot // per_rank for slot in allocation], num_ranks) != tuple(allocation):
        raise ValueError(f"expected experts of one rank in ascending order, got {tuple(allocation)}; use from_ranks")
    return tuple(allocation)


def imbalance(loads: Sequence[int], allocation: Allocation, num_ranks: int) -> float:
    """Return the load of the busiest rank over the mean: 1 is perfect balance, and so is no load.

    Example:
        >>> imbalance([6, 2, 0, 0], (0, 1, 2, 3), 2)
        2.0
    """
    per_rank = len(allocation) // num_ranks
    totals = [0] * num_ranks
    for expert, slot in enumerate(allocation):
        totals[slot // per_rank] += loads[expert]
    return max(totals) * num_ranks / sum(totals) if sum(totals) else 1.0


@runtime_checkable
class ExpertAllocator(Protocol):
    """A strategy that chooses an allocation.

    Every rank calls it with the same arguments. The result must depend on them alone, so that all ranks agree.

    Attributes:
        needs_loads: whether the experts count the tokens that they get; otherwise ``loads`` are zero.
    """

    needs_loads: bool

    def allocate(self, loads: Sequence[int], current: Allocation, num_ranks: int) -> Allocation:
        """Return the next allocation.

        Args:
            loads: pairs that each expert got since the last call, on all ranks together. A forward that runs again,
                for recomputation or a recording, counts again.
            current: the allocation now.
            num_ranks: ranks that the experts are spread over; it divides their number.
        """


@checked
@dataclass(frozen=True)
class StaticAllocator:
    """Experts stay in order: expert ``e`` on rank ``e // experts_per_rank``."""

    needs_loads: bool = False

    def allocate(self, loads: Sequence[int], current: Allocation, num_ranks: int) -> Allocation:  # noqa: ARG002
        """See :class:`ExpertAllocator`."""
        return initial_allocation(len(current))


@checked
@dataclass(frozen=True)
class LoadBalancingAllocator:
    """Spread the load evenly: the heaviest expert first, each to the least loaded rank that has room.

    At most ``4 / 3`` of the best possible maximum without the limit on room (Graham 1969, list scheduling in the order
    of length). Experts move only if that is worth it.

    Attributes:
        threshold: keep the current allocation unless its imbalance falls by more than this (0.1: 10% of the mean).
    """

    threshold: NonNegative = 0.1
    needs_loads: bool = True

    def allocate(self, loads: Sequence[int], current: Allocation, num_ranks: int) -> Allocation:
        """See :class:`ExpertAllocator`.

        Example:
            >>> LoadBalancingAllocator().allocate([9, 8, 1, 1], (0, 1, 2, 3), 2)
            (0, 2, 3, 1)
        """
        per_rank = len(loads) // num_ranks
        totals, room, ranks = [0] * num_ranks, [per_rank] * num_ranks, [0] * len(loads)
        for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
            rank = min((r for r in range(num_ranks) if room[r]), key=lambda r: (totals[r], r))
            ranks[expert] = rank
            totals[rank] += loads[expert]
            room[rank] -= 1
        chosen = from_ranks(ranks, num_ranks)
        gain = imbalance(loads, current, num_ranks) - imbalance(loads, chosen, num_ranks)
        return chosen if gain > self.threshold else current
