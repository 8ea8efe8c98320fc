"""The ranks of a mesh as Python numbers, and a process group for any set of ranks.

``DeviceMesh.mesh`` is a tensor. A compiler that traces an operator on DTensors allows no operator on other tensors, not
even ``mesh.mesh.flatten()``. So the numbers are read without an operator.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.placements import new_group

__all__ = ["group_of_ranks", "rank_set", "ranks_of"]

# The default process group is a part of the key: another one may be initialized after this one has ended.
_process_groups: dict[tuple[object, tuple[int, ...], str], dist.ProcessGroup] = {}


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
    """Return the global ranks of a mesh as a set."""
    return frozenset(ranks_of(mesh))


def group_of_ranks(
    ranks: Sequence[int], *, keep_order: bool = False, purpose: str = "", backend: str | None = None
) -> dist.ProcessGroup:
    """Return the process group of some ranks; the first call creates it.

    Only its members take part in the creation, and all of them must call this. Ranks may have created different numbers
    of other groups before. There is one object per set of ranks, order and purpose, for the life of the default process
    group.

    Args:
        ranks: global ranks in any order, including this rank.
        keep_order: whether the group has the ranks in the given order; otherwise they ascend.
        purpose: a name. Other purposes get other groups, for collectives that are not ordered against these.
        backend: the backend of a group with a purpose; that of the default process group if None.

    Raises:
        ValueError: a rank is listed twice, or this rank is not listed.

    Example:
        >>> group = group_of_ranks([0, 2, 3])                    # doctest: +SKIP
        >>> dist.all_reduce(norm, group=group)                   # doctest: +SKIP
    """
    members = tuple(ranks) if keep_order else tuple(sorted(ranks))
    if len(set(members)) < len(members) or dist.get_rank() not in members:
        raise ValueError(
            f"group_of_ranks({list(ranks)}) on rank {dist.get_rank()}: expected each rank once and this rank among "
            "them; only members of a group may ask for it"
        )
    if members == tuple(range(dist.get_world_size())) and not purpose:
        return dist.group.WORLD
    key = (dist.group.WORLD, members, purpose)
    if key not in _process_groups:
        _process_groups[key] = new_group(members, f"vescale.dtensor:{members}{purpose}", backend)
    return _process_groups[key]
