"""Describe what a plan does to a module: placements and shard of every parameter, without ranks or storage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor import Placement, Shard

from vescale.dtensor import InterleavedShard, RaggedShard
from vescale.dtensor.extension import Count, checked, chunk

from .resolve import resolve

__all__ = ["Axes", "TensorLayout", "describe", "largest_shard"]


@dataclass(frozen=True)
class Axes:
    """Mesh axes without ranks, see ``MeshAxes``."""

    mesh_dim_names: tuple[str, ...]
    sizes: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, mesh_dim: int | None = None) -> int:
        return math.prod(self.sizes) if mesh_dim is None else self.sizes[mesh_dim]


@dataclass(frozen=True)
class TensorLayout:
    """The layout of one parameter.

    Attributes:
        name: fully qualified name.
        shape: global shape.
        placements: one per mesh axis.
        local_shape: shape of the largest shard; of even ones, that on coordinate 0 of every axis.
        itemsize: bytes of an element.
    """

    name: str
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    local_shape: tuple[int, ...]
    itemsize: int

    @property
    def local_bytes(self) -> int:
        """Bytes of the largest shard."""
        return math.prod(self.local_shape) * self.itemsize

    def __str__(self) -> str:
        placements = " ".join(map(_short, self.placements))
        return f"{self.name}  {list(self.shape)} {placements} -> {list(self.local_shape)}"


@checked
def describe(
    module: nn.Module,
    axes: Mapping[str, Count],
    plan: Mapping[str, object],
    *,
    allow_empty: bool = False,
) -> tuple[TensorLayout, ...]:
    """Return the layout of every parameter of ``module`` under ``plan``; tied parameters once.

    Runs in one process, also for a deferred module, so a plan can be inspected before any launch.

    Args:
        module: the module to parallelize.
        axes: mesh axes and their sizes in mesh order, such as ``{"tp": 4}``.
        plan: as in :func:`parallelize_module`.
        allow_empty: as in :func:`parallelize_module`.

    Raises:
        PlanError: as :func:`parallelize_module` would.

    Example:
        >>> plan = {"parameter": {r"0\\.weight": {"tp": Shard(0)}}}
        >>> for layout in describe(nn.Sequential(nn.Linear(8, 6)), {"tp": 3}, plan):
        ...     print(layout)
        0.weight  [6, 8] S(0) -> [2, 8]
        0.bias  [6] R -> [6]
    """
    tensors = resolve(module, Axes(tuple(axes), tuple(axes.values())), plan, allow_empty=allow_empty).tensors
    return tuple(
        TensorLayout(
            name,
            tuple(parameter.shape),
            tensors[name],
            largest_shard(tuple(parameter.shape), tensors[name], list(axes.values())),
            parameter.element_size(),
        )
        for name, parameter in module.named_parameters()
    )


def _short(placement: Placement) -> str:
    if isinstance(placement, InterleavedShard):
        return f"S({placement.dim}/{placement.k})"
    if isinstance(placement, RaggedShard):
        return f"Ragged{placement.local_units}"
    return f"S({placement.dim})" if isinstance(placement, Shard) else "R"


def largest_shard(shape: tuple[int, ...], placements: tuple[Placement, ...], sizes: list[int]) -> tuple[int, ...]:
    """Return the local shape of the rank that holds most of a tensor, on a mesh with axes of these sizes."""
    local = list(shape)
    for placement, size in zip(placements, sizes, strict=True):
        if isinstance(placement, RaggedShard):
            count = len(placement.dims)
            numel = math.prod(local[:count])
            local = [max(placement.rows(numel, coord)[1] for coord in range(size)), *local[count:]]
        elif isinstance(placement, InterleavedShard):
            local[placement.dim] = placement.k * chunk(local[placement.dim] // placement.k, size, 0)[1]
        elif isinstance(placement, Shard):
            local[placement.dim] = chunk(local[placement.dim], size, 0)[1]
    return tuple(local)
