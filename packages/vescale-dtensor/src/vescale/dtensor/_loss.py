"""The mean of a classification loss over a sharded batch.

``cross_entropy`` and ``nll_loss`` divide the sum of the losses by the sum of the class weights of the targets that are
not ignored. Stock DTensor takes the mean of every shard's own mean: silently another number as soon as shards ignore
different numbers of targets, or their targets weigh differently; and it refuses uneven shards. Here, with N ranks::

    output = sum of local losses / (sum over N ranks of local weights)      Partial(sum)
    total_weight, which backward divides by, too                            Replicate

The one number that is reduced on the way is a part of the operator, not a redistribution of operands.

torch's ``loss_parallel`` context brings its own handlers for the same operators and removes both when it ends.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate

from . import _torch

__all__ = ["loss_handlers"]

aten = torch.ops.aten

REDUCTION = 3  # position of the argument
MEAN, SUM = 1, 2


def loss_handlers() -> dict[_torch.Op, _torch.Handler]:
    """Return the handlers of the losses that ``cross_entropy`` and ``nll_loss`` end in."""
    return {aten.nll_loss_forward.default: _nll_loss, aten.nll_loss2d_forward.default: _nll_loss}


def _nll_loss(op: _torch.Op, args: tuple, kwargs: dict) -> tuple[DTensor, DTensor]:
    if args[REDUCTION] != MEAN:
        return _torch.stock_dispatch(op, args, kwargs)
    summed, weights = _torch.stock_dispatch(op, (*args[:REDUCTION], SUM, *args[REDUCTION + 1 :]), kwargs)
    mesh, whole = weights.device_mesh, [Replicate()] * weights.device_mesh.ndim
    total = _torch.redistributed(weights, whole, for_op=None)
    mean = _torch.local_tensor(summed) / total
    return _torch.wrap(mean, mesh, summed.placements, summed), _torch.wrap(total, mesh, whole, weights)
