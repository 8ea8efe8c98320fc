"""Simulate a schedule: event times, idle time, activation memory and what is communicated.

Each rank runs its actions in order. An action starts when the rank is free and its dependencies have finished, with
``latency`` added to dependencies on other ranks. Links have unlimited bandwidth, and communication overlaps with
computation: the collectives of a lowered schedule run one after another beside the computations of their rank.

Two measures of time are reported, because papers use both. The **makespan** is the time from the first event on any
rank to the last event on any rank. The **span** of a rank is the time from its own first event to its own last.

Activations: a (stage, micro-batch) is live from the start of its F to the end of its B. Where the backward is split, it
is live to the end of its W, because the weight gradient needs the inputs. The unit is one micro-batch of one rank: with
v stages per rank, one live stage counts 1/v.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np

from .._checked import Condition, NonNegative, checked
from .actions import KINDS, RECV_B, RECV_F, REDUCE_GRAD, RESHARD, SEND_B, SEND_F, UNSHARD, Action, Schedule, actions_of
from .communication import receive_for, sender_of
from .table import B, F, Table, W
from .timeline import Timeline, Times
from .validate import checked_table

PerStage = NonNegative | Sequence[NonNegative]
Fraction = Annotated[float, Condition("a number from 0 to 1", lambda value: 0 <= value <= 1)]


@checked
@dataclass(frozen=True)
class Costs:
    """Durations of a stage's actions, in any unit of time, and sizes, in any unit: one number, or one per stage.

    Args:
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W. A full backward B takes ``input_grad + weight_grad``.
        latency: time from the end of an action to the start of one that depends on it on another rank.
        overlap: how much of the shorter of two actions that overlap takes no time of its own, from 0 to 1.
        activations: memory of one micro-batch on a stage, for the peaks.
        unshard: time to gather the parameters of a stage.
        reduce_grad: time to reduce the gradients of a stage.
        message: size of what a stage sends to the next one for a micro-batch; its gradient has the same.
        parameters: size of the parameters of a stage, which UNSHARD and REDUCE_GRAD communicate.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    latency: NonNegative = 0.0
    overlap: Fraction = 0.0
    activations: PerStage = 1.0
    unshard: PerStage = 0.0
    reduce_grad: PerStage = 0.0
    message: PerStage = 1.0
    parameters: PerStage = 1.0

    def of(self, action: Action) -> float:
        """Return the duration of a computation."""
        return float(self.table(action.stage + 1)[KINDS.index(action.kind)][action.stage])

    def table(self, num_stages: int) -> np.ndarray:
        """Return the duration of each kind of computation, in the order of ``KINDS``, on each stage."""
        forward, input_grad, weight_grad = (
            self.per_stage(name, num_stages) for name in ("forward", "input_grad", "weight_grad")
        )
        return np.stack([forward, input_grad + weight_grad, input_grad, weight_grad])

    def per_stage(self, name: str, num_stages: int) -> np.ndarray:
        """Return the values of a field for the first stages."""
        value = getattr(self, name)
        if not isinstance(value, Sequence):
            return np.full(num_stages, float(value))
        return np.array(value[:num_stages], dtype=float)

    def check_stages(self, num_stages: int) -> None:
        """Check that lists have a number for each stage.

        Raises:
            ValueError: one has another length.
        """
        for name, value in vars(self).items():
            if isinstance(value, Sequence) and len(value) != num_stages:
                raise ValueError(
                    f"simulate: expected a number for each of {num_stages} stages as costs.{name}, got {len(value)}"
                )


@dataclass(frozen=True, eq=False)
class Simulation(Timeline):
    """The result of ``simulate``. Times and sizes are in the units of the costs; see ``Timeline`` for those it shares.

    Attributes:
        peak_activations: per rank, the largest number of live micro-batches (1/v per stage with v stages per rank).
        volume: of a lowered schedule, per kind of communication, what each rank communicates: messages for a send or
            a receive, parameters for UNSHARD, gradients for REDUCE_GRAD.
    """

    peak_activations: tuple[float, ...]
    volume: Mapping[str, tuple[float, ...]]


@checked
def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Return the event times, idle time, peak activations and volume of a schedule.

    Args:
        schedule: the schedule, lowered or not; it is validated first.
        costs: durations; F = I = W = 1 and no latency by default.

    Raises:
        ScheduleError: the schedule is invalid.
        ValueError: a list in the costs has not one number per stage.

    Example:
        >>> from vescale.pipe import one_f_one_b
        >>> result = simulate(one_f_one_b(4, 8))
        >>> round(result.bubble, 4), result.peak_activations
        (0.2727, (4.0, 3.0, 2.0, 1.0))
    """
    table = checked_table(schedule)
    costs = costs or Costs()
    costs.check_stages(schedule.num_stages)
    durations = costs.table(schedule.num_stages)[table.kind, table.stage]
    if schedule.is_lowered:
        times, volume = _lowered_times(schedule, table, costs), _volume(schedule, costs)
    else:
        times, volume = _event_times(table, durations, costs), {}
    lasts = [max(end for _, end in row) for row in times]
    firsts = [row[0][0] for row in times]
    return Simulation(
        schedule=schedule,
        makespan=max(lasts) - min(firsts),
        spans=tuple(last - first for first, last in zip(firsts, lasts, strict=True)),
        busy=_busy(table, durations, costs),
        peak_activations=_peaks(table, costs),
        volume=volume,
        times=times,
    )


def _event_times(table: Table, durations: np.ndarray, costs: Costs) -> Times:
    """Return start and end of every cell of each rank."""
    lengths, other_lengths = table.of_cells(durations, 0.0)
    is_remote = np.where(table.needs() >= 0, _needs_other_rank(table), False) * costs.latency
    delays, other_delays = table.of_cells(is_remote, 0.0)
    ranks, hidden = table.cells(), costs.overlap
    ends: list[float | None] = [None] * (2 * table.num_stages * table.num_microbatches)
    ends.append(0.0)  # of the result -1, which is none
    times: Times = [[] for _ in ranks]
    free_at = [0.0] * len(ranks)
    waiting: dict[int, int] = {}
    ready = list(range(len(ranks)))
    while ready:  # every rank reaches its end: validate() checked it
        rank = ready.pop()
        cells, row, now = ranks[rank], times[rank], free_at[rank]
        gives, other_needs, other_gives = cells.gives, cells.other_needs, cells.other_gives
        length, other_length, delay, other_delay = lengths[rank], other_lengths[rank], delays[rank], other_delays[rank]
        for at in range(len(row), len(gives)):
            need = cells.needs[at]
            arrival = ends[need]
            if arrival is None:
                waiting[need] = rank
                break
            start = max(now, arrival + delay[at])
            end = start + length[at]
            if other_gives[at] >= 0:
                need = other_needs[at]
                arrival = ends[need]
                if arrival is None:
                    waiting[need] = rank
                    break
                start = max(start, arrival + other_delay[at])
                end = start + length[at] + other_length[at] - hidden * min(length[at], other_length[at])
                ends[other_gives[at]] = end
                if other_gives[at] in waiting:
                    ready.append(waiting.pop(other_gives[at]))
            row.append((start, end))
            now = end
            given = gives[at]
            if given >= 0:
                ends[given] = end
                if given in waiting:
                    ready.append(waiting.pop(given))
        free_at[rank] = now
    return times


def _needs_other_rank(table: Table) -> np.ndarray:
    """Return for each computation whether the result that it may need of another stage is of another rank."""
    home = np.concatenate([table.rank_of_stage(), [-1]])
    other = np.where(table.kind == F, table.stage - 1, table.stage + 1)
    elsewhere: np.ndarray = home[np.clip(other, -1, table.num_stages)] != table.rank
    return elsewhere


def _lowered_times(schedule: Schedule, table: Table, costs: Costs) -> Times:
    """Return start and end of every cell of each rank of a lowered schedule."""
    home = table.rank_of_stage().tolist()
    durations = costs.table(schedule.num_stages).tolist()
    unshard, reduce_grad = (costs.per_stage(name, schedule.num_stages).tolist() for name in ("unshard", "reduce_grad"))
    sent: dict[Action, float] = {}
    posted: dict[Action, float] = {}
    times: Times = [[] for _ in schedule.ranks]
    free_at = [0.0] * schedule.num_ranks
    collectives_end = [0.0] * schedule.num_ranks
    gathered: dict[int, float] = defaultdict(float)
    waiting: dict[Action, int] = {}
    ready = list(range(schedule.num_ranks))

    def start_of(rank: int, action: Action) -> float | None:
        if (receive := receive_for(action, home)) is None:
            return gathered[action.stage]
        if (send := sender_of(receive)) not in sent:
            waiting[send] = rank
            return None
        return max(gathered[action.stage], max(sent[send], posted[receive]) + costs.latency)

    while ready:
        rank = ready.pop()
        for cell in schedule.ranks[rank][len(times[rank]) :]:
            action, *others = actions_of(cell)
            now = end = free_at[rank]
            if action.kind in (SEND_F, SEND_B):
                sent[action] = now
                if action in waiting:
                    ready.append(waiting.pop(action))
            elif action.kind in (RECV_F, RECV_B):
                posted[action] = now
            elif action.kind in (UNSHARD, REDUCE_GRAD):
                now = max(now, collectives_end[rank])
                end = now + (unshard if action.kind == UNSHARD else reduce_grad)[action.stage]
                collectives_end[rank] = end
                if action.kind == UNSHARD:
                    gathered[action.stage] = end
            elif action.kind != RESHARD:
                starts = [start for each in (action, *others) if (start := start_of(rank, each)) is not None]
                if len(starts) <= len(others):
                    break
                lengths = [durations[KINDS.index(each.kind)][each.stage] for each in (action, *others)]
                now = max(now, *starts)
                end = now + sum(lengths) - (costs.overlap * min(lengths) if others else 0.0)
                free_at[rank] = end
            times[rank].append((now, end))
    return times


def _busy(table: Table, durations: np.ndarray, costs: Costs) -> tuple[float, ...]:
    busy = np.bincount(table.rank, weights=durations, minlength=table.num_ranks)
    seconds = np.flatnonzero(table.cell[1:] == table.cell[:-1]) + 1  # of two that overlap
    hidden = costs.overlap * np.minimum(durations[seconds], durations[seconds - 1])
    return tuple((busy - np.bincount(table.rank[seconds], weights=hidden, minlength=table.num_ranks)).tolist())


def _peaks(table: Table, costs: Costs) -> tuple[float, ...]:
    """Return the peak of live activations of each rank; of two that overlap, the forward counts first."""
    weights = costs.per_stage("activations", table.num_stages)
    ends = (table.kind == W) | (table.kind == B)
    change = weights[table.stage] * ((table.kind == F).astype(float) - ends)
    peaks = []
    for first, last in zip(table.starts_of_ranks[:-1], table.starts_of_ranks[1:], strict=True):
        stages = len(np.unique(table.stage[first:last]))
        peaks.append(round(float(np.cumsum(change[first:last]).max()) / stages, 12))
    return tuple(peaks)


def _volume(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, ...]]:
    message, parameters = (costs.per_stage(name, schedule.num_stages) for name in ("message", "parameters"))
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0] * schedule.num_ranks)
    for rank, action in schedule:
        if action.kind in (UNSHARD, REDUCE_GRAD):
            totals[action.kind][rank] += float(parameters[action.stage])
        elif action.kind in (SEND_F, RECV_F, SEND_B, RECV_B):
            # between stages s and s + 1 there is what stage s sends
            boundary = action.stage - (action.kind in (RECV_F, SEND_B))
            totals[action.kind][rank] += float(message[boundary])
    return {kind: tuple(values) for kind, values in totals.items()}
