"""Measured steps: when each rank ran its actions."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from .._schedule.actions import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Action, Schedule
from .._schedule.simulate import Costs
from .._schedule.timeline import Timeline


@dataclass(frozen=True)
class Timed:
    """An action that has run: ``start`` and ``end`` are of its computation, which it may have ``waited`` for."""

    action: Action
    start: float
    end: float
    waited: bool


@runtime_checkable
class WaitMeter(Protocol):
    """Measures waits for other ranks."""

    def waiting(self, device_type: str) -> contextlib.AbstractContextManager[object]:
        """Return a context for one wait of this rank on a device of a type."""


class Stopwatch:
    """Takes the times of one rank's actions, in seconds since the beginning of their step.

    An accelerator is synchronized before and after each action, so that what it computes counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: list[list[Timed]] = []
        self._device = device
        self._began = self._waited = 0.0

    def begin(self) -> None:
        """Begin a step, at the same time on all ranks."""
        self.steps.append([])
        self._began = self._now()

    @contextlib.contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Take the time of an action."""
        began, waited = self._now(), self._waited
        yield
        waited = self._waited - waited
        start, end = began + waited - self._began, self._now() - self._began
        self.steps[-1].append(Timed(action, start, end, waited > 0))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Take the time of a wait for another rank, in which this one computes nothing."""
        began = self._now()
        yield
        self._waited += self._now() - began

    def _now(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()


class Timing:
    """The steps that ``PipelineEngine.timing`` has measured.

    Attributes:
        steps: one timeline for each, in seconds, equal on every rank; empty while the context is open. Those that were
            recorded, the first of each input signature, are not among them.
    """

    def __init__(self) -> None:
        self.steps: tuple[Timeline, ...] = ()
        self._timed: list[list[list[Timed]]] = []  # step, rank, action

    def end(self, schedule: Schedule, of_ranks: Sequence[list[list[Timed]]]) -> None:
        """Take what all ranks have measured."""
        self._timed = [list(of_step) for of_step in zip(*of_ranks, strict=True)]
        self.steps = tuple(_timeline(schedule, rows) for rows in self._timed)

    def costs(self) -> Costs:
        """Return what a stage's actions take, for ``simulate``, and for the schedule ``"auto"``.

        Times are medians over steps and micro-batches, in seconds. Where no schedule has split the backward, half of
        it counts for inputs and half for weights. The latency is the median time from the end of an action to the start
        of one that has waited for its result on another rank.

        Raises:
            ValueError: no step with a backward has been measured.
        """
        found: dict[tuple[int, str], list[float]] = defaultdict(list)
        latencies: list[float] = []
        for rows in self._timed:
            ends = {(t.action.stage, t.action.kind, t.action.microbatch): (rank, t.end) for rank, t in _all(rows)}
            for rank, timed in _all(rows):
                found[timed.action.stage, timed.action.kind].append(timed.end - timed.start)
                for cause in _causes(timed.action):
                    other, end = ends.get(cause, (rank, 0.0))
                    if other != rank and timed.waited:
                        latencies.append(max(0.0, timed.start - end))
        medians = {key: statistics.median(values) for key, values in found.items()}
        stages = range(1 + max((stage for stage, _ in medians), default=-1))
        if not stages or any((stage, kind) not in medians for stage in stages for kind in _backward_of(medians, stage)):
            kinds = sorted({kind for _, kind in medians})
            raise ValueError(
                f"expected measured steps with a backward, got {len(self.steps)} steps of {kinds}; run at least two "
                "steps with gradients inside of engine.timing(), since the first one may be recorded"
            )
        half = {stage: medians.get((stage, BACKWARD), 0.0) / 2 for stage in stages}
        return Costs(
            forward=[medians[stage, FORWARD] for stage in stages],
            input_grad=[medians.get((stage, INPUT_GRAD), half[stage]) for stage in stages],
            weight_grad=[medians.get((stage, WEIGHT_GRAD), half[stage]) for stage in stages],
            latency=statistics.median(latencies) if latencies else 0.0,
        )


def _all(rows: Sequence[list[Timed]]) -> Iterator[tuple[int, Timed]]:
    return ((rank, timed) for rank, row in enumerate(rows) for timed in row)


def _causes(action: Action) -> list[tuple[int, str, int]]:
    """Return stage, kind and micro-batch of the actions of other stages whose result an action may need."""
    if action.kind == WEIGHT_GRAD:
        return []
    kinds, step = ((FORWARD,), -1) if action.kind == FORWARD else ((BACKWARD, INPUT_GRAD), 1)
    return [(action.stage + step, kind, action.microbatch) for kind in kinds]


def _backward_of(medians: dict[tuple[int, str], float], stage: int) -> tuple[str, ...]:
    return (INPUT_GRAD, WEIGHT_GRAD) if (stage, INPUT_GRAD) in medians else (BACKWARD,)


def _timeline(schedule: Schedule, rows: Sequence[list[Timed]]) -> Timeline:
    """Return the timeline of a step, whose actions are those of a schedule, or its forwards alone."""
    ranks = tuple(tuple(timed.action for timed in row) for row in rows)
    spans = [(min(t.start for t in row), max(t.end for t in row)) for row in rows]
    return Timeline(
        schedule=Schedule(schedule.num_stages, schedule.num_microbatches, ranks),
        makespan=max(end for _, end in spans) - min(start for start, _ in spans),
        spans=tuple(end - start for start, end in spans),
        busy=tuple(sum(timed.end - timed.start for timed in row) for row in rows),
        times=[[(timed.start, timed.end) for timed in row] for row in rows],
        is_measured=True,
    )
