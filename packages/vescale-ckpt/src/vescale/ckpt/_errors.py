"""The exception of this package, and helpers for its texts.

Every failure of a save or a load raises ``CheckpointError`` with the same text on every rank. Otherwise the other
ranks of the job would block in their next collective.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path


class CheckpointError(ValueError):
    """Raised if a checkpoint cannot be written, read or used; the text has names, ranks and the fix."""


def format_ranks(ranks: Iterable[int]) -> str:
    """Return ranks as compact text: ``rank 2``, ``ranks 0-3, 6``."""
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
    """Return the first ``limit`` items, joined by commas, and the number of the others."""
    listed = list(items)
    shown = ", ".join(listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"


def as_text(path: Path) -> str:
    """Return a path as text, also if its name is none."""
    return os.fsencode(str(path)).decode("utf-8", "backslashreplace")


def require_same(argument: str, values: Sequence[str]) -> None:
    """Check that all ranks have given the same argument.

    Raises:
        CheckpointError: they have not; the text has the value of each.
    """
    if len(set(values)) > 1:
        found = format_some(f"{value} on rank {rank}" for rank, value in enumerate(values))
        raise CheckpointError(f"expected the same {argument} on all ranks, got {found}; pass equal arguments")
