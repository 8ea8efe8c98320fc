"""Classification losses over a sharded batch, sharded classes, or both.

``cross_entropy`` ends in ``nll_loss``: the sum of the losses, divided by the sum of the class weights of the targets
that are not ignored. Stock DTensor averages the means of the shards. The result is silently wrong if shards ignore
different numbers of targets, or if the weights of their targets differ. It also gathers sharded classes. Here::

    log-probabilities   (N, C, d...)  Shard(1) on class axes, Shard(other) on batch axes, even or uneven
    targets             (N, d...)     full on class axes, sharded alike on batch axes

    loss of a target      on the rank that holds its class, 0 on the others       Partial over the class axes
    none                  the losses                                              Partial over the class axes
    sum                   local sum                                               Partial over class and batch axes
    mean                  local sum / (sum over batch axes of local weights)      the same

The reduction of the sum of weights (one number, for the mean) is a part of the operator, not a redistribution of
operands. No logits are gathered. With ``log_softmax`` (see ``vocabulary``) a row costs three reductions of one number.

A target outside ``[0, C)`` that is not ignored raises IndexError on the ranks that hold it, as on one device.

torch's ``loss_parallel`` context installs its own handlers for the same operators; the handler table in
``_torch.patches`` restores these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._placements.types import BlockShard
from .._torch import dispatch
from .scalars import of_number
from .vocabulary import axes_sharded_on, local_index, operand, reduced, shards_or_whole

__all__ = ["loss_handlers"]

aten = torch.ops.aten

REDUCTION = 3  # position of the argument
NONE, MEAN, SUM = 0, 1, 2


def loss_handlers() -> dict[dispatch.Op, dispatch.Handler]:
    """Return the handlers of the losses that ``cross_entropy`` and ``nll_loss`` end in."""
    return {
        aten.nll_loss_forward.default: _nll_loss,
        aten.nll_loss2d_forward.default: _nll_loss,
        aten.nll_loss_backward.default: _nll_loss_backward,
        aten.nll_loss2d_backward.default: _nll_loss_backward,
        aten.masked_fill_.Scalar: _masked_fill_,
    }


def _nll_loss(op: dispatch.Op, args: tuple, kwargs: dict) -> tuple[Tensor, Tensor]:
    if axes_sharded_on(args[0], _class_dim(args[0])):
        return _over_classes(op, *args)
    if args[REDUCTION] != MEAN:
        return dispatch.stock_dispatch(op, args, kwargs)
    summed, weights = dispatch.stock_dispatch(op, (*args[:REDUCTION], SUM, *args[REDUCTION + 1 :]), kwargs)
    mesh, whole = weights.device_mesh, [Replicate()] * weights.device_mesh.ndim
    total = dispatch.redistributed(weights, whole, for_op=None)
    mean = dispatch.local_tensor(summed) / total
    return dispatch.wrap(mean, mesh, summed.placements, summed), dispatch.wrap(total, mesh, whole, weights)


def _nll_loss_backward(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    grad, log_probs, target, weight, reduction, ignore_index, total = args
    if not axes_sharded_on(log_probs, _class_dim(log_probs)):
        return dispatch.stock_dispatch(op, args, kwargs)
    parts = _Parts.of(op, log_probs, target, weight, ignore_index)
    whole = [Replicate()] * parts.mesh.ndim
    scale = operand(op, grad, parts.mesh, parts.target_placements if reduction == NONE else whole)
    if reduction == MEAN:
        scale = scale / operand(op, total, parts.mesh, whole)
    values = torch.where(parts.held, -scale * parts.weights, 0).to(parts.local.dtype)
    result = torch.zeros_like(parts.local, memory_format=torch.contiguous_format)
    if result.shape[parts.dim]:
        result.scatter_(parts.dim, parts.index.unsqueeze(parts.dim), values.unsqueeze(parts.dim))
    return dispatch.wrap(result, parts.mesh, parts.placements, torch.empty(log_probs.shape, device="meta"))


# ------------------------------------------------------------------------------------------------- sharded classes


def _class_dim(log_probs: Tensor) -> int:
    return 1 if log_probs.ndim > 1 else 0


@dataclass(frozen=True)
class _Parts:
    """This rank's part of the operands of one call. Tensors without a class dim have the shape of the local targets.

    Attributes:
        mesh: of the log-probabilities.
        dim: the class dim.
        placements: of the log-probabilities.
        target_placements: of the targets: full on the axes that shard the classes.
        local: log-probabilities of the local classes.
        index: position of each target in the local classes; 0 for targets that are ignored or held by another rank.
        held: whether this rank holds the class of the target and the target is not ignored.
        weights: the class weight of each target, 0 for the ignored ones.
    """

    mesh: DeviceMesh
    dim: int
    placements: tuple[Placement, ...]
    target_placements: tuple[Placement, ...]
    local: Tensor
    index: Tensor
    held: Tensor
    weights: Tensor

    @classmethod
    def of(
        cls, op: dispatch.Op, log_probs: DTensor, target: Tensor, weight: Tensor | None, ignore_index: int
    ) -> _Parts:
        """Bring the operands to fitting placements and cut out this rank's part."""
        mesh, dim, placements = log_probs.device_mesh, _class_dim(log_probs), shards_or_whole(log_probs.placements)
        target_placements = _of_targets(placements, dim)
        num_classes = log_probs.shape[dim]
        targets = operand(op, target, mesh, target_placements).long()
        if log_probs.ndim == 1:  # one row: torch takes one target with or without a dim
            targets = targets.view(())
        kept = targets != ignore_index
        _check(targets, kept, num_classes)
        targets = torch.where(kept, targets, 0)
        local = dispatch.redistributed(log_probs, placements, for_op=op)
        offsets, sizes = dispatch.local_box(log_probs.shape, mesh, placements)
        index, held = local_index(targets, offsets[dim], sizes[dim], num_classes)
        weights = kept.to(local.dtype)
        if weight is not None:
            weights = weights * operand(op, weight, mesh, [Replicate()] * mesh.ndim)[targets]
        return cls(mesh, dim, placements, target_placements, local, index, held & kept, weights)

    @property
    def batch_axes(self) -> list[int]:
        """The mesh axes that shard the targets."""
        return [axis for axis, placement in enumerate(self.target_placements) if not placement.is_replicate()]

    @property
    def class_axes(self) -> list[int]:
        """The mesh axes that shard the classes."""
        return [axis for axis, placement in enumerate(self.placements) if placement == Shard(self.dim)]

    def losses(self) -> Tensor:
        """Return the weighted loss of each target that this rank holds, and 0 for the others."""
        if not self.local.shape[self.dim]:
            return torch.zeros_like(self.weights)
        picked = self.local.gather(self.dim, self.index.unsqueeze(self.dim)).squeeze(self.dim)
        return torch.where(self.held, -picked * self.weights, 0)


def _of_targets(placements: Sequence[Placement], class_dim: int) -> tuple[Placement, ...]:
    """Return placements without the class dim: Replicate where it was sharded, and later dims shifted left by one."""

    def one(placement: Placement) -> Placement:
        if not isinstance(placement, (Shard, BlockShard)) or placement.dim == class_dim:
            return Replicate()
        dim = placement.dim - (placement.dim > class_dim)
        return BlockShard(dim, placement.block) if isinstance(placement, BlockShard) else Shard(dim)

    return tuple(map(one, placements))


def _check(targets: Tensor, kept: Tensor, num_classes: int) -> None:
    """Refuse a target outside the classes on CPU, where the check needs no synchronization; other kernels check it."""
    if targets.device.type != "cpu":
        return
    wrong = targets[kept & (targets.lt(0) | targets.ge(num_classes))]
    if wrong.numel():
        raise IndexError(f"Target {wrong[0].item()} is out of bounds.")


def _over_classes(
    op: dispatch.Op, log_probs: DTensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    parts = _Parts.of(op, log_probs, target, weight, ignore_index)
    losses, mesh, whole = parts.losses(), parts.mesh, [Replicate()] * parts.mesh.ndim
    scalar = torch.empty((), device="meta")
    if reduction == NONE:
        placements = [Partial() if a in parts.class_axes else p for a, p in enumerate(parts.target_placements)]
        shape = target.shape if log_probs.ndim > 1 else ()
        none = dispatch.wrap(losses, mesh, placements, torch.empty(shape, device="meta"))
        return none, dispatch.wrap(losses.new_zeros(()), mesh, whole, scalar)
    summed = [Partial() if a in (*parts.class_axes, *parts.batch_axes) else Replicate() for a in range(mesh.ndim)]
    loss, total = losses.sum(), parts.weights.sum()
    if reduction == SUM:  # the weights are not read
        return dispatch.wrap(loss, mesh, summed, scalar), dispatch.wrap(total, mesh, whole, scalar)
    total = reduced("sum", total, mesh, whole, parts.batch_axes, ())
    return dispatch.wrap(loss / total, mesh, summed, scalar), dispatch.wrap(total, mesh, whole, scalar)


# ------------------------------------------------------------------------------------------------- label smoothing


def _masked_fill_(op: dispatch.Op, args: tuple, kwargs: dict) -> Tensor:
    """Fill zeros into partial sums in place, as ``cross_entropy`` with label smoothing does: every part gets zero."""
    tensor, mask, value = args
    if value != 0 or not isinstance(tensor, DTensor) or Partial() not in tensor.placements:
        return of_number(op, args, kwargs)
    if mask.shape != tensor.shape or not all(p == Partial() or not p.is_partial() for p in tensor.placements):
        return of_number(op, args, kwargs)
    placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
    op(dispatch.local_tensor(tensor), operand(op, mask, tensor.device_mesh, placements), value)
    return tensor
