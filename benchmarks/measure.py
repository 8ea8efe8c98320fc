"""Timing in turns, and what a benchmark hands back.

Machines change speed from minute to minute, so a time alone says little. The cases of a benchmark take turns within one
run, round by round, and are reported as ratios of medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Result:
    """Times of all cases of one benchmark.

    Attributes:
        title: What was measured, in one line.
        baseline: The case that counts as 1.
        seconds: Seconds of every round, by case.
    """

    title: str
    baseline: str
    seconds: dict[str, list[float]]

    def table(self) -> str:
        """Return a markdown table: median, the middle half of all rounds, and the ratio of medians to the baseline."""
        reference = statistics.median(self.seconds[self.baseline])
        lines = [
            f"| case | median, ms | middle half, ms | ratio to {self.baseline} |",
            "|---|---:|---:|---:|",
        ]
        for case, seconds in self.seconds.items():
            low, median, high = statistics.quantiles(seconds, n=4)
            middle = f"{1e3 * low:.2f} to {1e3 * high:.2f}"
            lines.append(f"| {case} | {1e3 * median:.2f} | {middle} | {median / reference:.2f} |")
        return "\n".join(lines)


def time_in_turns(
    cases: dict[str, Callable[[], object]], *, num_rounds: int, num_warmup: int = 3
) -> dict[str, list[float]]:
    """Run all cases once per round and return the seconds that each took, without the first `num_warmup` rounds.

    Under torch.distributed all ranks call it with the same names; a barrier precedes every case, so that a rank for
    which a case is nothing to do only waits. The times are those of the calling rank.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for round_ in range(num_warmup + num_rounds):
        for name, case in cases.items():
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            case()
            if round_ >= num_warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def with_processor_time(step: Callable[[], object], times: list[float]) -> Callable[[], None]:
    """Return ``step`` so that it appends its processor seconds, those of gloo's threads included, to ``times``."""

    def run() -> None:
        start = time.process_time()
        step()
        times.append(time.process_time() - start)

    return run
