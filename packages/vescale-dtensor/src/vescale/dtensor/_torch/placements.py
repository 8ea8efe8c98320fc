"""Private names of torch 2.11 to 2.14 for placements, meshes and collectives, which redistribution uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed._functional_collectives import AsyncCollectiveTensor, _are_we_tracing
from torch.distributed.device_mesh import DeviceMesh, _mesh_resources
from torch.distributed.tensor import DTensor, Partial, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

from .._containers import leaves

__all__ = [
    "DTensorSpec",
    "StridedShard",
    "all_gather_single",
    "backward_operator",
    "current_mesh",
    "is_tracing",
    "local_of",
    "new_group",
    "norm_partial",
    "partition",
    "reduced",
    "sharding",
    "with_placements",
]

# renamed in torch 2.13, which warns of the old name
all_gather_single: Callable = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def new_group(ranks: Sequence[int], name: str, backend: str | None = None) -> dist.ProcessGroup:
    """Return a new process group of ``ranks``, in their order, under this name; only its members create it.

    Torch would name such a group after the number of groups on the calling rank. If ranks have different numbers of
    groups, the members would wait for each other under different names, forever.
    """
    stock = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name
    try:
        order = {} if sorted(ranks) == list(ranks) else {"sort_ranks": False}
        return dist.new_group(list(ranks), use_local_synchronization=True, backend=backend, **order)
    finally:
        distributed_c10d._process_group_name = stock


def local_of(tensor: DTensor) -> Tensor:
    """Return this rank's shard itself, outside autograd, complete."""
    return _arrived(tensor._local_tensor)


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def reduced(local: Tensor, placement: Partial, mesh: DeviceMesh, axis: int) -> Tensor:
    """Reduce one axis by the method of the Partial's own class (masks of embeddings, norms)."""
    return _arrived(placement._reduce_value(local, mesh, axis))


def partition(local: Tensor, placement: Partial, mesh: DeviceMesh, axis: int) -> Tensor:
    """Turn a replicated tensor into partial values whose reduction over ``axis`` is the tensor."""
    return placement._partition_value(local, mesh, axis)


# ------------------------------------------------------------------------------------------------- dispatch


def current_mesh() -> DeviceMesh:
    """Return the mesh of the enclosing ``with mesh:``."""
    return _mesh_resources.get_current_mesh()


def sharding(schema: OpSchema, placements: Sequence[Placement], *, in_place: bool) -> OutputSharding:
    """Return the decision to run an operator on the present shards, with a result in ``placements``."""
    if in_place:
        return OutputSharding(schema.args_schema[0])
    meta = DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta(schema)
    spec = next(arg for arg in leaves((schema.args_schema, schema.kwargs_schema)) if isinstance(arg, DTensorSpec))
    return OutputSharding(DTensorSpec(spec.mesh, tuple(placements), tensor_meta=meta))


def norm_partial(order: float) -> Partial:
    """Return the placement of a rank's share of a vector norm."""
    if order in (float("inf"), float("-inf")):
        return Partial("max" if order > 0 else "min")
    return Partial("sum") if order == 0 else _NormPartial(order)


def backward_operator() -> str:
    """Return the name of the operator whose gradient autograd is computing now, such as ``"Split"``; empty if none."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name().removesuffix("0").removesuffix("Backward")


def is_tracing() -> bool:
    """Return whether a compiler is tracing the program."""
    return _are_we_tracing()


def with_placements(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """Return a copy of ``spec`` with ``placements``, which must shard the same dims in the same order."""
    return DTensorSpec(spec.mesh, tuple(placements), tensor_meta=spec.tensor_meta, shard_order=spec.shard_order)
