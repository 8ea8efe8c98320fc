"""Operators without a form of their own: the call of one device, on operands that every rank has whole.

A kernel that gets the same operands in the same shape gives the same bits, whatever it computes. What such an operator
writes goes back to the shards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import map_leaves, tensors_in
from .._operators.gather import gather
from .._operators.operands import written_arguments
from .._torch import dispatch
from ..errors import UnsupportedOperator
from .laid import Laid, mesh_of

__all__ = ["LINES", "embed", "refuse_fused", "run_on_lines", "run_whole"]

aten = torch.ops.aten

LINES = frozenset({aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default})
"""Operators that treat each line along their dim by itself, element after element."""


def run_whole(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator on full, contiguous operands."""
    written = {id(tensor) for tensor in written_arguments(op, args, kwargs)}
    mesh = mesh_of(tensors_in((args, kwargs)))

    def bring(tensor: Tensor) -> Tensor:
        if id(tensor) in written:
            return tensor
        return Laid.of(tensor, mesh).gathered().tensor() if isinstance(tensor, DTensor) else tensor.contiguous()

    if not dispatch.is_view(op):
        args, kwargs = map_leaves(bring, args, Tensor), map_leaves(bring, kwargs, Tensor)
    return op(*args, **kwargs) if mesh is None else gather(op, args, kwargs)


def run_on_lines(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Run an operator of :data:`LINES` on lines that ranks have whole."""
    tensor, dim, *others = args
    operand = Laid.of(tensor, mesh_of(args))
    operand = operand.gathered([dim % tensor.ndim]) if tensor.ndim else operand
    return operand.replaced(op(operand.local.contiguous(), dim, *others, **kwargs), operand.shape).tensor()


def embed(_num_blocks: int, op: dispatch.Op, weight: Tensor, *others: object) -> Tensor:
    """Look up rows of a table that ranks have whole, where stock adds zeros of the ranks that have not the row."""
    table = Laid.of(weight, mesh_of([weight])).gathered([0])
    return op(table.tensor() if isinstance(weight, DTensor) else weight, *others)


def refuse_fused(op: dispatch.Op) -> None:
    """Refuse an optimizer's step in one kernel, which rounds by the place of an element in a shard.

    Raises:
        UnsupportedOperator: the operator is one.
    """
    if op.overloadpacket.__name__.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")):
        raise UnsupportedOperator(
            f"{op} inside of vescale.dtensor.exact: expected an optimizer of single operators, got a fused one, whose "
            "bits depend on where an element lies in its shard; construct the optimizer with fused=False"
        )
