"""Operators that are defined by other operators, under inference mode.

Outside inference mode autograd takes them apart before DTensor sees them. Inference mode shows them whole (``matmul``,
``reshape``, ``dropout``), and stock DTensor's own rules for them, or those that it guesses, gather operands that need
no communication, and draw random numbers on the shard. Taking them apart first gives the same operators, and the same
placements, as outside.
"""

from __future__ import annotations

from .._torch import dispatch as _torch

__all__ = ["composite_handlers", "decompose"]


def composite_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handler of every composite operator."""
    return {op: decompose for op in _torch.operators() if _torch.is_composite(op)}


def decompose(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run the operators that define ``op``."""
    return op.decompose(*args, **kwargs)
