"""Pointwise operators on ragged tensors: they run on the local shards.

A ragged shard is a run of elements, so all operands must hold the same run. A replicated operand is sharded to match,
also if it is broadcast, because every rank already holds its elements. Operands in other placements are refused.
Unreduced values (Partial on another axis) are accepted only if the operator commutes with addition.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._containers import tensors_in
from .._torch.dispatch import Op, schema, wrap
from .._torch.placements import local_of
from .move import move
from .plan import crossed_axes
from .ragged import ragged_operands, refusal

__all__ = ["is_pointwise", "run_pointwise", "runs_on_shards"]

# pointwise operators that torch does not tag as pointwise
COPIES = frozenset(("alias", "clone", "copy", "copy_", "detach", "detach_", "_to_copy", "lift", "lift_fresh"))
FILLS = frozenset(("zero_", "fill_", "zeros_like", "ones_like", "empty_like", "full_like"))
FUSED = frozenset(("_fused_adam_", "_fused_adamw_", "_fused_adagrad_", "_fused_sgd_"))

# f(a) + f(b) = f(a + b) if all operands are unreduced alike
_SUMS = ("add", "add_", "sub", "sub_", "neg", "neg_")
LINEAR = COPIES | {"zero_", "zeros_like", "empty_like", "_foreach_zero_", "_foreach_copy_"}
LINEAR |= {*_SUMS, *(f"_foreach_{name}" for name in _SUMS)}

# f(a, c) + f(b, c) = f(a + b, c) for a number c
SCALED = frozenset(prefix + name for name in ("mul", "mul_", "div", "div_") for prefix in ("", "_foreach_"))


def is_pointwise(op: Op) -> bool:
    """Return whether each element of the result depends only on the operands' elements at the same position."""
    name = _name(op)
    if torch.Tag.nondeterministic_seeded in op.tags or name in ("_foreach_norm", "_foreach_max"):
        return False
    return torch.Tag.pointwise in op.tags or name in COPIES | FILLS | FUSED or name.startswith("_foreach_")


def _name(op: Op) -> str:
    return schema(op).name.removeprefix("aten::")


def runs_on_shards(args: tuple, kwargs: dict) -> bool:
    """Return whether a pointwise operator can run on the shards: all operands are numbers or have equal placements."""
    if any(isinstance(arg, (list, tuple)) and any(True for _ in tensors_in(arg)) for arg in args):
        return False
    like = ragged_operands(args, kwargs)[0]
    if any(placement.is_partial() for placement in like.placements) or kwargs.get("out") is not None:
        return False
    operands = tensors_in((args, kwargs))
    return all(_fits(operand, like) or (not isinstance(operand, DTensor) and not operand.ndim) for operand in operands)


def run_pointwise(op: Op, args: tuple, kwargs: dict) -> object:
    """Run a pointwise operator with at least one ragged operand.

    Raises:
        UnsupportedPlacement: the operands hold different elements, or are unreduced.
    """
    if kwargs.get("out") is not None:
        raise refusal(op, args, kwargs, "out= is not supported for ragged tensors")
    if any(isinstance(arg, (list, tuple)) and any(True for _ in tensors_in(arg)) for arg in args):
        return _run_lists(op, args, kwargs)
    like = ragged_operands(args, kwargs)[0]
    if schema(op).is_mutable and not _fits(args[0], like):
        raise refusal(op, args, kwargs, "the tensor that it writes to has other placements than the ragged operand")
    _check_unreduced(op, args, kwargs, like)
    shards = [_fitting(op, arg, like, (args, kwargs)) for arg in args]
    options = {key: _fitting(op, value, like, (args, kwargs)) for key, value in kwargs.items()}
    result = op(*shards, **options)
    return args[0] if schema(op).is_mutable else _wrapped(result, like)


def _run_lists(op: Op, args: tuple, kwargs: dict) -> object:
    """Run a foreach or fused operator: the tensors at one position of all lists belong together."""
    rows = args[0]
    columns = [list(arg) if isinstance(arg, (list, tuple)) and len(arg) == len(rows) else arg for arg in args]
    lists = [column for column in columns if isinstance(column, list) and len(column) == len(rows)]
    for i, like in enumerate(rows):
        row = [column[i] for column in lists]
        if not isinstance(like, DTensor):
            raise refusal(op, args, kwargs, f"tensor {i} of the first list is not a DTensor")
        _check_unreduced(op, [*row, *(arg for arg in args[1:] if not isinstance(arg, (list, tuple)))], {}, like)
        for column in lists:
            column[i] = _fitting(op, column[i], like, (row, {}))
    results = op(*map(_number, columns), **{key: _number(value) for key, value in kwargs.items()})
    if schema(op).is_mutable:
        return rows if schema(op).returns else None
    return [_wrapped(result, like) for result, like in zip(results, rows, strict=True)]


def _number(value: object) -> object:
    return local_of(value) if isinstance(value, DTensor) else value


def _fits(tensor: Tensor, like: DTensor) -> bool:
    return isinstance(tensor, DTensor) and tensor.placements == like.placements and tensor.shape == like.shape


def _fitting(op: Op, value: object, like: DTensor, call: tuple) -> object:
    """Return this rank's part of an operand: the elements at the positions of its shard of ``like``, or a number."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, DTensor):
        if value.numel() == 1 and value.ndim <= 1:
            return value
        raise refusal(op, *call, f"a plain tensor of shape {tuple(value.shape)} is among the operands")
    local, whole = local_of(value), all(placement.is_replicate() for placement in value.placements)
    if _fits(value, like) or (value.ndim == 0 and whole):
        return local
    shape, mesh = tuple(like.shape), like.device_mesh
    written = schema(op).is_mutable and value is call[0][0]
    if value.device_mesh == mesh and not written and _is_reduced(value) and _is_reduced(like):
        if whole and _broadcasts(value.shape, shape):
            return move(local.expand(shape), shape, mesh, value.placements, like.placements)
        if value.shape == like.shape and not crossed_axes(tuple(mesh.shape), value.placements, like.placements):
            return move(local, shape, mesh, value.placements, like.placements)
    reason = f"ranks lack elements that they need: {value.placements} does not give those of {like.placements} locally"
    raise refusal(op, *call, reason)


def _is_reduced(tensor: DTensor) -> bool:
    return not any(placement.is_partial() for placement in tensor.placements)


def _broadcasts(shape: Sequence[int], to: tuple[int, ...]) -> bool:
    padded = (1,) * (len(to) - len(shape)) + tuple(shape)
    return len(padded) == len(to) and all(size in (1, wide) for size, wide in zip(padded, to, strict=True))


def _check_unreduced(op: Op, args: Sequence, kwargs: dict, like: DTensor) -> None:
    tensors = list(tensors_in((args, kwargs)))
    unreduced = [tensor for tensor in tensors if isinstance(tensor, DTensor) and not _is_reduced(tensor)]
    if not unreduced:
        return
    kinds = {p.reduce_op for tensor in unreduced for p in tensor.placements if p.is_partial()}
    others = [tensor for tensor in tensors if not _fits(tensor, like)]
    numbers = [arg for arg in args[1:] if isinstance(arg, (int, float, complex)) and not isinstance(arg, bool)]
    linear = _name(op) in LINEAR and not others and (not numbers or _name(op) in COPIES)
    scaled = _name(op) in SCALED and len(tensors) - len(others) == 1 and all(tensor.ndim == 0 for tensor in others)
    if not (kinds <= {"sum", "avg"} and (linear or scaled)):
        raise refusal(op, args, kwargs, "an operand is not reduced yet (Partial), and the operator is not linear in it")


def _wrapped(result: object, like: DTensor) -> object:
    if isinstance(result, Tensor):
        return wrap(result, like.device_mesh, like.placements, like=like)
    if isinstance(result, (list, tuple)):
        return type(result)(_wrapped(item, like) for item in result)
    return result
