"""Reductions that add: sums, means, variances and norms, by the tree.

Two kinds of forms follow in this and the next files. `SUMS` take the number of blocks and the operator before its
arguments. **Definitions** have the arguments of the operator alone and are written in torch's functions on global
tensors; they run inside of the mode, so each of their steps is a form, or one operation per element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .._torch import dispatch
from .laid import Laid, mesh_of
from .tree import sum_dims, widened

__all__ = ["DEFINITIONS", "SUMS"]

aten = torch.ops.aten

Dims = Sequence[int] | int | None


# ------------------------------------------------------------------------------------------------- sums


def _sum(
    num_blocks: int,
    _op: dispatch.Op,
    self: Tensor,
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = _dims(self, dim)
    operand = self if dtype is None else self.to(dtype)
    total = sum_dims(Laid.of(operand, mesh_of([operand])), dims, num_blocks).tensor()
    total = total.to(operand.dtype, copy=total.dtype == operand.dtype)  # the sum of one element shares its memory
    return total if keepdim else total.reshape([size for d, size in enumerate(self.shape) if d not in dims])


def _sum_of_all(num_blocks: int, op: dispatch.Op, self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _sum(num_blocks, op, self, dtype=dtype)


def _dims(tensor: Tensor, dim: Dims) -> list[int]:
    """Return the dims that a reduction goes over; none named are all."""
    if isinstance(dim, int):
        dim = [dim]
    return [d % tensor.ndim for d in dim] if dim and tensor.ndim else list(range(tensor.ndim))


SUMS: dict[dispatch.Op, Callable] = {aten.sum.default: _sum_of_all, aten.sum.dim_IntList: _sum}


# ------------------------------------------------------------------------------------------------- definitions


def _count(tensor: Tensor, dim: Dims) -> int:
    return math.prod(tensor.shape[d] for d in _dims(tensor, dim))


def _mean(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    wide = widened(self if dtype is None else self.to(dtype))
    return (wide.sum(_dims(self, dim), keepdim=keepdim) / _count(self, dim)).to(dtype or self.dtype)


def _mean_of_all(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return _mean(self, dtype=dtype)


def _nansum(self: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    return self.masked_fill(self.isnan(), 0).sum(_dims(self, dim), keepdim=keepdim, dtype=dtype)


def _var_mean(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims = _dims(self, dim)
    wide = widened(self)
    mean = wide.sum(dims, keepdim=True) / _count(self, dim)
    distance = wide - mean
    freedom = max(0.0, _count(self, dim) - (1 if correction is None else correction))
    var = (distance * distance).sum(dims, keepdim=keepdim) / freedom
    return var.to(self.dtype), mean.to(self.dtype) if keepdim else mean.sum(dims).to(self.dtype)


def _var(self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var_mean(self, dim, correction=correction, keepdim=keepdim)[0]


def _std(self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Tensor:
    return _var(self, dim, correction=correction, keepdim=keepdim).sqrt()


def _std_mean(
    self: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    var, mean = _var_mean(self, dim, correction=correction, keepdim=keepdim)
    return var.sqrt(), mean


def _vector_norm(
    self: Tensor,
    ord: float = 2,  # noqa: A002 - torch's name
    dim: Dims = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    result = dtype or self.dtype
    dims = _dims(self, dim)
    sizes = widened(self if dtype is None else self.to(dtype)).abs()
    if math.isinf(ord) and sizes.ndim:
        norm = (sizes.amax if ord > 0 else sizes.amin)(dims, keepdim)
    elif ord == 0:
        norm = (sizes != 0).to(sizes.dtype).sum(dims, keepdim=keepdim)
    elif ord == 1 or not sizes.ndim:
        norm = sizes.sum(dims, keepdim=keepdim)
    elif ord == 2:
        norm = (sizes * sizes).sum(dims, keepdim=keepdim).sqrt()
    else:
        norm = (sizes**ord).sum(dims, keepdim=keepdim) ** (1 / ord)
    return norm.to(result)


def _norm(
    self: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    return _vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


def _norm_of_all(self: Tensor, p: float = 2) -> Tensor:
    return _vector_norm(self, p)


def _logsumexp(self: Tensor, dim: Dims, keepdim: bool = False) -> Tensor:
    dims = _dims(self, dim)
    wide = widened(self)
    top = wide.amax(dims, True)
    top = top.masked_fill(top.abs() == math.inf, 0)
    total = (wide - top).exp().sum(dims, keepdim=True).log() + top
    total = total if keepdim else total.sum(dims)
    return total.to(self.dtype)


def _dot(self: Tensor, tensor: Tensor) -> Tensor:
    return (widened(self) * widened(tensor)).sum().to(self.dtype)


def _trace(self: Tensor) -> Tensor:
    return self.diagonal().sum()


DEFINITIONS: dict[dispatch.Op, Callable] = {
    aten.mean.default: _mean_of_all,
    aten.mean.dim: _mean,
    aten.nansum.default: _nansum,
    aten.var.correction: _var,
    aten.var_mean.correction: _var_mean,
    aten.std.correction: _std,
    aten.std_mean.correction: _std_mean,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.norm.Scalar: _norm_of_all,
    aten.norm.ScalarOpt_dim: _norm,
    aten.norm.ScalarOpt_dim_dtype: _norm,
    aten.logsumexp.default: _logsumexp,
    aten.dot.default: _dot,
    aten.trace.default: _trace,
}
