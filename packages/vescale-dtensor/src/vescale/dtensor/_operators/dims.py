"""Rules see non-negative dims: ``x.cumsum(-1)`` and ``x.cumsum(1)`` get the same decision.

Sharding rules compare the dim of an operator with the dims of placements, which are never negative. A rule that forgets
to count a negative dim from the end decides as if the dim were not sharded. So no rule, stock's or ours, gets one:
:func:`with_counted_dims` replaces the negative dims of a call before any rule runs, defaults included (``topk`` has
``dim=-1``). The schema of the operator says which arguments are dims. The operator itself runs with the dims of the
call, and the decision is cached for them, so from the second call on nothing of this runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from .._containers import leaves
from .._torch import dispatch

__all__ = ["seeing_counted_dims", "takes_dims", "with_counted_dims"]

NAMES = frozenset({"dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis", "axis0", "axis1"})
TYPES = frozenset({"int", "Optional[int]", "List[int]", "Optional[List[int]]"})

# Operators whose dims are those of a result with one dim more than the operand.
OF_RESULT = frozenset({"unsqueeze", "unsqueeze_", "unsqueeze_copy", "stack", "_stack", "diag_embed"})
# Arguments of backward operators that are the shape of the tensor that the dims belong to.
SHAPES = frozenset({"input_sizes", "self_sizes", "sizes"})


@dataclass(frozen=True)
class _Argument:
    """An argument of an operator; ``position`` is None for a keyword-only argument."""

    name: str
    position: int | None
    default: object

    def of(self, args: Sequence, kwargs: dict) -> object:
        """Return the value that a call gives to the argument."""
        if self.position is not None and self.position < len(args):
            return args[self.position]
        return kwargs.get(self.name, self.default)


@functools.cache
def _arguments(op: dispatch.Op) -> tuple[_Argument, ...]:
    arguments = enumerate(dispatch.schema(op).arguments)
    return tuple(_Argument(a.name, None if a.kwarg_only else i, a.default_value) for i, a in arguments)


@functools.cache
def _dims(op: dispatch.Op) -> tuple[_Argument, ...]:
    types = {a.name: str(a.type) for a in dispatch.schema(op).arguments}
    return tuple(a for a in _arguments(op) if a.name in NAMES and types[a.name] in TYPES)


def takes_dims(op: dispatch.Op) -> bool:
    """Return whether ``op`` has an argument that is a dim or a list of dims."""
    return bool(_dims(op))


def with_counted_dims(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Return the arguments of a call with non-negative dims, or ``args`` and ``kwargs`` themselves.

    Operands may be tensors or specs of tensors. A dim out of range stays as it is, so that the operator reports it.
    """
    negative = [dim for dim in _dims(op) if _has_negative(dim.of(args, kwargs))]
    if not negative:
        return args, kwargs
    num_dims = _num_dims(op, args, kwargs)
    new_args, new_kwargs = list(args), dict(kwargs)
    for dim in negative:
        value = _counted(dim.of(args, kwargs), num_dims)
        if dim.position is None or dim.name in kwargs:
            new_kwargs[dim.name] = value
            continue
        new_args += [argument.default for argument in _arguments(op)[len(new_args) : dim.position + 1]]
        new_args[dim.position] = value
    return tuple(new_args), new_kwargs


def seeing_counted_dims(op: dispatch.Op, handler: dispatch.Handler) -> dispatch.Handler:
    """Return the handler of ``op`` that gets non-negative dims."""
    if not takes_dims(op) or dispatch.is_composite(op):  # a composite operator is decomposed first
        return handler

    @functools.wraps(handler)
    def handle(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
        return handler(op, *with_counted_dims(op, args, kwargs))

    return handle


def _has_negative(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return any(isinstance(dim, int) and dim < 0 for dim in value)
    return isinstance(value, int) and value < 0


def _counted(value: object, num_dims: int) -> object:
    if isinstance(value, (list, tuple)):
        return type(value)(_counted(dim, num_dims) for dim in value)
    return value + num_dims if isinstance(value, int) and -num_dims <= value < 0 else value


def _num_dims(op: dispatch.Op, args: tuple, kwargs: dict) -> int:
    """Return how many dims the tensor has that the dims of ``op`` belong to; a number counts as having one."""
    shape = next((a.of(args, kwargs) for a in _arguments(op) if a.name in SHAPES), None)
    if shape is not None:
        return max(len(shape), 1)
    operand = _arguments(op)[0].of(args, kwargs)
    num_dims = max((tensor.ndim for tensor in leaves(operand) if hasattr(tensor, "ndim")), default=0)
    return num_dims + 1 if op.overloadpacket.__name__ in OF_RESULT else max(num_dims, 1)
