"""Writes to views of a gathered copy, and in-place changes of metadata.

**Writes to views.** On one device ``weight[3]`` is a view, and ``weight[3].zero_()`` writes to ``weight``. A tensor
sharded over its rows has no such view. Stock DTensor gathers the tensor and returns a view of the gathered copy, so a
write to the view is silently lost. This module records which tensor the memory of each copy came from::

    row = weight[3]      gather weight; row is a view of the copy       copy's memory -> weight
    row[1].zero_()       gather weight again; write to the elements of row[1]; copy this rank's part back into weight

Views of the view share the copy's memory. Their strides and offset give their position in it.

In-place operators have our handlers only while such a copy is alive: the first copy installs the handlers, and they are
removed after the last copy is freed. At all other times in-place operators cost the same as in stock torch.

**Operators that change metadata in place** (``unsqueeze_``, ``squeeze_``, ``transpose_``, ``t_``) run as their
out-of-place form, which decides the placements and gives the local tensor. The operand then takes over the result.
(Stock DTensor has a rule for ``squeeze_`` only, and the tensor reports its old shape afterwards.)
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from .._torch import dispatch
from ..errors import UnsupportedOperator
from .operands import dtensors

__all__ = ["change_metadata", "forget_copies", "remember_copy"]


@dataclass(frozen=True)
class _Copy:
    """A gathered copy: its base tensor, its placements, and the strides of its local memory."""

    base: weakref.ref[DTensor]
    placements: tuple[Placement, ...]
    stride: tuple[int, ...]


_COPIES: dict[int, tuple[dispatch.StorageWeakRef, _Copy]] = {}

# While our handlers are installed: the previous handlers of in-place operators (None: stock rule).
_BEFORE: dict[dispatch.Op, dispatch.Handler | None] = {}


def remember_copy(base: DTensor, placements: Sequence[Placement], local: Tensor) -> None:
    """Remember that the memory of ``local`` is a copy of ``base``, redistributed to ``placements``."""
    if local.numel():
        storage = dispatch.StorageWeakRef(local.untyped_storage())
        _COPIES[storage.cdata] = storage, _Copy(weakref.ref(base), tuple(placements), local.stride())
        _watch()


def forget_copies() -> None:
    """Forget all copies, and restore the previous handlers of in-place operators."""
    table = dispatch.handler_table()
    for op, before in _BEFORE.items():
        if before is None:
            table.pop(op, None)
        else:
            table[op] = before
    _BEFORE.clear()
    _COPIES.clear()


def _watch() -> None:
    if not _BEFORE:
        table = dispatch.handler_table()
        _BEFORE.update({op: table.get(op) for op in _in_place_operators()})
        table.update(dict.fromkeys(_BEFORE, _write))


@functools.cache
def _in_place_operators() -> tuple[dispatch.Op, ...]:
    def is_one(op: dispatch.Op) -> bool:
        changes_values = dispatch.writes_first(op) and torch.Tag.inplace_view not in op.tags
        return changes_values and not dispatch.is_composite(op)

    return tuple(filter(is_one, dispatch.operators()))


def _write(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator that writes to its first operand; if that is a view of a copy, write to the copied tensor.

    Raises:
        UnsupportedOperator: the memory layout of the copied tensor has changed since the view was made.
    """
    run = _BEFORE.get(op) or dispatch.stock_dispatch
    for key in [key for key, (storage, _) in _COPIES.items() if storage.expired()]:
        del _COPIES[key]
    if not _COPIES:
        forget_copies()
    copy = _copy_behind(args[0])
    base = copy.base() if copy is not None else None
    if copy is None or base is None:
        return run(op, args, kwargs)
    moved = dispatch.redistributed(base, copy.placements, for_op=op)
    if moved.stride() != copy.stride:
        raise UnsupportedOperator.for_operands(
            op, (base,), "it writes to a view made before the tensor's memory layout changed: make the view again"
        )
    shown = dispatch.local_tensor(args[0])
    place = torch.as_strided(moved, shown.shape, shown.stride(), shown.storage_offset())
    run(op, (dispatch.with_local(args[0], place), *args[1:]), kwargs)
    shown.copy_(place)  # keep the copy equal to the tensor
    whole = dispatch.wrap(moved, base.device_mesh, copy.placements, base)
    dispatch.local_tensor(base).copy_(dispatch.redistributed(whole, dispatch.placements_of(base), for_op=None))
    return args[0]


def _copy_behind(tensor: object) -> _Copy | None:
    if not isinstance(tensor, DTensor):
        return None
    _, copy = _COPIES.get(dispatch.storage_key(dispatch.local_tensor(tensor)), (None, None))
    return copy


def change_metadata(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator that changes its first operand's metadata.

    Raises:
        UnsupportedOperator: it changes the storage, or has no form that returns a result.
    """
    functional = _functional(op) if torch.Tag.inplace_view in op.tags else None
    if functional is None:
        raise UnsupportedOperator.for_operands(
            op,
            tuple(dtensors(args, kwargs)),
            "it changes the tensor's shape or storage in place: use the form that returns a new tensor",
        )
    return dispatch.become(op, args, kwargs, functional(*args, **kwargs))


@functools.cache
def _functional(op: dispatch.Op) -> dispatch.Op | None:
    """Return the out-of-place form of ``op``: ``transpose.int`` for ``transpose_``."""
    packet = getattr(torch.ops.aten, op.overloadpacket.__name__.removesuffix("_"), None)
    if packet is None or packet is op.overloadpacket:
        return None
    candidates = (getattr(packet, name) for name in packet.overloads())
    return next((c for c in candidates if _arguments(c) == _arguments(op) and dispatch.is_view(c)), None)


def _arguments(op: dispatch.Op) -> list[tuple[str, str]]:
    return [(argument.name, str(argument.type)) for argument in dispatch.schema(op).arguments]
