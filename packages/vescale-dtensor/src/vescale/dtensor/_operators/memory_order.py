"""Handlers whose results are in the memory order, and of the dtype, of the operator's own kernel.

A handler that computes an operator by others, as a loss by its definition, gives their order. The kernel may have
another one: `mse_loss_backward` of transposed operands is row-major, its definition is transposed. A view or a draw
that follows would differ from one device. Handlers that run the operator itself on full operands need none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import leaves, map_leaves
from .._placements.hooks import in_memory_order
from .._torch import dispatch, kernels

__all__ = ["in_order_of", "in_orders_of_kernels", "in_row_major_order"]


def in_orders_of_kernels(handlers: Mapping[dispatch.Op, dispatch.Handler]) -> dict[dispatch.Op, dispatch.Handler]:
    """Return handlers that give the results of other ones in the memory order of the operator's kernel."""
    return {
        op: _in_order_of_kernel(handler) if kernels.has_an_order(op) else handler for op, handler in handlers.items()
    }


def _in_order_of_kernel(handler: dispatch.Handler) -> dispatch.Handler:
    @functools.wraps(handler)
    def run(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
        results = _in_dtypes_of_kernel(handler(op, args, kwargs), op, args, kwargs)
        if kernels.are_row_major(leaves((args, kwargs))):
            return results
        given = list(leaves(results))
        if not all(each is None or isinstance(each, DTensor) for each in given):
            return results
        metas = [None if each is None else dispatch.spec(each).tensor_meta for each in given]
        found = kernels.kernel_metas(op, args, kwargs, metas)
        strides = {id(each): meta.stride for each, meta in zip(given, found, strict=True) if meta is not None}
        return map_leaves(lambda each: in_order_of(each, strides[id(each)]), results, DTensor)

    return run


def _in_dtypes_of_kernel(results: object, op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    dtypes = kernels.kernel_dtypes(op, args, kwargs)
    given = list(leaves(results))
    if dtypes is None or len(dtypes) != len(given):
        return results
    wanted = {id(each): dtype for each, dtype in zip(given, dtypes, strict=True)}
    return map_leaves(lambda each: each.to(wanted[id(each)]), results, DTensor)


def in_order_of(tensor: DTensor, strides: tuple[int, ...]) -> DTensor:
    """Return a tensor with other global strides and its shard in their order; itself if it has both."""
    local, spec = dispatch.local_tensor(tensor), dispatch.spec(tensor)
    placed = in_memory_order(local, kernels.dims_in_order(strides))
    if placed is local and tuple(spec.tensor_meta.stride) == tuple(strides):
        return tensor
    like = torch.empty_strided(spec.shape, strides, dtype=local.dtype, device="meta")
    return dispatch.from_spec(placed, dispatch.spec_like(spec, spec.placements, like))


def in_row_major_order(stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of torch that makes its result anew, and of other operators for a subclass: `one_hot`."""

    @functools.wraps(stock)
    def function(*args: object, **kwargs: object) -> Tensor:
        result = stock(*args, **kwargs)
        return result.contiguous() if isinstance(result, DTensor) else result

    return function
