"""Operators that compare values: a sum of parts must have the same bits each time.

A maximum and the mask of its gradient, ``x == x.amax(0)``, each sum the parts of a partial ``x``. A reduction that
scatters its result adds them in another order than one that gives all ranks everything, so that the maximum may equal
no element, and its gradient is 0 / 0. So operators that compare, and those that select elements, always take the sums
that all ranks get.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from .._containers import leaves
from .._torch import dispatch
from .operands import is_sharded

__all__ = ["compares_scattered_sums"]

SELECTING = frozenset(
    {"amax", "amin", "aminmax", "cummax", "cummin", "fmax", "fmin", "kthvalue", "max", "maximum", "median", "min"}
    | {"minimum", "mode", "nanmedian", "sign", "sgn", "sort", "topk", "unique_dim"}
)
"""Operators with results of the dtype of their operand that depend on comparisons, by name."""


def compares_scattered_sums(name: str, args: tuple, decision: dispatch.Decision) -> bool:
    """Return whether an operator compares values, and stock would scatter the sums of partial ones for it."""
    if decision.needed is None:
        return False
    output = decision.output
    is_exact = output is not None and not (
        output.tensor_meta.dtype.is_floating_point or output.tensor_meta.dtype.is_complex
    )
    if not is_exact and name not in SELECTING:
        return False
    pairs = zip(leaves(args), leaves(decision.needed), strict=False)
    return any(_is_scattered(given, needed) for given, needed in pairs)


def _is_scattered(given: object, needed: object) -> bool:
    if not isinstance(given, DTensor) or not isinstance(needed, dispatch.Spec):
        return False
    if not (given.dtype.is_floating_point or given.dtype.is_complex):
        return False
    pairs = zip(dispatch.placements_of(given), needed.placements, strict=True)
    return any(old.is_partial() and is_sharded(new) for old, new in pairs)
