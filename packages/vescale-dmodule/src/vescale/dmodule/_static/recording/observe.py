"""Boundary records: the layouts of every tensor at a boundary, as data.

A *boundary record* describes one tensor at one boundary: an argument or result of a planned boundary, of the module
itself, or of a part in eager mode. The same observer runs in the recording on DTensors and in the check on local
tensors, so both can be compared value by value.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ... import _torch
from ..._boundary.convert import as_dtensor, bring
from ..._boundary.edges import averaged
from ..._boundary.rows_axis import OverRows, is_over_rows, part_of_rows

__all__ = ["BoundaryRecord", "BoundaryRecords", "Observer", "Seen", "replicated"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class BoundaryRecord:
    """One tensor at one boundary.

    Attributes:
        where: name of the boundary, such as ``model.layers.0.mlp.input 'x'``.
        arriving: local shape of the value before its conversion.
        shape: global shape.
        source: layout of the value before its conversion; None if it is a plain tensor in eager mode, too.
        target: layout of the value after its conversion.
        gradient: layout of the gradient of the converted value; None if it has no gradient.
        dtype: of the value.
        rows: layout on the axis of rows, if the call runs on the rows of all data-parallel ranks and the value is on
            their mesh. Layouts and shapes are then those of this rank's part (see `_boundary.rows_axis`).
        order: dims of the value from the slowest to the fastest in memory; None if they are in order.
    """

    where: str
    arriving: tuple[int, ...]
    shape: tuple[int, ...]
    source: Placements | None
    target: Placements | None
    gradient: Placements | None
    dtype: torch.dtype
    rows: OverRows | None = None
    order: tuple[int, ...] | None = None

    @property
    def own(self) -> Placement:
        """The placement on the axis of rows; values that are not on their mesh are equal on all ranks."""
        return Replicate() if self.rows is None else self.rows.placement

    @property
    def key(self) -> tuple[str, tuple[int, ...]]:
        """The identity of the value on local tensors."""
        return self.where, self.arriving


@dataclass(eq=False)
class Seen:
    """An incomplete record, with the local value and, after backward, its local gradient.

    Attributes:
        part: which part the value is of that of the recording: its dim, start and length; None if it is all of it.
    """

    record: BoundaryRecord
    value: Tensor
    module: str
    gradient: Tensor | None = None
    gradient_layout: Placements | None = None
    part: tuple[int, int, int] | None = None

    def of(self, recorded: Tensor) -> Tensor:
        """Return what the value should be, of that of the recording."""
        return recorded if self.part is None else recorded.narrow(*self.part)

    def note_gradient(self, grad: Tensor | None) -> None:
        if self.gradient is None and grad is not None:  # None: no operator on this rank used the value
            if not isinstance(grad, DTensor):
                self.gradient = grad.detach().clone()
                return
            own = () if self.record.rows is None else (self.record.own,)
            self.gradient_layout = tuple(grad.placements[len(own) :])
            num_summands = averaged(grad.device_mesh, (*own, *self.record.target))
            if self.is_summand and grad.placements[0].is_replicate():
                num_summands *= grad.device_mesh.size(0)
            self.gradient = _torch.local_of(grad).detach() / num_summands

    @property
    def is_summand(self) -> bool:
        """Whether the gradients of all data-parallel ranks must be added."""
        return self.record.rows is not None and self.record.own.is_replicate()

    def finished(self) -> BoundaryRecord:
        return BoundaryRecord(**{**vars(self.record), "gradient": self.gradient_layout})


@dataclass
class Observer:
    """Collects boundary records while a module runs.

    Attributes:
        mesh: of the placements of the plan.
        running: returns the name of the running module.
        changed: boundaries whose results are changed in place by the callers of their modules.
        seen: the records, in the order of the calls.
        edges: the nodes of autograd of the converted values, where layouts of gradients change.
    """

    mesh: DeviceMesh
    running: Callable[[], str]
    changed: frozenset[str] = frozenset()
    seen: list[Seen] = field(default_factory=list)
    edges: set[object] = field(default_factory=set)
    _results: list[tuple[str, Tensor, int]] = field(default_factory=list)

    def convert(self, tensor: Tensor, placements: Placements, where: str, *, is_result: bool) -> DTensor:
        """Bring a value of the eager run to its placements, and record it.

        A result of a module may have another use inside of it. The caller gets an alias, whose gradient leaves out that
        use. Hooks on an alias that is changed in place see no gradient, so such a result stays the same object.
        """
        tensor = tensor if isinstance(tensor, DTensor) else as_dtensor(tensor, self.mesh)
        source = self._placements(tensor)
        if is_result and tensor.requires_grad and source == placements and where not in self.changed:
            tensor = _alias(tensor)
        out = bring(tensor, placements, self.mesh, is_result=is_result)
        self.edges.add(out.grad_fn)
        if is_result:
            self._results.append((where, out, out._version))
        self._note(self._record(where, tensor, source, self._placements(out)), _local(out), out)
        return out

    def newly_changed(self) -> frozenset[str]:
        """Return the boundaries whose results were changed in place, without those known before."""
        found = frozenset(where for where, result, version in self._results if result._version != version)
        return found - self.changed

    def watch(self, tensor: Tensor, where: str) -> Tensor:
        """Record a value of the eager run unchanged; return an alias, so that its gradient has one record only."""
        layout = self._placements(tensor) if isinstance(tensor, DTensor) else None
        out = _alias(tensor) if tensor.requires_grad else tensor
        self._note(self._record(where, tensor, layout, layout), _local(out), out)
        return out

    def watch_argument(self, tensor: Tensor, where: str) -> Tensor:
        """Record an argument of the eager run; a plain tensor that requires a gradient becomes a DTensor."""
        if isinstance(tensor, DTensor):
            return self.watch(tensor, where)
        return self.watch(as_dtensor(tensor, self.mesh), where) if tensor.requires_grad else tensor

    def watch_rows(self, tensor: Tensor, where: str) -> Tensor:
        """Record an argument with a gradient. Others are plain on local tensors, also where they are DTensors here."""
        return self.watch_argument(tensor, where) if tensor.requires_grad else tensor

    def note_local(self, tensor: Tensor, where: str, part: tuple[int, int, int] | None = None) -> None:
        """Record a value of the run on local tensors, or a part of one, for the comparison."""
        self._note(self._record(where, tensor, None, None), _local(tensor), tensor, part)

    @_torch.unseen
    def _note(
        self, record: BoundaryRecord, value: Tensor, tensor: Tensor, part: tuple[int, int, int] | None = None
    ) -> None:
        seen = Seen(record, value.detach().clone(), self.running(), part=part)
        if tensor.requires_grad:
            _torch.hook_first(tensor, seen.note_gradient)  # before the boundary redistributes it
        self.seen.append(seen)

    def _placements(self, tensor: DTensor) -> Placements:
        """Return the placements on the axes of the plan."""
        return tuple(tensor.placements[-self.mesh.ndim :])

    def _record(
        self, where: str, tensor: Tensor, source: Placements | None, target: Placements | None
    ) -> BoundaryRecord:
        shape, rows = tensor.shape, None
        if is_over_rows(tensor, self.mesh):
            shape, rows = part_of_rows(tensor), OverRows(tensor.placements[0], tensor.shape)
        arriving = tuple(_local(tensor).shape)
        order = _memory_order(tensor)
        return BoundaryRecord(where, arriving, tuple(shape), source, target, None, tensor.dtype, rows, order)

    def records(self) -> Iterator[BoundaryRecord]:
        """Yield the records, with the layouts of the gradients that backward computed."""
        return (seen.finished() for seen in self.seen)


def _memory_order(tensor: Tensor) -> tuple[int, ...] | None:
    strides = tensor.stride()
    order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
    return None if 0 in strides or order == tuple(range(len(strides))) else order


@_torch.unseen
def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor)


def _local(tensor: Tensor) -> Tensor:
    return _torch.local_of(tensor) if isinstance(tensor, DTensor) else tensor


class BoundaryRecords:
    """Boundary records by boundary and local shape.

    Nearly always these two imply one layout. Where they do not, in one call of the program, the order of calls decides:
    there is one record per value, in that order.

    Attributes:
        known: the records of each boundary and local shape: one, or several in order.
    """

    def __init__(self, records: Iterable[BoundaryRecord] = ()):
        """Keep the records of one call of the program."""
        in_order: dict[tuple[str, tuple[int, ...]], list[BoundaryRecord]] = {}
        for record in records:
            in_order.setdefault(record.key, []).append(record)
        self.known = {key: _one_if_equal(found) for key, found in in_order.items()}
        self._next: dict[tuple[str, tuple[int, ...]], int] = {}

    def restart(self) -> None:
        """Begin the order of a call of the program."""
        self._next.clear()

    def next(self, where: str, shape: tuple[int, ...]) -> BoundaryRecord | None:
        """Return the record of the next value of a boundary that has a local shape; None if there is none."""
        found = self.known.get((where, shape), ())
        if len(found) < 2:
            return found[0] if found else None
        number = self._next.get((where, shape), 0)
        self._next[where, shape] = number + 1
        return found[number] if number < len(found) else None

    def whole(self, where: str, part: tuple[int, ...], count: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield the shapes of plain tensors of which ``count`` ranks have parts of a shape, and the dim that is cut.

        None of them if the boundary has a record of that shape itself. One dim of them is ``count`` times as long.
        """
        if (where, part) in self.known:
            return
        for (boundary, shape), found in self.known.items():
            if boundary != where or len(shape) != len(part) or any(record.source is not None for record in found):
                continue
            longer = [dim for dim, (whole, own) in enumerate(zip(shape, part, strict=True)) if whole != own]
            if len(longer) == 1 and shape[longer[0]] == count * part[longer[0]]:
                yield shape, longer[0]

    def ambiguous(self) -> BoundaryRecord | None:
        """Return a record whose boundary and local shape have several layouts; None if there is none."""
        return next((found[0] for found in self.known.values() if len(found) > 1), None)

    def fits(self, new: BoundaryRecords) -> bool:
        """Return whether no boundary and local shape has other layouts in ``new``."""
        both = [(self.known[key], found) for key, found in new.known.items() if key in self.known]
        return all(len(old) == len(found) and all(map(_agree, old, found)) for old, found in both)

    def add(self, new: BoundaryRecords) -> None:
        """Add records that fit."""
        for key, found in new.known.items():
            self.known[key] = [*map(_better, self.known[key], found)] if key in self.known else found

    def shapes(self, where: str) -> list[tuple[int, ...]]:
        """Return the recorded local shapes of a boundary."""
        return [shape for boundary, shape in self.known if boundary == where]


def _one_if_equal(records: list[BoundaryRecord]) -> list[BoundaryRecord]:
    if not all(_agree(*pair) for pair in itertools.combinations(records, 2)):
        return records
    return [functools.reduce(_better, records)]


def _better(old: BoundaryRecord, new: BoundaryRecord) -> BoundaryRecord:
    """Return one of two records that agree: that of a DTensor, and the one with a gradient."""
    return new if old.source is None or (old.gradient is None and new.source is not None) else old


def _agree(old: BoundaryRecord, new: BoundaryRecord) -> bool:
    if old.shape == new.shape and None in (old.source, new.source):  # plain tensors are equal on all ranks
        return all(p.is_replicate() for p in (*(old.source or ()), *(new.source or ())))
    layouts = (old.shape, old.source, old.target) == (new.shape, new.source, new.target)
    layouts &= old.own == new.own
    return layouts and (old.gradient == new.gradient or None in (old.gradient, new.gradient))


def replicated(mesh: DeviceMesh) -> Placements:
    """Return the placements of a tensor that is equal on all ranks."""
    return (Replicate(),) * mesh.ndim
