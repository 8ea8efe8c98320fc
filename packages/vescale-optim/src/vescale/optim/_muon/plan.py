"""Which rank orthogonalizes which matrix, and what is sent for it: integers only, equal on all ranks without
communication.

The ranks of a matrix's home (`layout.py`) have parts or copies of it; one of them is its **owner**. Parts are sent to
the owner, and the home's other ranks get their parts of the result back:

    tp 0, dp 0   A A B B        owner of A        A: parts from the ranks with the owner's coords on axes that copy
    tp 0, dp 1   A A B B        owner of B           results to all
    tp 1, dp 0   A A B B
    tp 1, dp 1   A A B B

Homes that lie within another share its collectives (a **sharing**): a step has two collectives per sharing, for any
number of matrices. Owners are balanced by cost, home by home, the large ones first. A smaller home starts from the
loads that its ranks have from larger ones, which all of its ranks can compute. So the plan of a rank depends only on
inputs that all ranks concerned have; a stack of experts, for example, may be longer on other ranks. Owners are chosen
once, for all parameters. The set of gradients in a step changes what is sent, not which rank owns.

A single matrix that every rank of its home holds in full is iterated on each: an owner would save no time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from .._ranks.axis import Axis
from .._ranks.grid import Grid, Ranks
from .layout import Cell, MatrixLayout

__all__ = ["Job", "Routes", "Sharing", "Span", "assign_owners", "matrix_cost", "share_matrices"]

Home = frozenset[Ranks]

#: Number of routes that are kept, one for each set of parameters that had gradients in a step.
_MAX_ROUTES = 16


@dataclass(frozen=True, eq=False)
class Job:
    """A matrix to orthogonalize.

    Attributes:
        tensor: Number of the parameter.
        index: Its position in this rank's stack of matrices; 0 for a single matrix.
        layout: Where its elements are.
        owner: Place of its owner; -1 if this rank computes it for itself.
    """

    tensor: int
    index: int
    layout: MatrixLayout
    owner: int = -1


@dataclass(frozen=True)
class Span:
    """Elements ``[start, stop)`` of a flat cell of a matrix.

    Attributes:
        job: The matrix.
        cell: The cell.
        start: First element.
        stop: Past the last element.
    """

    job: Job
    cell: Cell
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def is_full(self) -> bool:
        """Whether it is the full matrix."""
        rows, cols = self.job.layout.shape
        return self.numel == rows * cols


@dataclass(frozen=True)
class Routes:
    """What this rank sends and receives in a step, by place, in an order that both sides compute; nothing goes to
    itself.

    Attributes:
        sent: Its parts, to owners.
        held: Parts of the matrices that it owns, from their holders, including itself.
        owned: The matrices that it owns.
        returned: Parts of their results, to holders.
        awaited: Results of its parts, from owners, including itself.
    """

    sent: list[list[Span]]
    held: list[list[Span]]
    owned: list[Job]
    returned: list[list[Span]]
    awaited: list[list[Span]]


class Sharing:
    """Ranks that share matrices.

    Args:
        axes: Their axes.
        layouts: The matrices' layouts, by number of the parameter; none of their homes has other axes.

    Attributes:
        grid: The ranks.
        brings: Whether any matrix must be brought to its owner.
        is_copied: Whether every rank has all matrices in full.
    """

    def __init__(self, axes: Sequence[Axis], layouts: dict[int, MatrixLayout]):
        self.grid = Grid(axes)
        # All parameters count, also those without a matrix on this rank: all ranks must make the same calls.
        self.brings = not all(layout.is_copied for layout in layouts.values())
        self.is_copied = not self.brings and all(_home(layout) == set(self.grid.axes) for layout in layouts.values())
        self._jobs = self._assign(layouts)
        self._routes: dict[frozenset[int], Routes] = {}

    def _assign(self, layouts: dict[int, MatrixLayout]) -> list[Job]:
        done: dict[Home, dict[int, int]] = {}
        jobs = []
        for home in sorted({_home(layout) for layout in layouts.values()}, key=len, reverse=True):
            places = self.grid.places([self.grid.axes[ranks] for ranks in home])
            before = [sum(loads[place] for other, loads in done.items() if other > home) for place in places]
            ours = [(n, layout) for n, layout in layouts.items() if _home(layout) == home]
            slots = [(number, index, layout) for number, layout in ours for index in range(layout.count)]
            costs = [matrix_cost(*layout.shape) for _, _, layout in slots]
            loads = done[home] = dict.fromkeys(places, 0)
            for slot, cost, owner in zip(slots, costs, assign_owners(costs, len(places), before), strict=True):
                jobs.append(Job(*slot, places[owner]))
                loads[places[owner]] += cost
        return sorted(jobs, key=lambda job: (job.tensor, job.index))

    def describe(self) -> str:
        """Return the description that all ranks must agree on, as lines."""
        shared = {job.layout.fqn: job for job in self._jobs if _home(job.layout) == set(self.grid.axes)}
        return "\n".join(str(job.layout) for job in shared.values())

    def routes(self, used: frozenset[int]) -> Routes:
        """Return the routes of a step in which the parameters with these numbers have gradients."""
        if used not in self._routes:
            if len(self._routes) >= _MAX_ROUTES:  # a model that uses other parameters in every step
                self._routes.clear()
            self._routes[used] = self._route([job for job in self._jobs if job.tensor in used])
        return self._routes[used]

    def _route(self, jobs: Sequence[Job]) -> Routes:
        here, num_places = self.grid.place, len(self.grid.coords)
        sent, held, returned, awaited = ([[] for _ in range(num_places)] for _ in range(4))
        owned = [job for job in jobs if job.owner == here]
        for job in jobs:
            span = self._span(job, here)
            if span.numel:
                awaited[job.owner].append(span)
                if job.owner != here and self._brings(job, here):
                    sent[job.owner].append(span)
        for job in owned:
            for place in self.grid.places(job.layout.home):
                span = self._span(job, place)
                if span.numel and place != here:
                    returned[place].append(span)
                if span.numel and self._brings(job, place):
                    held[place].append(span)
        return Routes(sent, held, owned, returned, awaited)

    def _span(self, job: Job, place: int) -> Span:
        coords = self.grid.coords[place]
        return Span(job, job.layout.cell(coords), *job.layout.held(job.index, coords))

    def _brings(self, job: Job, place: int) -> bool:
        """Return whether the part at a place is sent to the owner; of several copies, the nearest one is."""
        holder, owner = self.grid.coords[place], self.grid.coords[job.owner]
        return all(holder[axis.ranks] == owner[axis.ranks] for axis in job.layout.copying)


def share_matrices(layouts: Sequence[MatrixLayout]) -> tuple[list[Job], list[Sharing]]:
    """Return the matrices that this rank orthogonalizes for itself, and all others by the ranks that share them.

    Args:
        layouts: The layout of each parameter; the same parameters in the same order on all ranks that share one.
    """
    homes = [_home(layout) for layout in layouts]
    by_itself = {n for n, layout in enumerate(layouts) if not homes[n] or _is_repeated(layout, homes.count(homes[n]))}
    jobs = [Job(n, index, layouts[n]) for n in sorted(by_itself) for index in range(layouts[n].count)]
    left = {home: n for n, home in reversed(list(enumerate(homes))) if n not in by_itself}
    largest = [home for home in sorted(left, key=left.get) if not any(home < other for other in left)]
    members: dict[Home, dict[int, MatrixLayout]] = {home: {} for home in largest}
    for n, layout in enumerate(layouts):
        if n not in by_itself:
            members[next(home for home in largest if homes[n] <= home)][n] = layout
    return jobs, [Sharing(layouts[left[home]].home, those) for home, those in members.items()]


def _is_repeated(layout: MatrixLayout, num_parameters: int) -> bool:
    """Return whether a matrix is the only one of its home, and full on all of its ranks.

    A stack counts as several matrices, because other ranks may not have their number.
    """
    return num_parameters == 1 and layout.is_alone and layout.is_copied


def _home(layout: MatrixLayout) -> Home:
    return frozenset(axis.ranks for axis in layout.home)


def matrix_cost(rows: int, cols: int) -> int:
    """Return the floating-point operations of one Newton-Schulz iteration: with n <= m, about 4 n^2 m + 2 n^3."""
    n, m = sorted((rows, cols))
    return 4 * n * n * m + 2 * n**3


def assign_owners(costs: Sequence[int], num_owners: int, loads: Sequence[int] | None = None) -> tuple[int, ...]:
    """Balance jobs: the most expensive first, each to the owner with the smallest load; ties to the lowest number.

    The largest sum is at most 4/3 - 1/(3 num_owners) times the best possible, if all loads are 0.

    Args:
        costs: Cost of each job.
        num_owners: Number of owners.
        loads: Cost that each owner already has.

    Source: Graham, "Bounds on multiprocessing timing anomalies" (1969).

    Raises:
        ValueError: If ``num_owners`` is not positive or a cost is negative.

    Example:
        >>> assign_owners([1, 5, 4, 3], num_owners=2)
        (0, 0, 1, 1)
    """
    if num_owners < 1 or any(cost < 0 for cost in costs):
        raise ValueError(f"num_owners must be positive and costs not negative, got {num_owners} and {list(costs)}")
    # Operations, then number of jobs, which balances jobs of cost zero.
    heap = [(load, 0, owner) for owner, load in enumerate(loads or [0] * num_owners)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for job in sorted(range(len(costs)), key=lambda job: (-costs[job], job)):
        load, num_jobs, owner = heap[0]
        owners[job] = owner
        heapq.heapreplace(heap, (load + costs[job], num_jobs + 1, owner))
    return tuple(owners)
