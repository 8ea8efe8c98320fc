"""Which operators are replayed, and how many values of a block each of them uses.

Source: ATen/native/cuda/DistributionTemplates.h of torch 2.11 to 2.13 (64-bit draws take two words each).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..._torch import dispatch as _torch

__all__ = ["NARROW", "WIDE", "trial_args", "values_per_block"]

aten = torch.ops.aten

FLOATING = {
    aten.uniform_.default,
    aten.normal_.default,
    aten.exponential_.default,
    aten.cauchy_.default,
    aten.log_normal_.default,
    aten.bernoulli_.float,
    aten.geometric_.default,
}
"""Fills that transform floats, or doubles for a tensor of doubles."""

RANDOM_FROM = getattr(aten.random_, "from")
UNBOUNDED_64 = {torch.int64, torch.float64}

WIDE_RANGE = 2**28
"""From this range on, integers are drawn from 64 bits."""

NARROW, WIDE = 4, 2


def values_per_block(op: _torch.Op, dtype: torch.dtype, args: Sequence[object]) -> int | None:
    """Return how many values of each Philox block a fill uses: 4, 2, or None where that is not known.

    Args:
        op: the in-place operator.
        dtype: element type of the tensor.
        args: positional arguments of `op` after the tensor.

    Example:
        >>> values_per_block(RANDOM_FROM, torch.int32, (0, 2**28)), values_per_block(RANDOM_FROM, torch.int32, (0, 9))
        (2, 4)
    """
    if dtype.is_complex:
        return None
    if op in FLOATING:
        return WIDE if dtype == torch.float64 else NARROW
    if op is aten.random_.default:
        return WIDE if dtype in UNBOUNDED_64 else NARROW
    size = _range(op, dtype, args)
    if size is None or (dtype.is_floating_point and WIDE_RANGE // 2 < size < WIDE_RANGE * 2):
        return None  # the bounds of a draw of integers into floats are rounded first
    return WIDE if size >= WIDE_RANGE else NARROW


def _range(op: _torch.Op, dtype: torch.dtype, args: Sequence[object]) -> int | None:
    """Return the number of integers that `random_` chooses from."""
    if op is aten.random_.to and len(args) == 1:
        start, stop = 0, args[0]
    elif op is RANDOM_FROM and len(args) == 2:
        start, stop = args
    else:
        return None
    if stop is None and not dtype.is_floating_point:
        stop = 2 if dtype == torch.bool else torch.iinfo(dtype).max + 1
    if not (isinstance(start, int) and isinstance(stop, int)):
        return None
    return stop - start


def trial_args(op: _torch.Op, dtype: torch.dtype, *, wide: bool) -> tuple[object, ...]:
    """Return arguments for a test draw that uses blocks as ``wide`` says, for any dtype that has such draws.

    Example:
        >>> trial_args(RANDOM_FROM, torch.int64, wide=True)
        (0, 268435456)
    """
    if op in (RANDOM_FROM, aten.random_.to):
        stop = WIDE_RANGE if wide else 2 if dtype == torch.bool else 100
        return (stop,) if op is aten.random_.to else (0, stop)
    return (0.5,) if op in (aten.bernoulli_.float, aten.geometric_.default) else ()
