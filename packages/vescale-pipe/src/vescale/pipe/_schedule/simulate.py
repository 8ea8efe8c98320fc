"""Simulate a schedule: event times, idle time and activation memory.

Each rank runs its actions in order. An action starts when the rank is free and its dependencies have finished, with
``latency`` added to dependencies on other ranks. Links have unlimited bandwidth, and communication overlaps with
computation.

Two measures of time are reported, because papers use both. The **makespan** is the time from the first event on any
rank to the last event on any rank. The **span** of a rank is the time from its own first event to its own last.

Activations: a (stage, micro-batch) is live from the start of its F to the end of its B. Where the backward is split, it
is live to the end of its W, because the weight gradient needs the inputs. The unit is one micro-batch of one rank: with
v stages per rank, one live stage counts 1/v.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from .._checked import NonNegative, checked
from ..schedules import dependencies, split_backwards, validate
from .actions import FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule

PerStage = NonNegative | Sequence[NonNegative]


@checked
@dataclass(frozen=True)
class Costs:
    """Durations of a stage's actions, in any unit of time: one number, or one per stage.

    Args:
        forward: time of F.
        input_grad: time of I.
        weight_grad: time of W. A full backward B takes ``input_grad + weight_grad``.
        latency: time from the end of an action to the start of one that depends on it on another rank.
    """

    forward: PerStage = 1.0
    input_grad: PerStage = 1.0
    weight_grad: PerStage = 1.0
    latency: NonNegative = 0.0

    def of(self, action: Action) -> float:
        """Return the duration of an action."""
        forward, input_grad, weight_grad = (
            value[action.stage] if isinstance(value, Sequence) else value
            for value in (self.forward, self.input_grad, self.weight_grad)
        )
        if action.kind == FORWARD:
            return forward
        if action.kind == INPUT_GRAD:
            return input_grad
        return weight_grad if action.kind == WEIGHT_GRAD else input_grad + weight_grad


@dataclass(frozen=True)
class Simulation:
    """The result of ``simulate``. Times are in the unit of the costs.

    Args:
        makespan: last event on any rank minus first event on any rank.
        spans: per rank, its last event minus its first.
        busy: per rank, the sum of its actions' durations.
        peak_activations: per rank, the largest number of live micro-batches (1/v per stage with v stages per rank).
        starts: start time of every action.
        ends: end time of every action.
    """

    makespan: float
    spans: tuple[float, ...]
    busy: tuple[float, ...]
    peak_activations: tuple[float, ...]
    starts: dict[Action, float]
    ends: dict[Action, float]

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks over the makespan."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def span_bubbles(self) -> tuple[float, ...]:
        """Idle fraction of each rank within its own span."""
        return tuple(1.0 - busy / span if span else 0.0 for busy, span in zip(self.busy, self.spans, strict=True))


@checked
def simulate(schedule: Schedule, costs: Costs | None = None) -> Simulation:
    """Return the event times, idle time and peak activations of a schedule.

    Args:
        schedule: the schedule; it is validated first.
        costs: durations; F = I = W = 1 and no latency by default.

    Raises:
        ScheduleError: the schedule is invalid.

    Example:
        >>> from vescale.pipe import one_f_one_b
        >>> result = simulate(one_f_one_b(4, 8))
        >>> round(result.bubble, 4), result.peak_activations
        (0.2727, (4.0, 3.0, 2.0, 1.0))
    """
    validate(schedule)
    costs = costs or Costs()
    _check_stages(costs, schedule.num_stages)
    starts, ends = _event_times(schedule, costs)
    firsts = [starts[actions[0]] for actions in schedule.ranks]
    lasts = [ends[actions[-1]] for actions in schedule.ranks]
    return Simulation(
        makespan=max(lasts) - min(firsts),
        spans=tuple(last - first for first, last in zip(firsts, lasts, strict=True)),
        busy=tuple(sum(costs.of(action) for action in actions) for actions in schedule.ranks),
        peak_activations=tuple(_peak_activations(actions) for actions in schedule.ranks),
        starts=starts,
        ends=ends,
    )


def _check_stages(costs: Costs, num_stages: int) -> None:
    for name in ("forward", "input_grad", "weight_grad"):
        value = getattr(costs, name)
        if isinstance(value, Sequence) and len(value) != num_stages:
            raise ValueError(
                f"simulate: expected a number for each of {num_stages} stages as costs.{name}, got {len(value)}"
            )


def _event_times(schedule: Schedule, costs: Costs) -> tuple[dict[Action, float], dict[Action, float]]:
    split = split_backwards(schedule)
    rank_of = {action.stage: rank for rank, action in schedule}
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    position = [0] * schedule.num_ranks
    free_at = [0.0] * schedule.num_ranks
    remaining = sum(len(actions) for actions in schedule.ranks)
    while remaining:  # terminates: validate() checked that every round makes progress
        for rank, actions in enumerate(schedule.ranks):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needs = dependencies(action, schedule, split_backward=split)
                if any(need not in ends for need in needs):
                    break
                arrivals = (ends[n] + (costs.latency if rank_of[n.stage] != rank else 0.0) for n in needs)
                starts[action] = max(free_at[rank], *arrivals) if needs else free_at[rank]
                ends[action] = free_at[rank] = starts[action] + costs.of(action)
                position[rank] += 1
                remaining -= 1
    return starts, ends


def _peak_activations(actions: Sequence[Action]) -> float:
    split = {(a.stage, a.microbatch) for a in actions if a.kind == INPUT_GRAD}
    stages_per_rank = len({action.stage for action in actions})
    live = peak = 0
    for action in actions:
        if action.kind == FORWARD:
            live += 1
            peak = max(peak, live)
        elif action.kind == WEIGHT_GRAD or (action.stage, action.microbatch) not in split:
            live -= 1
    return float(Fraction(peak, stages_per_rank))
