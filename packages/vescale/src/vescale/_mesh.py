"""The device mesh of a plan: all its axes, and the parts of it that each package gets.

    plan                              axes of the mesh, slowest first
    dp=4 tp=2 pp=2                    pp 2, dp 4, tp 2
    dp=8 dp_replicate=2               pp 1, dp_replicate 2, dp_shard 4, tp 1
    dp=8 ep=4                         pp 1, dp_shard 2, ep 4, tp 1

The axis of data parallelism is one axis, or a grid: replicas of the shards, shards, ranks that spread experts. Ranks of
one ep group share a part of the batch; it lies over them inside the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from vescale.dtensor import init_device_mesh
from vescale.plan import Plan


@dataclass(frozen=True)
class PlanMesh:
    """A mesh, and its parts.

    Attributes:
        whole: all axes.
        data: the axis of `vescale.optim.DDP`, or its two axes of hybrid sharding.
        tensor: the axes of `vescale.dmodule.parallelize_module`.
        pipeline: the axis of `vescale.pipe.PipelineEngine`.
    """

    whole: DeviceMesh
    data: DeviceMesh
    tensor: DeviceMesh
    pipeline: DeviceMesh

    @classmethod
    def of(cls, plan: Plan, mesh: DeviceMesh | None) -> PlanMesh:
        """Return the parts of the given mesh, checked against the plan, or of a new one.

        Raises:
            ValueError: the mesh has other axes, or is on another device.
        """
        axes = mesh_axes(plan)
        if mesh is None:
            mesh = init_device_mesh(plan.device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        _check(plan, mesh, axes)
        data = mesh["dp"] if "dp" in axes else mesh["dp_shard"]
        return cls(
            mesh,
            mesh["dp_replicate", "dp_shard"] if "dp_replicate" in axes else data,
            mesh[tensor_axes(plan)],
            mesh["pp"],
        )


def mesh_axes(plan: Plan) -> dict[str, int]:
    """Return the sizes of the mesh's axes by name, slowest first.

    Example:
        >>> mesh_axes(Plan(dp=8, dp_replicate=2, zero=1, tp=2))
        {'pp': 1, 'dp_replicate': 2, 'dp_shard': 4, 'tp': 2}
    """
    found: dict[str, int] = {}
    for axis in plan.axis_order:
        found |= _data_axes(plan) if axis == "dp" else {axis: getattr(plan, axis)}
    return found


def tensor_axes(plan: Plan) -> tuple[str, ...]:
    """Return the axes of `vescale.dmodule.parallelize_module`, without "tp" where only experts are spread.

    An axis less makes the recording of a program on DTensors several times as fast.

    Example:
        >>> tensor_axes(Plan(dp=2, ep=2)), tensor_axes(Plan(dp=2, ep=2, tp=2)), tensor_axes(Plan())
        (('ep',), ('ep', 'tp'), ('tp',))
    """
    if plan.ep == 1:
        return ("tp",)
    return ("ep",) if plan.tp == 1 else ("ep", "tp")


def _data_axes(plan: Plan) -> dict[str, int]:
    if plan.dp_replicate == 1 and plan.ep == 1:
        return {"dp": plan.dp}
    replicate = {"dp_replicate": plan.dp_replicate} if plan.dp_replicate > 1 else {}
    shard = plan.dp // plan.dp_replicate // plan.ep
    return {**replicate, "dp_shard": shard, **({"ep": plan.ep} if plan.ep > 1 else {})}


def _check(plan: Plan, mesh: DeviceMesh, axes: dict[str, int]) -> None:
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=False))
    if {axis: sizes.get(axis) for axis in axes} != axes or mesh.size() != plan.world_size:
        raise ValueError(
            f"parallelize: expected a mesh with the axes {axes}, got {sizes or 'axes without names'}; leave mesh out, "
            f"or build it with init_device_mesh(..., mesh_dim_names={tuple(axes)})"
        )
    if mesh.device_type != plan.device:
        raise ValueError(
            f"parallelize: expected a mesh on the plan's device {plan.device!r}, got {mesh.device_type!r}; leave mesh "
            "out, or build it on that device"
        )
