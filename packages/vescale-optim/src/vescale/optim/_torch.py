"""The only file of ``vescale.optim`` that touches private torch names, and the only one that knows torch versions.

Everything here exists in torch 2.11 to 2.13 with the same meaning; what differs is bridged here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

__all__ = [
    "UnmovableModule",
    "all_gather",
    "backward_is_nested",
    "backward_number",
    "foreach_mul_",
    "foreach_norms",
    "has_strided_shard",
    "is_deferred_storage",
    "local_tensor",
    "make_placeholder",
    "on_backward_end",
    "reduce_scatter",
    "shard_offsets",
    "wrap_like",
    "zero_operators",
]

# torch 2.13 renames both collectives; the old names warn there and will go.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard itself, or a plain tensor as it is; outside autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrap_like(local: Tensor, like: Tensor) -> Tensor:
    """Wrap ``local`` with the mesh, placements, global shape and strides of ``like`` if that is a DTensor."""
    if not isinstance(like, DTensor):
        return local
    # from_local would make a new view of `local`; the spec of `like` is exactly what is wanted.
    return DTensor(local, like._spec, requires_grad=False)


def shard_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Return the index, in the global tensor, of the first element of this rank's shard."""
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets)


def has_strided_shard(tensor: DTensor) -> bool:
    """Tell whether a placement interleaves shards, so that a rank's part is not one rectangle."""
    return any(isinstance(placement, _StridedShard) for placement in tensor.placements)


def is_deferred_storage(tensor: Tensor) -> bool:
    """Tell whether a parameter has a shape but no values yet."""
    return tensor.device.type == "meta" or local_tensor(tensor).device.type == "meta"


def backward_number() -> int:
    """Return the number of the backward pass that is running in this thread, -1 outside."""
    return torch._C._current_graph_task_id()


def backward_is_nested() -> bool:
    """Tell, at the end of a backward pass, whether it ran inside a node of another one (reentrant checkpointing)."""
    return torch._C._current_autograd_node() is not None


def on_backward_end(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the running backward pass has computed everything, before it returns to the user."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def foreach_norms(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """Return each tensor's p-norm as a 0-dim tensor, computed in ``dtype``; all tensors on one device."""
    # The infinity norm of an empty tensor is undefined in torch; here it is 0, as for every other norm.
    filled = [tensor for tensor in tensors if tensor.numel()]
    return list(torch._foreach_norm(filled, norm_type, dtype=dtype)) if filled else []


def foreach_mul_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply every tensor by the 0-dim tensor ``factor``, in place; all of one dtype and device."""
    torch._foreach_mul_(list(tensors), factor)


class UnmovableModule(nn.Module):
    """A module whose parameters must stay where they are: ``to``, ``cuda``, ``half`` and so on raise RuntimeError."""

    def _apply(self, fn: Callable, recurse: bool = True) -> UnmovableModule:  # noqa: ARG002 - torch's signature
        raise RuntimeError(
            f"{type(self).__name__} holds parameters in flat buffers: move or cast the module before wrapping"
        )


def make_placeholder(cls: type, like: Tensor) -> Tensor:
    """Return an instance of the tensor subclass ``cls`` with the metadata of ``like`` and no storage."""
    return torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device, requires_grad=False
    )


def zero_operators() -> tuple[torch._ops.OpOverload, torch._ops.OpOverload]:
    """Return the operators by which ``zero_grad(set_to_none=False)`` clears one gradient and a list of them."""
    return torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default
