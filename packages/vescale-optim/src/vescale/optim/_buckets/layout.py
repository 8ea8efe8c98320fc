"""Positions of tensors in one buffer that is cut into equal shards, so that no cut goes through a block.

A tensor may consist of blocks (a row, a matrix, a quantization block, an expert) that must stay on one rank. A shard
boundary inside of it must fall between two of its blocks. A tensor that does not fit is moved on or placed elsewhere,
so padding lies between tensors only:

    tensors      A: 6, any cut     B: 6 in blocks of 3      C: 4 in one block
    shards of 7  | A A A A A A . | B B B B B B . | C C C C . . . |
    shards of 6  | A A A A A A | B B B B B B | C C C C . . |               the smallest

Tensors and shards begin at multiples of ``align``, so a tensor is cut at multiples of its **step**, the least common
multiple of block and ``align``; it cannot be cut at all if that is no shorter than the tensor.

**In order.** For a given shard size, placing each tensor at the first allowed position is optimal, as an earlier end
never harms what follows. A tensor that contains two boundaries or more needs a shard size that its step divides, so
whether a size works is not monotone in the size; among the multiples of the least common multiple of the smallest steps
it nearly is. So: for each prefix of the sorted steps find the smallest multiple by bisection, look at some sizes just
below, and take the best of all prefixes.

**Packed.** Where the given order wastes much, shards are filled one after the other: with the largest tensors that
cannot be cut and still fit, then with others, of which the last one goes on in the next shard; bisection over the size.

Guarantee: let A be the sum of sizes, each rounded up to ``align``; N the number of shards; g the largest step, a tensor
that cannot be cut counting as a whole; u any common multiple of ``align`` (times ``num_pieces``) and of the steps of
some tensors, and b the size of the largest other tensor with blocks. Then a shard has at most
max((A + (N - 1) g) / N, b) elements, rounded up to u; none can be smaller than max(A / N, g). The reason: each boundary
moves one tensor, by less than its step. With steps that divide each other a shard has less than A / N + 2 g; without
blocks A / N rounded up to ``align``, the minimum.

Everything here is integers: no tensors and no process group. The same input gives the same layout everywhere.

Source: veScale-FSDP (arXiv 2602.22437), whose search over prefixes of granularities this is; the placement is simpler.
Packing by bisection: Coffman, Garey, Johnson, "An application of bin-packing to multiprocessor scheduling" (1978).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BlockedTensor", "Layout", "plan_layout"]

#: Number of sizes just below the result of the bisection that are tried, too.
_NEIGHBORS = 16

#: A layout in the given order is kept if at most this part of a shard could be saved.
_GOOD_ENOUGH = 1 / 128

#: Number of tensors that are considered for the position across the end of a shard.
_CROSSING = 8

Item = tuple[int, int]
"""Size of a tensor, a multiple of ``align``, and its step, at most the size."""


@dataclass(frozen=True)
class BlockedTensor:
    """A tensor of ``numel`` elements that may be cut at multiples of ``block`` only.

    Raises:
        ValueError: If ``block`` is not positive or does not divide ``numel``.
    """

    numel: int
    block: int = 1

    def __post_init__(self):
        if self.numel < 0 or self.block < 1 or self.numel % self.block:
            raise ValueError(f"a tensor of {self.numel} elements cannot consist of blocks of {self.block}")


@dataclass(frozen=True)
class Layout:
    """Positions of tensors in a buffer.

    Attributes:
        starts: First element of each tensor, in the order in which the tensors were given; not always increasing.
        shard_numel: Elements of a shard.
        num_shards: Number of shards.
    """

    starts: tuple[int, ...]
    shard_numel: int
    num_shards: int

    @property
    def numel(self) -> int:
        """Elements of the buffer, padding included."""
        return self.shard_numel * self.num_shards


def plan_layout(tensors: Sequence[BlockedTensor], *, num_shards: int, align: int = 1, num_pieces: int = 1) -> Layout:
    """Lay out ``tensors`` in a buffer of equal shards that is nearly as small as possible.

    Args:
        tensors: Sizes and blocks.
        num_shards: Number of shards.
        align: Tensors, shards and their pieces start at multiples of this.
        num_pieces: Number of equal pieces into which a shard can be cut, through blocks, too.

    Raises:
        ValueError: If ``num_shards``, ``align`` or ``num_pieces`` is not positive.

    Example:
        >>> plan_layout([BlockedTensor(6), BlockedTensor(6, block=3), BlockedTensor(4, block=4)], num_shards=3)
        Layout(starts=(0, 6, 12), shard_numel=6, num_shards=3)
    """
    if min(num_shards, align, num_pieces) < 1:
        raise ValueError(
            f"num_shards, align and num_pieces must be positive, got {num_shards}, {align} and {num_pieces}"
        )
    problem = _Problem(tensors, num_shards, align, num_pieces)
    if problem.total == 0:
        return Layout((0,) * len(tensors), 0, num_shards)
    shard_numel, starts = _in_order(problem)
    if shard_numel > problem.lowest * (1 + _GOOD_ENOUGH):
        shard_numel, starts = _packed(problem, shard_numel, starts)
    return Layout(tuple(starts), shard_numel, num_shards)


class _Problem:
    """The input of both searches.

    Attributes:
        items: Sizes and steps.
        blocked: The distinct items that cannot be cut everywhere.
        shard_align: The size of a shard is a multiple of this, itself a multiple of ``align``.
        total: Sum of sizes.
        lowest: No shard can be smaller.
        enough: Shards of at least this size hold everything, if steps allow it.
    """

    def __init__(self, tensors: Sequence[BlockedTensor], num_shards: int, align: int, num_pieces: int = 1):
        self.num_shards = num_shards
        self.align = align
        self.shard_align = align * num_pieces
        self.items: list[Item] = []
        for tensor in tensors:
            size = _round_up(tensor.numel, align)
            self.items.append((size, min(math.lcm(tensor.block, align), max(size, align))))
        self.blocked = sorted({item for item in self.items if item[1] > align})
        self.total = sum(size for size, _ in self.items)
        longest = max((step for _, step in self.blocked), default=align)
        self.lowest = _round_up(max(-(-self.total // num_shards), longest), self.shard_align)
        self.enough = max(-(-(self.total + (num_shards - 1) * (longest - align)) // num_shards), self.lowest)

    def slack(self, shard_numel: int) -> int:
        """Return the number of padding elements that a buffer may have."""
        return shard_numel * self.num_shards - self.total

    def units(self) -> list[int]:
        """Return, for each prefix of the sorted steps at which tensors are cut, the least common multiple."""
        units = [self.shard_align]
        for step in sorted({step for size, step in self.blocked if step < size}):
            unit = math.lcm(units[-1], step)
            if unit > self.total:
                break
            if unit != units[-1]:
                units.append(unit)
        return units


# ------------------------------------------------------------------------------------------------- in order


def _in_order(problem: _Problem) -> tuple[int, list[int]]:
    """Return a small shard size, and the positions of tensors one after the other."""
    best: int | None = None
    for unit in problem.units():
        low = _round_up(problem.lowest, unit)
        if best is not None and low >= best:
            break
        undivided = max((size for size, step in problem.blocked if unit % step), default=0)
        high = _round_up(max(problem.enough, undivided), unit)  # it fits: see the guarantee above
        if best is not None and high >= best:
            high = (best - 1) // unit * unit
            if not _fits(problem, high):
                continue
        best = _smallest(problem, low // unit, high // unit, unit)
    return best, _place(problem, best)


def _smallest(problem: _Problem, low: int, high: int, unit: int) -> int:
    """Return a small multiple of ``unit`` that works, not above ``high * unit``, which does."""
    if _fits(problem, low * unit):
        return low * unit
    lowest = low + 1
    low = lowest
    while low < high:
        middle = (low + high) // 2
        if _fits(problem, middle * unit):
            high = middle
        else:
            low = middle + 1
    below = range(max(lowest, high - _NEIGHBORS), high)
    return next((size * unit for size in below if _fits(problem, size * unit)), high * unit)


def _fits(problem: _Problem, shard_numel: int) -> bool:
    return _place(problem, shard_numel) is not None


def _place(problem: _Problem, shard_numel: int) -> list[int] | None:
    """Return the first allowed position of each tensor, or None if they do not fit."""
    slack, align = problem.slack(shard_numel), problem.align
    if slack < 0:
        return None
    starts, position, boundary = [], 0, shard_numel
    for item in problem.items:
        stop = position + item[0]
        if stop > boundary:
            if item[1] > align:
                start = _first_position(item, position, shard_numel)
                slack -= math.inf if start is None else start - position
                if slack < 0:
                    return None
                position, stop = start, start + item[0]
            boundary = (stop // shard_numel + 1) * shard_numel
        starts.append(position)
        position = stop
    return starts


def _first_position(item: Item, after: int, shard_numel: int) -> int | None:
    """Return the first position from ``after`` on at which every boundary inside is between steps."""
    size, step = item
    boundary = (after // shard_numel + 1) * shard_numel
    if after + size <= boundary:
        return after
    every = shard_numel % step == 0  # if one boundary is between steps, all are
    start = boundary - (boundary - after) // step * step
    if start < boundary and (every or start + size <= boundary + shard_numel):
        return start
    if every or size <= shard_numel:
        return boundary
    start = boundary + shard_numel - shard_numel // step * step  # one boundary inside, and the end before the next
    return start if start + size <= boundary + 2 * shard_numel else None


# --------------------------------------------------------------------------------------------------- packed


def _packed(problem: _Problem, best: int, starts: list[int]) -> tuple[int, list[int]]:
    """Return a smaller shard size than ``best``, and positions in another order; or ``best`` and ``starts``."""
    spanning = (step for size, step in problem.blocked if size > problem.lowest and step < size)
    unit = math.lcm(problem.shard_align, *spanning)
    low, high = -(-problem.lowest // unit), -(-best // unit)
    size, enough = low, max(1, int(low * _GOOD_ENOUGH))
    while low < high:
        found = _pack(problem, size * unit)
        if found is None:
            low = size + 1
        else:
            best, starts, high = size * unit, found, size
        if high - low < enough:
            break
        size = (low + high) // 2
    return best, starts


def _pack(problem: _Problem, shard_numel: int) -> list[int] | None:
    """Return positions of all tensors, filling one shard after the other, or None if they do not fit."""
    shelf = _Shelf(problem, shard_numel)
    while shelf.slack >= 0 and (shelf.atoms or shelf.fillers):
        gap = shard_numel - shelf.position % shard_numel
        if not (shelf.put_whole(shelf.atoms, gap) or shelf.put_whole(shelf.fillers, gap) or shelf.put_across(gap)):
            shelf.skip(gap)
    return shelf.starts if shelf.slack >= 0 else None


class _Shelf:
    """A buffer that is being filled.

    Attributes:
        atoms: Tensors that cannot be cut, by increasing size: ``(size, step, number)``.
        fillers: Tensors that can be cut, in the same form.
        position: Where the next tensor may begin.
        slack: Padding that is left.
    """

    def __init__(self, problem: _Problem, shard_numel: int):
        self.shard_numel = shard_numel
        self.slack = problem.slack(shard_numel)
        self.starts = [0] * len(problem.items)
        self.position = 0
        self.atoms: list[tuple[int, int, int]] = []
        self.fillers: list[tuple[int, int, int]] = []
        long = []
        for number, (size, step) in enumerate(problem.items):
            if step > problem.align and size > shard_numel:
                long.append((step, size, number))
            elif step == size and step > problem.align:
                self.atoms.append((size, step, number))
            else:
                self.fillers.append((size, step, number))
        self.atoms.sort()
        self.fillers.sort()
        for step, size, number in sorted(long, reverse=True):
            self._put(_first_position((size, step), self.position, shard_numel), size, number)

    def _put(self, start: int | None, size: int, number: int) -> None:
        if start is None:
            self.slack = -1
            return
        self.slack -= start - self.position
        self.starts[number] = start
        self.position = start + size

    def put_whole(self, items: list[tuple[int, int, int]], gap: int) -> bool:
        """Place the largest tensor that fits into the rest of the shard."""
        index = bisect_right(items, (gap, math.inf)) - 1
        if index < 0:
            return False
        size, _, number = items.pop(index)
        self._put(self.position, size, number)
        return True

    def put_across(self, gap: int) -> bool:
        """Place, across the end of the shard, the tensor that leaves the least padding before it."""
        first = bisect_right(self.fillers, (gap, math.inf))
        candidates = [
            (gap % step, index)
            for index, (_, step, _) in enumerate(self.fillers[first : first + _CROSSING], first)
            if step <= gap
        ]
        if not candidates:
            return False
        padding, index = min(candidates)
        size, _, number = self.fillers.pop(index)
        self._put(self.position + padding, size, number)
        return True

    def skip(self, gap: int) -> None:
        """Leave the rest of the shard empty."""
        self.slack -= gap
        self.position += gap


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
