"""Reductions of ragged tensors to one number: sum, mean, norms, largest and smallest element.

Every rank reduces its shard. The result is Partial, of the kind of the reduction, on the axes that shard the tensor.
A reduction over only some dims is refused: a run of elements has no dims.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement

from .._torch.dispatch import Op, wrap
from .._torch.placements import local_of, norm_partial
from .ragged import is_ragged, refusal

__all__ = ["REDUCTIONS"]


def _spread(tensor: DTensor, partial: Placement) -> list[Placement]:
    """Return the placements of the result: ``partial`` on the axes that shard the tensor."""
    return [partial if not p.is_replicate() and not p.is_partial() else p for p in tensor.placements]


def _number(tensor: DTensor, local: Tensor, partial: Placement) -> DTensor:
    like = torch.empty((), device="meta")
    return wrap(local, tensor.device_mesh, _spread(tensor, partial), like=like)


def _all_dims(op: Op, args: tuple, kwargs: dict, position: int, *, linear: bool) -> DTensor:
    """Return the operand if all of its dims are reduced; ``dim`` is the argument at ``position``."""
    tensor = args[0]
    dims = args[position] if len(args) > position else kwargs.get("dim")
    keepdim = args[position + 1] if len(args) > position + 1 else kwargs.get("keepdim", False)
    dims = range(tensor.ndim) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    if {dim % tensor.ndim for dim in dims} != set(range(tensor.ndim)) or keepdim:
        raise refusal(
            op, args, kwargs, f"it reduces dims {tuple(dims)} only, but a ragged tensor is reduced over all dims"
        )
    allowed = {"sum", "avg"} if linear else set()
    if any(p.is_partial() and p.reduce_op not in allowed for p in tensor.placements):
        raise refusal(op, args, kwargs, "the operand is not reduced yet (Partial)")
    return tensor


def _sum(op: Op, args: tuple, kwargs: dict) -> DTensor:
    tensor = _all_dims(op, args, kwargs, 1, linear=True)
    return _number(tensor, local_of(tensor).sum(dtype=kwargs.get("dtype")), Partial())


def _mean(op: Op, args: tuple, kwargs: dict) -> DTensor:
    tensor = _all_dims(op, args, kwargs, 1, linear=True)
    local, dtype = local_of(tensor), kwargs.get("dtype") or tensor.dtype
    # shards differ in size, so each rank divides by the global number of elements
    share = local.sum(dtype=torch.promote_types(dtype, torch.float32)) / tensor.numel()
    return _number(tensor, share.to(dtype), Partial())


def _vector_norm(op: Op, args: tuple, kwargs: dict) -> DTensor:
    tensor = _all_dims(op, args, kwargs, 2, linear=False)
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return _norm(tensor, order, kwargs.get("dtype"))


def _foreach_norm(op: Op, args: tuple, kwargs: dict) -> list[DTensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    norms = []
    for tensor in args[0]:
        if is_ragged(tensor):
            whole = _all_dims(op, (tensor,), {}, 2, linear=False)
            norms.append(_norm(whole, order, kwargs.get("dtype")))
        else:
            norms.append(torch.linalg.vector_norm(tensor, order, dtype=kwargs.get("dtype")))
    return norms


def _norm(tensor: DTensor, order: float, dtype: torch.dtype | None) -> DTensor:
    local = local_of(tensor)
    if local.numel() == 0:  # the norm of no elements is not defined for infinite orders
        share = local.new_full((), float("inf") if order == float("-inf") else 0.0, dtype=dtype)
    else:
        share = torch.linalg.vector_norm(local, order, dtype=dtype)
    return _number(tensor, share, norm_partial(order))


def _extremum(kind: str) -> Callable:
    def reduce(op: Op, args: tuple, kwargs: dict) -> DTensor:
        tensor = _all_dims(op, args, kwargs, 1, linear=False)
        local = local_of(tensor)
        if local.numel() == 0:
            limits = torch.finfo(local.dtype) if local.is_floating_point() else torch.iinfo(local.dtype)
            low, high = (-float("inf"), float("inf")) if local.is_floating_point() else (limits.min, limits.max)
            return _number(tensor, local.new_full((), low if kind == "max" else high), Partial(kind))
        return _number(tensor, local.amax() if kind == "max" else local.amin(), Partial(kind))

    return reduce


REDUCTIONS: dict[str, Callable] = {
    "sum": _sum,
    "sum.dim_IntList": _sum,
    "mean": _mean,
    "mean.dim": _mean,
    "linalg_vector_norm": _vector_norm,
    "_foreach_norm.Scalar": _foreach_norm,
    "max": _extremum("max"),
    "min": _extremum("min"),
    "amax": _extremum("max"),
    "amin": _extremum("min"),
}
