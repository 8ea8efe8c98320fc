"""The memory order of shards: that of the global tensor, without gaps, so that its views are views of the shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["as_strides_say", "in_memory_order"]


def as_strides_say(moved: Tensor, given: Tensor, shape: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return a shard that was moved without gaps, in the memory order of the global tensor: that of its strides.

    Torch cuts the padding off what it gathers. That leaves gaps, and strides of the padded shape in dims of size 1 and
    where there are no elements. A dim that was expanded has memory after the move, and stays where it is. So does a
    shard without gaps of a row-major tensor that was given in another order, which the strides do not promise.

    Args:
        moved: the shard after the move.
        given: the shard before it; what did not move keeps its memory.
        shape: shape of the global tensor.
        stride: strides of the global tensor.
    """
    if moved is given or moved.ndim != len(shape):
        return moved
    is_expanded = 0 in stride
    strides = moved.stride() if is_expanded else tuple(stride)
    if 0 in strides:
        return moved
    order = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    if order == sorted(order) and _is_permuted(moved):
        return moved
    return in_memory_order(moved, order, stride if moved.shape == tuple(shape) and not is_expanded else None)


def _is_permuted(shard):
    """Return whether a shard has no gaps, in another order than the row-major one."""
    if shard.is_contiguous():
        return False
    numel = 1
    for stride, size in sorted(
        (step, size) for step, size in zip(shard.stride(), shard.shape, strict=True) if size > 1
    ):
        if stride != numel:
            return False
        numel *= size
    return True


def in_memory_order(shard: Tensor, order: Sequence[int], whole: Sequence[int] | None = None) -> Tensor:
    """Return a shard whose dims are in memory in an order, from the slowest to the fastest; itself if they are.

    Args:
        shard: a shard.
        order: its dims.
        whole: strides of the whole tensor, if the shard is all of it. Those of dims of size 1 say whether a kernel
            takes the channels for the last dim.
    """
    strides, numel = [0] * len(order), 1
    for dim in reversed(order):
        strides[dim] = numel if whole is None or shard.shape[dim] > 1 else whole[dim]
        numel *= max(1, shard.shape[dim])
    if shard.stride() == tuple(strides):
        return shard
    return torch.empty_strided(shard.shape, strides, dtype=shard.dtype, device=shard.device).copy_(shard)
