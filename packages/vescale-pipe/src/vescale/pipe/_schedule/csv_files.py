"""Read and write schedules as the CSV files of ``torch.distributed.pipelining``.

A file has one row per rank and one cell per action (``2F0``), in order. An empty cell is an idle slot and is dropped.
This is torch's *compute-only* format: files hold computation, and each runtime adds its own communication.
"""

from __future__ import annotations

import csv
from pathlib import Path

from .._checked import FilePath, checked
from .actions import Action, Schedule


@checked
def to_csv(schedule: Schedule, path: FilePath) -> None:
    """Write a schedule as a compute-only CSV file for torch's pipeline runtime.

    Example:
        >>> import tempfile, pathlib
        >>> from vescale.pipe import gpipe
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "gpipe.csv"
        >>> to_csv(gpipe(2, 1), path)
        >>> path.read_text().split()
        ['0F0,0B0', '1F0,1B0']
    """
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([str(action) for action in rank] for rank in schedule.ranks)


@checked
def from_csv(path: FilePath) -> Schedule:
    """Read a compute-only CSV file written by ``to_csv`` or torch, and drop its idle cells.

    The schedule is not validated: call ``validate`` for that.

    Raises:
        ValueError: a cell is not a computation, for example a communication; the text has its row and column.
    """
    ranks = []
    with Path(path).open(newline="", encoding="utf-8") as file:
        for row_number, row in enumerate(csv.reader(file), 1):
            actions = []
            for column, cell in enumerate(row, 1):
                if not cell.strip():
                    continue
                try:
                    actions.append(Action.parse(cell))
                except ValueError as error:
                    raise ValueError(
                        f"{path}, row {row_number}, column {column}: {error}; write the file in torch's compute_only "
                        "format, which has F, B, I and W alone"
                    ) from None
            ranks.append(tuple(actions))
    actions = [action for rank in ranks for action in rank]
    if not actions:
        raise ValueError(f"{path}: expected one row per rank with cells like '0F0', got no action")
    return Schedule(1 + max(a.stage for a in actions), 1 + max(a.microbatch for a in actions), tuple(ranks))
