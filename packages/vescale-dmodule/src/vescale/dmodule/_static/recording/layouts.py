"""Recorded layouts, and the calls that share them.

On local tensors a boundary and a local shape identify a value, as long as they always imply the same layout. They may
not. Within one call of the program, the order of calls then identifies it (see `BoundaryRecords`). Between calls:
sequences of 8 and of 7 tokens over two ranks both have the local shape 4 on the first rank. Calls whose layouts
contradict each other have separate `RecordedLayouts`, and the signature of a call chooses. Nearly all programs have one
for all calls::

    recording of a call  ->  Recording  -- adopt -->  the RecordedLayouts that agree, or new ones
    signature of a call  ----------------- find ---->  RecordedLayouts
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ... import _torch
from ..._boundary.rows_axis import OverRows
from ..._execution.patch import ModulePatch
from ...errors import NotLocalFriendlyError
from ..direct_calls import Steps
from ..movement.collectives import Local
from ..movement.conversions import Conversion, compile_conversion, identity
from ..operators import ModuleOperators, RecordedOperator
from ..parts import Parts, describe, keep_on_dtensors
from .observe import BoundaryRecord, BoundaryRecords, replicated

__all__ = ["RecordedLayouts", "Recording", "Recordings"]

Placements = tuple[Placement, ...]

logger = logging.getLogger("vescale.dmodule")

MANY = 1 << 16  # calls of parts that may still be recomputed
WARNS_AT = 32  # recordings after which a warning says that shapes keep changing


@dataclass(eq=False)
class Recording:
    """The result of recording one call on DTensors; plain data.

    Attributes:
        records: of the boundaries.
        changed: boundaries whose results are changed in place by the callers of their modules.
        operators: of modules with random operators on shards, and of their parts, by module.
        drawn: all random operators, also those on plain tensors, by module; compile mode needs each.
        tokens: layouts of the tokens of experts, by name of the experts.
        gradients: layouts of the local gradients of parameters, by name.
        recomputed: parts that autograd called in backward.
        is_quiet: whether the forward drew no random numbers.
        mesh: of the operators.
        returned: layouts of the results on the axis of rows, in order, if the call ran on the rows of all ranks.
    """

    records: BoundaryRecords
    changed: frozenset[str]
    operators: dict[str, ModuleOperators]
    drawn: dict[str, list[RecordedOperator]]
    tokens: dict[str, Placements]
    gradients: dict[str, Placements]
    recomputed: set[str]
    is_quiet: bool
    mesh: DeviceMesh
    returned: tuple[OverRows | None, ...] = ()

    def check(self) -> None:
        """Refuse layouts that only the order of calls distinguishes, if parts are recomputed.

        Raises:
            NotLocalFriendlyError: naming the boundary and the layouts.
        """
        record = self.records.ambiguous() if self.recomputed else None
        if record is not None:
            found = self.records.known[record.key]
            layouts = ", ".join(f"{r.source} of shape {r.shape} with gradient {r.gradient}" for r in found)
            raise NotLocalFriendlyError(
                f"{record.where}: expected one layout of values of local shape {record.arriving} in a call with "
                f"activation checkpointing, whose recomputation has another order, got {layouts}; bring them to one "
                "layout by a boundary, or keep the module in eager mode"
            )

    def forward_layouts(self, mesh: DeviceMesh, returns: str | None) -> RecordedLayouts:
        """Return the layouts for a forward alone; see :meth:`RecordedLayouts.add` for the arguments."""
        known = (record for found in self.records.known.values() for record in found)
        layouts = RecordedLayouts()
        forward = BoundaryRecords(replace(record, gradient=None) for record in known)
        layouts.add(replace(self, records=forward, operators={}), mesh, returns)
        return layouts


class StepsInOrder:
    """The conversions of values that have one boundary and local shape but several layouts, by their order.

    Attributes:
        position: of the next value in the call of the program.
    """

    def __init__(self, where: str, steps: Sequence[Local]):
        self._where, self._steps = where, steps
        self.position = 0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_done(self) -> bool:
        """Whether all values of the call of the program came."""
        return self.position == len(self)

    def __call__(self, tensor: Tensor) -> Tensor:
        if self.is_done:
            raise NotLocalFriendlyError(
                f"{self._where}: expected {len(self._steps)} values of local shape {tuple(tensor.shape)}, as when "
                "static mode recorded this call, got one more; keep the modules around it in eager mode"
            )
        self.position += 1
        return self._steps[self.position - 1](tensor)


@dataclass(eq=False)
class RecordedLayouts:
    """The layouts of values in the calls with some signatures.

    Attributes:
        records: by boundary and local shape.
        changed: boundaries whose results are changed in place by the callers of their modules.
        steps: conversions of boundaries, by boundary and local shape.
        in_order: those of them that depend on the order of calls.
        operators: random operators on shards, by module.
        drawn: all random operators, by module.
        tokens: layouts of the tokens of experts, by name of the experts.
        calls: the patch of direct calls with these layouts; made at its first use.
        mesh: of recorded operators: that of the plan, or a wider one with an axis of rows; None before a recording.
    """

    records: BoundaryRecords = field(default_factory=BoundaryRecords)
    changed: frozenset[str] = frozenset()
    steps: Steps = field(default_factory=dict)
    in_order: dict[tuple[str, torch.Size], StepsInOrder] = field(default_factory=dict)
    operators: dict[str, ModuleOperators] = field(default_factory=dict)
    drawn: dict[str, list[RecordedOperator]] = field(default_factory=dict)
    tokens: dict[str, Placements] = field(default_factory=dict)
    calls: ModulePatch | None = None
    mesh: DeviceMesh | None = None

    def fits(self, new: Recording) -> bool:
        """Return whether another recording can be added."""
        if self.mesh != new.mesh or not self.records.fits(new.records):
            return False
        if any(self.tokens.get(name, layout) != layout for name, layout in new.tokens.items()):
            return False
        each = self.operators, new.operators
        if any(found.has_islands for operators in each for found in operators.values()):
            functions = [{name: found.functions for name, found in operators.items()} for operators in each]
            if functions[0] != functions[1]:  # what is an island here may be a local operator of equal shapes there
                return False
        both = [name for name in new.operators if name in self.operators]
        return all(self.operators[name].union(new.operators[name]) is not None for name in both)

    def add(self, new: Recording, mesh: DeviceMesh, returns: str | None) -> None:
        """Add a recording that fits.

        Args:
            new: the recording.
            mesh: of the layouts.
            returns: name of the boundary where replicated results become plain tensors; None if they stay DTensors.
        """
        self.mesh = new.mesh
        self.records.add(new.records)
        self.changed |= new.changed
        for key in new.records.known:
            self._add_steps(self.records.known[key], mesh, returns)
        for name, operators in new.operators.items():
            self.operators[name] = self.operators[name].union(operators) if name in self.operators else operators
        for name, operators in new.drawn.items():
            known = self.drawn.setdefault(name, [])
            for operator in operators:
                if not any((operator.function, operator.operands) == (old.function, old.operands) for old in known):
                    known.append(operator)
        self.tokens.update(new.tokens)

    def _add_steps(self, records: list[BoundaryRecord], mesh: DeviceMesh, returns: str | None) -> None:
        """Compile the conversions of the values of one boundary and local shape."""
        where, shape = records[0].where, torch.Size(records[0].arriving)
        steps = [self._step(record, mesh, returns, is_changed=where in self.changed) for record in records]
        if len(steps) == 1:
            if steps[0] is not None:
                self.steps.setdefault(where, {})[shape] = steps[0]
            return
        if any(step is None and record.source is not None for step, record in zip(steps, records, strict=True)):
            raise NotLocalFriendlyError(
                f"{where}: expected one layout of results of local shape {tuple(shape)}, got "
                f"{', '.join(str(record.source) for record in records)}; bring them to one layout by a boundary"
            )
        self.in_order[where, shape] = StepsInOrder(where, [step or identity for step in steps])
        self.steps.setdefault(where, {})[shape] = self.in_order[where, shape]

    @staticmethod
    def _step(record: BoundaryRecord, mesh: DeviceMesh, returns: str | None, *, is_changed: bool) -> Local | None:
        """Return the conversion of a value; None if it is a plain tensor in eager mode, or stays a DTensor."""
        if record.source is None:
            return None
        target, gradient = record.target, record.gradient
        if returns is not None and record.where.startswith(returns):
            if any(p.is_shard() for p in record.source):
                return None
            target = replicated(mesh)
            gradient = None if gradient is None else target
        try:
            conversion = Conversion(record.shape, record.source, target, gradient, record.order)
            return compile_conversion(conversion, mesh, is_changed=is_changed)
        except ValueError as error:
            raise NotLocalFriendlyError(f"{record.where}: {error}") from error

    def check_order(self) -> None:
        """Check that all values that only their order tells apart came, at the end of a call of the program.

        Raises:
            NotLocalFriendlyError: some did not.
        """
        for (where, shape), steps in self.in_order.items():
            if not steps.is_done:
                raise NotLocalFriendlyError(
                    f"{where}: expected {len(steps)} values of local shape {tuple(shape)}, as when static mode "
                    f"recorded this call, got {steps.position}; only their order tells them apart, so keep the modules "
                    "around it in eager mode"
                )

    def restart(self) -> None:
        """Begin a call of the program: values with several layouts are told apart by their order in it."""
        self.records.restart()
        for steps in self.in_order.values():
            steps.position = 0


class Recordings:
    """All recordings of one program.

    Attributes:
        by_signature: the layouts of the calls with a signature.
        layouts: all recorded layouts.
        gradients: layouts of the local gradients of parameters, by name.
        quiet: signatures of calls that draw no random numbers.
        seen: signatures of calls without gradients that ran once in eager mode.
        returned: by signature, the results of calls on the rows of all ranks.
        recomputes: whether a recorded call recomputed parts in backward.
    """

    def __init__(self):
        self.by_signature: dict[Hashable, RecordedLayouts] = {}
        self.layouts: list[RecordedLayouts] = []
        self.gradients: dict[str, Placements] = {}
        self.quiet: set[Hashable] = set()
        self.seen: set[Hashable] = set()
        self.returned: dict[Hashable, tuple[OverRows | None, ...]] = {}
        self.recomputes = False
        self._runs: dict[tuple[str, int], tuple[RecordedLayouts, _torch.StorageWeakRef]] = {}

    def adopt(self, new: Recording, mesh: DeviceMesh, returns: str | None) -> RecordedLayouts:
        """Add a recording to the layouts that it agrees with, or to new ones, and return them.

        Args:
            new: the recording.
            mesh: of the layouts.
            returns: see :meth:`RecordedLayouts.add`.

        Raises:
            NotLocalFriendlyError: the recording contradicts itself.
        """
        new.check()
        layouts = next((known for known in self.layouts if known.fits(new)), None)
        if layouts is None:
            layouts = RecordedLayouts()
            self.layouts.append(layouts)
        layouts.add(new, mesh, returns)
        self.gradients.update(new.gradients)
        self.recomputes |= bool(new.recomputed)
        return layouts

    def assign(self, signature: Hashable, layouts: RecordedLayouts, *, is_quiet: bool, parts: Parts) -> None:
        """Use some layouts for calls of a module with a signature from now on."""
        self.by_signature[signature] = layouts
        (self.quiet.add if is_quiet else self.quiet.discard)(signature)
        if len(self.by_signature) == WARNS_AT:
            logger.warning(
                "static mode has recorded %d different calls of %r; each costs forward and backward passes, so pad "
                "batches to few lengths",
                WARNS_AT,
                parts.name or type(parts.module).__name__,
            )

    # Note [layouts of a recomputation]: a checkpoint that is none of torch's calls a part again in backward, with the
    # operands of its first run, and remembers nothing else of it. So the layouts are looked up by the memory of the
    # first operand: its address, as long as that memory lives. The checkpoint keeps it until then, so no other run has
    # it. If something moved the saved tensors, their memory is unknown, and the recomputation is refused.

    def note_run(self, name: str, args: tuple, kwargs: Mapping, layouts: RecordedLayouts) -> None:
        """Note the layouts with which a part runs, see Note [layouts of a recomputation]."""
        operand = _first(args, kwargs)
        if operand is None:
            return
        address, memory = _memory_of(operand)
        self._runs.pop((name, address), None)
        self._runs[name, address] = layouts, memory
        if len(self._runs) > MANY:
            del self._runs[next(iter(self._runs))]

    def of_run(self, name: str, args: tuple, kwargs: Mapping) -> RecordedLayouts:
        """Return the layouts with which a part ran with these operands.

        Raises:
            NotLocalFriendlyError: there are several layouts, and none is noted for these operands.
        """
        if len(self.layouts) == 1:
            return self.layouts[0]
        operand = _first(args, kwargs)
        address, memory = (0, None) if operand is None else _memory_of(operand)
        known = self._runs.get((name, address))
        if operand is None or known is None or known[1] != memory:
            raise NotLocalFriendlyError(
                f"{describe(name)} is recomputed in backward: expected the operands of its first run in their memory, "
                "to find which of several recorded layouts they have, but got operands elsewhere, as with "
                "torch.autograd.graph.save_on_cpu; recompute it by torch.utils.checkpoint, leave saved tensors in "
                "place, pass the tensors as direct arguments of the checkpointed module, pad batches so that shards "
                f"are even, or {keep_on_dtensors(name)}"
            )
        return known[0]


def _memory_of(operand: Tensor) -> tuple[int, object]:
    """Return the address and the memory of an operand; no call of the user's program, which a pipeline would trace."""
    with _torch.no_function_modes():
        return operand.data_ptr(), _torch.memory_of(operand)


def _first(args: tuple, kwargs: Mapping) -> Tensor | None:
    """Return the first operand; None if no argument is a tensor."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
