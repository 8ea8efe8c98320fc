"""Collectives inside of the mode: what moves values is fine, what adds floating-point numbers is refused.

A backend adds in an order of its own, which depends on the number of ranks. The forms gather instead and add by the
tree. So a sum over ranks is one that the program makes for itself: data parallelism of a plain module, whose ranks see
their own rows alone, or a pipeline. What they compute locally is not what one device computes in blocks either. Maxima
pass where DTensor takes them, because no order changes them; so do sums of `one_addend`, which have one order.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from .._containers import tensors_in
from .._exact_context import ONE_ADDEND
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .passing import is_exact_dtype

__all__ = ["NAMESPACES", "refuse_sums"]

NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d")

REDUCES = ("all_reduce", "allreduce", "reduce", "reduce_scatter")
ORDERLESS = frozenset({"max", "min"})


def refuse_sums(op: dispatch.Op, args: tuple, kwargs: dict) -> None:
    """Refuse a collective that adds floating-point numbers of several ranks.

    Raises:
        UnsupportedOperator: the operator is one.
    """
    name = dispatch.schema(op).name.partition("::")[2].lstrip("_")
    floats = [tensor for tensor in tensors_in((args, kwargs)) if not is_exact_dtype(tensor)]
    if not floats or ONE_ADDEND.get():
        return
    if name.startswith(REDUCES) and not any(map(_is_orderless, args)):
        _refuse(op, floats, "would add numbers of ranks in the order of its backend", "a sum over ranks")


def _is_orderless(value: object) -> bool:
    """Return whether an argument names a maximum or a minimum: by a word, or as torch.distributed.ReduceOp."""
    if isinstance(value, torch.ScriptObject) and hasattr(value, "op"):
        return value.op() in (int(dist.ReduceOp.MAX), int(dist.ReduceOp.MIN))
    return isinstance(value, str) and value in ORDERLESS


def _refuse(op: dispatch.Op, floats: list[Tensor], does: str, what: str) -> None:
    raise UnsupportedOperator(
        f"{op} of a tensor of shape {tuple(floats[0].shape)} inside of vescale.dtensor.exact: expected values on all "
        f"ranks to be those of one device, got {what}: it {does}; put data parallelism into the mesh of the DTensors "
        "(Shard(0) on its axis), or leave the context"
    )
