"""Definitions of the normalizations, and of their gradients; see `sums.py` for what a definition is.

With ``y = (x - mean) * rstd`` over the dims that are normalized, and ``g`` the gradient of ``y``::

    gradient of x      rstd * (g - mean(g) - y * mean(g * y))
    of weight, bias    sums of grad * y and of grad over the other dims

The means of a gradient are left out where the statistics are given (batch norm in evaluation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._torch import dispatch
from .tree import widened

__all__ = ["DEFINITIONS"]

aten = torch.ops.aten

Three = tuple[Tensor | None, Tensor | None, Tensor | None]


def _statistics(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and reciprocal standard deviation over some dims, which keep size 1."""
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / count
    distance = x - mean
    var = (distance * distance).sum(dims, keepdim=True) / count
    return mean, var, (var + eps).rsqrt()


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * widened(weight)
    return y if bias is None else y + widened(bias)


def _of_input(g: Tensor, y: Tensor, rstd: Tensor, dims: Sequence[int]) -> Tensor:
    count = math.prod(y.shape[d] for d in dims)
    return (g - g.sum(dims, keepdim=True) / count - y * ((g * y).sum(dims, keepdim=True) / count)) * rstd


def _last(x: Tensor, count: int) -> tuple[list[int], list[int]]:
    """Return the dims before the last ``count`` dims, and these."""
    return list(range(x.ndim - count)), list(range(x.ndim - count, x.ndim))


# ------------------------------------------------------------------------------------------------- layer norm


def _layer_norm(
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x = widened(input)
    mean, _, rstd = _statistics(x, _last(x, len(normalized_shape))[1], eps)
    return _scaled((x - mean) * rstd, weight, bias).to(input.dtype), mean, rstd


def _layer_norm_backward(
    grad_out: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> Three:
    outer, inner = _last(input, len(normalized_shape))
    grad = widened(grad_out)
    y = (widened(input) - mean) * rstd
    return (
        _of_input(_scaled(grad, weight, None), y, rstd, inner).to(input.dtype) if output_mask[0] else None,
        _summed(grad * y, outer, weight) if output_mask[1] else None,
        _summed(grad, outer, bias) if output_mask[2] else None,
    )


def _summed(grad: Tensor, dims: Sequence[int], like: Tensor | None) -> Tensor | None:
    if like is None:
        return None
    return (grad.sum(dims) if dims else grad.clone()).to(like.dtype).reshape(like.shape)


def _rms_norm(
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    eps: float | None,
) -> tuple[Tensor, Tensor]:
    x = widened(input)
    inner = _last(x, len(normalized_shape))[1]
    least = torch.finfo(x.dtype).eps if eps is None else eps
    rstd = ((x * x).sum(inner, keepdim=True) / math.prod(normalized_shape) + least).rsqrt()
    return _scaled(x * rstd, weight, None).to(input.dtype), rstd


def _rms_norm_backward(
    grad_out: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    normalized_shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    outer, inner = _last(input, len(normalized_shape))
    grad = widened(grad_out)
    y = widened(input) * rstd
    g = _scaled(grad, weight, None)
    of_input = (g - y * ((g * y).sum(inner, keepdim=True) / math.prod(normalized_shape))) * rstd
    return (
        of_input.to(input.dtype) if output_mask[0] else None,
        _summed(grad * y, outer, weight) if output_mask[1] else None,
    )


# ------------------------------------------------------------------------------------------------- group norm


def _in_groups(x: Tensor, batch: int, channels: int, size: int, groups: int) -> Tensor:
    return x.reshape(batch, groups, channels // groups, size)


def _group_norm(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,  # noqa: N803 - torch's names
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x = _in_groups(widened(input), N, C, HxW, group)
    mean, _, rstd = _statistics(x, [2, 3], eps)
    sizes = (1, group, C // group, 1)
    parameters = [None if p is None else p.reshape(sizes) for p in (weight, bias)]
    result = _scaled((x - mean) * rstd, *parameters).reshape(input.shape)
    return result.to(input.dtype), mean.reshape(N, group), rstd.reshape(N, group)


def _group_norm_backward(
    grad_out: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,  # noqa: N803
    C: int,  # noqa: N803
    HxW: int,  # noqa: N803
    group: int,
    output_mask: Sequence[bool],
) -> Three:
    x, grad = (_in_groups(widened(t), N, C, HxW, group) for t in (input, grad_out))
    scale = rstd.reshape(N, group, 1, 1)
    y = (x - mean.reshape(N, group, 1, 1)) * scale
    g = grad if weight is None else grad * widened(weight).reshape(1, group, C // group, 1)
    of_input = _of_input(g, y, scale, [2, 3]).reshape(input.shape) if output_mask[0] else None
    dtype = input.dtype if weight is None else weight.dtype
    return (
        None if of_input is None else of_input.to(input.dtype),
        (grad * y).sum([0, 3]).reshape(C).to(dtype) if output_mask[1] else None,
        grad.sum([0, 3]).reshape(C).to(dtype) if output_mask[2] else None,
    )


# ------------------------------------------------------------------------------------------------- batch norm


def _across(x: Tensor, values: Tensor | None) -> Tensor | None:
    """Return one value for each channel in a shape that fits the batch."""
    return None if values is None else values.reshape(1, -1, *[1] * (x.ndim - 2))


def _batch_norm(
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    x = widened(input)
    dims = [d for d in range(x.ndim) if d != 1]
    if training:
        mean, var, rstd = _statistics(x, dims, eps)
        count = math.prod(x.shape[d] for d in dims)
        _follow(running_mean, mean.reshape(-1), momentum)
        _follow(running_var, var.reshape(-1) * (count / max(count - 1, 1)), momentum)
        saved = mean.reshape(-1), rstd.reshape(-1)
    else:
        mean, rstd = _across(x, running_mean), (_across(x, running_var) + eps).rsqrt()
        saved = mean.new_empty(0), mean.new_empty(0)
    return _scaled((x - mean) * rstd, _across(x, weight), _across(x, bias)).to(input.dtype), *saved


def _follow(running: Tensor | None, value: Tensor, momentum: float) -> None:
    if running is not None:
        running.copy_(running * (1 - momentum) + value.to(running.dtype) * momentum)


def _batch_norm_backward(
    grad_out: Tensor,
    input: Tensor,  # noqa: A002 - torch's name
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Three:
    x, grad = widened(input), widened(grad_out)
    dims = [d for d in range(x.ndim) if d != 1]
    mean = _across(x, save_mean if train else running_mean)
    rstd = _across(x, save_invstd if train else (running_var + eps).rsqrt())
    y = (x - mean) * rstd
    g = grad if weight is None else grad * _across(x, widened(weight))
    of_input = (_of_input(g, y, rstd, dims) if train else g * rstd).to(input.dtype) if output_mask[0] else None
    dtype = input.dtype if weight is None else weight.dtype
    return (
        of_input,
        (grad * y).sum(dims).to(dtype) if output_mask[1] else None,
        grad.sum(dims).to(dtype) if output_mask[2] else None,
    )


def _table(**definitions: Callable) -> dict[dispatch.Op, Callable]:
    """Return the definitions by operator; some operators are not in every version of torch."""
    found = {dispatch.overload(name): definition for name, definition in definitions.items()}
    return {op: definition for op, definition in found.items() if op is not None}


DEFINITIONS = _table(
    native_layer_norm=_layer_norm,
    native_layer_norm_backward=_layer_norm_backward,
    _fused_rms_norm=_rms_norm,
    _fused_rms_norm_backward=_rms_norm_backward,
    native_group_norm=_group_norm,
    native_group_norm_backward=_group_norm_backward,
    native_batch_norm=_batch_norm,
    native_batch_norm_backward=_batch_norm_backward,
)
