"""Draw a grid of cells, each with the set of ranks that holds it; cells of one set share a frame.

                0:2         2:4
           ┌───────────┬───────────┐
      0:1  │        rank 0         │       the frame between two cells is drawn only where the ranks differ
           │           ┌───────────┤
      1:2  │           │  rank 1   │
           └───────────┴───────────┘

Pure functions over strings and sets of integers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

__all__ = ["draw", "ranks_text"]

Owners = Sequence[Sequence[frozenset[int]]]

# lines that leave a corner up, down, left and right
CORNERS = dict(
    zip(
        [(u, d, l, r) for u in (0, 1) for d in (0, 1) for l in (0, 1) for r in (0, 1)],  # noqa: E741
        "   ─ ┌┐┬ └┘┴│├┤┼",
        strict=True,
    )
) | {(0, 0, 1, 0): "─", (0, 1, 0, 0): "│", (1, 0, 0, 0): "│"}


def draw(rows: Sequence[str], columns: Sequence[str], owners: Owners, *, long: bool = True) -> list[str]:
    """Return the lines of a grid with headings.

    Args:
        rows: heading of every row.
        columns: heading of every column.
        owners: for each row and column, the ranks that hold the cell.
        long: whether a cell says ``rank 0`` or only ``0``.
    """
    labels = [[ranks_text(cell, word=long) for cell in row] for row in owners]
    widths = [
        max([len(heading), *(len(row[c]) for row in labels if _is_alone(owners, c))]) + 2
        for c, heading in enumerate(columns)
    ]
    _widen(widths, labels, owners)
    margin = max(map(len, rows)) + 2
    headings = " ".join(heading.center(width) for heading, width in zip(columns, widths, strict=True))
    lines = [" " * (margin + 1) + headings] if any(columns) else []
    for r, heading in enumerate(rows):
        lines.append(" " * margin + _border(owners, widths, r))
        lines.append(heading.rjust(margin - 2) + "  " + _cells(owners, widths, labels, r))
    lines.append(" " * margin + _border(owners, widths, len(rows)))
    return [line.rstrip() for line in lines]


def ranks_text(ranks: Collection[int], *, word: bool = True) -> str:
    """Return ranks in few characters: runs as ``0-3``, equal steps as ``0,2..14``.

    Example:
        >>> ranks_text([3]), ranks_text([0, 1, 2, 5]), ranks_text(range(0, 16, 2)), ranks_text([])
        ('rank 3', 'ranks 0-2,5', 'ranks 0,2..14', 'no rank')
    """
    ordered = sorted(ranks)
    if not ordered:
        return "no rank" if word else "-"
    prefix = ("rank " if len(ordered) == 1 else "ranks ") if word else ""
    return prefix + _compact(ordered)


def _compact(ordered: list[int]) -> str:
    steps = {after - before for before, after in itertools.pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]},{ordered[1]}..{ordered[-1]}"
    runs: list[list[int]] = []
    for rank in ordered:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    if len(parts) > 6:
        return f"{','.join(parts[:4])}.. ({len(ordered)} of them)"
    return ",".join(parts)


# ------------------------------------------------------------------------------------------------- frames


def _is_alone(owners: Owners, column: int) -> bool:
    """Return whether a column shares no cell with its neighbors, so that its labels must fit into it."""
    return not any(_open_left(owners, r, column) or _open_left(owners, r, column + 1) for r in range(len(owners)))


def _widen(widths: list[int], labels: Sequence[Sequence[str]], owners: Owners) -> None:
    """Make every run of cells that share a frame wide enough for its label."""
    for r, row in enumerate(labels):
        for start, stop in _runs(owners, r):
            missing = len(row[start]) + 2 - (sum(widths[start:stop]) + stop - start - 1)
            widths[stop - 1] += max(missing, 0)


def _open_left(owners: Owners, r: int, c: int) -> bool:
    """Return whether there is no line between column ``c - 1`` and ``c`` of a row."""
    inside = 0 <= r < len(owners) and 0 < c < len(owners[0])
    return inside and owners[r][c - 1] == owners[r][c]


def _open_top(owners: Owners, r: int, c: int) -> bool:
    inside = 0 < r < len(owners) and 0 <= c < len(owners[0])
    return inside and owners[r - 1][c] == owners[r][c]


def _has_vertical(owners: Owners, r: int, c: int) -> bool:
    return 0 <= r < len(owners) and not _open_left(owners, r, c)


def _has_horizontal(owners: Owners, r: int, c: int) -> bool:
    return 0 <= c < len(owners[0]) and not _open_top(owners, r, c)


def _border(owners: Owners, widths: Sequence[int], r: int) -> str:
    """Return the line above row ``r``."""
    text = ""
    for c in range(len(widths) + 1):
        up, down = _has_vertical(owners, r - 1, c), _has_vertical(owners, r, c)
        left, right = _has_horizontal(owners, r, c - 1), _has_horizontal(owners, r, c)
        text += CORNERS[(up, down, left, right)]
        if c < len(widths):
            text += ("─" if right else " ") * widths[c]
    return text


def _runs(owners: Owners, r: int) -> list[tuple[int, int]]:
    """Return ``(start, stop)`` of the columns of a row that no line separates."""
    starts = [c for c in range(len(owners[0])) if not _open_left(owners, r, c)]
    return list(zip(starts, [*starts[1:], len(owners[0])], strict=True))


def _cells(owners: Owners, widths: Sequence[int], labels: Sequence[Sequence[str]], r: int) -> str:
    text = "│"
    for start, stop in _runs(owners, r):
        width = sum(widths[start:stop]) + stop - start - 1
        first = not any(_open_top(owners, r, c) for c in range(start, stop))
        text += (labels[r][start] if first else "").center(width) + "│"
    return text
