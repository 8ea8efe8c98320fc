"""Differentiable collectives of the experts' region, on local tensors and a process group.

Each is its own adjoint's partner: the backward of an all-to-all is the all-to-all the other way, ``sum_ranks`` (forward
an all-reduce, backward nothing) belongs to ``share`` (forward nothing, backward an all-reduce), and ``take_rows`` to
``add_rows``. A group of None is a group of one rank: nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Group", "add_rows", "all_to_all", "join", "share", "sum_ranks", "take_rows"]

Group = dist.ProcessGroup | None


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
        dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.splits
        return _AllToAll.apply(grad, receive, send, group), None, None, None


def sum_ranks(partial: Tensor, group: Group) -> Tensor:
    """Return the sum over the ranks of ``group``. The gradient, equal on all of them, goes back as it is."""
    return partial if group is None else _SumRanks.apply(partial, group)


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, partial: Tensor, group: Group) -> Tensor:
        out = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(_ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def share(tensor: Tensor, group: Group) -> Tensor:
    """Return a tensor that is equal on all ranks of ``group``, each of which uses it in part: gradients are summed."""
    return tensor if group is None else _Share.apply(tensor, group)


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _SumRanks.apply(grad, ctx.group), None


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
        return tokens[order // width]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        return _AddRows.apply(grad, *ctx.saved_tensors, *ctx.sizes), None, None


class _AddRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, num_tokens: int, width: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.width = width
        pairs = rows.new_zeros((num_tokens * width, *rows.shape[1:])).index_copy_(0, order, rows)
        first, *others = pairs.unflatten(0, (num_tokens, width)).unbind(1)
        for other in others:
            first = first + other
        return first.contiguous() if others else first.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _TakeRows.apply(grad, *ctx.saved_tensors, ctx.width), None, None, None


def join(output: Tensor, *operands: Tensor) -> Tensor:
    """Return ``output`` so that it depends on all ``operands``, with no gradient.

    A rank whose experts got no token does not use them. Without this, the backward of its inputs would not run there,
    while the other ranks wait in its communication; and its parameters would have no gradient, where on one device the
    tensor of all experts has one that is zero for these, and the optimizer updates them.
    """
    return _Join.apply(output, *operands)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output: Tensor, *operands: Tensor) -> Tensor:
        ctx.num_operands = len(operands)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.num_operands)
