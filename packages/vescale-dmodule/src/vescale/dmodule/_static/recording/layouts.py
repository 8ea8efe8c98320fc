"""Recorded layouts, and the calls that share them.

On local tensors a boundary and a local shape identify a value, as long as they always imply the same layout. They may
not: sequences of 8 and of 7 tokens over two ranks both have the local shape 4 on the first rank. Calls whose layouts
contradict each other have separate `RecordedLayouts`, and the signature of a call chooses. Nearly all programs have one
for all calls::

    recording of a call  ->  Recording  -- adopt -->  the RecordedLayouts that agree, or new ones
    signature of a call  ----------------- find ---->  RecordedLayouts
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from ..._execution.patch import ModulePatch
from ...errors import NotLocalFriendlyError
from ..direct_calls import Steps
from ..movement.conversions import Conversion, compile_conversion
from ..parts import describe, keep_on_dtensors, ways_out
from ..random_operators import RandomOperator
from .observe import BoundaryRecord, BoundaryRecords, replicated

__all__ = ["RecordedLayouts", "Recording", "Recordings"]

Placements = tuple[Placement, ...]

MANY = 1 << 16  # calls of parts that may still be recomputed


@dataclass(eq=False)
class Recording:
    """The result of recording one call on DTensors; plain data.

    Attributes:
        records: boundary records in order.
        operators: random operators of modules with random operators on shards, and of their parts, by module.
        drawn: all random operators, also those on plain tensors, by module; compile mode needs each.
        tokens: layouts of the tokens of experts, by name of the experts.
        gradients: layouts of the local gradients of parameters, by name.
        recomputed: parts that autograd called in backward.
        is_quiet: whether the forward drew no random numbers.
    """

    records: list[BoundaryRecord]
    operators: dict[str, list[RandomOperator]]
    drawn: dict[str, list[RandomOperator]]
    tokens: dict[str, Placements]
    gradients: dict[str, Placements]
    recomputed: set[str]
    is_quiet: bool

    def check(self) -> None:
        """Refuse two layouts in one call that local tensors cannot distinguish.

        Raises:
            NotLocalFriendlyError: naming the boundary or the module, and the layouts.
        """
        seen = BoundaryRecords()
        for record in self.records:
            other = seen.conflict(record)
            if other is not None:
                raise NotLocalFriendlyError(
                    f"{record.where}: expected one layout of values of local shape {record.arriving} in one call, got "
                    f"{other.source} of shape {other.shape} with gradient {other.gradient} and {record.source} of "
                    f"shape {record.shape} with gradient {record.gradient}; bring them to one layout by a boundary, or "
                    "keep the module in eager mode"
                )
            seen.add(record)
        for name, found in self.operators.items():
            known: dict[tuple, RandomOperator] = {}
            for operator in found:
                other = known.setdefault(operator.key, operator)
                if not operator.agrees(other):
                    raise NotLocalFriendlyError(
                        f"{describe(name)}: expected one layout of random operators with equal local shapes, got "
                        f"{other} and {operator}; {ways_out(name, is_random=True)}"
                    )


@dataclass(eq=False)
class RecordedLayouts:
    """The layouts of values in the calls with some signatures.

    Attributes:
        records: by boundary and local shape.
        steps: conversions of boundaries, by boundary and local shape.
        operators: random operators on shards, by module.
        drawn: all random operators, by module.
        tokens: layouts of the tokens of experts, by name of the experts.
        calls: the patch of direct calls with these layouts; made at its first use.
    """

    records: BoundaryRecords = field(default_factory=BoundaryRecords)
    steps: Steps = field(default_factory=dict)
    operators: dict[str, list[RandomOperator]] = field(default_factory=dict)
    drawn: dict[str, list[RandomOperator]] = field(default_factory=dict)
    tokens: dict[str, Placements] = field(default_factory=dict)
    calls: ModulePatch | None = None

    def fits(self, new: Recording) -> bool:
        """Return whether another recording can be added."""
        if any(self.records.conflict(record) is not None for record in new.records):
            return False
        if any(self.tokens.get(name, layout) != layout for name, layout in new.tokens.items()):
            return False
        pairs = ((a, b) for name, found in new.operators.items() for a in found for b in self.operators.get(name, ()))
        return all(operator.agrees(old) for operator, old in pairs)

    def add(self, new: Recording, mesh: DeviceMesh, returns: str | None) -> None:
        """Add a recording that fits.

        Args:
            new: the recording.
            mesh: of the layouts.
            returns: name of the boundary where replicated results become plain tensors; None if they stay DTensors.
        """
        for record in new.records:
            self.records.add(record)
            self._add_step(self.records.known[record.key], mesh, returns)
        for name, operators in new.operators.items():
            self._add_operators(name, operators)
        for name, operators in new.drawn.items():
            known = self.drawn.setdefault(name, [])
            for operator in operators:
                if not any(operator.key == old.key and operator.operands == old.operands for old in known):
                    known.append(operator)
        self.tokens.update(new.tokens)

    def _add_step(self, record: BoundaryRecord, mesh: DeviceMesh, returns: str | None) -> None:
        """Compile the conversion of a value, unless it is a plain tensor in eager mode, too."""
        if record.source is None:
            return
        target, gradient = record.target, record.gradient
        if returns is not None and record.where.startswith(returns):
            if any(p.is_shard() for p in record.source):
                return  # stays a DTensor
            target = replicated(mesh)
            gradient = None if gradient is None else target
        try:
            conversion = Conversion(record.shape, record.source, target, gradient)
            step = compile_conversion(conversion, mesh, is_result=record.is_result)
        except ValueError as error:
            raise NotLocalFriendlyError(f"{record.where}: {error}") from error
        self.steps.setdefault(record.where, {})[torch.Size(record.arriving)] = step

    def _add_operators(self, name: str, operators: Iterable[RandomOperator]) -> None:
        """Add random operators of a module; of two with equal keys, keep one with known gradient layouts."""
        known = {operator.key: operator for operator in self.operators.get(name, ())}
        for operator in operators:
            old = known.get(operator.key)
            if old is None or all(gradient is None for gradient in old.gradients):
                known[operator.key] = operator
        self.operators[name] = list(known.values())


class Recordings:
    """All recordings of one program.

    Attributes:
        by_signature: the layouts of the calls with a signature.
        layouts: all recorded layouts.
        gradients: layouts of the local gradients of parameters, by name.
        quiet: signatures of calls that draw no random numbers.
        seen: signatures of calls without gradients that ran once in eager mode.
        recomputes: whether a recorded call recomputed parts in backward.
    """

    def __init__(self):
        self.by_signature: dict[Hashable, RecordedLayouts] = {}
        self.layouts: list[RecordedLayouts] = []
        self.gradients: dict[str, Placements] = {}
        self.quiet: set[Hashable] = set()
        self.seen: set[Hashable] = set()
        self.recomputes = False
        self._runs: dict[tuple[str, int | None], RecordedLayouts] = {}

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

    def assign(self, signature: Hashable, layouts: RecordedLayouts, *, is_quiet: bool) -> None:
        """Use some layouts for calls with a signature from now on."""
        self.by_signature[signature] = layouts
        (self.quiet.add if is_quiet else self.quiet.discard)(signature)

    # Note [layouts of a recomputation]: activation checkpointing calls a part again in backward, with the operands of
    # its first run. Torch offers no identity of that run: reentrant checkpointing passes detached copies of the
    # operands, and neither kind restores context or attributes. So the layouts are looked up by the address of the
    # first operand. Checkpointing keeps its memory until then, so no other run has that address. If something moved the
    # saved tensors, the address is unknown, and the recomputation is refused.

    def note_run(self, name: str, args: tuple, kwargs: Mapping, layouts: RecordedLayouts) -> None:
        """Note the layouts with which a part runs, see Note [layouts of a recomputation]."""
        key = name, _address(args, kwargs)
        self._runs.pop(key, None)
        self._runs[key] = layouts
        if len(self._runs) > MANY:
            del self._runs[next(iter(self._runs))]

    def of_run(self, name: str, args: tuple, kwargs: Mapping) -> RecordedLayouts:
        """Return the layouts with which a part ran with these operands.

        Raises:
            NotLocalFriendlyError: there are several layouts, and none is noted for these operands.
        """
        if len(self.layouts) == 1:
            return self.layouts[0]
        address = _address(args, kwargs)
        if address is None or (name, address) not in self._runs:
            raise NotLocalFriendlyError(
                f"{describe(name)} is recomputed in backward: expected the operands of its first run in their memory, "
                "to find which of several recorded layouts they have, but got operands elsewhere, as with "
                "torch.autograd.graph.save_on_cpu; leave saved tensors in place, pass the tensors as direct arguments "
                f"of the checkpointed module, pad batches so that shards are even, or {keep_on_dtensors(name)}"
            )
        return self._runs[name, address]


def _address(args: tuple, kwargs: Mapping) -> int | None:
    """Return the address of the first operand; None if no argument is a tensor."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return None if first is None else first.data_ptr()
