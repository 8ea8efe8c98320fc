"""A schedule as integers, for checks and simulations of many actions.

The results of actions are numbered: the forward of stage s and micro-batch m gives result ``s * M + m``, with M
micro-batches in a step, and its input gradients (B or I) give ``S * M + s * M + m``. An action needs at most one result
of another stage: the forward that of the stage before, the backward that of the next one. What it needs of its own
stage is earlier in the list of its own rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from .actions import BACKWARD, FORWARD, INPUT_GRAD, KINDS, WEIGHT_GRAD, Action, Schedule, actions_of

__all__ = ["Cells", "Table"]

CODES = {kind: code for code, kind in enumerate(KINDS)}
F, B, I, W = (CODES[kind] for kind in (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD))  # noqa: E741


@dataclass(frozen=True)
class Cells:
    """Cells of one rank, in order. The lists named ``other`` are of the backward of a pair that overlaps.

    Args:
        needs: the result of another stage that the cell waits for; -1 for none.
        gives: the result that it has at its end; -1 for none.
        other_needs: the same of the second action of a pair; -1 if there is none.
        other_gives: the same.
    """

    needs: list[int]
    gives: list[int]
    other_needs: list[int]
    other_gives: list[int]


class Table:
    """The computations of a schedule, rank by rank, in arrays with one entry for each.

    Args:
        schedule: the schedule; communication is left out.

    Attributes:
        actions: the computations.
        rank: rank of each.
        stage: its stage.
        kind: its code, the position in ``KINDS``.
        microbatch: its micro-batch.
        cell: number of its cell, counted over all ranks; two that overlap have the same.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.num_stages, self.num_microbatches = schedule.num_stages, schedule.num_microbatches
        self.num_ranks = schedule.num_ranks
        actions: list[Action] = []
        cells: list[int] = []
        ends = []
        number = 0
        for row in schedule.ranks:
            for cell in row:
                if type(cell) is Action:
                    if cell.kind not in CODES:
                        continue
                    actions.append(cell)
                    cells.append(number)
                else:
                    pair = actions_of(cell)
                    actions += pair
                    cells += [number] * len(pair)
                number += 1
            ends.append(len(actions))
        self.actions = actions
        self.cell = np.array(cells, dtype=np.int64)
        self.rank = np.repeat(np.arange(self.num_ranks), np.diff([0, *ends]))
        self.stage = _integers(a.stage for a in actions)
        self.kind = _integers(CODES[a.kind] for a in actions)
        self.microbatch = _integers(a.microbatch for a in actions)
        self.starts_of_ranks = [0, *ends]

    def result(self, stage: np.ndarray) -> np.ndarray:
        """Return the results of the forwards of the same micro-batches on other stages."""
        results: np.ndarray = stage * self.num_microbatches + self.microbatch
        return results

    def needs(self) -> np.ndarray:
        """Return for each computation the result of another stage that it needs, or -1."""
        forward, gradient = self.kind == F, (self.kind == B) | (self.kind == I)
        total = self.num_stages * self.num_microbatches
        needs = np.where(forward & (self.stage > 0), self.result(self.stage - 1), -1)
        return np.where(gradient & (self.stage + 1 < self.num_stages), total + self.result(self.stage + 1), needs)

    def gives(self) -> np.ndarray:
        """Return for each computation the result that it has at its end, or -1."""
        total = self.num_stages * self.num_microbatches
        given = np.where(self.kind == F, self.result(self.stage), total + self.result(self.stage))
        return np.where(self.kind == W, -1, given)

    def of_cells(self, values: np.ndarray, empty: float) -> tuple[list[list], list[list]]:
        """Return values by rank and cell: those of the first action of each cell, and of the second or ``empty``."""
        first = np.ones(len(self.cell), dtype=bool)
        first[1:] = self.cell[1:] != self.cell[:-1]
        numbers = np.flatnonzero(first)
        others = np.full(len(numbers), empty, dtype=values.dtype)
        others[self.cell[~first]] = values[~first]
        cuts = np.searchsorted(numbers, self.starts_of_ranks[1:-1])
        return (
            [part.tolist() for part in np.split(values[numbers], cuts)],
            [part.tolist() for part in np.split(others, cuts)],
        )

    def cells(self) -> list[Cells]:
        """Return what the cells of each rank need and give."""
        needs, other_needs = self.of_cells(self.needs(), -1)
        gives, other_gives = self.of_cells(self.gives(), -1)
        return [Cells(*lists) for lists in zip(needs, gives, other_needs, other_gives, strict=True)]

    def rank_of_stage(self) -> np.ndarray:
        """Return the rank of each stage, -1 for a stage without actions."""
        ranks = np.full(self.num_stages, -1)
        ranks[self.stage] = self.rank
        return ranks

    def place(self, code: int) -> np.ndarray:
        """Return the cell of each (stage, micro-batch)'s action of a kind; -1 where there is none."""
        place = np.full((self.num_stages, self.num_microbatches), -1)
        chosen = self.kind == code
        place[self.stage[chosen], self.microbatch[chosen]] = self.cell[chosen]
        return place


def _integers(values: Iterable[int]) -> np.ndarray:
    return np.fromiter(values, dtype=np.int64)
