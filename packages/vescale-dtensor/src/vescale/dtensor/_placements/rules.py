"""Choose the rule of an operator on ragged or interleaved operands.

The dispatcher calls `decide` once per operator, shapes and placements, and caches the answer if it is a sharding. Only
operators on lists, reductions and operators that change shapes call it every time.
"""

from __future__ import annotations

import torch

from .._torch.dispatch import Op, is_composite
from .._torch.dispatch import schema as operator_schema
from .._torch.placements import sharding
from .interleaved import run_interleaved
from .pointwise import is_pointwise, run_pointwise, runs_on_shards
from .ragged import ragged_operands, refusal
from .reductions import REDUCTIONS

__all__ = ["decide", "refuse_ragged"]


def decide(op: Op, args: tuple, kwargs: dict, schema: object) -> object:
    """Return a sharding, or the operator's result, or NotImplemented where torch's own rules apply.

    Raises:
        UnsupportedPlacement: the operator does not support its ragged operands.
    """
    ragged = ragged_operands(args, kwargs)
    if not ragged:
        found = run_interleaved(op, args, kwargs)
        return NotImplemented if found is None else found
    if (reduction := REDUCTIONS.get(op.name().removeprefix("aten::"))) is not None:
        return reduction(op, args, kwargs)
    if op in _VIEWS and tuple(args[1]) == tuple(args[0].shape):
        return run_pointwise(torch.ops.aten.alias.default, args[:1], {})
    if is_composite(op):  # dispatched in inference mode only
        return op.decompose(*args, **kwargs)
    if not is_pointwise(op):
        raise refusal(op, args, kwargs, _REASON)
    if runs_on_shards(args, kwargs):
        return sharding(schema, ragged[0].placements, in_place=operator_schema(op).is_mutable)
    return run_pointwise(op, args, kwargs)


def refuse_ragged(op: Op, args: tuple, kwargs: dict) -> None:
    """Raise if an operand is ragged; for operators whose other rules do not support ragged tensors.

    Raises:
        UnsupportedPlacement: an operand is ragged.
    """
    if ragged_operands(args, kwargs):
        raise refusal(op, args, kwargs, _REASON)


_REASON = "it is neither pointwise nor a reduction over all dims"
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
