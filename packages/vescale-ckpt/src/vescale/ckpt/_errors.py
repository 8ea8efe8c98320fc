"""The one exception of this package, and how ranks are named in its messages.

Whatever makes a save or a load impossible is raised as ``CheckpointError`` on every rank alike, with the same text: a
job whose ranks disagree about an error hangs in its next collective.
"""

from collections.abc import Iterable


class CheckpointError(ValueError):
    """Say why a checkpoint cannot be written, read or used, with the names, ranks and the fix."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Name ranks compactly: ``rank 2``, ``ranks 0-3, 6``."""
    ordered = sorted(set(ranks))
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"{'rank' if len(ordered) == 1 else 'ranks'} {text}"


def format_some(items: Iterable[str], *, limit: int = 5) -> str:
    """Join the first ``limit`` items with commas and count the others."""
    listed = list(items)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
