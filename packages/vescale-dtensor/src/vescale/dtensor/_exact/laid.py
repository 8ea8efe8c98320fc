"""A tensor as its local part and its layout, so that a form is written once for plain tensors and for DTensors.

A plain tensor is its own local part on no mesh. Everything works outside autograd. Decisions use global shapes and
placements only, so all ranks decide alike. What a form moves is a part of its operator: `strict` allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._torch import dispatch
from .blocks import are_whole, block_size, starts_of

__all__ = ["Laid", "Placements", "is_whole_on", "mesh_of", "sharded_dim"]

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Laid:
    """The local part of a tensor.

    Attributes:
        local: this rank's part.
        shape: global shape.
        mesh: None for a plain tensor.
        placements: one for each axis of the mesh: `Replicate`, or a placement that shards one dim.
    """

    local: Tensor
    shape: tuple[int, ...]
    mesh: DeviceMesh | None = None
    placements: Placements = ()

    @classmethod
    def of(cls, tensor: Tensor, mesh: DeviceMesh | None) -> Laid:
        """Return a tensor on a mesh: a plain one is replicated, and so are ragged shards."""
        if mesh is None:
            return cls(tensor, tuple(tensor.shape))
        if not isinstance(tensor, DTensor):
            return cls(tensor, tuple(tensor.shape), mesh, (Replicate(),) * mesh.ndim)
        placements = tuple(Replicate() if sharded_dim(p) is None else p for p in dispatch.placements_of(tensor))
        local = dispatch.redistributed(tensor, placements, for_op=None)
        return cls(local, tuple(tensor.shape), mesh, placements)

    def tensor(self) -> Tensor:
        """Return the DTensor, or the plain tensor."""
        if self.mesh is None:
            return self.local
        like = torch.empty(self.shape, dtype=self.local.dtype, device="meta")
        return dispatch.wrap(self.local.contiguous(), self.mesh, self.placements, like)

    def replaced(self, local: Tensor, shape: Sequence[int], placements: Sequence[Placement] | None = None) -> Laid:
        """Return another tensor on the same mesh, in the same placements by default."""
        return Laid(local, tuple(shape), self.mesh, self.placements if placements is None else tuple(placements))

    def map(self, function: Callable[[Tensor], Tensor]) -> Laid:
        """Apply a function that keeps the shape."""
        return self.replaced(function(self.local), self.shape)

    def moved(self, placements: Sequence[Placement]) -> Laid:
        """Return the tensor in other placements."""
        if tuple(placements) == self.placements:
            return self
        local = dispatch.redistributed(self.tensor(), placements, for_op=None)
        return self.replaced(local, self.shape, placements)

    def axes(self, dim: int) -> tuple[int, ...]:
        """Return the mesh axes that shard a dim."""
        return tuple(axis for axis, p in enumerate(self.placements) if sharded_dim(p) == dim)

    def gathered(self, dims: Iterable[int] | None = None) -> Laid:
        """Return the tensor with all of some dims on every rank, by default of all dims."""
        if dims is None:
            return self.moved([Replicate()] * len(self.placements))
        return self.moved(_without(self.placements, [axis for dim in dims for axis in self.axes(dim)]))

    def in_blocks(self, dim: int, num_blocks: int) -> Laid:
        """Return the tensor with whole blocks of a dim on every rank, gathered along the axes that cut elsewhere."""
        unit, placements = block_size(self.shape[dim], num_blocks), self.placements
        while not is_whole_on(self.mesh, placements, dim, self.shape[dim], unit):
            placements = _without(placements, [max(i for i, p in enumerate(placements) if sharded_dim(p) == dim)])
        return self.moved(placements)

    def has_pairs(self, dim: int) -> bool:
        """Return whether no two neighbors ``2 i``, ``2 i + 1`` of a dim lie on different ranks."""
        return is_whole_on(self.mesh, self.placements, dim, self.shape[dim], 2)


def is_whole_on(mesh: DeviceMesh | None, placements: Sequence[Placement], dim: int, size: int, unit: int) -> bool:
    """Return whether every rank holds whole blocks of ``unit`` elements of a dim, and one range of them."""
    if mesh is None:
        return True
    cut = [(mesh.size(axis), p) for axis, p in enumerate(placements) if sharded_dim(p) == dim]
    if not all(type(p) is Shard for _, p in cut):
        return False
    return are_whole(starts_of(size, tuple(num for num, _ in cut)), unit)


def _without(placements: Sequence[Placement], axes: Sequence[int]) -> Placements:
    return tuple(Replicate() if axis in axes else p for axis, p in enumerate(placements))


def sharded_dim(placement: Placement) -> int | None:
    """Return the dim that a placement shards, or None."""
    return placement.dim if placement.is_shard() or dispatch.is_strided_shard(placement) else None


def mesh_of(tensors: Iterable[object]) -> DeviceMesh | None:
    """Return the mesh of the DTensors among the operands, or None."""
    return next((tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor)), None)
