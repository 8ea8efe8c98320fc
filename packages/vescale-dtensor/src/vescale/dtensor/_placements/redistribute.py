"""`distribute_tensor` and `DTensor.redistribute` among all placements.

A redistribution is differentiable any number of times. Gradients follow torch's rules: the backward of a redistribution
returns the gradient in the original placements of the tensor. There is one exception: if the original placement is
Partial and the gradient is complete, the gradient stays complete (Replicate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute_tensor

from .._checked import checked
from .._layout.shards import check
from .._torch.dispatch import wrap
from .._torch.placements import DTensorSpec, StridedShard, current_mesh, local_of
from .collectives import in_group_order
from .memory import as_strides_say
from .move import redistribute_shard
from .plan import is_axis_order, without_partials
from .types import BlockShard, InterleavedShard, RaggedShard

__all__ = ["distribute_tensor", "is_own", "normalized", "redistribute", "shard_gradient"]


def is_own(placements: Sequence[Placement], mesh: DeviceMesh) -> bool:
    """Return whether veScale redistributes a layout: it has shards that torch lacks.

    Torch redistributes strided shards that only express an order of the mesh axes (FSDP2 over tensor parallel). It
    keeps that order, also for uneven shards. Torch's operator rules also produce strided shards that are interleaved.
    """
    if _TORCHS.issuperset(map(type, placements)):  # the only cost for torch's own placements: one check of the types
        return False
    if any(isinstance(placement, (BlockShard, InterleavedShard, RaggedShard)) for placement in placements):
        return True
    strided = any(isinstance(placement, StridedShard) for placement in placements)
    return strided and not is_axis_order(tuple(placements), tuple(mesh.shape))


_TORCHS = frozenset((Replicate, Shard, Partial))


def normalized(placements: Sequence[Placement], ndim: int) -> tuple[Placement, ...]:
    """Return the placements with dims counted from the front."""
    return tuple(_normalized(placement, ndim) for placement in placements)


def _normalized(placement: Placement, ndim: int) -> Placement:
    dim = getattr(placement, "dim", 0)
    if dim >= 0:
        return placement
    if isinstance(placement, StridedShard):
        return type(placement)(dim + ndim, split_factor=placement.split_factor)
    return Shard(dim + ndim)


def redistribute(
    tensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,  # noqa: ARG001 - the redistribution is complete on return
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> DTensor:
    """Redistribute a DTensor among all placements, as `DTensor.redistribute` does among torch's.

    Raises:
        RuntimeError: no placements are given, or one would become Partial, as in torch.
        NotImplementedError: another mesh, as in torch, or a change from one kind of Partial to another.
        ValueError: the placements do not fit the shape or the mesh.
    """
    if placements is None:
        raise RuntimeError("placements is needed for redistribute!")
    if device_mesh is not None and device_mesh != tensor.device_mesh:
        raise NotImplementedError(
            f"cannot redistribute a tensor placed {tensor.placements} from mesh {tensor.device_mesh} to another mesh "
            f"{device_mesh}; gather it with full_tensor(), then use distribute_tensor"
        )
    placements = normalized(placements, tensor.ndim)
    for old, new in zip(tensor.placements, placements, strict=False):
        if new.is_partial() and old != new:
            raise RuntimeError(
                f"Can not redistribute from {old} to {new}, redistributing to Partial is for internal use only!"
            )
    return Redistribute.apply(tensor, placements, forward_dtype, backward_dtype)


class Redistribute(torch.autograd.Function):
    """Forward and backward are both redistributions; the backward is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: DTensor,
        placements: tuple[Placement, ...],
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> DTensor:
        """Redistribute, in ``forward_dtype`` if one is given."""
        ctx.source, ctx.dtype, ctx.backward_dtype = tensor.placements, tensor.dtype, backward_dtype
        ctx.forward_input_device_mesh = tensor.device_mesh  # as in from_local: a plain gradient becomes a DTensor on it
        local = local_of(tensor)
        local = local if forward_dtype is None else local.to(forward_dtype)
        shard = redistribute_shard(local, tensor.shape, tensor.device_mesh, tensor.placements, placements)
        shard = local.view_as(local) if shard is local else as_strides_say(shard, local, tensor.shape, tensor.stride())
        return wrap(shard, tensor.device_mesh, placements, like=tensor, requires_grad=tensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> tuple[DTensor, None, None, None]:
        """Bring the gradient back, in ``backward_dtype`` or else the dtype of the input."""
        target = _gradient_placements(gradient.placements, ctx.source)
        if gradient.dtype != (op_dtype := ctx.backward_dtype or ctx.dtype):
            gradient = gradient.to(op_dtype)
        gradient = Redistribute.apply(gradient, target, None, None)
        return gradient if gradient.dtype == ctx.dtype else gradient.to(ctx.dtype), None, None, None


def _gradient_placements(present: Sequence[Placement], source: Sequence[Placement]) -> tuple[Placement, ...]:
    pairs = zip(present, source, strict=True)
    return tuple(Replicate() if old.is_partial() and now != old else old for now, old in pairs)


def shard_gradient(gradient: torch.Tensor, like: DTensorSpec, placements: Sequence[Placement] | None) -> DTensor:
    """Return the gradient of ``to_local`` as a DTensor: the local gradient, in the placements of the tensor.

    Torch would compute the strides of the global tensor from the local strides. A ragged shard does not allow that, so
    the gradient takes the strides of the tensor.
    """
    if placements is None:
        placements = [Replicate() if placement.is_partial() else placement for placement in like.placements]
    return DTensor.from_local(gradient, like.mesh, placements, run_check=False, shape=like.shape, stride=like.stride)


@checked
def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distribute a leaf tensor (an ``nn.Parameter``, a batch) over a mesh, in any placements.

    Like torch's function of this name, which it calls if all placements are torch's own.

    Args:
        tensor: the full tensor, of any shape and dtype; the same shape on every rank.
        device_mesh: the mesh; by default that of the enclosing ``with mesh:``.
        placements: one for each mesh axis; by default Replicate for all.
        src_data_rank: the rank of each mesh axis that provides the values; None if every rank takes its shard from its
            own copy, without communication.

    Raises:
        TypeError: an argument is not what it should be.
        ValueError: the placements do not fit the shape or the mesh, or the tensor is a DTensor placed otherwise.
        RuntimeError: the tensor is not a leaf.

    Example:
        >>> weight = distribute_tensor(torch.randn(12, 4), mesh, [RaggedShard((0,), (1, 2))])   # doctest: +SKIP
        >>> weight.to_local().shape                                                             # doctest: +SKIP
        torch.Size([8, 4])
    """
    mesh = device_mesh or _enclosing_mesh()
    if placements is not None:
        _check_placements(placements, mesh, tensor.ndim)
    if src_data_rank is not None and not 0 <= src_data_rank < min(mesh.shape):
        raise ValueError(
            f"distribute_tensor: expected a rank of each axis of {mesh} for src_data_rank, got {src_data_rank}; pass "
            "0, or None for values that every rank has"
        )
    known = placements is None or (not is_own(placements, mesh) and in_group_order(mesh))
    if known or isinstance(tensor, DTensor):
        return torch_distribute_tensor(tensor, mesh, placements, src_data_rank=src_data_rank)
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor expects a leaf tensor, but got the result of an operator; detach it first"
        )
    target = normalized(placements, tensor.ndim)
    check(tuple(tensor.shape), tuple(mesh.shape), without_partials(target))
    copies = [placement if placement.is_partial() else Replicate() for placement in target]
    values = tensor.detach() if src_data_rank is None else tensor.detach().clone()  # torch broadcasts into its argument
    copied = torch_distribute_tensor(values, mesh, copies, src_data_rank=src_data_rank)
    whole = local_of(copied)
    shard = redistribute_shard(whole, tensor.shape, mesh, copied.placements, target)
    shard = as_strides_say(shard, whole, tensor.shape, tensor.stride())
    shard = shard.clone() if shard.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() else shard
    grad = tensor.requires_grad
    return wrap(shard.requires_grad_(grad), mesh, target, like=tensor, requires_grad=grad)


def _enclosing_mesh() -> DeviceMesh:
    try:
        return current_mesh()
    except RuntimeError as error:
        raise ValueError(
            "distribute_tensor: expected a DeviceMesh for device_mesh, got None outside of `with mesh:`; pass the mesh"
        ) from error


def _check_placements(placements: Sequence[Placement], mesh: DeviceMesh, ndim: int) -> None:
    for placement in placements:
        if isinstance(placement, Shard) and not -ndim <= placement.dim < ndim:
            raise ValueError(
                f"distribute_tensor: expected a dim of a tensor with {ndim} dims, got {placement}; pass a dim in "
                f"[{-ndim}, {ndim})"
            )
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"distribute_tensor: expected placements, one for each axis of {mesh}, got {len(placements)}: "
            f"{list(placements)}; pass {mesh.ndim}"
        )
