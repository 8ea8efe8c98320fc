"""The call in progress: its state, and the conversion of values at the edges of a static program.

The hooks of all parts of a program share one :class:`Call`. They read its state and convert values with it. Only the
program changes the state (see ``program``).
"""

from __future__ import annotations

import enum
from collections.abc import Hashable

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from vescale.dtensor.debug import CommLog

from .. import _torch
from .._boundary.convert import as_dtensor, to_plain
from .._boundary.edges import unwrapped, wrapped
from .._boundary.rows_axis import is_over_rows, lift, lower
from ..errors import NotLocalFriendlyError
from .movement.conversions import Conversion, compile_conversion
from .operator_mode import log_text
from .operators import ModuleOperators, RecordedOperator
from .parts import Parts, describe
from .recording.layouts import RecordedLayouts
from .recording.observe import BoundaryRecord, Observer

__all__ = ["Call", "State"]


class State(enum.Enum):
    """The states of a static program; ``program`` describes the transitions."""

    IDLE = enum.auto()
    RECORDING = enum.auto()
    CHECKING = enum.auto()
    EAGER_ONCE = enum.auto()
    OPEN = enum.auto()


class Call:
    """The state of a static program and the layouts of its current call.

    Args:
        parts: of the program.
        plan_mesh: of the layouts of values.
        is_root: whether callers expect plain tensors (the full model) or DTensors (a part of it).

    Attributes:
        state: of the program.
        number: counts the calls of the program.
        depth: number of calls of the module in progress; more than one if the module calls itself.
        layouts: the recorded layouts of the current or the last call.
        observer: collects boundary records during a dry run.
        silent: parameters that are shown as negative zeros, see ``LocalParameters.silent``.
        signature: of the call, or of the last one.
        costs: text about an island -> what it communicated in the forward of the check.
    """

    def __init__(self, parts: Parts, plan_mesh: DeviceMesh, *, is_root: bool):
        self.parts, self.plan_mesh, self.is_root = parts, plan_mesh, is_root
        self.state = State.IDLE
        self.number = self.depth = 0
        self.layouts = RecordedLayouts()
        self.observer: Observer | None = None
        self.silent: dict[int, DTensor] = {}
        self.signature: Hashable = None
        self.costs: dict[str, str] = {}

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of recorded operators: that of the plan, or a wider one with an axis of rows ahead."""
        return self.layouts.mesh or self.plan_mesh

    @property
    def is_open(self) -> bool:
        """Whether the module runs on local tensors."""
        return self.state is State.OPEN

    @property
    def checks(self) -> bool:
        """Whether this is a dry run."""
        return self.observer is not None

    def operators_of(self, name: str) -> ModuleOperators | None:
        """Return the recorded operators of a module; None if it does not run on local tensors, or has none."""
        return self.layouts.operators.get(name) if self.is_open else None

    def note_cost(self, name: str, operator: RecordedOperator, log: CommLog) -> None:
        """Note what an island in a module communicates."""
        self.costs[f"{operator} in {describe(name)}"] = log_text(log)

    def convert(self, tensor: Tensor, _placements: object, where: str, *, is_result: bool) -> Tensor:
        """Run the recorded conversion of one value at a planned boundary.

        Raises:
            NotLocalFriendlyError: no value of this shape is recorded there.
        """
        step = self.layouts.steps.get(where, {}).get(tensor.shape)
        if step is None:
            raise self._unknown(where, tensor)
        out = step(tensor)
        return out if self.observer is None else self.noted(out, where, is_result=is_result)

    def noted(self, local: Tensor, where: str, *, is_result: bool = False) -> Tensor:
        """Pass a local value to the observer of a check.

        Return an alias, so that the record of its gradient leaves out other uses. The result of a module that its
        caller changes in place stays the same object.
        """
        if self.observer is not None:
            if local.requires_grad and (local.is_leaf or not is_result or where not in self.layouts.changed):
                local = _torch.unseen(local.view_as)(local)
            self.observer.note_local(local, where)
        return local

    def record(self, where: str, local: Tensor) -> BoundaryRecord:
        """Return the record of a local value.

        Raises:
            NotLocalFriendlyError: no value of this shape is recorded there.
        """
        record = self.layouts.records.next(where, tuple(local.shape))
        if record is None:
            raise self._unknown(where, local)
        return record

    def part_of_whole(self, local: Tensor, where: str) -> DTensor | None:
        """Return the DTensor whose part a value is; None if it is no such part.

        Code that makes a tensor of sizes that it reads, such as a mask for its rows or zeros for its heads, makes a
        whole one where it is recorded, and the part of this rank on local tensors.
        """
        if isinstance(local, DTensor) or local.requires_grad:
            return None
        num_rows = self.mesh.ndim - self.plan_mesh.ndim
        found = [
            (axis < num_rows and dim > 0, axis, dim, shape)  # rows are on dim 0, or else on any that no other axis cuts
            for axis in range(self.mesh.ndim)
            for shape, dim in self.layouts.records.whole(where, tuple(local.shape), self.mesh.size(axis))
        ]
        if not found:
            return None
        _, axis, dim, shape = min(found)
        if self.observer is not None:
            length = local.shape[dim]
            self.observer.note_local(local, where, (dim, self.mesh.get_local_rank(axis) * length, length))
        if axis < num_rows:
            return lift(as_dtensor(local, self.plan_mesh), self.mesh, Shard(dim), shape=shape)
        placements = tuple(Shard(dim) if a == axis else Replicate() for a in range(num_rows, self.mesh.ndim))
        part = wrapped(local, self.plan_mesh, placements, shape=shape)
        return lift(part, self.mesh) if num_rows else part

    def _unknown(self, where: str, local: Tensor) -> NotLocalFriendlyError:
        return NotLocalFriendlyError(
            f"{where}: expected a local tensor of a recorded shape, {self.layouts.records.shapes(where)}, got "
            f"{tuple(local.shape)}, which depends on data, or on state that is not in the arguments; keep the modules "
            "around it in eager mode"
        )

    def localize(self, tensor: Tensor, where: str) -> Tensor:
        """Return an argument of the program as a local tensor."""
        if isinstance(tensor, DTensor):
            tensor = lower(tensor, self.plan_mesh) if is_over_rows(tensor, self.plan_mesh) else tensor
            local = _torch.local_of(tensor)
            if tensor.requires_grad:
                local = unwrapped(tensor, self.record(where, local).gradient)
        elif tensor.requires_grad:
            self.record(where, tensor)
            local = self.layouts.steps[where][tensor.shape](tensor)
        else:
            return tensor
        return self.noted(local, where)

    def globalize(self, local: Tensor, where: str) -> Tensor:
        """Return a result of the program as the tensor that eager mode returns."""
        if isinstance(local, DTensor):  # an eager part left it in an object, such as a cache
            local = self.noted(local, where)
            return to_plain(local) if self.is_root else local
        if not self.is_root and (part := self.part_of_whole(local, where)) is not None:
            return part
        record = self.record(where, local)
        local = self.noted(local, where)
        if record.source is None:
            return local
        if self.is_root:
            step = self.layouts.steps.get(where, {}).get(local.shape)
            return self.wrap(local, record) if step is None else step(local)
        return self.over_rows(self.wrap(local, record), record)

    def over_rows(self, tensor: DTensor, record: BoundaryRecord) -> DTensor:
        """Return a value as code on the rows of all data-parallel ranks has it, if the recorded call ran on these."""
        return (
            tensor if record.rows is None else lift(tensor, self.mesh, record.rows.placement, shape=record.rows.shape)
        )

    def wrap(self, local: Tensor, record: BoundaryRecord, *, pins_gradient: bool = True) -> DTensor:
        """Return a local value as the DTensor of eager mode.

        Args:
            local: the value.
            record: its boundary record.
            pins_gradient: whether to redistribute the gradient, which comes from the caller's code, to the recorded
                layout. The gradient from an eager part of the program has the recorded layout already.
        """
        if record.gradient is None and local.requires_grad:
            # backward raises: no layout is recorded for this gradient
            local = compile_conversion(Conversion(record.shape, record.source, record.source), self.plan_mesh)(local)
        gradient = record.gradient if pins_gradient else None
        return wrapped(local, self.plan_mesh, record.source, shape=record.shape, gradient=gradient)
