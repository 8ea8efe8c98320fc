"""All ranks of a mesh have the same plan, checked before the first collective that would depend on it.

Ranks that place one parameter differently would wait for each other in different collectives. They compare the text of
their resolved plans once, along each mesh axis, and a difference is an error on all of them that names ranks and entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .errors import PlanError

__all__ = ["check_agreement", "difference"]


def check_agreement(lines: Sequence[str], mesh: DeviceMesh) -> None:
    """Compare the lines of a resolved plan over all ranks of ``mesh``. One small gather of objects per axis.

    Raises:
        PlanError: on every rank of a group whose members differ, naming two ranks and their first difference.
    """
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if dist.get_backend(group) == "fake":  # carries no data between ranks
            continue
        gathered: list[Sequence[str]] = [()] * dist.get_world_size(group)
        dist.all_gather_object(gathered, list(lines), group=group)
        if text := difference(dict(zip(dist.get_process_group_ranks(group), gathered, strict=True))):
            raise PlanError(text)


def difference(plans: dict[int, Sequence[str]]) -> str:
    """Describe the first difference between plans by rank; empty if they are equal.

    Example:
        >>> difference({0: ["parameter w: S(0)"], 1: ["parameter w: R"]})
        "the plan differs between ranks: rank 0 has 'parameter w: S(0)', rank 1 has 'parameter w: R'"
    """
    (first, expected), *others = plans.items()
    for rank, lines in others:
        for one, other in zip_longest(expected, lines, fillvalue="nothing more"):
            if one != other:
                return f"the plan differs between ranks: rank {first} has {one!r}, rank {rank} has {other!r}"
    return ""
