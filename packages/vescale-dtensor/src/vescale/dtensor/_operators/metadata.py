"""Operators that change a tensor's shape or strides in place: ``unsqueeze_``, ``squeeze_``, ``transpose_``, ``t_``.

The form that returns a result decides placements and gives the local part; the tensor then becomes that result. (Stock
DTensor has a rule for ``squeeze_`` alone, after which the tensor shows its old shape.)
"""

from __future__ import annotations

import functools

import torch

from .._torch import dispatch as _torch
from ..errors import UnsupportedOperator
from .operands import dtensors

__all__ = ["change_metadata"]


def change_metadata(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator that changes its first operand's metadata.

    Raises:
        UnsupportedOperator: it changes the storage, or has no form that returns a result.
    """
    functional = _functional(op) if torch.Tag.inplace_view in op.tags else None
    if functional is None:
        raise UnsupportedOperator.for_operands(
            op,
            tuple(dtensors(args, kwargs)),
            "it changes the tensor's shape or storage in place: use the form that returns a new tensor",
        )
    return _torch.become(op, args, kwargs, functional(*args, **kwargs))


@functools.cache
def _functional(op: _torch.Op) -> _torch.Op | None:
    """Return the operator that gives what ``op`` makes of its operand: of ``transpose_``, ``transpose.int``."""
    packet = getattr(torch.ops.aten, op._overloadpacket.__name__.removesuffix("_"), None)
    if packet is None or packet is op._overloadpacket:
        return None
    candidates = (getattr(packet, name) for name in packet.overloads())
    return next((c for c in candidates if _arguments(c) == _arguments(op) and _torch.is_view(c)), None)


def _arguments(op: _torch.Op) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in op._schema.arguments]
