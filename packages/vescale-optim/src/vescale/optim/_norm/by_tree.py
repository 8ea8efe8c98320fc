"""The gradient norm of ``torch.nn.utils.clip_grad_norm_`` in one process, inside of ``vescale.dtensor.exact``.

The norm of the norms of the parameters, in their order: each is taken of the whole gradient, which ZeRO gathers bucket
by bucket, by the tree of exact mode. A DTensor stays in its shards: exact mode has a form for it. Stages of a pipeline
exchange the norms of their parameters, in the order of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch
from .._gradients.bucket import FlatBucket, FlatSlot
from .._gradients.placeholder import ShardedGradient
from .._ranks.axis import Axis

__all__ = ["norm_by_tree", "norms_by_tree", "of_all_stages"]

#: Of norms; float64 has the values of all of them.
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


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
        found = _of_all_ranks(found, axis, order)
    return [found[name] for name in order if name in found]


def _of_all_ranks(norms: Mapping[str, Tensor], axis: Axis, order: Sequence[str]) -> dict[str, Tensor]:
    """Return the norms of all ranks of an axis, by one all-gather of a table with a column for each name.

    A column has the norm and the number of its dtype from 1 on, or zeros on a rank without such a parameter.
    """
    kinds = [1 + _DTYPES.index(norms[name].dtype) if name in norms else 0 for name in order]
    absent = torch.zeros((), dtype=torch.float64, device=axis.device_type)
    values = torch.stack([norms.get(name, absent).to(absent) for name in order])
    mine = torch.stack([values, torch.tensor(kinds).to(absent)])
    every = mine.new_zeros(axis.size, *mine.shape)
    pending = axis.all_gather(every.view(-1), mine.view(-1), what="the norms of gradients")
    if pending is None:
        return dict(norms)
    pending.wait()
    found = {}
    for numbers, held in zip(every[:, 0], every[:, 1].int().tolist(), strict=True):
        found |= {name: numbers[i].to(_DTYPES[held[i] - 1]) for i, name in enumerate(order) if held[i]}
    return found


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
