"""Which operator gets which rule, and why.

An operator that stock DTensor has no rule for, or whose rule does not know the placements at hand, runs on whole
operands (:func:`fallback`). The tables name the operators that it has a rule for which is wrong.
"""

from __future__ import annotations

import functools

import torch

from .. import _torch
from ..errors import UnsupportedOperator
from ._compose import compose
from ._gather import gather
from ._guard import whole_where_empty, whole_where_uneven
from ._operands import dtensors

__all__ = ["fallback", "operator_handlers"]

GATHER: tuple[str, ...] = ()

COMPOSE: tuple[str, ...] = ()

WHOLE_WHERE_EMPTY: tuple[str, ...] = ()

WHOLE_WHERE_UNEVEN: tuple[str, ...] = ()


@functools.cache
def operator_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return a handler for every operator that stock DTensor has a wrong rule for."""
    rules = (
        (GATHER, gather),
        (COMPOSE, compose),
        (WHOLE_WHERE_EMPTY, whole_where_empty),
        (WHOLE_WHERE_UNEVEN, whole_where_uneven),
    )
    return {op: rule for names, rule in rules for name in names if (op := _torch.overload(name)) is not None}


def fallback(op: _torch.Op, args: tuple, kwargs: dict, error: Exception) -> object:
    """Run an operator for which stock DTensor finds no placements, or raises ``error`` looking for them.

    Raises:
        UnsupportedOperator: it changes a tensor's shape or storage in place.
    """
    if torch.Tag.inplace_view in op.tags or op._overloadpacket in _OF_STORAGE:
        raise UnsupportedOperator.for_operands(
            op,
            tuple(dtensors(args, kwargs)),
            "it changes the tensor's shape or storage in place: use the form that returns a new tensor",
        ) from error
    return gather(op, args, kwargs)


_OF_STORAGE = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("resize_", "resize_as_", "resize", "set_", "set_data", "record_stream", "_resize_output_")
    if hasattr(torch.ops.aten, name)
)
