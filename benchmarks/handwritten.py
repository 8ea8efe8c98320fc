"""Tensor and sequence parallelism written by hand: the yardstick of `static_overhead`.

Plain local tensors and one autograd function per kind of boundary, as a careful engineer would write them into the
model. Activations between the blocks are (batch, seq / n, hidden) on each of n ranks. Attention and feed-forward gather
the sequence, and each rank has its share of heads or of the inner dim:

    norm -> all-gather -> column, attention, row -> reduce-scatter -> add the row's bias

Backward runs the conjugates. Norms and row biases see a part of the tokens, so their gradients are partial sums: they
are added over the ranks once per step, together, in one flat tensor (`reduce_shared`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from blocks import Attention, GatedMLP, GeluMLP, LlamaBlock
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "WholeEdges",
    "by_hand",
    "gather",
    "gather_equal",
    "partial_sum",
    "reduce_shared",
    "scatter",
    "share",
    "split",
    "whole_from_equal",
]


# ----------------------------------------------------------------------------------------------------- collectives

# torch 2.13 renamed them
_gather_tensor = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_tensor = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _all_gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, seq / n, hidden) -> (batch, seq, hidden)."""
    n, (batch, seq, hidden) = group.size(), local.shape
    pieces = local.new_empty(n * batch, seq, hidden)
    _gather_tensor(pieces, local.contiguous(), group=group)
    return pieces.view(n, batch, seq, hidden).transpose(0, 1).reshape(batch, n * seq, hidden)


def _reduce_scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(batch, seq, hidden) -> (batch, seq / n, hidden), added over the ranks."""
    n, (batch, seq, hidden) = group.size(), whole.shape
    pieces = whole.view(batch, n, seq // n, hidden).transpose(0, 1).contiguous()
    local = whole.new_empty(batch, seq // n, hidden)
    _scatter_tensor(local, pieces.view(n * batch, seq // n, hidden), group=group)
    return local


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(local, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad.contiguous(), ctx.group), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(whole, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.chunk(group.size(), dim=1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(partial)
        dist.all_reduce(partial, group=group)
        return partial

    @staticmethod
    def backward(_ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx, equal: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return equal.view_as(equal)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherEqual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(local, group)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].contiguous(), None


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, local: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        pieces = local.new_empty(group.size() * local.shape[0], *local.shape[1:])
        _gather_tensor(pieces, local.contiguous(), group=group)
        return torch.cat(pieces.chunk(group.size()), dim=-1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()].contiguous(), None


def gather(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence from each rank's part; gradients are added over the ranks and cut."""
    return _Gather.apply(local, group)


def scatter(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sequence of the sum over the ranks; gradients are gathered."""
    return _Scatter.apply(whole, group)


def split(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's part of the sequence of a tensor that is equal on all ranks; gradients are gathered."""
    return _Split.apply(whole, group)


def partial_sum(partial: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the ranks, in place; every rank's gradient is the whole one."""
    return _Sum.apply(partial, group)


def share(equal: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor, for uses that differ between ranks; gradients are added over the ranks."""
    return _Share.apply(equal, group)


def gather_equal(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole sequence from each rank's part, for a use that is equal on all ranks; gradients are cut."""
    return _GatherEqual.apply(local, group)


def whole_from_equal(local: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the whole last dim from each rank's part, for a use that is equal on all ranks."""
    return _GatherLast.apply(local, group)


def reduce_shared(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Add the gradients of `parameters` over the ranks, in one collective; they become views of one flat tensor."""
    flat = torch.cat([p.grad.view(-1) for p in parameters])
    dist.all_reduce(flat, group=group)
    for parameter, grad in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = grad.view(parameter.shape)


# ----------------------------------------------------------------------------------------------------- blocks


class WholeEdges(nn.Module):
    """A stack of rewritten blocks that takes and returns whole tensors, equal on all ranks."""

    def __init__(self, stack: nn.Sequential, group: dist.ProcessGroup):
        super().__init__()
        self.stack, self.group = stack, group

    def forward(self, x: Tensor) -> Tensor:
        return gather_equal(self.stack(split(x, self.group)), self.group)

    def named_parameters(self, *args: object, **kwargs: object) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the stack's own names."""
        yield from self.stack.named_parameters(*args, **kwargs)


class _HandAttention(nn.Module):
    """A rank's heads of an `Attention`."""

    def __init__(self, attention: Attention, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.head_dim = group, attention.head_dim
        self.q, self.k, self.v = (_column(f, group) for f in (attention.q, attention.k, attention.v))
        self.out = _row(attention.out, group)

    mix = Attention.mix

    def forward(self, x: Tensor, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        mixed = self.mix(gather(x, self.group), cos, sin)
        return _project(self.out, mixed, self.group)


class _HandMLP(nn.Module):
    """A rank's share of the inner dim of a `GeluMLP` or a `GatedMLP`."""

    def __init__(self, mlp: GeluMLP | GatedMLP, group: dist.ProcessGroup):
        super().__init__()
        self.group, self.mix_of = group, type(mlp).mix
        self.up, self.down = _column(mlp.up, group), _row(mlp.down, group)
        if isinstance(mlp, GatedMLP):
            self.gate = _column(mlp.gate, group)

    def forward(self, x: Tensor) -> Tensor:
        return _project(self.down, self.mix_of(self, gather(x, self.group)), self.group)


def _project(row: nn.Linear, inner: Tensor, group: dist.ProcessGroup) -> Tensor:
    # a bias added before the sum would count once per rank
    out = scatter(F.linear(inner, row.weight), group)
    return out if row.bias is None else out + row.bias


def _column(linear: nn.Linear, group: dist.ProcessGroup) -> nn.Linear:
    bias = None if linear.bias is None else _part(linear.bias, 0, group)
    return _linear(_part(linear.weight, 0, group), bias)


def _row(linear: nn.Linear, group: dist.ProcessGroup) -> nn.Linear:
    return _linear(_part(linear.weight, 1, group), linear.bias)


def _part(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    return tensor.detach().chunk(group.size(), dim)[group.rank()].clone()


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    linear.bias = None if bias is None else nn.Parameter(bias.detach().clone())
    return linear


def by_hand(model: nn.Sequential, group: dist.ProcessGroup) -> tuple[nn.Sequential, list[nn.Parameter]]:
    """Rewrite a stack of `blocks` for the ranks of `group`, in place.

    Returns:
        The stack, and the parameters whose gradients are partial sums over the ranks after backward.
    """
    shared: list[nn.Parameter] = []
    for block in model:
        block.attn, block.mlp = _HandAttention(block.attn, group), _HandMLP(block.mlp, group)
        shared += [*block.norm1.parameters(), *block.norm2.parameters()]
        if not isinstance(block, LlamaBlock):
            shared += [block.attn.out.bias, block.mlp.down.bias]
    return model, shared
