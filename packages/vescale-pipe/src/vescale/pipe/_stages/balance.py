"""Cut a row of modules into stages of nearly equal cost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from .._checked import Count, NonNegative, checked

__all__ = ["balanced_split"]

_Cuts = tuple[float, float, tuple[int, ...]]
_NONE: _Cuts = (math.inf, math.inf, ())


@checked
def balanced_split(costs: Mapping[str, NonNegative], num_stages: Count) -> tuple[tuple[str, ...], ...]:
    """Return the ``split`` of a plan whose most expensive stage costs as little as possible.

    Of several, it is the one with the least sum of squares: the other stages are even, too.

    Args:
        costs: cost of each module, such as its measured time for a micro-batch, in the order in which they run. A
            module that is no unit by itself has the units inside of it.
        num_stages: number of stages; each gets at least one module.

    Raises:
        ValueError: there are fewer modules than stages.

    Example:
        >>> balanced_split({"embed": 1.0, "layers.0": 2.0, "layers.1": 2.0, "layers.2": 2.0, "head": 3.0}, 3)
        (('embed', 'layers.0'), ('layers.1', 'layers.2'), ('head',))
    """
    names = list(costs)
    if len(names) < num_stages:
        raise ValueError(
            f"balanced_split: expected costs of at least {num_stages} modules for as many stages, got {len(names)}; "
            "give costs of smaller modules, or use fewer stages"
        )
    before = [0.0, *itertools.accumulate(costs.values())]
    # best[n]: for the first n modules in the stages so far, the largest stage, the sum of squares, and the cuts
    best: list[_Cuts] = [(0.0, 0.0, ()), *[_NONE] * len(names)]
    for stage in range(1, num_stages + 1):
        rows = [_NONE] * (len(names) + 1)
        for end in range(stage, len(names) + 1):
            rows[end] = min(
                (max(largest, cost), squares + cost * cost, (*cuts, end))
                for start in range(stage - 1, end)
                for largest, squares, cuts in [best[start]]
                for cost in [before[end] - before[start]]
            )
        best = rows
    ends = (0, *best[-1][2])
    return tuple(tuple(names[start:end]) for start, end in itertools.pairwise(ends))
