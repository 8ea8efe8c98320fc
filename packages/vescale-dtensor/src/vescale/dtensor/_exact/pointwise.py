"""Functions of single elements: most have two codes on a CPU, which round differently.

A kernel computes whole vector registers with one code, and the last few elements, or those with a stride, with another.
So ``gelu(x)[5]`` depends on how many elements a rank holds. Operators that are one IEEE operation per element
(:data:`ONE_OPERATION`) have equal bits in both codes. All others run on a flat copy in whole vectors::

    local operands, broadcast -> contiguous and flat, at aligned memory, up to a multiple of 64 elements -> the operator

Below DTensor's dispatch, that is: a rank does so with its shards. float16 and bfloat16 are computed in float32 and
rounded once; kernels round a number, as of ``x * 0.1``, to 16 bits in one code and not in the other.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import map_leaves, tensors_in
from .._operators.operands import written_arguments
from .._torch import dispatch

__all__ = ["has_own_dispatch", "is_one_operation", "run_pointwise"]

UNIT = 64
"""Elements, and bytes of alignment: two of the widest vector registers of the narrowest floating-point dtype."""

LOW = (torch.float16, torch.bfloat16)

ONE_OPERATION = frozenset(
    {"abs", "add", "ceil", "clamp", "clamp_max", "clamp_min", "clip", "copysign", "div", "eq", "fill", "floor", "fmax"}
    | {"fmin", "ge", "gt", "hardtanh", "hardtanh_backward", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "le"}
    | {
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "lt",
        "masked_fill",
        "maximum",
        "minimum",
        "mul",
        "ne",
    }
    | {"neg", "positive", "reciprocal", "relu", "round", "rsub", "sgn", "sign", "signbit", "sqrt", "square", "sub"}
    | {"threshold", "threshold_backward", "true_divide", "trunc", "where"}
)
"""Operators that round once, or never, by name without a final ``_``."""


def is_one_operation(op: dispatch.Op, args: tuple, kwargs: dict) -> bool:
    """Return whether a pointwise operator computes each element by one IEEE operation."""
    is_plain = kwargs.get("alpha", 1) == 1 and kwargs.get("rounding_mode") is None and not _scales(op, args)
    if not is_plain or _name(op) not in ONE_OPERATION:
        return False
    return not any(tensor.is_complex() for tensor in tensors_in((args, kwargs)))


@functools.cache
def _name(op: dispatch.Op) -> str:
    return op.overloadpacket.__name__.removesuffix("_")


def _scales(op: dispatch.Op, args: tuple) -> bool:
    """Return whether a scale of the second operand is among the positional arguments (``rsub(x, y, 2)``)."""
    names = dispatch.argument_names(op)[: len(args)]
    return "alpha" in names and args[names.index("alpha")] != 1


class _InVectors(dispatch.TorchDispatchMode):
    """Run pointwise operators in whole vectors on the local tensors of DTensors."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(each, DTensor) or dispatch.is_delayed(each) for each in types):
            return NotImplemented  # their own dispatch follows, and comes back here with local tensors
        kwargs = kwargs or {}
        is_other = (
            any(map(has_own_dispatch, types))
            or torch.Tag.pointwise not in func.tags
            or is_one_operation(func, args, kwargs)
        )
        return func(*args, **kwargs) if is_other else _run(func, args, kwargs)


def has_own_dispatch(kind: type) -> bool:
    """Return whether tensors of a class dispatch operators themselves, as wrappers of other tensors do."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__


def run_pointwise(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run a pointwise operator so that an element's bits depend on its operands alone."""
    tensors = list(tensors_in((args, kwargs)))
    if any(tensor.dtype in LOW for tensor in tensors):
        return _run_wide(op, args, kwargs)
    if is_one_operation(op, args, kwargs):
        return op(*args, **kwargs)
    if not any(isinstance(tensor, DTensor) for tensor in tensors):
        return _run(op, args, kwargs)
    with _InVectors():
        return op(*args, **kwargs)


def _run_wide(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator on operands in float32, and round what it gives or writes."""
    wide: dict[int, Tensor] = {}

    def widen(tensor: Tensor) -> Tensor:
        if tensor.dtype not in LOW:
            return tensor
        return wide.setdefault(id(tensor), tensor.float())

    metas = tensors_in(op(*map_leaves(_meta, args, Tensor), **map_leaves(_meta, kwargs, Tensor)))
    results = run_pointwise(op, map_leaves(widen, args, Tensor), map_leaves(widen, kwargs, Tensor))
    given = [tensor for tensor in written_arguments(op, args, kwargs) if id(tensor) in wide]
    written = {id(wide[id(tensor)]): tensor.copy_(wide[id(tensor)]) for tensor in given}

    def narrow(result: Tensor) -> Tensor:
        meta = next(metas)
        return written[id(result)] if id(result) in written else result.to(meta.dtype)

    return map_leaves(narrow, results, Tensor)


def _run(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.ndim]
    if not operands or operands[0].device.type != "cpu" or _are_vectors(operands):
        return op(*args, **kwargs)  # on accelerators an element has one code
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in operands))
    size = shape.numel()
    flat: dict[int, Tensor] = {}

    def flatten(tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        if id(tensor) not in flat:
            memory = tensor.new_ones(-(-size // UNIT) * UNIT)
            memory[:size].view(shape).copy_(tensor.expand(shape))
            flat[id(tensor)] = memory
        return flat[id(tensor)]

    results = op(*map_leaves(flatten, args, Tensor), **map_leaves(flatten, kwargs, Tensor))
    written: dict[int, Tensor] = {}
    for tensor in written_arguments(op, args, kwargs):
        if (memory := flat.get(id(tensor))) is not None:
            written[id(memory)] = tensor.copy_(memory[:size].view(shape))
    metas = (
        iter(()) if written else tensors_in(op(*map_leaves(_meta, args, Tensor), **map_leaves(_meta, kwargs, Tensor)))
    )

    def unflatten(result: Tensor) -> Tensor:
        if id(result) in written:
            return written[id(result)]
        like = next(metas)
        memory = torch.empty_strided(like.shape, like.stride(), dtype=result.dtype, device=result.device)
        return memory.copy_(result[:size].view(shape))

    return map_leaves(unflatten, results, Tensor)


def _are_vectors(operands: list[Tensor]) -> bool:
    """Return whether the operands lie alike, without gaps, in whole vectors."""
    first = operands[0]
    if first.numel() % UNIT or not first.is_contiguous():
        return False
    return all(
        tensor.shape == first.shape and tensor.is_contiguous() and tensor.data_ptr() % UNIT == 0 for tensor in operands
    )


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
