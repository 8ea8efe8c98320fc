"""Operators that are defined by other operators, under inference mode.

Outside inference mode autograd takes them apart before DTensor sees them. Inference mode shows them whole (``matmul``,
``linear``, ``dropout``). Where stock DTensor has no rule for such an operator it guesses one from a decomposition, which
can gather operands that need no communication, or draw random numbers on the shard. Taking the operator apart first
gives the same operators, and the same placements, as outside.
"""

from __future__ import annotations

from . import _torch

__all__ = ["composite_handlers", "decompose"]


def composite_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handler of every composite operator for which stock DTensor has no rule."""
    return {op: decompose for op in _torch.operators() if _torch.is_composite(op) and not _torch.has_stock_rule(op)}


def decompose(op: _torch.Op, args: tuple, kwargs: dict) -> object:
    """Run the operators that define ``op``."""
    return op.decompose(*args, **kwargs)
