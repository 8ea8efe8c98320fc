"""Operators whose result on a device has another memory order than torch says.

The strides of a result are those that torch computes without values. For some operators it computes them from their
definition, and the kernel orders the result otherwise: ``softplus_backward`` of a transposed operand. Then a view that
the strides allow fails on the shard. Here the shard gets the order that the strides say.
"""

from __future__ import annotations

from torch.distributed.tensor import DTensor

from .._containers import map_leaves
from .._placements.hooks import in_memory_order
from .._torch import dispatch

__all__ = ["OTHERWISE_ORDERED", "ordered"]

OTHERWISE_ORDERED: tuple[str, ...] = (
    "copysign.Tensor",
    "floor_divide",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "log_sigmoid_forward",
    "logit_backward",
    "native_dropout_backward",
    "softplus_backward",
    "xlogy.Tensor",
)


def ordered(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run the stock rule, and bring the shards of its results to the order of their strides."""

    def order(result: DTensor) -> DTensor:
        local, spec = dispatch.local_tensor(result), dispatch.spec(result)
        strides = spec.tensor_meta.stride
        placed = in_memory_order(local, sorted(range(local.ndim), key=lambda dim: -strides[dim]))
        return result if placed is local else dispatch.from_spec(placed, spec)

    return map_leaves(order, dispatch.stock_dispatch(op, args, kwargs), DTensor)
