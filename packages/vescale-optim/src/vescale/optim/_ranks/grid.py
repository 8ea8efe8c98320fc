"""The ranks of several mesh axes as one axis, numbered row by row, and their coordinates.

    axes     dp (2) and tp (3)
    places   dp 0:  0 1 2       the ranks of dp 0
             dp 1:  3 4 5

The axes need not be slices of one mesh: the ranks exchange their axes once, and compare the results.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
import torch.distributed as dist

from vescale.dtensor.extension import differing_texts, group_of_ranks

from .axis import Axis

__all__ = ["Coords", "Grid", "Ranks"]

Ranks = tuple[int, ...]
"""The global ranks of an axis, which identify it."""

Coords = Mapping[Ranks, int]
"""Coordinates of a rank by axis."""


class Grid:
    """All ranks that differ from this one on the given axes only.

    Args:
        axes: The axes, at least one, of two ranks or more each. No two of them have two ranks in common.

    Attributes:
        axes: The axes by their ranks.
        coords: Coordinates of every place.
        place: This rank's place.
    """

    def __init__(self, axes: Sequence[Axis]):
        self.axes = {axis.ranks: axis for axis in axes}
        sizes = [range(axis.size) for axis in axes]
        self.coords: list[Coords] = [dict(zip(self.axes, each, strict=True)) for each in itertools.product(*sizes)]
        self.place = self.coords.index({axis.ranks: axis.coord for axis in axes})

    def places(self, axes: Sequence[Axis]) -> list[int]:
        """Return the places that differ from this rank's on ``axes`` only, in increasing order."""
        free = {axis.ranks for axis in axes}
        strides = dict(zip(self.axes, self._strides(), strict=True))
        here = self.coords[self.place]
        choices = [range(axis.size) if ranks in free else [here[ranks]] for ranks, axis in self.axes.items()]
        return [sum(c * s for c, s in zip(each, strides.values(), strict=True)) for each in itertools.product(*choices)]

    def _strides(self) -> list[int]:
        sizes = [axis.size for axis in self.axes.values()]
        return [math.prod(sizes[number + 1 :]) for number in range(len(sizes))]

    @cached_property
    def axis(self) -> Axis:
        """All ranks as one axis. The first access communicates, so all ranks make it together; it may make a process
        group.

        Raises:
            ValueError: On all ranks, if the axes of some ranks intersect differently from those of others.
        """
        axes = list(self.axes.values())
        if len(axes) == 1:
            return axes[0]
        ranks = torch.tensor(axes[-1].ranks, device=axes[-1].device_type)
        for axis in reversed(axes[:-1]):
            every = ranks.new_empty(axis.size * len(ranks))
            axis.all_gather(every, ranks, what="ranks").wait()
            ranks = every
        members = ranks.tolist()
        name = " x ".join(axis.name for axis in axes)
        self._check(members, name)
        return Axis(name, len(members), self.place, group_of_ranks(members, keep_order=True), axes[0].device_type)

    def _check(self, members: list[int], name: str) -> None:
        """Raise on all ranks unless all have the same members, and each finds its own axes in them."""
        axes = self.axes.values()
        is_grid = all(tuple(members[place] for place in self.places([axis])) == axis.ranks for axis in axes)
        for axis in axes:  # what the ranks of one axis have found is a part of what the next axis compares
            is_grid = not differing_texts(f"{members} is a grid: {is_grid}", axis.group) and is_grid
        if not is_grid:
            lines = ", ".join(f"{axis.name}: {list(axis.ranks)}" for axis in axes)
            raise ValueError(
                f"matrices are shared over the axes {name}, whose ranks are no grid: on rank {dist.get_rank()} the "
                f"axes are {lines}, and all together {members}; take the meshes of DDP and of parameters from one "
                "init_device_mesh(..., mesh_dim_names=...)"
            )
