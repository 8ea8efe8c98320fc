"""How far rounding errors of a program reach, measured.

Kernels may add in another order for another memory layout, and cancellation makes small differences large. The check's
first bound follows from the dtype alone. Where it is exceeded, the call is recorded once more, and the result of every
operator is changed by about two rounding errors, alike on all replicas. What that changes at a boundary is what
rounding can do in this program; `GAIN` times as much is allowed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ... import _torch

__all__ = ["GAIN", "allowed", "bound_of", "nudged"]

GAIN = 4
"""How many times the measured effect is allowed: it is one sample, and operators add up many terms."""

COARSE = 1e-4
"""Relative rounding error, above which a dtype has less than 32 bits; operators add it up in float32."""


def bound_of(dtype: torch.dtype) -> float:
    """Return the difference that is always allowed, relative to the largest element."""
    eps = torch.finfo(dtype).eps
    return 8 * eps if eps > COARSE else 32 * eps**0.75


def allowed(expected: Tensor, nudged: Tensor | None) -> float:
    """Return the absolute difference that rounding explains; 0 if nothing was measured."""
    if nudged is None or nudged.shape != expected.shape or not expected.numel():
        return 0.0
    difference = (nudged - expected).abs()  # of complex numbers, too
    return GAIN * float(torch.nan_to_num(difference, 0, 0, 0).max())


@_torch.unseen
def nudged(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements, and those of its gradient, are changed by up to two rounding errors.

    Equal elements change alike. Views stay as they are, because they share memory, and so do partial sums.
    """
    if not tensor.dtype.is_floating_point or tensor._is_view() or _is_sum(tensor):
        return tensor
    return _Nudged.apply(tensor)


class _Nudged(torch.autograd.Function):
    """Changes local values only, so that layouts stay as they are."""

    @staticmethod
    def forward(_ctx: object, tensor: Tensor) -> Tensor:
        return _moved(tensor)

    @staticmethod
    @_torch.unseen
    def backward(_ctx: object, grad: Tensor) -> Tensor:
        return grad if _is_sum(grad) else _moved(grad)


def _is_sum(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements)


def _moved(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return _moved_local(tensor)
    return _torch.wrapper_like(tensor)(_moved_local(tensor.to_local()))


def _moved_local(local: Tensor) -> Tensor:
    values = local.detach().double()
    change = 2 * torch.finfo(local.dtype).eps * values * torch.cos(1e3 * values)
    return (values + torch.nan_to_num(change, 0, 0, 0)).to(local.dtype)  # what masks have put at infinity stays there
