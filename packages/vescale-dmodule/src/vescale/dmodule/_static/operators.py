"""Recorded calls of torch functions that need DTensors: which of them a call on local tensors is.

Two kinds of calls need DTensors. Random operators draw this rank's part of global values. Islands are operators that
give another result on local tensors, because they communicate or depend on global sizes.

A function and the local shapes of its operands identify a call within a module, as long as they always imply the same
layouts. Where they do not, where local code has other local shapes than the recording, or where shapes depend on data,
the order of calls within a call of the module decides. A module makes the same calls of torch functions on local
tensors as on DTensors::

    recorded call of a module      dropout(scores)     rand_like(x)    dropout(out)
    the same on local tensors      position 0          position 1      position 2

Calls of the program with several shapes (lengths of sequences) share a position, which then has one `RecordedOperator`
per local shape. A module may be called several times in one call of the program. These calls are one sequence if they
agree. If they contradict each other, the number of the call decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.overrides import resolve_name

from vescale.dtensor.extension import BlockShard, chunk

from .._boundary.rows_axis import gradient_over_rows
from .movement.steps import without_partials
from .recording.observe import replicated

__all__ = ["ModuleOperators", "Operand", "Part", "RecordedOperator", "Repeat"]

Placements = tuple[Placement, ...]
Part = tuple[int, int, int]
"""What local code has of a whole tensor: a dim, the first index and the number of indices."""


class Operand(NamedTuple):
    """A tensor operand of a recorded operator."""

    local_shape: torch.Size
    shape: torch.Size
    placements: Placements

    def as_seen(self, local_shape: torch.Size, mesh: DeviceMesh) -> Operand | None:
        """Return the operand as local code has it in the check of the recording; None if its placements are unknown.

        Local code may make a tensor for this rank that eager mode makes whole, or keep a whole one that eager mode
        shards. The check compares the results.
        """
        if local_shape == self.local_shape:
            return self
        if local_shape == self.shape:
            return None if any(p.is_partial() for p in self.placements) else self.whole(mesh)
        found = [
            (axis, dim)
            for axis, placement in enumerate(self.placements)
            for dim, size in enumerate(self.shape)
            if placement.is_replicate() and len(local_shape) == len(self.shape)
            if chunk(size, mesh.size(axis), mesh.get_local_rank(axis))[1] == local_shape[dim] != size
            if all(local_shape[d] == self.local_shape[d] for d in range(len(local_shape)) if d != dim)
        ]
        if len(found) != 1:
            return None
        ((axis, dim),) = found
        placements = (*self.placements[:axis], Shard(dim), *self.placements[axis + 1 :])
        return Operand(local_shape, self.shape, placements)

    def with_sizes(self, local_shape: torch.Size) -> Operand | None:
        """Return the operand with other sizes of dims that no axis shards, as data decides them; None for others.

        An example are the tokens that an expert takes.
        """
        sharded = {p.dim for p in self.placements if type(p) in (Shard, BlockShard)}
        known = all(type(p) in (Shard, BlockShard) or p.is_replicate() or p.is_partial() for p in self.placements)
        if len(local_shape) != len(self.shape) or not known:
            return None
        if any(local_shape[dim] != self.local_shape[dim] for dim in sharded):
            return None
        shape = (self.shape[dim] if dim in sharded else size for dim, size in enumerate(local_shape))
        return Operand(local_shape, torch.Size(shape), self.placements)

    def whole(self, mesh: DeviceMesh) -> Operand:
        """Return the operand on a rank that has all of it."""
        return Operand(self.shape, self.shape, replicated(mesh))


@dataclass
class RecordedOperator:
    """One recorded call of a torch function of which a call needs DTensors, here or elsewhere in the program.

    Attributes:
        function: the torch function.
        operands: its tensor operands, in order.
        draws: whether this call advanced the random stream; dropout with rate 0 does not.
        gradients: layouts of the gradients of its results, in order.
        is_island: whether the call gives another result on local tensors.
        constants: arguments of an island that local code passes otherwise, such as sizes: what it passes and what the
            recorded call has, by their place among all arguments that are no tensors.
        written: places of the operands that an island writes.
        part: the part of the result that local code has, of an island whose result is whole on all ranks.
        totals: layouts of an island's operands, partial along the axes where what other operators add to their
            gradients, up to the next boundary, is; by place.
        drawn_on: placements of the DTensors for which its random operators draw, in order; empty ones where this rank's
            part does not follow from them.
        is_seen: whether the operands are as local code had them when the recording was checked, not as recorded.
        over_rows: whether the first axis of the layouts is that of the rows of data-parallel ranks (see
            `_boundary.rows_axis`): there the placement of an operand decides that of its gradient.
    """

    function: Callable
    operands: list[Operand]
    draws: bool = True
    gradients: list[Placements | None] = field(default_factory=list)
    is_island: bool = False
    constants: dict[int, tuple[object, object]] = field(default_factory=dict)
    written: tuple[int, ...] = ()
    part: Part | None = None
    totals: dict[int, Placements] = field(default_factory=dict)
    drawn_on: tuple[Placements, ...] = ()
    is_seen: bool = False
    over_rows: bool = False

    def gradient_of(self, place: int) -> Placements:
        """Return the layout in which an island gives the gradient of an operand: one that local code can add to.

        Where all ranks have the operand, and other operators give partial gradients of it, so does the island.
        """
        placements = self.operands[place].placements
        own = without_partials(placements)
        total = self.totals.get(place, own)
        total = (*own[: len(own) - len(total)], *total)  # an operand that is lifted to the mesh of rows
        each = zip(placements, own, total, strict=True)
        both = [t if p.is_replicate() and t.is_partial() else o for p, o, t in each]  # a summand has a whole gradient
        return tuple([gradient_over_rows(placements[0]), *both[1:]] if self.over_rows else both)

    @property
    def local_shapes(self) -> tuple[torch.Size, ...]:
        """Local shapes of the operands."""
        return tuple(operand.local_shape for operand in self.operands)

    @property
    def is_sharded(self) -> bool:
        """Whether the ranks draw different parts of the global values."""
        return self.draws and not all(p.is_replicate() for operand in self.operands for p in operand.placements)

    @property
    def draws_rows(self) -> bool:
        """Whether all that it draws is for rows on dim 0, as in `vescale.dtensor.random.local_batch`."""
        return not self.is_island and bool(self.drawn_on) and set(self.drawn_on) == {(Shard(0),)}

    @property
    def needs_dtensors(self) -> bool:
        """Whether the call on local tensors must run on DTensors."""
        return self.is_island or self.is_sharded

    def on(
        self, local_shapes: tuple[torch.Size, ...], fit: Callable[[Operand, torch.Size], Operand | None]
    ) -> RecordedOperator | None:
        """Return the same operator on operands of other local shapes; None if one of them does not ``fit``."""
        if len(local_shapes) != len(self.operands):
            return None
        operands = list(map(fit, self.operands, local_shapes))
        return None if None in operands else replace(self, operands=operands)

    def joined(self, other: RecordedOperator) -> RecordedOperator | None:
        """Return one operator for two calls with equal functions and local shapes; None if their layouts differ."""
        known = [op.gradients for op in (self, other) if any(gradient is not None for gradient in op.gradients)]
        if self.operands != other.operands or known[1:] not in ([], known[:1]):
            return None
        as_island = [(op.is_island, op.constants, op.written, op.part, op.drawn_on) for op in (self, other)]
        if as_island[0] != as_island[1] or any(self.totals.get(p, t) != t for p, t in other.totals.items()):
            return None
        totals = self.totals | other.totals
        return replace(self, draws=self.draws or other.draws, gradients=known[0] if known else [], totals=totals)

    def __str__(self) -> str:
        operands = ", ".join(f"{tuple(o.shape)} {o.placements}" for o in self.operands)
        return f"{resolve_name(self.function) or self.function}{' on ' * bool(operands)}{operands}"


Position = dict[tuple[torch.Size, ...], RecordedOperator]  # by local shapes; all of one function

Repeat = tuple[int, Sequence[RecordedOperator]]
"""What activation checkpointing repeats of a call: the number of operators before, and the operators."""


def _merge(one: Sequence[Position] | None, other: Sequence[Position]) -> list[Position] | None:
    """Return the sequence of two calls; None if they contradict each other, or if there is none of the first."""
    if one is None or [_function(position) for position in one] != [_function(position) for position in other]:
        return None
    sequence = []
    for old, new in zip(one, other, strict=True):
        position = dict(old)
        for shapes, operator in new.items():
            merged = position[shapes].joined(operator) if shapes in position else operator
            if merged is None:
                return None
            position[shapes] = merged
        sequence.append(position)
    return sequence


def _function(position: Position) -> Callable:
    return next(iter(position.values())).function


class ModuleOperators:
    """The recorded operators of one module.

    Attributes:
        calls: the sequence of every call of the module in a call of the program; a single one if all calls agree.
    """

    def __init__(self, calls: Iterable[Sequence[RecordedOperator]], repeats: Iterable[Repeat] = ()):
        """Make the record of a module.

        Args:
            calls: its operators, call by call.
            repeats: those that activation checkpointing repeated, of the whole module or of a function in it.

        Raises:
            ValueError: a module with calls that contradict each other is recomputed, so the number of the recomputed
                call is unknown.
        """
        each = [_positions(call) for call in calls]
        together = functools.reduce(_merge, each) if each else []
        for begin, repeated in repeats:
            end = begin + len(repeated)  # torch ends a recomputation when it has what it needs
            again = None if together is None else _merge(together[begin:end], _positions(repeated))
            if again is None and repeated:
                raise ValueError("recomputed calls with different operators")
            together = [*together[:begin], *again, *together[end:]] if again else together
        self.calls = each if together is None else [together]

    def union(self, other: ModuleOperators) -> ModuleOperators | None:
        """Return the record of calls of the program with both; None if they contradict each other."""
        if len(self.calls) != len(other.calls):
            return None
        pairs = [_merge(one, two) for one, two in zip(self.calls, other.calls, strict=True)]
        if None in pairs:
            return None
        union = ModuleOperators(())
        union.calls = pairs
        return union

    @functools.cached_property
    def functions(self) -> set[Callable]:
        """The torch functions of all positions."""
        return {operator.function for operator in self}

    @property
    def has_islands(self) -> bool:
        """Whether any of the operators is an island."""
        return any(operator.is_island for operator in self)

    @functools.cached_property
    def _by_shape(self) -> dict[tuple[Callable, tuple[torch.Size, ...]], RecordedOperator | None]:
        """The operators by function and local shapes; None where these imply no single layout."""
        found: dict[tuple[Callable, tuple[torch.Size, ...]], RecordedOperator | None] = {}
        for operator in self:
            key = operator.function, operator.local_shapes
            old = found.setdefault(key, operator)
            found[key] = None if old is None else old.joined(operator)
        return found

    def by_shape(self, function: Callable, shapes: tuple[torch.Size, ...]) -> RecordedOperator | None:
        """Return the operator of a function on operands of some local shapes; None if the order of calls decides."""
        return self._by_shape.get((function, shapes))

    def sequence(self, call: int) -> list[Position]:
        """Return the operators of one call of the module in order; empty if that call was not recorded."""
        if len(self.calls) == 1:
            return self.calls[0]
        return self.calls[call] if call < len(self.calls) else []

    def by_order(
        self,
        call: int,
        position: int,
        function: Callable,
        shapes: tuple[torch.Size, ...],
        mesh: DeviceMesh,
        *,
        checks: bool,
    ) -> RecordedOperator | None:
        """Return the operator at a position of a call, on operands of some local shapes; None if none is recorded.

        Args:
            call: number of the call of the module.
            position: in that call.
            function: the torch function.
            shapes: of its tensor operands.
            mesh: of the layouts.
            checks: whether the recording is being checked. What local code has then is the rule for later calls.
        """
        found = self._at(call, position, function)
        if shapes in found:
            return found[shapes]
        seen = [operator for operator in found.values() if operator.is_seen]
        if checks:
            fit = [on for op in found.values() if (on := op.on(shapes, functools.partial(Operand.as_seen, mesh=mesh)))]
            if len(fit) == 1:
                found[shapes] = replace(fit[0], is_seen=True)
                return found[shapes]
        fit = [on for operator in seen or found.values() if (on := operator.on(shapes, Operand.with_sizes))]
        return fit[0] if fit and all(fit[0].joined(other) for other in fit) else None

    def is_island_at(self, call: int, position: int, function: Callable) -> bool:
        """Return whether the recorded call of a function at a position of a call is an island."""
        return any(operator.is_island for operator in self._at(call, position, function).values())

    def has_other_shapes(self, call: int, position: int, function: Callable, shapes: tuple[torch.Size, ...]) -> bool:
        """Return whether a function is recorded at a position of a call, but not on operands of these shapes."""
        found = self._at(call, position, function)
        return bool(found) and shapes not in found

    def _at(self, call: int, position: int, function: Callable) -> Position:
        sequence = self.sequence(call)
        found = sequence[position] if position < len(sequence) else {}
        return found if found and _function(found) == function else {}

    def __iter__(self) -> Iterator[RecordedOperator]:
        return (operator for call in self.calls for position in call for operator in position.values())


def _positions(call: Sequence[RecordedOperator]) -> list[Position]:
    return [{operator.local_shapes: operator} for operator in call]
