"""Views that are copies: what is written to one side arrives on the other.

On one device ``weight[3]`` is a view, and ``weight[3].zero_()`` writes to ``weight``. A tensor sharded over its rows
has no such view. Stock DTensor gathers the tensor and returns a view of the gathered copy: a write to the view is lost,
and the view does not see later writes to the tensor. This module records the memory of each copy and of its base::

    row = weight[3]      gather weight; row is a view of the copy       copy's memory <-> memory of weight's shard
    row[1].zero_()       gather again; write to row[1]; put its elements in the gathered tensor; take this rank's part
    weight.mul_(2)       write; gather again into the copies that are alive

Views share memory, so strides, offset and dtype of a view give the position of its elements, however it was made, and
a base is found by its memory, also if the DTensor that was indexed (``weight.detach()``) is gone.

**A copy keeps the memory that it copies alive**, as a view does on one device: the copy's storage holds the other one.
So the tensor behind a view that a program writes to is there on every rank. That matters most for a copy of a copy:
where ``weight[3]`` is still sharded, ``weight[3][1:].zero_()`` writes through the row, which no program holds. Torch's
rules decide where a view has to be a copy, and its versions decide differently. Copies form a tree; its root is the
memory of a tensor::

    weight ── copy behind weight[3] ── copy behind weight[3][1:]
          └── copy behind weight[0]

A write to a copy goes up to the root, and the present values go down to all others.

**All ranks decide alike.** Whether a program still holds a copy depends on Python's garbage collector, which runs at
another time on every rank. So before the copies of a written base are renewed, the ranks of the mesh reduce which of
them any rank holds. The tree itself is equal on all ranks; it is pruned after such a reduction only. A rank that no
longer holds a copy renews those below it from what it has gathered.

Operators that write have our handlers only while there are bases with copies: the first copy installs the handlers, and
they are removed with the last one. At all other times they cost the same as in stock torch.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate

from .._torch import dispatch
from .._torch.placements import is_tracing
from ..errors import UnsupportedOperator
from .operands import dtensors, has_shared_elements, written_arguments
from .overlaps import Place, overlap, raise_overlap

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
        self.is_lazy = tensor.is_conj(), tensor.is_neg()

    def is_held(self) -> bool:
        """Return whether anything on this rank refers to the storage."""
        return not self.storage.expired()

    def tensor(self, storage: torch.UntypedStorage | None = None) -> Tensor:
        """Return the tensor, or the one at its place in another storage; its own one must be held."""
        storage = dispatch.storage_of(self.storage) if storage is None else storage
        tensor = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, *self.place)
        return dispatch.with_lazy_bits(tensor, *self.is_lazy)


@dataclass(frozen=True, eq=False)
class _Copy:
    """A gathered copy: its memory, its placements, and the tensor that it is a copy of.

    Attributes:
        outer: the copy in whose memory the base lies; None if the base lies in that of a tensor.
        copies: the copies of tensors in this copy's memory.
    """

    memory: _Memory
    placements: tuple[Placement, ...]
    base_memory: _Memory
    base_spec: dispatch.Spec
    outer: _Copy | None
    copies: list[_Copy] = field(default_factory=list)

    def base(self, storage: torch.UntypedStorage | None = None) -> DTensor:
        """Return the copied tensor, with the values of its own memory or of another one."""
        return dispatch.from_spec(self.base_memory.tensor(storage), self.base_spec)

    def gathered(self, base: DTensor, op: dispatch.Op | None) -> Tensor:
        """Return the present values of the base, in the placements and the layout of the copy, in their own memory."""
        moved = dispatch.redistributed(base, self.placements, for_op=op)
        _, shape, strides = self.memory.place
        is_base = dispatch.storage_key(moved) == dispatch.storage_key(dispatch.local_tensor(base))
        if tuple(moved.shape) == shape and (is_base or moved.stride() != strides):
            laid_out = torch.empty_strided(shape, strides, dtype=moved.dtype, device=moved.device)
            moved = laid_out.copy_(moved)
        if (moved.storage_offset(), tuple(moved.shape), moved.stride()) != self.memory.place:
            raise UnsupportedOperator.for_operands(
                op, (base,), "it writes to a view made before the tensor's memory layout changed: make the view again"
            )
        return moved

    def is_like(self, other: _Copy) -> bool:
        """Return whether both are copies of one tensor with the same layout."""
        mine = self.base_memory.key, self.base_memory.place, self.base_spec, self.placements, self.memory.place
        theirs = other.base_memory.key, other.base_memory.place, other.base_spec, other.placements, other.memory.place
        return mine == theirs

    def path(self) -> list[_Copy]:
        """Return the copies through which a write to this one reaches the tensor: itself first."""
        return [self, *(() if self.outer is None else self.outer.path())]


@dataclass(eq=False)
class _Base:
    """The copies of tensors that share one storage, in the order of their making, which is that of every rank."""

    storage: dispatch.StorageWeakRef
    copies: list[_Copy] = field(default_factory=list)


_BASES: dict[int, _Base] = {}  # by storage of a tensor that is no copy
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
    dispatch.keep_alive(local, source)
    outer = _COPIES.get(key)
    if outer is None and key not in _BASES:
        _BASES[key] = _Base(dispatch.StorageWeakRef(source.untyped_storage()))
    copy = _Copy(_Memory(local), tuple(placements), _Memory(source), dispatch.spec(base), outer)
    (_BASES[key] if outer is None else outer).copies.append(copy)
    _COPIES[copy.memory.key] = copy
    root = _BASES[copy.path()[-1].base_memory.key]
    if len(list(_below(root))) > MAX_COPIES:
        _keep_held(root, copy.path())
    _watch()


def forget_copies() -> None:
    """Forget all copies, and restore the previous handlers of operators that write."""
    for op, before in _BEFORE.items():
        dispatch.set_handler(op, before)
    for registry in (_BEFORE, _COPIES, _BASES):
        registry.clear()


def _watch() -> None:
    if not _BEFORE:
        _BEFORE.update({op: dispatch.handler_of(op) for op in _writing_operators()})
        for op in _BEFORE:
            dispatch.set_handler(op, _write)


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
        UnsupportedOperator: it writes to a tensor and to a view of it that is a copy; it writes to one and reads the
            other, or two such views that may overlap; the memory layout of the copied tensor has changed since the view
            was made; elements of an expanded tensor share memory.
    """
    run = _BEFORE.get(op) or dispatch.stock_dispatch
    _forget_freed()
    written = [tensor for tensor in written_arguments(op, args, kwargs) if isinstance(tensor, DTensor)]
    keys = set(map(_key, written))
    views = [(tensor, _COPIES[_key(tensor)]) for tensor in written if _key(tensor) in _COPIES]
    above = {each.base_memory.key for _, copy in views for each in copy.path()}
    if keys & above:
        raise UnsupportedOperator.for_operands(
            op, written[:2], "it writes to a tensor and to a view of it, which is a copy here: use two operators"
        )
    _refuse_expanded(op, written, [base for key, base in _BASES.items() if key in keys | above])
    _refuse_overlaps(op, written, dtensors(args, kwargs))
    gathered = [_refresh(copy, op) for _, copy in views]
    result = run(op, args, kwargs)
    for number, (view, copy) in enumerate(views):
        # the views of one base are written one after another, each to what the others have written
        _deliver(dispatch.local_tensor(view), copy, gathered[0] if number == 0 else _gathered_again(copy))
    up_to_date = views[0][1].path() if len(views) == 1 else []
    for base in [base for key, base in _BASES.items() if key in keys | above]:
        _keep_held(base, up_to_date)
        _renew(base, None, up_to_date)
    if not _BASES:
        forget_copies()
    return result


def _refuse_expanded(op: dispatch.Op, written: Sequence[DTensor], bases: Sequence[_Base]) -> None:
    for copy in (copy for base in bases for copy in _below(base)):
        if has_shared_elements(copy.base_spec):
            way_out = "elements of an expanded tensor share memory, and a view of it is a copy here: clone() it first"
            raise UnsupportedOperator.for_operands(op, written, way_out)


def _refuse_overlaps(op: dispatch.Op, written: Sequence[DTensor], operands: Sequence[DTensor]) -> None:
    """Refuse operands that are views of the same tensor as one that is written, unless they are known to be apart.

    Views in copies of one tensor have their places in it; of others nothing is known.
    """
    ids = {id(tensor) for tensor in written}
    read = [tensor for tensor in operands if id(tensor) not in ids and tensor.numel()]
    for tensor in (each for each in written if each.numel()):
        for other in (each for each in read if _key(each) != _key(tensor) and _root(each) == _root(tensor)):
            one, another = _COPIES.get(_key(tensor)), _COPIES.get(_key(other))
            if one is None or another is None or not one.is_like(another):
                raise_overlap(op, tensor, other)
            if overlap(*map(Place.of_view, (dispatch.local_tensor(tensor), dispatch.local_tensor(other)))):
                raise_overlap(op, tensor, other)


def _root(tensor: DTensor) -> int:
    """Return the key of the memory that a tensor lies in, or that it is a copy of."""
    copy = _COPIES.get(_key(tensor))
    return _key(tensor) if copy is None else copy.path()[-1].base_memory.key


def _key(tensor: DTensor) -> int:
    return dispatch.storage_key(dispatch.local_tensor(tensor))


def _forget_freed() -> None:
    """Forget bases whose memory is free, to which no program can write, and do not take a copy's memory for another."""
    for key in [key for key, base in _BASES.items() if base.storage.expired()]:
        del _BASES[key]
    for key in [key for key, copy in _COPIES.items() if not copy.memory.is_held()]:
        del _COPIES[key]


def _refresh(copy: _Copy | None, op: dispatch.Op | None) -> list[Tensor]:
    """Gather present values into the copies on the way to a copy, which are held; return them, the innermost first."""
    gathered: list[Tensor] = []
    for each in reversed([] if copy is None else copy.path()):
        gathered.insert(0, each.gathered(each.base(), op))
        each.memory.tensor().copy_(gathered[0])
    return gathered


def _gathered_again(copy: _Copy) -> list[Tensor]:
    """Return the same, and leave in the copy itself what has been written to it."""
    outer = _refresh(copy.outer, None)
    return [copy.gathered(copy.base(), None), *outer]


def _deliver(written: Tensor, copy: _Copy, gathered: list[Tensor]) -> None:
    """Write the elements of ``written``, a view of a copy's memory, to the tensor that was copied, up to the root.

    Args:
        written: a view of the copy's memory.
        copy: where it is written.
        gathered: the values of the copies on the way, before the write, in memory of their own; the innermost first.
    """
    for each, whole in zip(copy.path(), gathered, strict=True):
        base = each.base()
        dispatch.same_place(whole, written).copy_(dispatch.as_stored(written))
        moved = dispatch.wrap(whole, base.device_mesh, each.placements, base)
        written = dispatch.local_tensor(base)
        written.copy_(_in_placements(moved, dispatch.placements_of(base)))


def _in_placements(tensor: DTensor, placements: Sequence[Placement]) -> Tensor:
    """Return the shard in other placements; torch cannot make a shard partial, but a replicated axis."""
    pairs = zip(tensor.placements, placements, strict=True)
    between = [Replicate() if new.is_partial() and new != old else old for old, new in pairs]
    local = dispatch.redistributed(tensor, between, for_op=None)
    return dispatch.redistributed(dispatch.wrap(local, tensor.device_mesh, between, tensor), placements, for_op=None)


def _renew(above: _Base | _Copy, storage: torch.UntypedStorage | None, up_to_date: Collection[_Copy]) -> None:
    """Gather the present values of a memory into its copies and into the copies of these, but for those up to date.

    Args:
        above: the tensor or copy whose copies are renewed.
        storage: its values, if its own memory may not be held on this rank.
        up_to_date: copies with the present values; they are held on all ranks.
    """
    for copy in above.copies:
        if copy in up_to_date:
            _renew(copy, None, up_to_date)
            continue
        moved = copy.gathered(copy.base(storage), None)
        if copy.memory.is_held():
            copy.memory.tensor().copy_(moved)
        _renew(copy, moved.untyped_storage(), up_to_date)


def _below(above: _Base | _Copy) -> Iterator[_Copy]:
    """Yield all copies of a memory, those of copies too, in the same order on every rank."""
    for copy in above.copies:
        yield copy
        yield from _below(copy)


def _keep_held(base: _Base, known: Collection[_Copy]) -> None:
    """Forget the copies of ``base`` that no rank holds; every rank holds those in ``known``."""
    asked = [copy for copy in _below(base) if copy not in known]
    held = {*known, *_held_anywhere(asked)}
    for above in [base, *_below(base)]:
        above.copies[:] = [copy for copy in above.copies if copy in held]
    if not base.copies:
        _BASES.pop(base.storage.cdata, None)


def _held_anywhere(copies: Sequence[_Copy]) -> Iterator[_Copy]:
    """Yield the copies that a rank of their mesh holds; it then holds those that they are copies of, too."""
    for mesh in dict.fromkeys(copy.base_spec.mesh for copy in copies):
        asked = [copy for copy in copies if copy.base_spec.mesh == mesh]
        votes = torch.tensor([int(copy.memory.is_held()) for copy in asked], device=asked[0].base_memory.device)
        ballot = dispatch.wrap(votes, mesh, [Partial("max")] * mesh.ndim, votes)
        counted = dispatch.redistributed(ballot, [Replicate()] * mesh.ndim, for_op=None).tolist()
        yield from (copy for copy, is_held in zip(asked, counted, strict=True) if is_held)
