"""What text and pages show of a plan, as pure functions of numbers.

Stages with equal memory are one row, because a plan for 64 stages usually has three kinds of them. The mesh is
row-major in the plan's order of axes, as ``torch.distributed.device_mesh`` numbers ranks.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from .._memory import StageMemory
from .._table import Candidate

#: What memory is used for, in the order in which it is stacked.
KINDS = tuple(field.name for field in dataclasses.fields(StageMemory))


class Explained(Protocol):
    """What is shown of a plan; see `Plan`."""

    @property
    def axis_order(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Degrees in this order."""

    @property
    def memory(self) -> tuple[StageMemory, ...]:
        """Estimated bytes on a rank of each stage, or nothing."""

    @property
    def limit_bytes(self) -> int | None:
        """Memory limit per rank of the search."""

    @property
    def table(self) -> tuple[Candidate, ...]:
        """Layouts of the search, or nothing."""


@dataclass(frozen=True)
class StageRow:
    """Consecutive stages with the same memory.

    Attributes:
        name: ``"stage 0"``, or ``"stages 1-6"``.
        memory: of one rank of one of them.
    """

    name: str
    memory: StageMemory

    @property
    def parts(self) -> list[int]:
        """Bytes of each of `KINDS`."""
        return [getattr(self.memory, kind) for kind in KINDS]


@dataclass(frozen=True)
class Place:
    """One rank on the mesh.

    Attributes:
        rank: its number.
        coords: by axis, in the plan's order.
        host: number of its host; None if the devices of a host are not given.
    """

    rank: int
    coords: tuple[int, ...]
    host: int | None


def stage_rows(stages: Sequence[StageMemory]) -> list[StageRow]:
    """Return one row per run of equal stages."""
    rows, first = [], 0
    for stage in range(1, len(stages) + 1):
        if stage == len(stages) or stages[stage] != stages[first]:
            name = f"stage {first}" if stage - first == 1 else f"stages {first}-{stage - 1}"
            rows.append(StageRow(name, stages[first]))
            first = stage
    return rows


def full_scale(rows: Sequence[StageRow], limit: int | None) -> int:
    """Return the number of bytes at the end of an axis: the limit, or the fullest rank if it exceeds that."""
    return max(limit or 1, *(row.memory.total for row in rows), 1)


def stacked_ends(parts: Sequence[int], scale: float, width: float) -> list[float]:
    """Return where each part of a stacked bar ends, if ``scale`` bytes are ``width`` long."""
    ends, total = [], 0
    for part in parts:
        total += part
        ends.append(total / scale * width)
    return ends


def places(shape: Sequence[int], *, devices_per_host: int | None, count: int) -> list[Place]:
    """Return the first ``count`` ranks of a mesh."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return [
        Place(
            rank,
            tuple(rank // stride % size for stride, size in zip(strides, shape, strict=True)),
            None if devices_per_host is None else rank // devices_per_host,
        )
        for rank in range(min(count, math.prod(shape)))
    ]


def used_axes(shape: Sequence[int]) -> list[int]:
    """Return the axes with more than one rank, or the last one if there is none."""
    return [axis for axis, size in enumerate(shape) if size > 1] or [len(shape) - 1]
