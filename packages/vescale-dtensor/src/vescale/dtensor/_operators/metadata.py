"""Operators that change the metadata of a tensor in place: ``unsqueeze_``, ``squeeze_``, ``transpose_``, ``t_``.

They run as their out-of-place form, which decides the placements and gives the local tensor. The operand then takes
over the result. (Stock DTensor has a rule for ``squeeze_`` only, and the tensor reports its old shape afterwards.)
"""

from __future__ import annotations

import functools

import torch

from .._torch import dispatch
from ..errors import UnsupportedOperator
from .operands import dtensors

__all__ = ["change_metadata"]


def change_metadata(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
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
    return dispatch.become(op, args, kwargs, functional(*args, **kwargs))


@functools.cache
def _functional(op: dispatch.Op) -> dispatch.Op | None:
    """Return the out-of-place form of ``op``: ``transpose.int`` for ``transpose_``."""
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if packet is None or packet is op.overloadpacket:
        return None
    candidates = (getattr(packet, name) for name in packet.overloads())
    return next((c for c in candidates if _arguments(c) == _arguments(op) and dispatch.is_view(c)), None)


def _arguments(op: dispatch.Op) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in dispatch.schema(op).arguments]
