"""The data-parallel ranks, grouped by what they share: parts of a batch, shards, or replicas of a shard.

A mesh of two axes shards over the second and replicates over the first (hybrid sharding). Every rank has its own part
of the batch; ranks are numbered row by row:

                    shard: coord 0   coord 1   coord 2
    replicate: coord 0      rank 0    rank 1    rank 2       gathers of parameters, sums of gradients: along a row
               coord 1      rank 3    rank 4    rank 5       sums of a shard's gradients: along a column, too

    mesh    ZeRO    all          shard          replicate
    1-D     0       the axis     this rank      the axis
    1-D     1-3     the axis     the axis       this rank
    2-D     0       both axes    this rank      both axes
    2-D     1-3     both axes    second axis    first axis

So ``all`` is always ``shard`` times ``replicate``, and no other file distinguishes the four cases. With one row per
node, most of the communication stays within a node.

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023), section 3.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor.extension import group_of_ranks

from .axis import Axis

__all__ = ["DataAxes"]


@dataclass(frozen=True)
class DataAxes:
    """The axes of data parallelism.

    Attributes:
        all: All ranks that have a part of the batch, in the order of these parts.
        shard: The axis over which gradients, state and parameters are sharded.
        replicate: The ranks that hold the same shard as this one.
        pieces: All ranks in another order: shard by shard, with the replicas of a shard next to each other.
        meshes: 1-D meshes of the axes of more than one rank that were given, the outer one first.
    """

    all: Axis
    shard: Axis
    replicate: Axis
    pieces: Axis
    meshes: tuple[DeviceMesh, ...]

    @classmethod
    def of(cls, mesh: DeviceMesh, *, sharded: bool, ordered: bool = False) -> DataAxes:
        """Return the axes of a mesh; all of its ranks call it alike.

        Args:
            mesh: 1-D, or 2-D: replicas over the first axis, shards over the second.
            sharded: Whether anything is sharded (ZeRO 1 to 3).
            ordered: Whether ``pieces`` is needed, which may take one more process group.

        Raises:
            ValueError: If ``mesh`` is neither 1-D nor 2-D, or if the ranks of a 2-D mesh do not ascend along each axis.
        """
        if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
            inner = both = Axis.of_dim(mesh, 0)
            outer = both.of_this_rank()
            meshes = (mesh,) if both.size > 1 else ()
        else:
            _check(mesh)
            outer, inner = Axis.of_dim(mesh, 0), Axis.of_dim(mesh, 1)
            both = _product(outer, inner, mesh.mesh)
            outer, inner = (replace(axis, listening=both.ranks) for axis in (outer, inner))
            meshes = tuple(_mesh_of(axis) for axis in (outer, inner) if axis.size > 1)
        if not sharded:
            inner, outer = both.of_this_rank(), both
        pieces = both
        if ordered and sharded and mesh.ndim == 2:
            pieces = replace(_product(inner, outer, mesh.mesh.T), name=both.name, listening=both.ranks)
        return cls(both, inner, outer, pieces, meshes)

    @property
    def one_mesh(self) -> DeviceMesh:
        """A 1-D mesh of all ranks that have a part of the batch, in the order of these parts."""
        return self.meshes[0] if len(self.meshes) == 1 else _mesh_of(self.all)

    @property
    def batch_order(self) -> list[int]:
        """The coords along ``pieces`` in the order of ``all``."""
        num_shards, num_replicas = self.shard.size, self.replicate.size
        return [s * num_replicas + r for r in range(num_replicas) for s in range(num_shards)]

    def own_shard(self, buffer: Tensor) -> Tensor:
        """Return this rank's shard of a flat buffer, which all ranks of ``shard`` cut alike: a view."""
        return buffer.view(self.shard.size, -1)[self.shard.coord]

    def own_piece(self, shard: Tensor) -> Tensor:
        """Return the piece of a shard that this rank has among its replicas: a view."""
        return shard.view(self.replicate.size, -1)[self.replicate.coord]

    def __repr__(self) -> str:
        return f"{self.all!r}, shards over {self.shard!r}, replicas over {self.replicate!r}"


def _check(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
        came = f"axes {mesh.mesh_dim_names or mesh.ndim}" if isinstance(mesh, DeviceMesh) else repr(mesh)
        raise ValueError(
            'DDP(mesh_axis=...) expects a 1-D DeviceMesh such as mesh["dp"], or a 2-D one such as mesh["replicate", '
            f'"shard"] (replicas over its first axis, shards over its second), got {came}'
        )
    for dim in range(2):
        if not (mesh.mesh.diff(dim=dim) > 0).all():
            raise ValueError(
                f"the ranks of the 2-D mesh given to DDP must ascend along each axis, as those of its process groups "
                f"do, got {mesh.mesh.tolist()} for axes {mesh.mesh_dim_names}; build it with init_device_mesh"
            )


def _product(outer: Axis, inner: Axis, ranks: Tensor) -> Axis:
    """Return one axis of all ranks of a grid, row by row; one of its axes, if the other has a single rank.

    Args:
        outer: Axis of the rows.
        inner: Axis of the columns.
        ranks: Global ranks (rows, columns).
    """
    if outer.size == 1 or inner.size == 1:
        return outer if inner.size == 1 else inner
    group = group_of_ranks(ranks.flatten().tolist(), keep_order=True)
    coord = outer.coord * inner.size + inner.coord
    return Axis(f"{outer.name} x {inner.name}", outer.size * inner.size, coord, group, outer.device_type)


def _mesh_of(axis: Axis) -> DeviceMesh:
    return DeviceMesh.from_group(axis.group, axis.device_type, mesh_dim_names=(axis.name,))
