"""The role of each mesh axis in a call of experts, and the destinations of routed tokens: pure functions.

A call is described by two layouts, that of the experts (from the plan) and that of the tokens (from the call). On each
mesh axis they meet in one of six ways::

    experts          tokens sharded                              tokens replicated
    expert dim       exchange: tokens travel to their experts    masked: each rank takes its experts' share, then a sum
    an inner dim     copies: tokens travel to every part         inner: each rank computes its part, then a sum
    replicated       data: gradients of parameters are partial   nothing: ranks compute the same

``exchange`` and ``copies`` axes together are one all-to-all, ``masked`` and ``inner`` axes together one all-reduce. So
expert parallelism on its own axis, folded over data and tensor parallelism, and with expert tensor parallelism, in any
combination, are the same code.

A *pair* is a token and one of its top-k experts. A *slot* is an expert's place: slots ``0 .. num_experts - 1`` are cut
into equal blocks over the expert axes, the first axis outermost, as ``Shard(0)`` on several axes cuts. A *lane* is a
slot of one rank of the all-to-all's group: ``group rank * num_local + local slot``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement

__all__ = ["Axes", "axes_of", "is_cut", "lane_table"]


def is_cut(placement: Placement) -> bool:
    """Return whether each rank holds a part of its own: any kind of sharding, not only ``Shard``."""
    return not placement.is_replicate() and not placement.is_partial()


@dataclass(frozen=True)
class Axes:
    """The mesh axes by their role in one call. See the table of the module."""

    exchange: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    data: tuple[int, ...] = ()

    @property
    def group(self) -> tuple[int, ...]:
        """Axes of the all-to-all."""
        return tuple(sorted(self.exchange + self.copies))

    @property
    def summed(self) -> tuple[int, ...]:
        """Axes of the all-reduce."""
        return tuple(sorted(self.masked + self.inner))

    @property
    def experts(self) -> tuple[int, ...]:
        """Axes that cut the expert dim."""
        return tuple(sorted(self.exchange + self.masked))


def axes_of(expert_axes: Sequence[int], inner_axes: Sequence[int], tokens: Sequence[Placement]) -> Axes:
    """Sort the mesh axes by their role.

    Args:
        expert_axes: axes that cut the expert dim.
        inner_axes: axes that cut inner dims of the experts.
        tokens: one placement per mesh axis; on an axis that shards in any way, each rank has its own tokens.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> axes_of([0, 1], [], [Shard(0), Replicate()])
        Axes(exchange=(0,), copies=(), masked=(1,), inner=(), data=())
    """
    found: dict[str, list[int]] = {"exchange": [], "copies": [], "masked": [], "inner": [], "data": []}
    for axis, placement in enumerate(tokens):
        own_tokens = is_cut(placement)
        if axis in expert_axes:
            found["exchange" if own_tokens else "masked"].append(axis)
        elif axis in inner_axes:
            found["copies" if own_tokens else "inner"].append(axis)
        elif own_tokens:
            found["data"].append(axis)
    return Axes(**{role: tuple(axes) for role, axes in found.items()})


def lane_table(
    slots: Sequence[int], *, axes: Axes, shape: Sequence[int], coord: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return, for each expert, the lanes that its pairs go to: one per copy, copies in the order of their coordinates.

    Experts that another rank of the masked axes takes care of, and the row after the last expert, which stands for
    "no expert", have the lane ``num_lanes``: nowhere.

    Args:
        slots: the slot of each expert, a permutation.
        axes: what the axes do.
        shape: number of ranks along each mesh axis.
        coord: this rank's coordinate on each mesh axis.

    Example:
        >>> lane_table([0, 1, 2, 3], axes=Axes(exchange=(0,)), shape=[2], coord=[0])      # 2 experts per rank
        ((0,), (1,), (2,), (3,), (4,))
        >>> lane_table([0, 1, 2, 3], axes=Axes(masked=(0,)), shape=[2], coord=[1])
        ((2,), (2,), (0,), (1,), (2,))
    """
    expert_sizes = [shape[axis] for axis in axes.experts]
    num_local = len(slots) // math.prod(expert_sizes)
    num_lanes = num_local * math.prod(shape[axis] for axis in axes.group)
    num_copies = math.prod(shape[axis] for axis in axes.copies)
    nowhere = (num_lanes,) * num_copies
    table = []
    for slot in slots:
        block, local = divmod(slot, num_local)
        owner = dict(zip(axes.experts, _unravel(block, expert_sizes), strict=True))
        if any(owner[axis] != coord[axis] for axis in axes.masked):
            table.append(nowhere)
            continue
        table.append(tuple(rank * num_local + local for rank in _group_ranks(owner, axes, shape)))
    return (*table, nowhere)


def _group_ranks(owner: dict[int, int], axes: Axes, shape: Sequence[int]) -> list[int]:
    """Return the group ranks of all copies of the block of experts at ``owner``."""
    choices = [[owner[axis]] if axis in axes.exchange else range(shape[axis]) for axis in axes.group]
    sizes = [shape[axis] for axis in axes.group]
    return [_ravel(coords, sizes) for coords in itertools.product(*choices)]


def _unravel(index: int, sizes: Sequence[int]) -> list[int]:
    coords = []
    for size in reversed(sizes):
        index, coord = divmod(index, size)
        coords.append(coord)
    return coords[::-1]


def _ravel(coords: Sequence[int], sizes: Sequence[int]) -> int:
    index = 0
    for coord, size in zip(coords, sizes, strict=True):
        index = index * size + coord
    return index
