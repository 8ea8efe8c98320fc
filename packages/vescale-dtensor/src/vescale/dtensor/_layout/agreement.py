"""Agreement between ranks: compare a text over all ranks, and describe the difference.

Ranks that disagree about a plan, a layout or a seed wait for each other in different collectives, or compute with
different values. A comparison beforehand gives one error instead, raised alike on every rank::

    every rank      digest of its text --all-gather--> all digests      equal: done, with 64 bytes per rank
    otherwise       text               --all-gather--> all texts        every rank describes the same difference

A mesh has process groups along its axes only, so the comparison goes axis by axis: after the first axis a rank has the
values of its line of the mesh, after the second those of its plane, after the last those of all ranks.

Texts travel as bytes, in JSON and not as a pickle: no rank runs what another one sends.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch.debugging import without_modes
from .._torch.placements import all_gather_single
from .._torch.waits import Waits, waits_over

__all__ = ["describe_difference", "differing_texts", "gather_texts"]


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
    digests = gather_texts(hashlib.sha256(text.encode()).hexdigest(), over)
    return gather_texts(text, over) if len(set(digests.values())) > 1 else {}


def gather_texts(
    text: str, over: dist.ProcessGroup | DeviceMesh, *, what: str = "comparison of ranks"
) -> dict[int, str]:
    """Return ``{global rank: text}`` of all ranks of a process group or mesh, in their order. All of them call it.

    Args:
        text: of this rank.
        over: the ranks. Those of a group of the backend "fake" do not exist: the text of this one is all there is.
        what: name of the exchange in errors about lost ranks.

    Example:
        >>> of_ranks = map(json.loads, gather_texts(json.dumps(own), mesh).values())    # doctest: +SKIP
    """
    known = {dist.get_rank(): text}
    for waits in waits_over(over):
        with without_modes():
            messages = _gather_bytes(json.dumps(known).encode(), waits, what)
        known = {int(rank): theirs for message in messages for rank, theirs in json.loads(message).items()}
    return dict(sorted(known.items()))


def _gather_bytes(message: bytes, waits: Waits, what: str) -> list[bytes]:
    """Return the messages of all ranks of a group, which are not empty: their sizes travel first."""
    device = _device_type(waits.group)
    sizes = torch.zeros(waits.group.size(), dtype=torch.int64, device=device)
    waits.run(what, all_gather_single, sizes, torch.tensor([len(message)], device=device))
    longest = int(sizes.max())
    padded = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    padded[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    rows = torch.empty(len(sizes) * longest, dtype=torch.uint8, device=device)
    waits.run(what, all_gather_single, rows, padded.to(device))
    pairs = zip(rows.cpu().view(-1, longest), sizes.tolist(), strict=True)
    return [row[:size].numpy().tobytes() for row, size in pairs]


def _device_type(group: dist.ProcessGroup) -> str:
    """Return the type of the devices over which a group carries messages: CPUs, if it can."""
    types = [entry.partition(":")[0] for entry in str(dist.get_backend_config(group)).split(",")]
    return "cpu" if "cpu" in types else types[0]


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
