"""Definitions of softmax, log-softmax and the losses over classes, and of their gradients; see `sums.py`.

Classes may be sharded: the maximum, which no order changes, and the sums of `tree.py` are all that ranks share. A loss
finds the target's value by a comparison with every class, so nothing is looked up on other ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from .._torch import dispatch
from .tree import widened

__all__ = ["DEFINITIONS"]

aten = torch.ops.aten

NONE, MEAN = 0, 1  # of torch's numbers of reductions


# ------------------------------------------------------------------------------------------------- softmax


def _softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    x = widened(self)
    powers = (x - x.amax(dim, True)).exp()
    result = powers / powers.sum(dim, keepdim=True)
    return result if half_to_float else result.to(self.dtype)


def _safe_softmax(self: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Rows that are masked whole become zeros."""
    x = self if dtype is None else self.to(dtype)
    return _softmax(x, dim).masked_fill((x == -math.inf).all(dim, keepdim=True), 0)


def _softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    y = widened(output)
    terms = widened(grad_output) * y
    return (terms - y * terms.sum(dim, keepdim=True)).to(input_dtype)


def _log_softmax(self: Tensor, dim: int, half_to_float: bool = False) -> Tensor:
    x = widened(self)
    x = x - x.amax(dim, True)
    result = x - x.exp().sum(dim, keepdim=True).log()
    return result if half_to_float else result.to(self.dtype)


def _log_softmax_backward(grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    grad = widened(grad_output)
    return (grad - widened(output).exp() * grad.sum(dim, keepdim=True)).to(input_dtype)


# ------------------------------------------------------------------------------------------------- losses


def _chosen(x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Return where in ``x`` of shape (rows, classes, ...) the classes of the targets are; nowhere where ignored."""
    classes = torch.arange(x.shape[1], device=x.device).reshape(-1, *[1] * (x.ndim - 2))
    if isinstance(x, DTensor):
        classes = DTensor.from_local(classes, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    is_class = classes == target.unsqueeze(1)
    return is_class & (target != ignore_index).unsqueeze(1)


def _weights(x: Tensor, chosen: Tensor, weight: Tensor | None) -> Tensor:
    """Return the weight of each chosen element of ``x``, and 0 elsewhere."""
    weights = chosen.to(x.dtype)
    return weights if weight is None else weights * widened(weight).reshape(-1, *[1] * (x.ndim - 2))


def _nll_loss(
    self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    x = widened(_with_rows(self))
    chosen = _chosen(x, target.reshape(x.shape[0], *x.shape[2:]), ignore_index)
    weights = _weights(x, chosen, weight)
    losses = (-x).masked_fill(~chosen, 0) * weights
    each = losses.sum(1).reshape(target.shape)
    if reduction == NONE:
        return each.to(self.dtype), self.new_zeros(())
    total_weight = weights.sum()
    total = each.sum()
    return (total / total_weight if reduction == MEAN else total).to(self.dtype), total_weight.to(self.dtype)


def _nll_loss_backward(
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    x = widened(_with_rows(self))
    targets = target.reshape(x.shape[0], *x.shape[2:])
    grad = widened(grad_output)
    grad = grad / widened(total_weight) if reduction == MEAN else grad
    grad = grad.reshape(targets.shape).unsqueeze(1) if reduction == NONE else grad
    chosen = _chosen(x, targets, ignore_index)
    return (-grad * _weights(x, chosen, weight)).masked_fill(~chosen, 0).reshape(self.shape).to(self.dtype)


def _with_rows(x: Tensor) -> Tensor:
    return x if x.ndim > 1 else x.unsqueeze(0)


DEFINITIONS: dict[dispatch.Op, Callable] = {
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
}
