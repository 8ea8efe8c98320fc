"""Who takes the local gradients of a parameter as they are, and reduces them itself: data parallelism, for example.

Data parallelism puts gradients into flat buckets of local tensors and reduces those. It can take a partial sum over
other axes as well, reduce it over the data-parallel ranks with everything else, and sum what is left of it over its own
axes once per step, together with all others (see ``vescale.optim``). Then nothing is reduced here. The two packages
know each other by one attribute of the parameter alone, whose value is a :class:`Taker`.

A hook of the user must see the reduced gradient, so a parameter that has one is left to autograd and to its hooks, as
if nobody took anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import Placement

from .. import _torch

__all__ = ["Taker", "introduce", "taker_of"]

TAKER = "_vescale_takes_gradients"


class Taker(Protocol):
    """The value of the attribute ``_vescale_takes_gradients`` of a parameter.

    Attributes:
        own: keys of the taker's own hooks, in the parameter's tables.
        known: keys of all hooks that can do with a partial gradient; those who install such hooks add theirs.
        more: set by who calls ``take``: tells, while a gradient arrives at the parameter itself, whether ``take`` will
            be called in the same backward.
    """

    own: frozenset[int]
    known: set[int]
    more: Callable[[], bool] | None

    def take(self, local: Tensor, placements: Sequence[Placement], *, more: bool = False) -> None:
        """Take this rank's part of a gradient while backward runs.

        Args:
            local: the part; the taker copies it.
            placements: what it is to the whole gradient.
            more: whether another gradient of the parameter will come in this backward.
        """


def introduce(parameter: Tensor, keys: Iterable[int]) -> None:
    """Tell the taker of a parameter, if there is one, which hooks are ours."""
    taker = vars(parameter).get(TAKER)
    if taker is not None:
        taker.known.update(keys)


def taker_of(parameter: Tensor) -> Taker | None:
    """Return what takes the gradients of a parameter; None where a hook must see them reduced."""
    taker = vars(parameter).get(TAKER)
    if taker is None:
        return None
    keys = set(_torch.hook_keys(parameter))
    return taker if taker.own <= keys <= taker.known else None
