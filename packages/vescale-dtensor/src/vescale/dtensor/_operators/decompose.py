"""Run an operator by its definition.

torch defines many operators by simpler ones (a loss is a pointwise function and a mean). Stock DTensor uses such a
definition only to guess placements, and then runs the operator itself on the shards: a mean is then divided by the
number of local elements. Here the definition runs on the DTensors, so every step is an operator of its own with a rule
of its own, and results stay sharded as far as those steps allow.
"""

from __future__ import annotations

from .._placements.rules import refuse_ragged
from .._torch import dispatch as _torch
from .gather import gather

__all__ = ["compose"]


def compose(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run torch's definition of ``op`` on the DTensors; an operator without one runs on whole operands."""
    refuse_ragged(op, args, kwargs)
    definition = _torch.decomposition(op)
    if definition is None:
        return gather(op, args, kwargs)
    return definition(*args, **kwargs)
