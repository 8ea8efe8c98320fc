"""The gradient norm of ``torch.nn.utils.clip_grad_norm_`` in one process, inside of ``vescale.dtensor.exact``.

The norm of the norms of the parameters, in their order: each is taken of the whole gradient, which ZeRO gathers bucket
by bucket, by the tree of exact mode. A DTensor stays in its shards: exact mode has a form for it. Stages of a pipeline
exchange the norms of their parameters, by name.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from vescale.dtensor.extension import waits_of

from .. import _torch
from .._gradients.bucket import FlatBucket, FlatSlot
from .._gradients.placeholder import ShardedGradient
from .._ranks.axis import Axis

__all__ = ["norm_by_tree", "norms_by_tree", "of_all_stages"]


def norm_by_tree(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of norms, a 0-dim tensor."""
    return torch.linalg.vector_norm(torch.stack(list(norms)), norm_type) if norms else torch.zeros(())


def norms_by_tree(parameters: Iterable[Tensor], norm_type: float) -> dict[Tensor, Tensor]:
    """Return the norm of each gradient, a 0-dim tensor with the same bits on every layout."""
    norms: dict[Tensor, Tensor] = {}
    flat: dict[FlatBucket, Tensor] = {}
    for param in parameters:
        grad = param.grad
        if grad is None:
            continue
        if isinstance(grad, ShardedGradient):
            bucket = grad.slot.bucket
            if bucket not in flat:
                flat = {bucket: _gathered(bucket)}  # one at a time
            grad = _whole(grad.slot, flat[bucket])
        norm = torch.linalg.vector_norm(grad, norm_type)
        norms[param] = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return norms


def of_all_stages(norms: Mapping[str, Tensor], axes: Iterable[Axis], order: Sequence[str]) -> list[Tensor]:
    """Return the norms of the parameters of all ranks of the axes, in the order of one process.

    Args:
        norms: Those of this rank's parameters, by name.
        axes: Over which ranks have other parameters.
        order: Names of all parameters, in the order of one process.
    """
    found = dict(norms)
    for axis in axes:
        every: list[Any] = [None] * axis.size
        gather = functools.partial(dist.all_gather_object, every, {k: v.cpu() for k, v in found.items()}, axis.group)
        waits_of(axis.group).call("all-gather of norms", gather)
        found = {name: norm for theirs in every for name, norm in theirs.items()}
    return [found[name] for name in order if name in found]


def _gathered(bucket: FlatBucket) -> Tensor:
    """Return the reduced gradients of a bucket, of which each rank keeps a shard."""
    if bucket.axis.size == 1:
        return bucket.grad_shard
    flat = bucket.grad_shard.new_empty(bucket.plan.numel)
    pending = bucket.axis.all_gather(flat, bucket.grad_shard, what="gradients for their norm")
    if pending is not None:
        pending.wait()
    return flat


def _whole(slot: FlatSlot, flat: Tensor) -> Tensor:
    place = next(each for each in slot.bucket.plan.slots if each.fqn == slot.fqn)
    local = flat[place.start : place.start + place.numel].view(slot.local_view.shape)
    return _torch.wrap_like(local, slot.param)
