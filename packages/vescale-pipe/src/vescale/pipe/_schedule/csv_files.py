"""Read and write schedules as the CSV files of ``torch.distributed.pipelining``.

A file has one row per rank and one cell per action (``2F0``, or ``(0F8;7B0)OVERLAP_F_B``), in order. An empty cell is
an idle slot and is dropped. Torch's *compute_only* format has computations alone, and each runtime adds communication;
its *compute_comms* format has the communication, too, as a lowered schedule does.
"""

from __future__ import annotations

import csv
from pathlib import Path

from .._checked import FilePath, checked
from .actions import KINDS, Action, Cell, Schedule, parse_cell


@checked
def to_csv(schedule: Schedule, path: FilePath) -> None:
    """Write a schedule for torch's pipeline runtime: as compute_only, or as compute_comms if it is lowered.

    Example:
        >>> import tempfile, pathlib
        >>> from vescale.pipe import gpipe
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "gpipe.csv"
        >>> to_csv(gpipe(2, 1), path)
        >>> path.read_text().split()
        ['0F0,0B0', '1F0,1B0']
    """
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([str(cell) for cell in rank] for rank in schedule.ranks)


@checked
def from_csv(path: FilePath, *, lowered: bool = False) -> Schedule:
    """Read a CSV file written by ``to_csv`` or torch, and drop its idle cells.

    The schedule is not validated: call ``validate`` for that.

    Args:
        path: the file.
        lowered: whether it may have communication.

    Raises:
        ValueError: a cell is no action, or a communication that is not asked for; the text has its row and column.
    """
    ranks = []
    with Path(path).open(newline="", encoding="utf-8") as file:
        for row_number, row in enumerate(csv.reader(file), 1):
            cells: list[Cell] = []
            for column, cell in enumerate(row, 1):
                if not cell.strip():
                    continue
                try:
                    cells.append(parse_cell(cell))
                except ValueError as error:
                    raise ValueError(f"{path}, row {row_number}, column {column}: {error}") from None
                if not lowered and isinstance(cells[-1], Action) and cells[-1].kind not in KINDS:
                    raise ValueError(
                        f"{path}, row {row_number}, column {column}: expected a computation, got {cell!r}; write the "
                        "file in torch's compute_only format, or pass lowered=True"
                    )
            ranks.append(cells)
    if not any(ranks):
        raise ValueError(f"{path}: expected one row per rank with cells like '0F0', got no action")
    return Schedule.of(ranks)
