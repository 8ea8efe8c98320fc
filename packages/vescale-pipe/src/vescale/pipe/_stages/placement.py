"""Which rank of the pipeline axis runs each stage."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .._schedule.actions import Schedule


@dataclass(frozen=True)
class Placement:
    """The rank of every stage, seen from one rank.

    Args:
        ranks: the rank of each stage, its index in the pipeline axis.
        num_ranks: number of ranks of the axis.
        rank: this one.
    """

    ranks: tuple[int, ...]
    num_ranks: int
    rank: int

    @classmethod
    def of(cls, schedule: Schedule, rank: int) -> Placement:
        """Return the placement of a valid schedule's stages."""
        home = {action.stage: rank for rank, action in schedule}
        return cls(tuple(home[stage] for stage in range(schedule.num_stages)), schedule.num_ranks, rank)

    @property
    def num_stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.ranks)

    @property
    def last_rank(self) -> int:
        """The rank of the last stage, which has the loss."""
        return self.ranks[-1]

    @cached_property
    def mine(self) -> tuple[int, ...]:
        """This rank's stages, in order."""
        return self.stages_of(self.rank)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank, in order."""
        return tuple(stage for stage, home in enumerate(self.ranks) if home == rank)

    def is_here(self, stage: int) -> bool:
        """Return whether this rank runs the stage."""
        return self.ranks[stage] == self.rank

    def name_of(self, rank: int) -> str:
        """Return a rank's name in messages: its stages."""
        stages = self.stages_of(rank)
        return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}"
