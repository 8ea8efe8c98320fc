"""Differentiable operators of the experts' region, on local tensors and a process group.

They come in adjoint pairs, each the backward of the other:

    all_to_all                              all_to_all in the other direction
    sum_ranks: all-reduce, then identity    share: identity, then all-reduce
    take_rows: gather rows                  add_rows: add rows in a fixed order

A group of None stands for one rank, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from vescale.dtensor.extension import waits_of

from .. import _torch
from .._boundary.edges import depend_on

__all__ = ["Group", "add_rows", "all_to_all", "share", "sum_ranks", "take_rows"]

Group = dist.ProcessGroup | None
Sums = _torch.Collectives | None
"""A group with prepared collectives; None for one rank."""


# ------------------------------------------------------------------------------------------------- between ranks


def all_to_all(rows: Tensor, *, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Send consecutive rows to the ranks of ``group`` and return those received, in the order of the ranks.

    Args:
        rows: (sum of ``send``, ...).
        send: number of rows for each rank.
        receive: number of rows from each rank.
        group: its ranks all call this.
    """
    return rows if group is None else _AllToAll.apply(rows, tuple(send), tuple(receive), group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...], group: Group) -> Tensor:
        ctx.splits = send, receive, group
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        waits_of(group).run("all-to-all", dist.all_to_all_single, out, rows.contiguous(), list(receive), list(send))
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.splits
        return _AllToAll.apply(grad, receive, send, group), None, None, None


def sum_ranks(partial: Tensor, group: Sums, *operands: Tensor) -> Tensor:
    """Return the sum over the ranks of ``group``, which depends on ``operands`` as `depend_on` says.

    The gradient, equal on all ranks, goes back as it is.
    """
    return depend_on(partial, *operands) if group is None else _SumRanks.apply(partial, group, *operands)


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial: Tensor, group: Sums, *operands: Tensor) -> Tensor:
        ctx.nothing = (None,) * (1 + len(operands))
        return group.all_reduce(partial, "sum")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, *ctx.nothing


def share(group: Sums, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Return tensors that are equal on all ranks of ``group``, each of which uses them in part.

    Their gradients are summed over the ranks.
    """
    return tensors if group is None else _Share.apply(group, *tensors)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group: Sums, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = zip(grads, ctx.needs_input_grad[1:], strict=True)
        return None, *(_SumRanks.apply(grad, ctx.group) if needs else None for grad, needs in needed)


# ------------------------------------------------------------------------------------------------- on one rank


def take_rows(tokens: Tensor, order: Tensor, width: int) -> Tensor:
    """Return the token of each pair, ``tokens[order // width]``. Gradients are added as in :func:`add_rows`.

    Args:
        tokens: (num_tokens, hidden).
        order: (num_pairs,) int64, distinct, below ``num_tokens * width``: pair ``p`` belongs to token ``p // width``.
        width: pairs per token.
    """
    return _TakeRows.apply(tokens, order, width)


def add_rows(rows: Tensor, order: Tensor, num_tokens: int, width: int) -> Tensor:
    """Add the rows of each token's pairs, in the order of the pairs, starting from the first; no pair gives zeros.

    The order does not depend on where a row was computed, so neither does the sum.

    Args:
        rows: (num_pairs, hidden).
        order: (num_pairs,) int64: the pair of each row.
        num_tokens: length of the result.
        width: pairs per token.
    """
    return _AddRows.apply(rows, order, num_tokens, width)


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, order: Tensor, width: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.sizes = len(tokens), width
        return tokens.index_select(0, order // width if width > 1 else order)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _AddRows.apply(grad, *ctx.saved_tensors, *ctx.sizes), None, None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, num_tokens: int, width: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.width = width
        num_pairs = num_tokens * width
        new = rows.new_empty if len(rows) == num_pairs else rows.new_zeros  # pairs are distinct: all come, or not
        pairs = new((num_pairs, *rows.shape[1:])).index_copy_(0, order, rows)
        first, *others = pairs.unflatten(0, (num_tokens, width)).unbind(1)
        for other in others:
            first = first + other
        return first.contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _TakeRows.apply(grad, *ctx.saved_tensors, ctx.width), None, None, None
