"""The reduction of a step's gradients over data-parallel ranks, while other stages work.

The sums of a stage are complete after its last backward. What reduces the gradients of its parameters over other ranks
takes them then (``docs/protocols.md``), and they are freed. The sums of weights that several stages use are complete at
the end. Parameters without such a reduction keep their sums until the user's ``loss.backward()``::

    stage 1   F0 F1 B0 B1 | reduce ........ |
    stage 0                       F2 F3 B2 B3 | reduce ... | end of the step | loss.backward(): adds the means
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._schedule.actions import BACKWARD, WEIGHT_GRAD, Action
from .backward import GradientSum


class Reductions:
    """The reductions of one step.

    Args:
        parameters: those of each stage of this rank that require gradients.
        actions: of this rank, in order.
        tied: the weights of this rank that several stages use.

    Attributes:
        means: the reduced gradients, once the step has ended; what they are is their reduction's affair.
    """

    def __init__(
        self, parameters: Mapping[int, Sequence[torch.Tensor]], actions: Sequence[Action], tied: Iterable[torch.Tensor]
    ) -> None:
        self.means: list[torch.Tensor] = []
        trained = {p for own in parameters.values() for p in own}
        self._tied = {p: None for p in tied if p in trained}
        ends = {action.stage: None for action in reversed(actions) if action.kind in (BACKWARD, WEIGHT_GRAD)}
        groups = [[p for p in parameters.get(stage, ()) if p not in self._tied] for stage in reversed(ends)]
        self._of = _begun([*groups, list(self._tied)])
        self._counts: list[int] = []

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._of

    def add(self, stage: int, total: GradientSum) -> None:
        """Take the sums of a stage, which are complete."""
        self._hand_over([p for p in total.of_stage[stage] if p not in self._tied], total)

    def _hand_over(self, parameters: Sequence[torch.Tensor], total: GradientSum) -> None:
        for reduction in self._all():
            own = [parameter for parameter in parameters if self._of.get(parameter) is reduction]
            reduction.add((parameter, total.take(parameter)) for parameter in own)

    def finish(self, total: GradientSum) -> None:
        """Take what is left, and wait for all means."""
        self._hand_over(list(self._tied), total)
        for reduction in self._all():
            means = reduction.finish()
            self._counts.append(len(means))
            self.means += means

    def close(self) -> None:
        """End the step, failed or not."""
        for reduction in self._all():
            reduction.close()

    def deliver(self, means: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        """Add the means, times a factor, to the gradients of the parameters, at the end of the running backward."""
        left: Iterator[torch.Tensor] = iter(means)
        for reduction, count in zip(self._all(), self._counts, strict=True):
            reduction.deliver([next(left) for _ in range(count)], factor)

    def _all(self) -> list[Any]:
        return list(dict.fromkeys(self._of.values()))


def _begun(groups: Sequence[Sequence[torch.Tensor]]) -> dict[torch.Tensor, Any]:
    """Begin the reductions of these parameters, and return each parameter's own, where it has one."""
    reducers = {p: reducer for group in groups for p in group if (reducer := _reducer_of(p)) is not None}
    begun: dict[Any, Any] = {}
    for reducer in dict.fromkeys(reducers.values()):
        begin: Callable[..., Any] = reducer.begin
        begun[reducer] = begin([[p for p in group if reducers.get(p) is reducer] for group in groups])
    return {p: begun[reducer] for p, reducer in reducers.items() if begun[reducer] is not None}


def _reducer_of(parameter: torch.Tensor) -> Any:
    offered = getattr(parameter, "_vescale_gradients", None)
    return getattr(getattr(offered, "receiver", None), "reducer", None)
