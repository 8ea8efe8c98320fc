"""Means over a global batch whose terms are distributed unevenly over the ranks.

With sums ``s_r`` and counts ``n_r`` on N ranks, a global mean is ``sum(s) / sum(n)``. Data parallelism averages over
ranks, so a rank's loss has to be ``s_r * N / sum(n)``:

    (1/N) * sum_r (s_r * N / sum(n))  =  sum(s) / sum(n)

The factor is the same on all ranks and for all micro-batches of a step. It multiplies sums, not means: a rank without
terms has the sum 0 and no mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._ranks.axis import Axis

__all__ = ["global_mean_scale"]


def global_mean_scale(count: float | Tensor, axis: Axis) -> float:
    """Return ``axis.size`` over the sum of ``count`` over the axis.

    Raises:
        ValueError: On every rank, if any count is not a finite number of 0 or more, or all are 0.
    """
    mine = _number(count)
    counts = torch.zeros(axis.size, dtype=torch.float64, device=axis.device_type)
    counts[axis.coord] = math.nan if mine is None else mine
    work = axis.all_reduce(counts, what="the counts of a global mean")
    if work is not None:
        work.wait()
    every = counts.tolist()
    bad = [coord for coord, number in enumerate(every) if not 0 <= number < math.inf]
    if bad:
        here = f"; here it is {count!r}" if axis.coord in bad else ""
        raise ValueError(
            f"global_mean_scale: expected the number of terms, 0 or more, for count on every rank, got something else "
            f"at coords {bad} of axis {axis.name!r}{here}"
        )
    if not any(every):
        raise ValueError(
            f"global_mean_scale: expected a count above 0 on some rank, got 0: no rank of axis {axis.name!r} has a "
            "term, so there is no mean; skip this batch on all ranks"
        )
    return axis.size / math.fsum(every)


def _number(count: float | Tensor) -> float | None:
    """Return a count as a number, or None if it is not a valid number."""
    if isinstance(count, Tensor):
        count = count.item() if count.numel() == 1 and not count.is_complex() else None
    return float(count) if isinstance(count, (int, float)) and not isinstance(count, bool) else None
