"""All ranks of a mesh have the same plan, checked before the first collective that would depend on it.

Ranks that place one parameter differently would wait for each other in different collectives. They compare a digest of
their resolved plans once; if any two differ, every rank of the mesh gets the texts and raises the same error, which
names the ranks and the first entry in which they differ.

A mesh has groups along its axes only, so what all ranks know spreads axis by axis: after the first axis a rank knows
its line of the mesh, after the second its plane, after the last all of it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import PlanError

__all__ = ["check_agreement", "difference"]


def check_agreement(lines: Sequence[str], mesh: DeviceMesh) -> None:
    """Compare the lines of a resolved plan over all ranks of ``mesh``. One small gather of objects per axis.

    Raises:
        PlanError: on every rank of the mesh if any two differ, naming ranks and their first difference.
    """
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    digests = _gather(digest, mesh)
    if len(set(digests.values())) > 1:
        raise PlanError(difference(_gather(tuple(lines), mesh)))


def _gather(value: object, mesh: DeviceMesh) -> dict[int, object]:
    """Return ``{global rank: value}`` of all ranks of ``mesh``."""
    known = {dist.get_rank(): value}
    for axis in range(mesh.ndim):
        group = mesh.get_group(axis)
        if dist.get_backend(group) == "fake":  # carries no data between ranks
            continue
        gathered: list[dict[int, object]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(gathered, known, group=group)
        known = {rank: value for part in gathered for rank, value in part.items()}
    return dict(sorted(known.items()))


def difference(plans: Mapping[int, Sequence[str]]) -> str:
    """Describe how plans differ by rank, against the plan that most ranks have; empty if they are equal.

    Example:
        >>> difference({0: ["parameter w: S(0)"], 1: ["parameter w: R"], 2: ["parameter w: S(0)"]})
        "the plan differs between ranks: ranks 0, 2 have 'parameter w: S(0)', rank 1 has 'parameter w: R'"
    """
    texts = {rank: tuple(lines) for rank, lines in plans.items()}
    expected = Counter(texts.values()).most_common(1)[0][0]  # of equally many the one that comes first
    found = []
    for text in dict.fromkeys(texts.values()):
        pairs = zip_longest(expected, text, fillvalue="nothing more")
        if first := next((pair for pair in pairs if pair[0] != pair[1]), None):
            usual, other = (_ranks([rank for rank, t in texts.items() if t == plan]) for plan in (expected, text))
            found.append(f"{usual} {first[0]!r}, {other} {first[1]!r}")
    return f"the plan differs between ranks: {'; '.join(found)}" if found else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Return 'rank 3 has', 'ranks 0, 1 have', or with many ranks the first of them."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''} have"
