"""Views that are copies: what is written to one side arrives on the other.

On one device ``weight[3]`` is a view, and ``weight[3].zero_()`` writes to ``weight``. A tensor sharded over its rows
has no such view. Stock DTensor gathers the tensor and returns a view of the gathered copy: a write to the view is lost,
and the view does not see later writes to the tensor. This module records the memory of each copy and of its base::

    row = weight[3]      gather weight; row is a view of the copy       copy's memory <-> memory of weight's shard
    row[1].zero_()       gather again; write to row[1]; put its elements in the gathered tensor; take this rank's part
    weight.mul_(2)       write; gather again into the copies that are alive

Views share memory, so strides, offset and dtype of a view give the position of its elements, however it was made, and
a base is found by its memory, also if the DTensor that was indexed (``weight.detach()``) is gone.

**All ranks decide alike.** Whether a program still holds a copy depends on Python's garbage collector, which runs at
another time on every rank. So before the copies of a written base are renewed, the ranks of the mesh reduce which of
them any rank holds. The list of copies itself is equal on all ranks; it is shortened after such a reduction only.

Operators that write have our handlers only while there are bases with copies: the first copy installs the handlers, and
they are removed with the last one. At all other times they cost the same as in stock torch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .._torch import dispatch
from .._torch.placements import is_tracing
from ..errors import UnsupportedOperator
from .operands import written_arguments

__all__ = ["forget_copies", "remember_copy"]

MAX_COPIES = 64
"""Number of copies of one base after which the ranks agree on those that are still held."""


class _Memory:
    """A local tensor that is not kept alive: its storage, and where it lies there."""

    def __init__(self, tensor: Tensor):
        self.storage = dispatch.StorageWeakRef(tensor.untyped_storage())
        self.key = self.storage.cdata
        self.dtype, self.device = tensor.dtype, tensor.device
        self.place = tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride())

    def tensor(self) -> Tensor | None:
        """Return the tensor, or None if its storage is gone."""
        storage = dispatch.storage_of(self.storage)
        return (
            None if storage is None else torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.place)
        )


@dataclass(frozen=True, eq=False)
class _Copy:
    """A gathered copy: its memory, its placements, and the tensor that it is a copy of."""

    memory: _Memory
    placements: tuple[Placement, ...]
    base_memory: _Memory
    base_spec: dispatch.Spec

    def base(self) -> DTensor | None:
        """Return the copied tensor, or None if nothing refers to its memory any more."""
        local = self.base_memory.tensor()
        return None if local is None else dispatch.from_spec(local, self.base_spec)

    def gathered(self, base: DTensor, op: dispatch.Op | None) -> Tensor:
        """Return the present values of the base, in the placements of the copy and in memory of its own."""
        moved = dispatch.redistributed(base, self.placements, for_op=op)
        if (moved.storage_offset(), tuple(moved.shape), moved.stride()) != self.memory.place:
            raise UnsupportedOperator.for_operands(
                op, (base,), "it writes to a view made before the tensor's memory layout changed: make the view again"
            )
        return moved


@dataclass(eq=False)
class _Base:
    """The copies of tensors that share one storage, in the order of their making, which is that of every rank."""

    storage: dispatch.StorageWeakRef
    copies: list[_Copy] = field(default_factory=list)


_BASES: dict[int, _Base] = {}  # by storage of the base
_COPIES: dict[int, _Copy] = {}  # by storage of the copy

# While our handlers are installed: the previous handlers of operators that write (None: stock rule).
_BEFORE: dict[dispatch.Op, dispatch.Handler | None] = {}


def remember_copy(base: DTensor, placements: Sequence[Placement], local: Tensor) -> None:
    """Remember that the memory of ``local`` is a copy of ``base``, redistributed to ``placements``."""
    source = dispatch.local_tensor(base)
    key = dispatch.storage_key(source)
    if not base.numel() or base.device_mesh.get_coordinate() is None or key == dispatch.storage_key(local):
        return
    if is_tracing():  # a compiler sees values, and no memory
        return
    if key not in _BASES:
        _BASES[key] = _Base(dispatch.StorageWeakRef(source.untyped_storage()))
    copy = _Copy(_Memory(local), tuple(placements), _Memory(source), dispatch.spec(base))
    _BASES[key].copies.append(copy)
    _COPIES[copy.memory.key] = copy
    if len(_BASES[key].copies) > MAX_COPIES:
        _keep_held(_BASES[key], copy)
    _watch()


def forget_copies() -> None:
    """Forget all copies, and restore the previous handlers of operators that write."""
    table = dispatch.handler_table()
    for op, before in _BEFORE.items():
        if before is None:
            table.pop(op, None)
        else:
            table[op] = before
    for registry in (_BEFORE, _COPIES, _BASES):
        registry.clear()


def _watch() -> None:
    if not _BEFORE:
        table = dispatch.handler_table()
        _BEFORE.update({op: table.get(op) for op in _writing_operators()})
        table.update(dict.fromkeys(_BEFORE, _write))


@functools.cache
def _writing_operators() -> tuple[dispatch.Op, ...]:
    def is_one(op: dispatch.Op) -> bool:
        return (
            bool(dispatch.written_arguments(op))
            and torch.Tag.inplace_view not in op.tags
            and not dispatch.is_composite(op)
        )

    return tuple(filter(is_one, dispatch.operators()))


# ------------------------------------------------------------------------------------------------- writes


def _write(op: dispatch.Op, args: tuple, kwargs: dict) -> object:
    """Run an operator that writes; then bring what it has written from copies to bases, and from bases to copies.

    Raises:
        UnsupportedOperator: it writes to a tensor and to a view of it that is a copy; the memory layout of the copied
            tensor has changed since the view was made.
    """
    run = _BEFORE.get(op) or dispatch.stock_dispatch
    _forget_freed()
    written = [tensor for tensor in written_arguments(op, args, kwargs) if isinstance(tensor, DTensor)]
    keys = set(map(_key, written))
    views = [(tensor, _COPIES[_key(tensor)]) for tensor in written if _key(tensor) in _COPIES]
    if keys & {copy.base_memory.key for _, copy in views}:
        raise UnsupportedOperator.for_operands(
            op, written[:2], "it writes to a tensor and to a view of it, which is a copy here: use two operators"
        )
    gathered = [_renew(copy, op) for _, copy in views]
    result = run(op, args, kwargs)
    for number, (view, copy) in enumerate(views):
        # the views of one base are written one after another, each to what the others have written
        keys |= _deliver(dispatch.local_tensor(view), copy, gathered[0] if number == 0 else None)
    up_to_date = views[0][1] if len(views) == 1 else None
    for base in [base for key, base in _BASES.items() if key in keys]:
        _renew_copies(base, up_to_date)
    if not _BASES:
        forget_copies()
    return result


def _key(tensor: DTensor) -> int:
    return dispatch.storage_key(dispatch.local_tensor(tensor))


def _forget_freed() -> None:
    """Forget bases whose memory is free, to which no program can write, and do not take a copy's memory for another."""
    for key in [key for key, base in _BASES.items() if base.storage.expired()]:
        del _BASES[key]
    for key in [key for key, copy in _COPIES.items() if copy.memory.storage.expired()]:
        del _COPIES[key]


def _renew(copy: _Copy, op: dispatch.Op | None) -> Tensor | None:
    """Gather the present values of a copy's base into the copy; return them, or None if the base is gone."""
    outer = _COPIES.get(copy.base_memory.key)
    if outer is not None:  # a copy of a view of a copy
        _renew(outer, op)
    base, memory = copy.base(), copy.memory.tensor()
    if base is None:
        return None
    moved = copy.gathered(base, op)
    if memory is not None:
        memory.copy_(moved)
    return moved


def _deliver(written: Tensor, copy: _Copy, gathered: Tensor | None) -> set[int]:
    """Write the elements of ``written``, a view of a copy's memory, to the tensor that was copied.

    Returns:
        The storages that were written: that of the copied tensor, and of the tensor that it is a copy of, if it is one.
    """
    base = copy.base()
    if base is None:
        return set()
    whole = copy.gathered(base, None) if gathered is None else gathered
    dispatch.same_place(whole, written).copy_(dispatch.as_stored(written))
    moved = dispatch.wrap(whole, base.device_mesh, copy.placements, base)
    local = dispatch.local_tensor(base)
    local.copy_(dispatch.redistributed(moved, dispatch.placements_of(base), for_op=None))
    outer = _COPIES.get(copy.base_memory.key)
    return {copy.base_memory.key} | (set() if outer is None else _deliver(local, outer, None))


def _renew_copies(base: _Base, up_to_date: _Copy | None) -> None:
    """Gather the present values into the copies of a base but one, and into the copies of these."""
    for copy in _keep_held(base, up_to_date):
        if copy is not up_to_date:
            _renew(copy, None)
            if (inner := _BASES.get(copy.memory.key)) is not None:
                _renew_copies(inner, None)


def _keep_held(base: _Base, known: _Copy | None) -> list[_Copy]:
    """Forget the copies of ``base`` that no rank holds, and return the others; every rank holds ``known``."""
    asked = [copy for copy in base.copies if copy is not known]
    held = _held_anywhere(asked) if asked else set()
    base.copies = [copy for copy in base.copies if copy is known or copy in held]
    if not base.copies:
        _BASES.pop(base.storage.cdata, None)
    return list(base.copies)


def _held_anywhere(copies: list[_Copy]) -> set[_Copy]:
    mesh = copies[0].base_spec.mesh
    device = copies[0].base_memory.device
    votes = torch.tensor([int(not copy.memory.storage.expired()) for copy in copies], device=device)
    ballot = dispatch.wrap(votes, mesh, [Partial("max")] * mesh.ndim, votes)
    counted = dispatch.redistributed(ballot, [Replicate()] * mesh.ndim, for_op=None).tolist()
    return {copy for copy, is_held in zip(copies, counted, strict=True) if is_held}
