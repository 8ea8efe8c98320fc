"""`distribute_tensor` for all placements."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from .._layout.shards import check
from .._torch import placements as _torch
from .collectives import in_group_order
from .move import redistribute_shard
from .plan import without_partials
from .redistribute import is_own, normalized

__all__ = ["distribute_tensor"]


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a leaf tensor (an ``nn.Parameter``, a batch) over a mesh, in any placements.

    As torch's function of this name, which it calls where torch knows all placements.

    Args:
        tensor: the whole tensor, of any shape and dtype; the same shape on every rank.
        device_mesh: the mesh; by default that of the enclosing ``with mesh:``.
        placements: one for each mesh axis; by default Replicate for all.
        src_data_rank: the rank of each mesh axis whose values are taken, or None: every rank cuts its own copy, without
            communication.

    Raises:
        ValueError: the placements do not fit the shape or the mesh, or the tensor is a DTensor placed otherwise.
        RuntimeError: the tensor is not a leaf.

    Example:
        >>> weight = distribute_tensor(torch.randn(12, 4), mesh, [RaggedShard((0,), (1, 2))])   # doctest: +SKIP
        >>> weight.to_local().shape                                                             # doctest: +SKIP
        torch.Size([8, 4])
    """
    mesh = device_mesh or _torch.current_mesh()
    known = placements is None or (not is_own(placements, mesh) and in_group_order(mesh))
    if known or isinstance(tensor, DTensor):
        return torch_distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank)
    if not tensor.is_leaf:
        raise RuntimeError("distribute_tensor distributes leaf tensors; this one was computed: detach it first")
    target = normalized(placements, tensor.ndim)
    check(tuple(tensor.shape), tuple(mesh.shape), without_partials(target))
    copies = [placement if placement.is_partial() else Replicate() for placement in target]
    values = tensor.detach() if src_data_rank is None else tensor.detach().clone()  # torch broadcasts into its argument
    copied = torch_distribute_tensor(values, mesh, copies, src_data_rank=src_data_rank)
    shard = redistribute_shard(_torch.local_of(copied), tensor.shape, mesh, copied.placements, target)
    shard = shard.clone() if shard.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else shard
    grad = tensor.requires_grad
    return _torch.wrap(shard.requires_grad_(grad), mesh, target, like=tensor, requires_grad=grad)
