"""Parts of parameters, and of their state, as DTensors over the data-parallel axis.

The ranks' parts of a parameter are consecutive ranges of its flat local tensor, some of which may be empty. This is a
placement of `vescale.dtensor`: ``RaggedShard`` of all dims, with as many units per rank as it owns,

    weight (4, 3), cut at 0 | 5 | 5 | 12        RaggedShard((0, 1), (5, 0, 7))
    weight (4, 3), cut at 0 | 6 | 12 | 12       RaggedShard((0, 1), (1, 1, 0))      in units as large as possible

So the DTensor's local tensor is the memory that the rank owns, without a copy. Over replicas (hybrid sharding, ZeRO 0)
it is replicated. A tensor-parallel parameter becomes a DTensor over the axes of both. There the ragged placement cuts
the local tensor that the other axes leave: all tensor-parallel ranks cut at the same positions. A parameter without
dims that one rank owns has the shape (1,), because only dims can be cut. If a parameter's tensor-parallel shards differ
in size, only the rectangles of a `StatePiece` describe its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from vescale.dtensor import RaggedShard

from .. import _torch
from .._buckets.granularity import is_even
from .._buckets.plan import Bucket, Slot

__all__ = ["Spread", "spreads_of"]


@dataclass(frozen=True)
class Spread:
    """How the flat local tensor of a parameter is distributed over the data-parallel ranks.

    Attributes:
        fqn: Name of the parameter.
        mesh: The data-parallel mesh; shards are over its last axis.
        place: Bucket and slot; None if every rank has all of the parameter.
    """

    fqn: str
    mesh: DeviceMesh
    place: tuple[Bucket, Slot] | None = None

    def held(self) -> tuple[int, ...]:
        """Return how many elements each coord of the last axis has; one number, or none, if every rank has all."""
        if self.place is None:
            return ()
        bucket, slot = self.place
        parts = [bucket.part(slot, coord) for coord in range(bucket.num_shards)]
        return tuple(part.stop - part.start for part in parts)

    def layout(self, param: Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return mesh and placements of the parameter as a DTensor.

        Raises:
            NotImplementedError: If there are no such placements.
        """
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        held = self.held()
        if len(held) > 1 and sum(held):
            placements[-1] = self._ragged(param, held)
        if not isinstance(param, DTensor):
            return self.mesh, tuple(placements)
        by_name = dict(zip(self.mesh.mesh_dim_names or (), placements, strict=False))
        return self.joined(param, by_name)

    def _ragged(self, param: Tensor, held: tuple[int, ...]) -> RaggedShard:
        if not is_even(param):
            raise NotImplementedError(
                f"{self.fqn!r} is a DTensor over {param.device_mesh.mesh_dim_names} with shards of unequal size "
                f"(placements {param.placements} of shape {tuple(param.shape)}), of which data-parallel ranks own "
                "unequal shares: no placement describes that; use the rectangles of its StatePiece (__boxes__), which "
                "checkpoints store"
            )
        unit = math.gcd(*held)
        return RaggedShard(tuple(range(max(param.ndim, 1))), tuple(count // unit for count in held))

    def joined(self, param: DTensor, placements: Mapping[str, Placement]) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        """Return the mesh of both, and placements: the parameter's on its axes, others by name of the axis."""
        joined = _torch.joined_mesh(self.mesh, param.device_mesh)
        if joined is None:
            raise NotImplementedError(
                f"{self.fqn!r} is a DTensor over {param.device_mesh}, and data parallelism is over {self.mesh}: they "
                "are no slices by name of one mesh; take both from one init_device_mesh(..., mesh_dim_names=...), or "
                "use the rectangles of its StatePiece (__boxes__)"
            )
        by_name = {**placements, **dict(zip(param.device_mesh.mesh_dim_names, param.placements, strict=True))}
        return joined, tuple(by_name.get(name, Replicate()) for name in joined.mesh_dim_names)

    def to_dtensor(self, part: Tensor, param: Tensor) -> DTensor:
        """Return this rank's part of a tensor of the parameter's shape as a DTensor, over the same memory.

        A tensor without dims has the shape (1,) there if one rank owns it.

        Args:
            part: This rank's part: flat, or of the local tensor's shape if every rank has all.
            param: The parameter; its values are not read.
        """
        mesh, placements = self.layout(param)
        shape, stride = tuple(param.shape), param.stride()
        if any(isinstance(placement, RaggedShard) for placement in placements):
            shape = shape or (1,)
            part, stride = part.view(-1), _row_major(shape)
        elif part.ndim != param.ndim:
            part = part.view(_torch.local_tensor(param).shape)
        part = part.detach()
        # from_local would copy a tensor in host memory to the device.
        here = part if part.device.type == mesh.device_type else part.to("meta")
        found = DTensor.from_local(here, mesh, placements, run_check=False, shape=shape, stride=stride)
        return found if here is part else _torch.wrap_like(part, found)

    def full_tensor(self, part: Tensor, param: Tensor) -> Tensor:
        """Return the tensor of the parameter's global shape of which this is the rank's part; all ranks call it alike.

        Args:
            part: This rank's part, as for `to_dtensor`.
            param: The parameter; its values are not read.
        """
        local, held = part.detach().reshape(-1).to(self.mesh.device_type), self.held()
        if len(held) > 1 and sum(held):
            unit = math.gcd(*held)
            ragged = RaggedShard((0,), tuple(count // unit for count in held))
            placements = [*[Replicate()] * (self.mesh.ndim - 1), ragged]
            size = torch.Size((sum(held),))
            local = DTensor.from_local(
                local, self.mesh, placements, run_check=False, shape=size, stride=(1,)
            ).full_tensor()
        local = local.view(_torch.local_tensor(param).shape)
        return _torch.wrap_like(local, param).full_tensor() if isinstance(param, DTensor) else local

    def part_of(self, value: DTensor, param: Tensor) -> Tensor | None:
        """Return this rank's part of a tensor that is distributed over the same mesh; None for another mesh.

        All ranks of the mesh call it: data may be exchanged.

        Raises:
            NotImplementedError: As `layout`.
        """
        mesh, placements = self.layout(param)
        if value.device_mesh != mesh:
            return None
        if _torch.local_tensor(value).device.type != mesh.device_type:
            value = value.to(mesh.device_type)  # from host memory to the device, for the collective
        if value.ndim == 0 and any(isinstance(placement, RaggedShard) for placement in placements):
            value = value.reshape(1)
        return _torch.local_tensor(value.redistribute(placements=placements))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def spreads_of(
    mesh: DeviceMesh, params: Mapping[str, nn.Parameter], buckets: Iterable[Bucket]
) -> dict[nn.Parameter, Spread]:
    """Return how each parameter is distributed over the data-parallel ranks.

    Args:
        mesh: The data-parallel mesh.
        params: All parameters, by name.
        buckets: The buckets with their slots; parameters without a slot are full on every rank.
    """
    places = {slot.fqn: (bucket, slot) for bucket in buckets for slot in bucket.slots}
    return {param: Spread(fqn, mesh, places.get(fqn)) for fqn, param in params.items()}
