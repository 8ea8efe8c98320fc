"""Processor time to make, validate, simulate and lower schedules of 64 ranks with 4 stages and 512 micro-batches each.

The search is of 8 ranks and 32 micro-batches, with its default effort.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vescale.pipe import Costs, interleaved_1f1b, interleaved_zero_bubble, lower, search_schedule, simulate, validate

RANKS, MICROBATCHES, STAGES = 64, 512, 4
ROUNDS = 5


@dataclass(frozen=True)
class Times:
    """A benchmark's result that is a table of processor times in seconds."""

    title: str
    rows: Sequence[tuple[str, int, float]]

    def table(self) -> str:
        """Return a markdown table with one line per call."""
        lines = ["| call | actions | median, s of one processor |", "|---|---:|---:|"]
        return "\n".join([*lines, *(f"| {name} | {count:,} | {seconds:.2f} |" for name, count, seconds in self.rows)])


def run(num_rounds: int) -> Times:
    """Measure each call a few times; lengths of schedules are in actions."""
    rows = []
    for make in (interleaved_1f1b, interleaved_zero_bubble):
        sizes = functools.partial(make, RANKS, MICROBATCHES, STAGES)
        schedule = sizes()
        count = sum(len(schedule.actions(rank)) for rank in range(RANKS))
        calls: dict[str, Callable] = {
            make.__name__: sizes,
            f"validate({make.__name__})": lambda schedule=schedule: validate(schedule),
            f"simulate({make.__name__})": lambda schedule=schedule: simulate(schedule),
            f"lower({make.__name__})": lambda schedule=schedule: lower(schedule, unshard=True, reduce_grad=True),
        }
        rows += [(name, count, _median(call, min(num_rounds, ROUNDS))) for name, call in calls.items()]
    costs = Costs(0.5, 0.6, 0.4, 0.05)
    search = functools.partial(search_schedule, 8, 32, costs=costs, stages_per_rank=2, placement="V")
    rows.append(("search_schedule", 3 * 2 * 8 * 32, _median(search, 2)))
    return Times(f"Schedules of {RANKS} ranks, {MICROBATCHES} micro-batches, {STAGES} stages per rank", rows)


def _median(call: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)
