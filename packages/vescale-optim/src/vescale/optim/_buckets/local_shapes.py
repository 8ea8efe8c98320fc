"""Which shapes the local tensors of a parameter have on the ranks of its mesh: integers only, the same on every rank.

What a rank finds out from its own local tensor may differ from what others find: an uneven tensor-parallel shard is
larger on some. Errors must be the same everywhere, so they are decided by the shapes of all.
"""

from __future__ import annotations

import itertools

from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["is_even", "local_shapes"]


def local_shapes(tensor: Tensor) -> list[tuple[int, ...]]:
    """Return every shape that a local tensor of ``tensor`` has on some rank of its mesh; a plain tensor has one.

    Example:
        >>> import torch
        >>> local_shapes(torch.zeros(3, 2))
        [(3, 2)]
    """
    sizes = [{size} for size in tensor.shape]
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            dim = getattr(placement, "dim", None)
            if dim is not None:
                num_parts = getattr(placement, "split_factor", 1)
                num_ranks = tensor.device_mesh.size(axis)
                sizes[dim] = {part for size in sizes[dim] for part in _cut(size, num_parts, num_ranks)}
    return sorted(itertools.product(*map(sorted, sizes)))


def _cut(size: int, num_parts: int, num_ranks: int) -> set[int]:
    """Return what ranks have of a dim of which each gets its chunk of every part; chunks are cut as by torch.chunk."""
    held = []
    for index in range(num_ranks):
        held.append(sum(_chunk(_chunk(size, num_parts, part), num_ranks, index) for part in range(num_parts)))
    return set(held)


def _chunk(size: int, num_chunks: int, index: int) -> int:
    full = -(-size // num_chunks)
    return min(full, max(size - full * index, 0))


def is_even(tensor: Tensor) -> bool:
    """Tell whether the local tensors of all ranks have the same shape."""
    return len(local_shapes(tensor)) == 1
