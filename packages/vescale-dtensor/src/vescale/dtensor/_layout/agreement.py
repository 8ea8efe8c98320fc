"""Agreement between ranks: compare a text over all ranks, and describe the difference.

Ranks that disagree about a plan, a layout or a seed wait for each other in different collectives, or compute with
different values. A comparison beforehand gives one error instead, raised alike on every rank::

    every rank      digest of its text --all-gather--> all digests      equal: done, with 64 bytes per rank
    otherwise       text               --all-gather--> all texts        every rank describes the same difference

A mesh has process groups along its axes only, so the comparison goes axis by axis: after the first axis a rank has the
values of its line of the mesh, after the second those of its plane, after the last those of all ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.waits import waits_over

__all__ = ["describe_difference", "differing_texts", "gather_objects"]

T = TypeVar("T")


def differing_texts(text: str, over: dist.ProcessGroup | DeviceMesh) -> dict[int, str]:
    """Compare a text over the ranks of a process group or mesh. All of them must call this.

    Args:
        text: the text that must be equal on all ranks, such as the lines of a plan. Its length costs no communication
            if all texts are equal.
        over: the ranks to compare. A group of the backend "fake" carries no data: its ranks count as equal.

    Returns:
        An empty dict if all texts are equal; otherwise the text of every rank, by global rank, the same on all ranks.

    Example:
        >>> if texts := differing_texts(repr(plan), mesh):                               # doctest: +SKIP
        ...     raise ValueError(describe_difference("the plan", texts))
    """
    digests = gather_objects(hashlib.sha256(text.encode()).hexdigest(), over)
    return gather_objects(text, over) if len(set(digests.values())) > 1 else {}


def gather_objects(value: T, over: dist.ProcessGroup | DeviceMesh) -> dict[int, T]:
    """Return ``{global rank: value}`` of all ranks of a process group or mesh, in the order of ranks."""
    known = {dist.get_rank(): value}
    for waits in waits_over(over):
        gathered: list[dict[int, T]] = [{}] * waits.group.size()
        gather = functools.partial(dist.all_gather_object, gathered, known, group=waits.group)
        waits.call("comparison of ranks", gather)
        known = {rank: value for part in gathered for rank, value in part.items()}
    return dict(sorted(known.items()))


def describe_difference(what: str, texts: Mapping[int, str]) -> str:
    """Describe the first line in which texts differ by rank, against the text that most ranks have.

    Args:
        what: the subject of the sentence, such as "the plan".
        texts: the text of every rank, as `differing_texts` returns them.

    Returns:
        One sentence; empty if all texts are equal.

    Example:
        >>> describe_difference("the plan", {0: "w: S(0)", 1: "w: R", 2: "w: S(0)"})
        "the plan differs between ranks: ranks 0, 2 have 'w: S(0)', rank 1 has 'w: R'"
    """
    expected = Counter(texts.values()).most_common(1)[0][0]  # on a tie, the first text
    found = []
    for text in dict.fromkeys(texts.values()):
        pairs = zip_longest(expected.splitlines(), text.splitlines(), fillvalue="nothing more")
        if first := next((pair for pair in pairs if pair[0] != pair[1]), None):
            usual, other = (_ranks([r for r, t in texts.items() if t == one]) for one in (expected, text))
            found.append(f"{usual} {first[0]!r}, {other} {first[1]!r}")
    return f"{what} differs between ranks: {'; '.join(found)}" if found else ""


def _ranks(ranks: Sequence[int]) -> str:
    """Return "rank 3 has" or "ranks 0, 1 have"; list at most eight ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}{f' and {len(ranks) - 8} more' if len(ranks) > 8 else ''} have"
