"""Check that a schedule computes each result exactly once and does not deadlock."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .._checked import Count, checked
from .actions import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, Action, Schedule
from .communication import check_communication
from .errors import ScheduleError
from .table import B, F, I, Table, W

__all__ = ["checked_table", "validate"]


@checked
def validate(schedule: Schedule, *, buffers: Count | None = None) -> None:
    """Check that a schedule computes each result exactly once and does not deadlock.

    The checks are:

    - indices are in range;
    - each stage runs on one rank;
    - each (stage, micro-batch) has one F and either one B, or one I and one W;
    - if all ranks run their actions in order, every rank reaches its end.

    Of a lowered schedule also:

    - each value and gradient that another rank needs is sent once, after it is computed, and received once, before it
      is used, in the order in which the other rank sends;
    - no rank waits forever for a free buffer;
    - parameters are gathered when they are used, never twice at a time, and gradients are reduced after the last one.

    Args:
        schedule: the schedule.
        buffers: messages that one rank may send to another before the first of them is received; no limit if None. Of
            a lowered schedule only.

    Raises:
        ScheduleError: a check fails; the text names the rank and the action.

    Example:
        >>> from vescale.pipe import one_f_one_b
        >>> validate(one_f_one_b(4, 8))
    """
    checked_table(schedule, buffers=buffers)


def checked_table(schedule: Schedule, *, buffers: int | None = None) -> Table:
    """Return the computations of a valid schedule as integers.

    Raises:
        ScheduleError: it is not valid, see ``validate``.
    """
    table = Table(schedule)
    _check_indices(schedule, table)
    _check_counts(table)
    _check_own_order(table)
    _check_progress(table)
    if schedule.is_lowered:
        check_communication(schedule, table, buffers)
    return table


def _check_indices(schedule: Schedule, table: Table) -> None:
    for rank, cells in enumerate(schedule.ranks):
        if not cells:
            raise ScheduleError(f"rank {rank}: expected at least one action, got none; give every rank a stage")
    outside = (table.stage >= table.num_stages) | (table.microbatch >= table.num_microbatches)
    if outside.any():
        where = int(np.flatnonzero(outside)[0])
        raise ScheduleError(
            f"rank {table.rank[where]}: expected an action within {table.num_stages} stages x "
            f"{table.num_microbatches} micro-batches, got {table.actions[where]}; count both from 0"
        )
    elsewhere = table.rank_of_stage()[table.stage] != table.rank
    if elsewhere.any():
        stage = int(table.stage[np.flatnonzero(elsewhere)[0]])
        places = np.flatnonzero(table.stage == stage)
        home = int(table.rank[places[0]])
        other = int(next(place for place in places if table.rank[place] != home))
        raise ScheduleError(
            f"expected stage {stage} on one rank, got {table.actions[other]} on rank {table.rank[other]} and other "
            f"actions on rank {home}; move all actions of a stage to one rank"
        )


def _check_counts(table: Table) -> None:
    num_stages, num_microbatches = table.num_stages, table.num_microbatches
    codes = table.result(table.stage) * len(KINDS) + table.kind
    counts = np.bincount(codes, minlength=num_stages * num_microbatches * len(KINDS))
    if (counts > 1).any():
        repeated = [str(_action_of(int(code), num_microbatches)) for code in np.flatnonzero(counts > 1)]
        raise ScheduleError(f"expected each action once, got several of {', '.join(repeated)}; list it once")
    has = counts.reshape(num_stages, num_microbatches, len(KINDS)).astype(bool)
    whole, split = has[..., B], has[..., I] & has[..., W]
    wrong = ~has[..., F] | (whole == split) | (whole & (has[..., I] | has[..., W]))
    if wrong.any():
        stage, m = (int(index) for index in np.argwhere(wrong)[0])
        kinds = [kind for kind, found in zip(KINDS, has[stage, m], strict=True) if found]
        raise ScheduleError(f"stage {stage}, micro-batch {m}: expected the actions F and B, or F, I and W, got {kinds}")


def _action_of(code: int, num_microbatches: int) -> Action:
    result, kind = divmod(code, len(KINDS))
    return Action(result // num_microbatches, KINDS[kind], result % num_microbatches)


def _check_own_order(table: Table) -> None:
    """Check that a rank's list has the forward before the backward, and I before W."""
    place = {code: table.place(code) for code in (F, B, I, W)}
    late = []
    for code, kind, before, before_kind in (
        (B, BACKWARD, F, FORWARD),
        (I, INPUT_GRAD, F, FORWARD),
        (W, WEIGHT_GRAD, I, INPUT_GRAD),
    ):
        wrong = (place[code] >= 0) & (place[before] >= place[code])
        for stage, m in np.argwhere(wrong):
            actions = Action(int(stage), kind, int(m)), Action(int(stage), before_kind, int(m))
            late.append((int(place[code][stage, m]), *actions))
    if late:
        _, first, needed = min(late)
        raise _deadlock([f"rank {table.rank_of_stage()[first.stage]} waits at {first} for {needed}"])


def _check_progress(table: Table) -> None:
    ranks = table.cells()
    done = bytearray(2 * table.num_stages * table.num_microbatches + 1)
    done[-1] = 1  # the result -1 is no result
    waiting: dict[int, int] = {}  # result -> the rank that waits for it
    position = [0] * table.num_ranks
    ready = list(range(table.num_ranks))
    while ready:
        rank = ready.pop()
        cells = ranks[rank]
        needs, others, gives, other_gives = cells.needs, cells.other_needs, cells.gives, cells.other_gives
        at = position[rank]
        while at < len(needs):
            if not done[needs[at]]:
                waiting[needs[at]] = rank
                break
            if not done[others[at]]:
                waiting[others[at]] = rank
                break
            for given in (gives[at], other_gives[at]) if other_gives[at] >= 0 else (gives[at],):
                done[given] = 1
                if given in waiting:
                    ready.append(waiting.pop(given))
            at += 1
        position[rank] = at
    if waiting:
        names = dict(zip(table.gives().tolist(), table.actions, strict=True))
        firsts = np.flatnonzero(np.diff(table.cell, prepend=-1))
        cuts = np.searchsorted(firsts, table.starts_of_ranks)
        stuck = []
        for need, rank in sorted(waiting.items(), key=lambda item: item[1]):
            is_second = ranks[rank].needs[position[rank]] != need  # of two that overlap
            stuck.append((rank, table.actions[firsts[cuts[rank] + position[rank]] + is_second], names[need]))
        raise _deadlock(f"rank {rank} waits at {action} for {need}" for rank, action, need in stuck)


def _deadlock(waits: Iterable[str]) -> ScheduleError:
    return ScheduleError(
        f"expected an order in which every action can run, got a deadlock: {'; '.join(waits)}; put each action after "
        "the actions that it waits for"
    )
