"""Stages of a pipeline, and how many micro-batches are alive on a rank, for every schedule of ``vescale.pipe``.

With p ranks, m micro-batches and v stages per rank, rank r keeps activations of at most this many micro-batches (one is
all stages of the rank; `vescale.pipe` has the orders, and a test of the umbrella compares):

    gpipe, looped_bfs                m
    1f1b                             p - r
    interleaved_1f1b                 ((v - 1) p + 2 (p - 1 - r) + 1) / v
    zb_h1, interleaved_zero_bubble   p        gradients of weights, which need activations, are r stages late
    zb_h2                            2 p - 1
    zb_v                             p
    dual_pipe_v                      p + 1/2
    auto                             p        the limit of its search
"""

from __future__ import annotations

import itertools

from ._blocks import uniform_counts
from ._checks import TWO_STAGES

#: Schedules whose stages lie there and back over the ranks.
V_SHAPED = ("zb_v", "dual_pipe_v")


def stages_per_rank(schedule: str, given: int | None = None) -> int:
    """Return how many stages each rank has."""
    return given or (2 if schedule in TWO_STAGES else 1)


def stage_blocks(num_blocks: int, num_stages: int) -> tuple[range, ...]:
    """Return the blocks of each stage under the uniform split of ``vescale.pipe``.

    >>> stage_blocks(7, 4)
    (range(0, 2), range(2, 4), range(4, 6), range(6, 7))
    """
    counts = uniform_counts(num_blocks, num_stages)
    ends = list(itertools.accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def recomputed(num_blocks: int, every: int | None) -> range:
    """Return the positions of the blocks that are recomputed: every k-th, so none of fewer than k.

    >>> list(recomputed(5, 2))
    [1, 3]
    """
    return range(0) if every is None else range(every - 1, num_blocks, every)


def rank_of_stage(stage: int, pp: int, schedule: str) -> int:
    """Return the rank of a stage: stages lie in a loop over the ranks, or there and back."""
    if schedule in V_SHAPED:
        return stage if stage < pp else 2 * pp - 1 - stage
    return stage % pp


def microbatches_in_flight(schedule: str, pp: int, num_microbatches: int, rank: int, stages: int = 1) -> float:
    """Return the number of micro-batches with live activations on a rank, see the module's table."""
    v = stages
    most: dict[str, float] = {
        "1f1b": pp - rank,
        "interleaved_1f1b": pp - rank if v == 1 else ((v - 1) * pp + 2 * (pp - 1 - rank) + 1) / v,
        "zb_h1": pp,
        "interleaved_zero_bubble": pp,
        "zb_h2": 2 * pp - 1,
        "zb_v": pp,
        "dual_pipe_v": pp + 0.5,
        "auto": pp,
    }
    return min(num_microbatches, most.get(schedule, num_microbatches))
