"""Boxes: axis-aligned blocks of a global tensor, and their arithmetic.

A box has ``offsets`` and ``sizes`` per tensor dim. Every supported layout (replicas, uneven shards, shards over several
mesh axes, ranges of rows in a flat buffer) is a set of boxes per rank. Planning works on boxes alone:

    global (4, 6)        +---+---+        Box((0, 3), (2, 3)) is the upper right block,
                         | A | B |        B intersect [1:4, 0:4] = [1:2, 3:4]
                         +---+---+
                         |   C   |        {A, B, C} cover the tensor: disjoint, and their
                         +---+---+        elements add up to 24

A 0-dim tensor has one box, ``Box((), ())``, with one element. All functions are pure.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True, slots=True)
class Box:
    """A block of a global tensor.

    Attributes:
        offsets: first index per dim.
        sizes: number of indices per dim.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Box":
        """Return the box of a full tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        """Count the elements."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return (
            "["
            + ", ".join(f"{start}:{start + size}" for start, size in zip(self.offsets, self.sizes, strict=True))
            + "]"
        )

    def intersect(self, other: "Box") -> "Box | None":
        """Return the common box, or None if the boxes share no element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ends = (min(a + m, b + n) for a, m, b, n in sides)
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return None if any(size <= 0 for size in sizes) else Box(starts, sizes)

    def contains(self, other: "Box") -> bool:
        """Return whether ``other`` lies inside this box."""
        sides = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(a <= b and b + n <= a + m for a, m, b, n in sides)

    def slices(self, *, inside: "Box") -> tuple[slice, ...]:
        """Return the slices of this box in a tensor of the box ``inside``."""
        return tuple(
            slice(start - base, start - base + size)
            for start, size, base in zip(self.offsets, self.sizes, inside.offsets, strict=True)
        )

    def rows(self, dim: int, start: int, end: int) -> "Box":
        """Return the sub-box with indices ``start`` to ``end`` (relative to this box) of one dim."""
        offsets, sizes = list(self.offsets), list(self.sizes)
        offsets[dim] += start
        sizes[dim] = end - start
        return Box(tuple(offsets), tuple(sizes))


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover ``box`` without ``hole``, at most two per dim."""
    common = box.intersect(hole)
    if common is None:
        return [box]
    rest, core = [], box
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        before = start - core.offsets[dim]
        after = before + size
        if before > 0:
            rest.append(core.rows(dim, 0, before))
        if after < core.sizes[dim]:
            rest.append(core.rows(dim, after, core.sizes[dim]))
        core = core.rows(dim, before, after)
    return rest


def uncovered(shape: Sequence[int], boxes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes that cover the part of a tensor outside of ``boxes``."""
    rest = [Box.full(shape)] if math.prod(shape) else []
    for box in boxes:
        rest = [piece for part in rest for piece in subtract(part, box)]
    return rest


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element, or None.

    Sweep along the dim with the most distinct offsets. Boxes are visited by their first index in this dim, and compared
    only with boxes that are still open there. A tensor of n slabs costs n log n, not n squared.
    """
    if len(boxes) < 2:
        return None
    if not boxes[0].offsets:
        return boxes[0], boxes[1]
    dim = max(range(len(boxes[0].offsets)), key=lambda d: len({box.offsets[d] for box in boxes}))
    still_open: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.offsets[dim]):
        start = box.offsets[dim]
        still_open = [other for other in still_open if other.offsets[dim] + other.sizes[dim] > start]
        for other in still_open:
            if other.intersect(box) is not None:
                return other, box
        still_open.append(box)
    return None


def describe_coverage_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return the text of the first fault in a tiling of a tensor by ``boxes``, or None if they tile it exactly once.

    The faults are a box outside of the tensor (or of another number of dims), two overlapping boxes, and a missing box.
    """
    full = Box.full(shape)
    for box in boxes:
        if {len(box.offsets), len(box.sizes)} != {len(shape)} or not full.contains(box):
            return f"box {box} lies outside of the global shape {tuple(shape)}"
    if (pair := find_overlap(boxes)) is not None:
        return f"boxes {pair[0]} and {pair[1]} overlap"
    if sum(box.num_elements for box in boxes) != math.prod(shape):
        missing = uncovered(shape, boxes)
        return f"box {missing[0]} is missing" + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
    return None
