"""Writes that autograd does not count: operators on lists of tensors (``torch._foreach_mul_([x], 2)``).

Autograd counts the writes to a tensor. By the count it knows that a saved tensor has changed, which is an error in the
backward pass, and that a view has, whose history it then makes anew. For one tensor torch counts before DTensor gets
the operator. For a list each tensor's own operator counts, which for DTensors runs on the shards only: the gradient of
a view that is written so would lack the write. The handler of these operators counts for the DTensors.
"""

from __future__ import annotations

from torch.autograd.graph import increment_version

from .._torch import dispatch
from .operands import written_arguments

__all__ = ["count_writes", "writes_lists"]


def writes_lists(op: dispatch.Op) -> bool:
    """Return whether ``op`` is an operator on lists that writes to its first one."""
    return op.overloadpacket.__name__.startswith("_foreach_") and bool(dispatch.written_arguments(op))


def count_writes(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule, and count the write for each tensor of the list."""
    result = dispatch.stock_dispatch(op, args, kwargs)
    increment_version([tensor for tensor in written_arguments(op, args, kwargs) if not tensor.is_inference()])
    return result
