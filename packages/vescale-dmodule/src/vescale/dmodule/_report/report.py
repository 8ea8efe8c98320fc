"""``report``: what each boundary of a parallelized module moves, and how long it takes.

While a report is open, a meter (see ``ranges``) measures every boundary, forward and backward, and all collectives are
logged. Collectives logged during a conversion are the boundary's traffic. Those logged during a reduction of parameter
gradients are listed as gradients. The rest (operators that communicate, the program around the module) is listed by
module. So the rows add up to all bytes of this rank.

Nothing can be measured inside a graph of ``torch.compile``, so compiled blocks run in static mode meanwhile. They move
the same bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate

from vescale.dtensor.debug import CommLog, CommRecord, comm_log
from vescale.dtensor.extension import Count, bytes_text, checked, text_table

from .._execution.modes import execution_of
from .ranges import Meter, clock, placements_of

__all__ = ["BoundaryTraffic", "Collective", "Report", "report"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Collective:
    """The collectives of one kind, together.

    Attributes:
        operator: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"``.
        axis: name of the mesh axis, or the ranks of a group that is none.
        num_bytes: of what goes in or comes out on this rank, whichever is more.
        count: number of calls.
    """

    operator: str
    axis: str
    num_bytes: int
    count: int


@dataclass(frozen=True)
class BoundaryTraffic:
    """The traffic of values of one layout at one boundary, in all steps of a report, on this rank.

    Attributes:
        where: fully qualified name of the module, side, and name or position of the value:
            ``layers.0.attention.input 'hidden_states'``.
        source: placements of the value that arrived.
        target: placements of the value that left.
        gradient: placements of the gradient that came back, None if none did or it was not a DTensor.
        shape: global shape.
        dtype: of the value.
        count: number of calls.
        forward: the collectives of the value.
        backward: the collectives of the gradient.
        forward_seconds: spent in the conversions, one by one.
        backward_seconds: the same of the gradients.
    """

    where: str
    source: Placements
    target: Placements
    gradient: Placements | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    count: int = 0
    forward: tuple[Collective, ...] = ()
    backward: tuple[Collective, ...] = ()
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes of all its collectives."""
        return sum(c.num_bytes for c in (*self.forward, *self.backward))


class Measurable(Protocol):
    """The parts of a parallelized module's execution that a report reads.

    Attributes:
        mesh: of the plan.
        phase: its ``meter`` measures boundaries.
        sync: its ``meter`` measures reductions of gradients.
    """

    mesh: DeviceMesh
    phase: Any
    sync: Any

    def boundary_record(self, where: str, local_shape: tuple[int, ...]) -> Any:
        """Return the boundary record of a local tensor in static mode, or None."""


@dataclass
class _Row:
    traffic: BoundaryTraffic
    forward: list[CommRecord] = field(default_factory=list)
    backward: list[CommRecord] = field(default_factory=list)


class _Meter(Meter):
    """Assigns the records of a log to the boundary or reduction that issued them."""

    def __init__(self, log: CommLog, execution: Measurable):
        self.log, self.execution = log, execution
        self.rows: dict[tuple, _Row] = {}
        self.gradient_records: list[CommRecord] = []
        self.taken: set[int] = set()
        self.is_open = True

    def begin(self) -> tuple[float, int]:
        return clock(self.execution.mesh.device_type), len(self.log)

    def _end(self, begun: tuple[float, int]) -> tuple[float, list[CommRecord]]:
        start, position = begun
        numbers = [i for i in range(position, len(self.log)) if i not in self.taken]
        self.taken.update(numbers)
        return clock(self.execution.mesh.device_type) - start, [self.log[i] for i in numbers]

    def forward(self, begun: tuple[float, int], where: str, tensor: Tensor, result: Tensor) -> _Row:
        seconds, records = self._end(begun)
        layout = self._layout(where, tensor, result)
        row = self.rows.setdefault((where, *layout), _Row(BoundaryTraffic(where, *layout)))
        row.forward += records
        count, total = row.traffic.count + 1, row.traffic.forward_seconds + seconds
        row.traffic = replace(row.traffic, count=count, forward_seconds=total)
        return row

    def _layout(self, where: str, tensor: Tensor, result: Tensor) -> tuple:
        record = None if placements_of(result) else self.execution.boundary_record(where, tuple(tensor.shape))
        if record is not None:
            return record.source, record.target, record.gradient, tuple(record.shape), tensor.dtype
        whole = (Replicate(),) * self.execution.mesh.ndim  # a plain tensor is equal on all ranks
        source, target = placements_of(tensor) or whole, placements_of(result) or whole
        return source, target, None, tuple(tensor.shape), tensor.dtype

    def backward(self, begun: tuple[float, int], row: _Row, gradient: Tensor | None) -> None:
        if not self.is_open:
            return
        seconds, records = self._end(begun)
        row.backward += records
        layout = placements_of(gradient) or row.traffic.gradient
        total = row.traffic.backward_seconds + seconds
        row.traffic = replace(row.traffic, gradient=layout, backward_seconds=total)

    def gradients(self, begun: tuple[float, int]) -> None:
        if self.is_open:
            self.gradient_records += self._end(begun)[1]


class Report:
    """The traffic of a parallelized module, boundary by boundary; see :func:`vescale.dmodule.report`.

    Attributes:
        num_steps: steps inside of the context; printed numbers are those of one.
        boundaries: in the order in which values first crossed them.
        gradients: reductions of the gradients of parameters.
        others: collectives that no boundary and no reduction of gradients issued.
    """

    def __init__(self, module: nn.Module, execution: Measurable | None, *, num_steps: int = 1):
        self.num_steps = num_steps
        self.boundaries: list[BoundaryTraffic] = []
        self.gradients: tuple[Collective, ...] = ()
        self.others = CommLog()
        self._module, self._execution = module, execution
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> Report:
        if self._execution is None:  # one rank: there are no boundaries
            return self
        if self._execution.phase.meter is not None:
            raise RuntimeError("a report of this module is open already; close it first")
        log = self._contexts.enter_context(comm_log(self._module, mesh=self._execution.mesh))
        self._contexts.enter_context(self._metered(_Meter(log, self._execution)))
        return self

    def __exit__(self, *exc: object) -> None:
        self._contexts.close()

    @contextlib.contextmanager
    def _metered(self, meter: _Meter) -> Iterator[None]:
        self._execution.phase.meter = self._execution.sync.meter = meter
        try:
            yield
        finally:
            self._execution.phase.meter = self._execution.sync.meter = None
            meter.is_open = False
            self._take(meter)

    def _take(self, meter: _Meter) -> None:
        self.boundaries = [
            replace(row.traffic, forward=_collectives(row.forward), backward=_collectives(row.backward))
            for row in meter.rows.values()
        ]
        self.gradients = _collectives(meter.gradient_records)
        self.others = CommLog(r for i, r in enumerate(meter.log) if i not in meter.taken)

    @property
    def num_bytes(self) -> int:
        """Bytes of all collectives of this rank in all steps."""
        of_boundaries = sum(boundary.num_bytes for boundary in self.boundaries)
        return of_boundaries + sum(c.num_bytes for c in self.gradients) + self.others.total_bytes

    def __str__(self) -> str:
        header = ["boundary", "placements", "gradient", "forward", "backward", "calls", "bytes", "forward ms"]
        rows = [self._row(boundary) for boundary in self.boundaries]
        rows.append(self._sums("gradients of parameters", self.gradients, is_backward=True))
        for (module, phase), records in _by_module(self.others).items():
            rows.append(self._sums(f"other: {module}", _collectives(records), is_backward=phase == "backward"))
        rows.append(["total", *[""] * 5, self._bytes(self.num_bytes), "", ""])
        return text_table([*header, "backward ms"], [row for row in rows if any(row[1:])], num_text=5)

    def __repr__(self) -> str:
        return f"Report({len(self.boundaries)} boundaries, {self._bytes(self.num_bytes)} a step)"

    def _row(self, boundary: BoundaryTraffic) -> list[str]:
        back = "" if boundary.gradient is None else _layout_text(boundary.gradient)
        return [
            boundary.where,
            f"{_layout_text(boundary.source)} -> {_layout_text(boundary.target)}",
            back,
            self._text(boundary.forward),
            self._text(boundary.backward),
            f"{boundary.count / self.num_steps:g}",
            self._bytes(boundary.num_bytes),
            self._milliseconds(boundary.forward_seconds),
            self._milliseconds(boundary.backward_seconds),
        ]

    def _sums(self, name: str, collectives: Sequence[Collective], *, is_backward: bool) -> list[str]:
        text = self._text(collectives)
        traffic = ["", text] if is_backward else [text, ""]
        num_bytes = sum(c.num_bytes for c in collectives)
        return [name, "", "", *traffic, "", self._bytes(num_bytes) if num_bytes else "", "", ""]

    def _text(self, collectives: Iterable[Collective]) -> str:
        return ", ".join(self._one(c) for c in collectives)

    def _one(self, collective: Collective) -> str:
        count = collective.count / self.num_steps
        times = f"{count:g} x " if count != 1 else ""
        return f"{times}{collective.operator} {collective.axis} {self._bytes(collective.num_bytes)}"

    def _bytes(self, total: int) -> str:
        return bytes_text(total / self.num_steps)

    def _milliseconds(self, total: float) -> str:
        return f"{1e3 * total / self.num_steps:.3f}"


def _layout_text(placements: Placements) -> str:
    return f"[{', '.join(map(str, placements))}]"


def _collectives(records: Iterable[CommRecord]) -> tuple[Collective, ...]:
    """Return the sums by operator and axis."""
    sums: dict[tuple[str, str], Collective] = {}
    for record in records:
        key = record.operator, record.axis
        old = sums.get(key, Collective(*key, 0, 0))
        sums[key] = replace(old, num_bytes=old.num_bytes + record.num_bytes, count=old.count + 1)
    return tuple(sums.values())


def _by_module(records: Iterable[CommRecord]) -> dict[tuple[str, str], list[CommRecord]]:
    found: dict[tuple[str, str], list[CommRecord]] = {}
    for record in records:
        found.setdefault((record.module or "(outside)", record.phase), []).append(record)
    return found


@checked
def report(module: nn.Module, *, num_steps: Count = 1) -> Report:
    """Measure the traffic of each boundary of a parallelized module, inside the context.

    Every rank sees its own traffic. Measured conversions are awaited one by one, so their times do not overlap with
    anything (the backward of a boundary includes the weight gradients that are computed while its reduction is under
    way); the step as a whole takes longer than without a report. Values and gradients do not change, except that
    compiled blocks run in static mode meanwhile. In static mode call the module once before, or the recording is
    listed among the other collectives.

    Args:
        module: the root module that :func:`parallelize_module` returned.
        num_steps: how many steps will run inside of the context; numbers are printed for one.

    Returns:
        A context that gives a :class:`Report`, which prints as a table: for each boundary the placements of the value
        and of its gradient, collectives, bytes and milliseconds.

    Raises:
        ValueError: ``module`` is not parallelized, or a part of one that is; or ``num_steps`` is not positive.
        RuntimeError: (on entry) a report of the module is open already.

    Example:
        >>> with report(model) as traffic:                              # doctest: +SKIP
        ...     model(batch).loss.backward()
        >>> print(traffic)                                              # doctest: +SKIP
    """
    return Report(module, execution_of(module), num_steps=num_steps)
