"""When the ranks of a pipeline run their actions: in a simulation, or measured in a step."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

from .actions import Action, Schedule, actions_of

Times = list[list[tuple[float, float]]]


@dataclass(frozen=True, eq=False)
class Timeline:
    """When the ranks of a pipeline run their actions.

    Attributes:
        schedule: the actions of each rank.
        makespan: last event on any rank minus first event on any rank.
        spans: per rank, its last event minus its first.
        busy: per rank, the time in which it computes.
        times: start and end of each entry of the schedule, by rank.
        events: rank, action, start and end of every computation and collective, rank by rank, in order.
        is_measured: whether it is that of a step, in seconds; else it is simulated, in the units of the costs.
    """

    schedule: Schedule = field(repr=False)
    makespan: float
    spans: tuple[float, ...]
    busy: tuple[float, ...]
    times: Times = field(repr=False)
    is_measured: bool = field(default=False, kw_only=True)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks over the makespan."""
        return 1.0 - sum(self.busy) / (len(self.busy) * self.makespan) if self.makespan else 0.0

    @property
    def span_bubbles(self) -> tuple[float, ...]:
        """Idle fraction of each rank within its own span."""
        return tuple(1.0 - busy / span if span else 0.0 for busy, span in zip(self.busy, self.spans, strict=True))

    @property
    def events(self) -> Iterator[tuple[int, Action, float, float]]:
        """See the class."""
        for rank, (cells, times) in enumerate(zip(self.schedule.ranks, self.times, strict=True)):
            for cell, (start, end) in zip(cells, times, strict=True):
                for action in actions_of(cell):
                    yield rank, action, start, end

    @functools.cached_property
    def starts(self) -> dict[Action, float]:
        """Start time of every action."""
        return {action: start for _, action, start, _ in self.events}

    @functools.cached_property
    def ends(self) -> dict[Action, float]:
        """End time of every action."""
        return {action: end for _, action, _, end in self.events}
