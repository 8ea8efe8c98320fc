"""The ranks of a mesh as Python numbers.

``DeviceMesh.mesh`` is a tensor. A compiler that traces an operator on DTensors allows no operator on other tensors,
``mesh.mesh.flatten()`` neither; reading the numbers is none.
"""

from __future__ import annotations

import functools
import itertools

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["rank_set", "ranks_of"]


@functools.lru_cache(maxsize=64)
def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the global ranks, row by row.

    Example:
        >>> ranks_of(init_device_mesh("cpu", (2, 2)))                               # doctest: +SKIP
        (0, 1, 2, 3)
    """
    numbers = mesh.mesh.tolist()
    for _ in range(mesh.ndim - 1):
        numbers = itertools.chain.from_iterable(numbers)
    return tuple(numbers)


@functools.lru_cache(maxsize=64)
def rank_set(mesh: DeviceMesh) -> frozenset[int]:
    """Return the same as a set."""
    return frozenset(ranks_of(mesh))
