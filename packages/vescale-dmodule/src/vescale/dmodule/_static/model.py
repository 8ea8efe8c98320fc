"""What a static program uses of the parallelized model: protocols."""

from __future__ import annotations

from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._boundary.hooks import Phase
from .._execution.eager import EagerScope
from .._execution.rank_checks import RankChecks
from .._gradients.sync import GradientSync

__all__ = ["Model", "Rows"]


class Rows(Protocol):
    """Calls of the model on the rows of all data-parallel ranks; ``mesh`` has an axis of rows ahead of the plan's.

    Attributes:
        keeps_results: whether the model returns DTensors on that mesh.
    """

    mesh: DeviceMesh
    row_wise: frozenset[str]
    keeps_results: bool

    def distribute(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Return the arguments of the model with DTensors in place of tensors of rows."""

    def log(self) -> AbstractContextManager[Sized]:
        """Log the collectives over the axis of rows while the context is open."""

    def part_of(self, tensor: DTensor) -> DTensor:
        """Return what this rank returns of a result on the rows of all ranks, on the mesh of the plan."""


class Model(Protocol):
    """The attributes of the parallelized model that its programs use."""

    mesh: DeviceMesh
    rows: Rows | None
    root: nn.Module
    phase: Phase
    scope: EagerScope
    sync: GradientSync
    checks: RankChecks
    is_rehearsed: bool
    any_rank: Callable[[bool], bool] | None
    local_attributes: dict[str, dict[str, object]]
