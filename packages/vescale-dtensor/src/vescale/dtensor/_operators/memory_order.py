"""Results in the memory order, and of the dtype, of the operator's own kernel; and their shards in the same order.

**Handlers.** A handler that computes an operator by others, as a loss by its definition, gives their order. The kernel
may have another one: `mse_loss_backward` of transposed operands is row-major, its definition is transposed. A view or a
draw that follows would differ from one device. Handlers that run the operator on full operands need none of this.

**Shards.** Where operands are broadcast, the order that a kernel chooses depends on sizes, too: a dim in which one of
them has a stride of 0 is not compared by its stride, and that of a dim of size 1 is any number. So it may order a shard
otherwise than the whole::

    x (3, 1, 2, 1) * y (1, 3, 1, 2)       strides 3, 1, 18, 9; in another order where a rank has one row of x

Then a view that the strides of the result allow, as `kron` makes it, fails on that rank alone. So before a decision is
accepted the kernel runs once on ones of the sizes of the shard (see `kernels`). If that gives another order, the
decision is not cached: each call runs the operator and brings its result into order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from .._containers import leaves, map_leaves
from .._layout.shards import local_shape
from .._placements.hooks import has_ragged
from .._placements.memory import in_memory_order
from .._torch import dispatch, kernels
from .._torch.placements import is_tracing

__all__ = ["in_order_of", "in_orders_of_kernels", "in_row_major_order", "order_of_shards"]


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


# ------------------------------------------------------------------------------------------------- shards


def order_of_shards(
    op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision
) -> Callable[[], object] | None:
    """Return None if the kernel gives this rank's shards the memory order of the results, else a function that does.

    Ranks may differ in that: neither way communicates more than the other.
    """
    outputs = [spec for spec in decision.outputs if spec is not None]
    if not outputs or not kernels.has_an_order(op) or kernels.are_row_major(leaves((args, kwargs))) or is_tracing():
        return None
    specs = [dispatch.spec(each) for each in leaves((args, kwargs)) if isinstance(each, DTensor)]
    if outputs[0].mesh.get_coordinate() is None or any(has_ragged(spec.placements) for spec in specs):
        return None
    wanted = [None if spec is None else _shard(spec, spec.placements).tensor_meta for spec in decision.outputs]
    for describe in (_present, _dense):  # a later call may have the same operands in shards with other strides
        operands = _on_shards(describe, args, decision)
        if not kernels.gives_order(op, operands, map_leaves(_local, kwargs, DTensor), wanted):
            return functools.partial(_in_order, op, args, kwargs, decision)
    return None


def _on_shards(bring: Callable, args: tuple, decision: dispatch.Decision) -> tuple:
    """Return the arguments with which the operator runs: ``bring(tensor, placements)`` in place of each DTensor."""
    needed = leaves(args if decision.needed is None else decision.needed)
    mesh = next(spec.mesh for spec in decision.outputs if spec is not None)

    def chosen(given: object) -> object:
        wanted = next(needed)
        if not isinstance(given, Tensor):
            return wanted  # a shape may be that of the shard
        if not isinstance(given, DTensor) and isinstance(wanted, dispatch.Spec):
            given = dispatch.wrap(given, mesh, [Replicate()] * mesh.ndim, given)
        if not isinstance(given, DTensor):
            return given
        return bring(given, wanted.placements)

    return map_leaves(chosen, args)


def _local(tensor: DTensor) -> dispatch.Spec:
    spec = dispatch.spec(tensor)
    return dispatch.spec_like(spec, spec.placements, dispatch.local_tensor(tensor))


def _present(tensor: DTensor, placements: tuple[Placement, ...]) -> dispatch.Spec:
    """Return shape and strides of the shard; after a redistribution no dim is expanded."""
    spec = dispatch.spec(tensor)
    if tuple(spec.placements) == tuple(placements):
        return _local(tensor)
    is_expanded = 0 in spec.tensor_meta.stride
    return _shard(spec, placements, range(spec.ndim)[::-1] if is_expanded else None)


def _dense(tensor: DTensor, placements: tuple[Placement, ...]) -> dispatch.Spec:
    """Return shape and strides of a shard without gaps, in which the same dims are expanded as in the tensor."""
    spec = dispatch.spec(tensor)
    return _shard(spec, placements, zeros=[stride == 0 for stride in spec.tensor_meta.stride])


def _shard(
    spec: dispatch.Spec,
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
    zeros: Sequence[bool] | None = None,
) -> dispatch.Spec:
    """Return shape and strides of this rank's shard as if they were those of a tensor.

    Args:
        spec: of the tensor.
        placements: of the shard.
        order: strides in whose order its dims are; None: those of the tensor.
        zeros: which of its strides are 0; None: none is.
    """
    mesh = spec.mesh
    kept = tuple(Replicate() if p.is_partial() else p for p in placements)
    shape = local_shape(tuple(spec.shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), kept)
    strides = kernels.dense_strides(shape, spec.tensor_meta.stride if order is None else order)
    strides = [0 if is_zero else s for s, is_zero in zip(strides, zeros or [False] * len(shape), strict=True)]
    meta = torch.empty_strided(shape, strides, dtype=spec.tensor_meta.dtype, device="meta")
    return dispatch.spec_like(spec, placements, meta)


def _in_order(op: dispatch.Op, args: tuple, kwargs: dict, decision: dispatch.Decision) -> object:
    """Run an operator on its shards, as decided, and give results whose shards have their memory order."""
    outputs = iter(decision.outputs)

    def give(result: object) -> object:
        spec = next(outputs)
        if spec is None:
            return result
        strides = spec.tensor_meta.stride
        if not kernels.is_same_order(result.shape, result.stride(), strides):
            result = in_memory_order(result, kernels.dims_in_order(strides))
        return dispatch.from_spec(result, spec)

    local = _on_shards(functools.partial(dispatch.redistributed, for_op=op), args, decision)
    return map_leaves(give, op(*local, **map_leaves(dispatch.local_tensor, kwargs, DTensor)))
