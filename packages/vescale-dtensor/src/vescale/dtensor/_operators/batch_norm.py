"""Batch norm of a batch that is sharded over rows or space: ranks exchange statistics, not rows.

Stock DTensor normalizes over the local batch. Here, with C channels and n elements per channel on all ranks::

    forward    s = sum x           mean = s / n           C numbers are reduced
               q = sum (x - mean)^2    var = q / n        C numbers are reduced
               the kernel of evaluation runs on the shard, with these statistics
    backward   sum g,  sum g (x - mean)                   2 C numbers are reduced; they are the gradients of bias and
                                                          weight, too

The sum of squares needs the mean of all ranks: ``sum x^2 - n mean^2`` would cancel. The reductions are a part of the
operator, not a redistribution of operands. In evaluation nothing is reduced.

Sharded channels, sharded running statistics and partial operands run on full operands, see ``gather``. Source: Ioffe
and Szegedy, Batch Normalization, 2015, section 3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._torch import dispatch
from .gather import gather
from .vocabulary import operand, reduced

__all__ = ["batch_norm_handlers"]

aten = torch.ops.aten

CHANNELS = 1  # a dim


def batch_norm_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of batch norm, forward and backward."""
    return {aten.native_batch_norm.default: _forward, aten.native_batch_norm_backward.default: _backward}


def _forward(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[Tensor, ...]:
    x, weight, bias, running_mean, running_var, training, momentum, eps = args
    if not _is_sharded_batch(x, weight, bias, running_mean, running_var):
        return gather(op, args, kwargs)
    mesh, whole, local = x.device_mesh, [Replicate()] * x.device_mesh.ndim, dispatch.local_tensor(x)
    of_channels = (weight, bias, running_mean, running_var)
    weight, bias, running_mean, running_var = (t if t is None else operand(op, t, mesh, whole) for t in of_channels)
    mean, var, saved = running_mean, running_var, [local.new_empty(0)] * 2
    if training:
        mean, var = _statistics(x, local)
        dtype = local.dtype if weight is None else weight.dtype
        saved = [mean.to(dtype), (var + eps).rsqrt().to(dtype)]
        num = _num_per_channel(x)
        for running, new in ((running_mean, mean), (running_var, var * (num / max(1, num - 1)))):
            if running is not None:
                running.copy_(momentum * new + (1 - momentum) * running)
        mean, var = mean.to(dtype), var.to(dtype)
    out = op(local, weight, bias, mean, var, False, 0.0, eps)[0] if local.numel() else torch.empty_like(local)
    return dispatch.wrap(out, mesh, x.placements, x), *(dispatch.wrap(each, mesh, whole, each) for each in saved)


def _backward(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[Tensor | None, ...]:
    grad, x, *of_channels, training, eps, mask = args
    if not _is_sharded_batch(x, *of_channels):
        return gather(op, args, kwargs)
    mesh, whole, local = x.device_mesh, [Replicate()] * x.device_mesh.ndim, dispatch.local_tensor(x)
    grad = operand(op, grad, mesh, x.placements)
    of_channels = [t if t is None else operand(op, t, mesh, whole) for t in of_channels]
    if training:
        found = _gradients(x, local, grad, of_channels[0], *of_channels[3:])
        placed = whole
    else:
        found = op(grad, local, *of_channels, False, eps, [True] * 3) if local.numel() else _no_gradients(x, local)
        placed = [Partial() if p.is_shard() else p for p in x.placements]
    of_input, *of_parameters = found
    results = (
        dispatch.wrap(of_input, mesh, x.placements, x),
        *(dispatch.wrap(g, mesh, placed, g) for g in of_parameters),
    )
    return tuple(result if wanted else None for result, wanted in zip(results, mask, strict=True))


def _is_sharded_batch(x: Tensor, *of_channels: Tensor | None) -> bool:
    """Return whether ``x`` is sharded, but not over channels, and statistics and parameters are on every rank."""
    if not isinstance(x, DTensor) or x.device_mesh.get_coordinate() is None or not x.numel():
        return False
    whole = all(not isinstance(t, DTensor) or all(p == Replicate() for p in t.placements) for t in of_channels)
    rows = all(p == Replicate() or (type(p) is Shard and p.dim != CHANNELS) for p in x.placements)
    return whole and rows and any(p.is_shard() for p in x.placements)


def _num_per_channel(x: DTensor) -> int:
    return math.prod(x.shape) // x.shape[CHANNELS]


def _dims(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != CHANNELS]


def _of_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return ``values``, one per channel, in a shape that broadcasts over ``x``."""
    return values.view(-1, *[1] * (x.ndim - 2))


def _sums(x: DTensor, *locals_: Tensor) -> Tensor:
    """Return the sums per channel of some tensors over all ranks, a row for each: (len(locals_), C)."""
    least = 2 if locals_[0].is_cpu else 4  # bytes of numbers that torch's kernels add up in their own width
    accumulated = torch.float64 if locals_[0].element_size() > least else torch.float32
    sums = torch.stack([local.sum(_dims(x), dtype=accumulated) for local in locals_])
    axes = [axis for axis, placement in enumerate(x.placements) if placement.is_shard()]
    return reduced("sum", sums, x.device_mesh, [Replicate()] * x.device_mesh.ndim, axes, sums.shape)


def _statistics(x: DTensor, local: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and variance per channel, in the dtype in which torch's kernels accumulate."""
    num = _num_per_channel(x)
    (total,) = _sums(x, local)
    mean = total / num
    (squares,) = _sums(x, (local - _of_channels(mean, local)).square())
    return mean, squares / num


def _gradients(
    x: DTensor, local: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of the shard, of the weight and of the bias."""
    num, wide = _num_per_channel(x), grad.to(mean.dtype)
    centered = local - _of_channels(mean, local)
    of_bias, products = _sums(x, wide, wide * centered)
    scale = invstd if weight is None else invstd * weight
    slope = (products / num).to(mean.dtype) * invstd.square()
    of_input = wide - _of_channels((of_bias / num).to(mean.dtype), local) - centered * _of_channels(slope, local)
    of_parameters = (total.to(mean.dtype) for total in (products * invstd, of_bias))
    return (of_input * _of_channels(scale, local)).to(local.dtype), *of_parameters


def _no_gradients(x: DTensor, local: Tensor) -> tuple[Tensor, ...]:
    return torch.empty_like(local), *(local.new_zeros(x.shape[CHANNELS]) for _ in range(2))
