"""The memory order of results: that of the kernel, where torch's formula without values says another.

DTensor takes the strides of a result from the operator's formula. For some operators the formula orders the dims
otherwise than the kernel does: ``xlogy``, ``copysign`` or ``floor_divide`` of operands whose dims are not in row-major
order. What reads memory in its order then differs from one device: a view, or a later ``rand_like``. So where an
operand is in another order, the kernel itself runs once, on ones, and the strides are those of its result::

    operands small                their own shapes and strides; the strides of the result are those of one device
    else, each size above 1 is 2  strides of the same order, with gaps where there are gaps; the result's are rebuilt

Where the kernel does not run on such operands, or gives a result of another shape, the formula applies. Everything
follows from global shapes and strides, so that all ranks decide alike. It happens once for each cached decision.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._python_dispatch import _disable_current_modes

from .._containers import leaves, map_leaves
from .patches import AttributePatch, Op

__all__ = [
    "are_row_major",
    "dense_strides",
    "dims_in_order",
    "gives_order",
    "has_an_order",
    "is_same_order",
    "kernel_dtypes",
    "kernel_metas",
    "strides_of_kernels",
]

SMALL = 4096  # elements of memory

Metas = list[TensorMeta | None]


def strides_of_kernels() -> AttributePatch:
    """Return the patch of the function that gives shapes and strides of the results of a decision."""

    def make(stock: Callable) -> Callable:
        @functools.wraps(stock)
        def propagate(self: object, schema: OpSchema) -> object:
            formula = stock(self, schema)
            is_one = formula is None or isinstance(formula, TensorMeta)
            metas = [formula] if is_one else list(formula)
            found = kernel_metas(schema.op, schema.args_schema, schema.kwargs_schema, metas)
            if found is metas:
                return formula
            return found[0] if is_one else type(formula)(found)

        return propagate

    owner = type(DTensor._op_dispatcher.sharding_propagator)
    return AttributePatch((owner,), "_propagate_tensor_meta_non_cached", make)


def kernel_metas(op: Op, args: tuple, kwargs: dict, metas: Metas) -> Metas:
    """Return shapes and strides of results in the memory order of the kernel; ``metas`` themselves if that is theirs.

    Args:
        op: an operator.
        args: its arguments, with specs or DTensors as operands.
        kwargs: its other arguments.
        metas: shapes and strides of its results by a formula; None for what is no tensor.
    """
    is_known = not has_an_order(op) or are_row_major(leaves((args, kwargs)))
    return metas if is_known else _in_kernel_order(op, args, kwargs, metas)


def gives_order(op: Op, args: tuple, kwargs: dict, metas: Metas) -> bool:
    """Return whether the kernel gives results in the memory order of ``metas``; also where it does not run."""
    return _in_kernel_order(op, args, kwargs, metas) is metas


def _in_kernel_order(op: Op, args: tuple, kwargs: dict, metas: Metas) -> Metas:
    operands = [meta for each in leaves((args, kwargs)) if (meta := _meta(each)) is not None]
    ordered = [meta for meta in metas if meta is not None]
    if not any(sum(size > 1 for size in meta.shape) > 1 for meta in ordered):
        return metas
    memory = [_extent(each.shape, each.stride) for each in (*operands, *ordered)]
    if not all(isinstance(extent, int) for extent in memory):  # symbolic sizes
        return metas
    is_small = max(memory) <= SMALL
    results = _run(op, args, kwargs, is_small)
    if results is None or len(results) != len(metas):
        return metas
    found = [_ordered(meta, result, is_small) for meta, result in zip(metas, results, strict=True)]
    return metas if all(new is old for new, old in zip(found, metas, strict=True)) else found


def kernel_dtypes(op: Op, args: tuple, kwargs: dict) -> list[torch.dtype | None] | None:
    """Return the dtypes of results of the kernel on operands of several dtypes; None if they are not known.

    The kernel of `huber_loss` gives its result the dtype of the first operand, torch's definition that of both.
    """
    if len({meta.dtype for each in leaves((args, kwargs)) if (meta := _meta(each)) is not None}) < 2:
        return None
    results = _run(op, args, kwargs, is_small=False)
    return None if results is None else [getattr(result, "dtype", None) for result in results]


@functools.cache
def has_an_order(op: Op) -> bool:
    """Return whether the kernel chooses the order of new memory, and its arguments alone decide what it does."""
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return not (is_random or op._schema.is_mutable or op._schema._is_view_op())


def are_row_major(arguments: Iterable[object]) -> bool:
    """Return whether the specs and DTensors among some arguments have their dims in row-major order, without gaps."""
    metas = (meta for each in arguments if (meta := _meta(each)) is not None)
    return all(_is_row_major(meta.shape, meta.stride) for meta in metas)


def _meta(argument: object) -> TensorMeta | None:
    spec = argument._spec if isinstance(argument, DTensor) else argument
    return spec.tensor_meta if isinstance(spec, DTensorSpec) else None


def _is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return 0 in shape
        expected *= size
    return True


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _run(op: Op, args: tuple, kwargs: dict, is_small: bool) -> list[object] | None:
    """Return the results of an operator on ones, or on zeros: indices; None where it runs on neither."""
    sizes = [] if is_small else [at for at, arg in enumerate(op._schema.arguments) if "SymInt[]" in str(arg.type)]
    args = tuple(_shrunk(arg) if at in sizes and isinstance(arg, tuple | list) else arg for at, arg in enumerate(args))
    for value in (1, 0):
        fill = functools.partial(_filled, value=value, is_small=is_small)
        try:
            with _disable_current_modes(), torch.no_grad():
                made, named = map_leaves(fill, (args, kwargs), (DTensorSpec, DTensor))
                results = op(*made, **named)
        except (RuntimeError, ValueError, IndexError, NotImplementedError, TypeError):  # not of these sizes or values
            continue
        return list(results) if isinstance(results, tuple | list) else [results]
    return None


def _filled(operand: DTensorSpec | DTensor, *, value: int, is_small: bool) -> Tensor:
    spec = operand._spec if isinstance(operand, DTensor) else operand
    meta = spec.tensor_meta
    shape, strides = (meta.shape, meta.stride) if is_small else (_shrunk(meta.shape), _strides_alike(meta))
    extent = max(1, _extent(shape, strides))
    return torch.full((extent,), value, dtype=meta.dtype, device=spec.mesh.device_type).as_strided(shape, strides)


def _shrunk(shape: Sequence[int]) -> tuple[int, ...]:
    """Return a small shape; equal sizes stay equal, so that operands that fit still do."""
    return tuple(min(size, 2) for size in shape)


def dims_in_order(strides: Sequence[int]) -> list[int]:
    """Return the dims from the slowest to the fastest in memory."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def is_same_order(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Return whether the dims of a shape have one order by either strides; those of size 1 may be anywhere."""
    orders = ([dim for dim in dims_in_order(strides) if shape[dim] > 1] for strides in (first, second))
    return next(orders) == next(orders)


def _strides_alike(meta: TensorMeta) -> list[int]:
    """Return strides for the small shape of the same order, with gaps between dims where these have gaps."""
    strides, given, made = [0] * len(meta.shape), 1, 1  # the next stride of dense memory
    for dim in reversed(dims_in_order(meta.stride)):
        size, stride = meta.shape[dim], meta.stride[dim]
        if stride == 0:
            continue
        made = made * 2 if size > 1 and stride > given else made
        strides[dim] = made
        given, made = stride * size, made * min(size, 2)
    return strides


def _ordered(meta: TensorMeta | None, result: object, is_small: bool) -> TensorMeta | None:
    """Return the meta with the memory order of a result; itself if it has it, or if that is not known."""
    if meta is None or not isinstance(result, Tensor) or result.layout is not torch.strided:
        return meta
    if tuple(result.shape) != (tuple(meta.shape) if is_small else _shrunk(meta.shape)):
        return meta
    if is_same_order(meta.shape, result.stride(), meta.stride):
        return meta
    strides = result.stride() if is_small else dense_strides(meta.shape, result.stride())
    return TensorMeta(meta.shape, strides, meta.dtype)


def dense_strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of memory without gaps whose dims are in the order of other strides."""
    order = dims_in_order(like)
    return tuple(
        math.prod(max(1, shape[faster]) for faster in order[order.index(dim) + 1 :]) for dim in range(len(shape))
    )
