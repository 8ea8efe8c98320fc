"""The call in progress, and what is recorded of calls that mix rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale.dtensor.debug import CommLog
from vescale.dtensor.extension import Position, random_position

from .. import _torch
from .._static.operator_mode import log_text
from .._static.operators import ModuleOperators, RecordedOperator
from .._static.parts import describe
from .values import WAY_OUT, Output

__all__ = ["RecordedRows", "RowsCall"]


@dataclass(frozen=True)
class RecordedRows:
    """What is recorded of the calls with one signature that mix rows.

    Attributes:
        operators: those that run on DTensors, by module.
        outputs: of the call, in order, without values; those in attributes last.
    """

    operators: Mapping[str, ModuleOperators]
    outputs: tuple[Output, ...]


@dataclass
class RowsCall:
    """The call in progress; see ``ProgramCall``.

    Attributes:
        is_open: whether recorded operators run on DTensors.
        recorded: of the call in progress, or of the last one.
        costs: text about an island -> what it communicated in the forward that was checked.
        num_bytes: that islands communicated in the last forward that was checked.
    """

    mesh: DeviceMesh | None
    is_open: bool = False
    number: int = 0
    checks: bool = False
    silent: Mapping[int, DTensor] = field(default_factory=dict)
    recorded: RecordedRows | None = None
    costs: dict[str, str] = field(default_factory=dict)
    num_bytes: int = 0
    _position: Position | None = None  # of the random stream after the last recorded operator

    def __reduce__(self) -> object:
        return RowsCall, (None,)  # a copy of the module runs as it is

    def operators_of(self, name: str) -> ModuleOperators | None:
        if self.recorded is None or not (self.is_open or _torch.in_backward()):
            return None
        return self.recorded.operators.get(name)

    def open(self, recorded: RecordedRows | None) -> None:
        """Begin a call of the program."""
        self.recorded, self.is_open = recorded, recorded is not None
        self.number += 1
        self.note_position()

    def note_position(self) -> None:
        """Note where the random stream is after a recorded operator."""
        self._position = random_position(self.mesh.device_type) if self.is_open else None

    def check_position(self, name: str) -> None:
        """Check that nothing was drawn since the last recorded operator.

        Raises:
            RuntimeError: something was, in the module of that name or before it.
        """
        if self.is_open and random_position(self.mesh.device_type) != self._position:
            raise RuntimeError(
                f"{describe(name)}, or a module before it, drew random numbers that were not drawn when its call was "
                "recorded, as if this rank were alone (a rate that was 0?); give the module its rates and flags before "
                f"its first call, or, {WAY_OUT}"
            )

    def note_cost(self, name: str, operator: RecordedOperator, log: CommLog) -> None:
        """Note what an island communicates."""
        self.num_bytes += sum(record.num_bytes for record in log)
        self.costs[f"{operator} in {describe(name)}"] = log_text(log)
