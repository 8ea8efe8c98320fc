"""The rule of one operator: which dims of its operands and results are cut together; `rules` makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from . import cuts
from .cuts import Cut
from .graph import Graph

__all__ = ["Link", "Place", "Rule"]

Place = tuple[int, int]
"""A tensor and one of its dims."""

Follow = Callable[[Cut], Cut | None]


@dataclass(frozen=True)
class Link:
    """What the cut of one dim says of another one.

    Attributes:
        target: the other dim.
        follow: its cut; None if it would be no cut of one dim.
    """

    target: Place
    follow: Follow


@dataclass
class Rule:
    """The rule of one operator.

    Attributes:
        links: of each dim. A view's target dim follows from the cut: see ``views``.
        views: pairs of a tensor and its view, with groups of dims that are split and merged together.
        summed: dims over which the operator sums, those of one sum together.
        free: dims of results that may be cut, whatever the operands are.
        averages: whether the sums are divided by the number of summands, so that equal parts of a dim may be cut only.
    """

    links: dict[Place, list[Link]] = field(default_factory=dict)
    views: list[tuple[int, int]] = field(default_factory=list)
    summed: list[tuple[Place, ...]] = field(default_factory=list)
    free: set[Place] = field(default_factory=set)
    averages: bool = False

    def link(self, one: Place, other: Place, there: Follow | None = None, back: Follow | None = None) -> None:
        """Link two dims; by default with equal cuts."""
        self.links.setdefault(one, []).append(Link(other, there or _same))
        self.links.setdefault(other, []).append(Link(one, back or _same))

    def follow(self, graph: Graph, tensor: int, dim: int, cut: Cut) -> list[tuple[Place, Cut | None]] | None:
        """Return the cuts that follow from one; None if the operator needs all of the dim on every rank."""
        found = [(link.target, link.follow(cut)) for link in self.links.get((tensor, dim), ())]
        known = (tensor, dim) in self.links or (tensor, dim) in self.free
        for pair in self.views:
            if tensor in pair:
                other = pair[1] if tensor == pair[0] else pair[0]
                result = _view(cut, dim, graph.shape(tensor), graph.shape(other))
                found.append(((other, -1 if result is None else result[0]), None if result is None else result[1]))
                known = True
        for places in self.summed:
            if (tensor, dim) in places and not (self.averages and not cuts.is_even(cut)):
                found += [(place, cut) for place in places if place != (tensor, dim)]
                known = True
        return found if known else None

    def sums(self, tensor: int, dim: int) -> bool:
        """Return whether the operator sums over a dim."""
        return any((tensor, dim) in places for places in self.summed)


def _same(cut: Cut) -> Cut:
    return cut


def _view(cut: Cut, dim: int, shape: Sequence[int], new: Sequence[int]) -> tuple[int, Cut] | None:
    """Return the dim of a view that is cut if ``dim`` is, within the dims that are split or merged with it."""
    for start, stop, new_start, new_stop in _groups(shape, new):
        if start <= dim < stop:
            found = cuts.reshaped(cut, dim - start, shape[start:stop], new[new_start:new_stop])
            return None if found is None else (new_start + found[0], found[1])
    return None


def _groups(shape: Sequence[int], new: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Return the smallest ranges of dims of two shapes that have equally many elements."""
    groups, i, j = [], 0, 0
    while i < len(shape) or j < len(new):
        start, new_start = i, j
        left, right = math.prod(shape[i : i + 1]), math.prod(new[j : j + 1])
        i, j = min(i + 1, len(shape)), min(j + 1, len(new))
        while left != right:
            if left < right and i < len(shape):
                left, i = left * shape[i], i + 1
            elif j < len(new):
                right, j = right * new[j], j + 1
            else:
                return groups
        groups.append((start, i, new_start, j))
    return groups
