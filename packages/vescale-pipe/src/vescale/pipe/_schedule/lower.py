"""Lower a schedule of computations: add sends, receives, collectives of parameters and of gradients.

Sends follow the computation. The receive stands where the other rank is at that time, before the computation that it
will run next, so it is posted early; since both stand at one point of time, no order of them can deadlock, however few
buffers there are.

Parameters of a stage are gathered one stage ahead of their use, at most ``max_unsharded`` stages at a time; the stage
that is used last again is freed first. Gradients of a stage are reduced after its last weight gradient, while other
stages compute.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque

from .._checked import Count, checked
from .actions import (
    BACKWARD,
    REDUCE_GRAD,
    RESHARD,
    UNSHARD,
    WEIGHT_GRAD,
    Action,
    Cell,
    Schedule,
    actions_of,
)
from .communication import message_of
from .simulate import Costs, simulate
from .table import Table

__all__ = ["lower"]


@checked
def lower(
    schedule: Schedule,
    *,
    costs: Costs | None = None,
    unshard: bool = False,
    max_unsharded: Count = 3,
    reduce_grad: bool = False,
) -> Schedule:
    """Return a schedule with its communication.

    Args:
        schedule: computations only.
        costs: durations, which place receives and sends between the computations of their ranks.
        unshard: whether to gather and free parameters (ZeRO 3).
        max_unsharded: stages of a rank that may have gathered parameters at a time.
        reduce_grad: whether to reduce gradients over data-parallel ranks.

    Raises:
        ScheduleError: the schedule is invalid.
        ValueError: it has communication already, or two that overlap need more stages than ``max_unsharded``.

    Example:
        >>> from vescale.pipe import one_f_one_b
        >>> print(lower(one_f_one_b(2, 1), reduce_grad=True))
        0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD
        1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD
    """
    if schedule.is_lowered:
        raise ValueError("lower: expected a schedule of computations, got one with communication; lower it once")
    rows = _with_messages(schedule, costs)
    if reduce_grad:
        rows = list(map(_with_reductions, rows))
    if unshard:
        rows = [_with_gathers(row, max_unsharded) for row in rows]
    return Schedule(schedule.num_stages, schedule.num_microbatches, tuple(map(tuple, rows)))


def _with_messages(schedule: Schedule, costs: Costs | None) -> list[list[Cell]]:
    home = Table(schedule).rank_of_stage().tolist()
    result = simulate(schedule, costs)
    order = simulate(schedule)  # by which what takes no time has its place, too
    cells = [
        ((result.ends[last], order.ends[last], rank), cell)
        for rank, row in enumerate(schedule.ranks)
        for cell in row
        for last in actions_of(cell)[-1:]
    ]
    rows: list[list[Cell]] = [[] for _ in schedule.ranks]
    for (_, _, rank), cell in sorted(cells, key=lambda pair: pair[0]):
        rows[rank].append(cell)
        for action in actions_of(cell):
            if (message := message_of(action, home)) is not None:
                send, receive = message
                rows[rank].append(send)
                rows[home[receive.stage]].append(receive)
    return rows


def _with_reductions(row: list[Cell]) -> list[Cell]:
    last = {a.stage: n for n, cell in enumerate(row) for a in actions_of(cell) if a.kind in (BACKWARD, WEIGHT_GRAD)}
    reduced: list[Cell] = []
    pending: list[Cell] = []
    for number, cell in enumerate(row):
        reduced.append(cell)
        pending += [Action(stage, REDUCE_GRAD) for stage, at in last.items() if at == number]
        follows = row[number + 1] if number + 1 < len(row) else None
        if not (isinstance(follows, Action) and follows.kind.startswith("SEND")):  # messages leave first
            reduced += pending
            pending = []
    return reduced


def _with_gathers(row: list[Cell], limit: int) -> list[Cell]:
    """Gather each stage one use ahead; free the one whose next use is the furthest away."""
    uses: dict[int, deque[int]] = defaultdict(deque)  # of each stage, those to come
    for number, cell in enumerate(row):
        for stage in _stages(cell):
            uses[stage].append(number)
    gathered: list[int] = []
    result: list[Cell] = []

    def next_use(stage: int) -> float:
        return uses[stage][0] if uses[stage] else math.inf

    def free(stage: int) -> None:
        gathered.remove(stage)
        result.append(Action(stage, RESHARD))

    for cell in row:
        wanted = list(_stages(cell))
        if len(wanted) > limit:
            raise ValueError(
                f"lower: expected max_unsharded of {len(wanted)} or more for the stages of {cell}, got {limit}"
            )
        others = sorted((stage for stage in uses if uses[stage] and stage not in wanted), key=next_use)
        for stage in [*wanted, *others[: limit - len(wanted)][:1]] if wanted else []:
            if stage not in gathered:
                if len(gathered) == limit:
                    free(max((s for s in gathered if s not in wanted), key=next_use))
                gathered.append(stage)
                result.append(Action(stage, UNSHARD))
        result.append(cell)
        for stage in wanted:
            uses[stage].popleft()
            if not uses[stage]:
                free(stage)
    return result


def _stages(cell: Cell) -> tuple[int, ...]:
    """Return the stages that a cell computes."""
    return tuple(dict.fromkeys(a.stage for a in actions_of(cell) if len(a.kind) == 1))
