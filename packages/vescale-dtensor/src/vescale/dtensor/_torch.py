"""The only file of ``vescale.dtensor`` that touches private torch names (the deferred-init sub-package has its own).

Everything here exists in torch 2.11 to 2.13 with the same meaning; what differs between versions is bridged here and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "Handler",
    "TorchDispatchMode",
    "handler_table",
    "is_strided_shard",
    "local_box",
    "local_tensor",
    "stock_dispatch",
    "tree_leaves",
    "tree_map_only",
    "wrap_like",
]

Handler = Callable[[torch._ops.OpOverload, tuple, dict], object]


def handler_table() -> dict[torch._ops.OpOverload, Handler]:
    """Return DTensor's table of operators that are handled before sharding propagation (and before its own RNG tracker)."""
    return DTensor._op_dispatcher._custom_op_handlers


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this rank's shard itself, outside autograd."""
    return tensor._local_tensor


def local_box(
    shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return ``(offsets, sizes)`` of this rank's rectangle in a tensor of global ``shape``."""
    sizes, offsets = compute_local_shape_and_global_offset(torch.Size(shape), mesh, tuple(placements))
    return tuple(offsets), tuple(sizes)


def is_strided_shard(placement: Placement) -> bool:
    """Tell whether a placement interleaves its shards, so that a rank's part is not one rectangle."""
    return isinstance(placement, _StridedShard)


def wrap_like(local: Tensor, like: DTensor, *, shape: Sequence[int] | None = None) -> DTensor:
    """Wrap ``local`` as a DTensor with the mesh, placements and (contiguous) global shape of ``like``, outside autograd."""
    shape = torch.Size(like.shape if shape is None else shape)
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(like.device_mesh, tuple(like.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def stock_dispatch(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> object:
    """Run ``op`` as if this package had no handler for it."""
    table = handler_table()
    handler = table.pop(op, None)
    try:
        return op(*args, **kwargs)
    finally:
        if handler is not None:
            table[op] = handler
