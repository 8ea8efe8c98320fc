"""Rectangles of a row-major tensor and flat ranges of its elements: pure functions over tuples of integers.

A **box** is ``(offsets, sizes)``, one integer per dim. A **flat range** ``[start, stop)`` counts elements in row-major
order. Random streams, flat optimizer buffers and checkpoints all need the rectangles that make up a flat range:

    shape (3, 4), range [2, 9)             . . 0 1      box (0, 2) + (1, 2)
                                           2 3 4 5      box (1, 0) + (1, 4)
                                           6 . . .      box (2, 0) + (1, 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

__all__ = ["Box", "chunk", "flat_offset", "flat_range_boxes", "index_from", "intersect", "overlaps"]

Box = tuple[tuple[int, ...], tuple[int, ...]]


def chunk(total: int, num_chunks: int, index: int) -> tuple[int, int]:
    """Return ``(start, length)`` of a chunk by the rule of ``torch.chunk``; the last chunks may be short or empty.

    Example:
        >>> [chunk(5, 4, index) for index in range(4)]
        [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    full = -(-total // num_chunks)
    start = min(full * index, total)
    return start, min(full, total - start)


def flat_range_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the flat range ``[start, stop)`` of a row-major tensor into rectangles, in order.

    Each returned box is itself a contiguous flat range, and there are at most ``2 * len(shape) - 1`` of them (for a
    0-dim tensor: one). The caller must ensure ``0 <= start <= stop <= numel``.

    Example:
        >>> flat_range_boxes((3, 4), 2, 9)
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    return list(_boxes(tuple(shape), start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # complete rows are [first, last)
    if first > last:  # inside one row
        yield from _inner(shape, last, start - last * row, stop - last * row)
        return
    if start < first * row:
        yield from _inner(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if last * row < stop:
        yield from _inner(shape, last, 0, stop - last * row)


def _inner(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    for offsets, sizes in _boxes(shape[1:], start, stop):
        yield (index, *offsets), (1, *sizes)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty.

    Example:
        >>> intersect(((0, 2), (2, 2)), ((1, 0), (4, 3)))
        ((1, 2), (1, 1))
    """
    offsets = tuple(map(max, a[0], b[0]))
    ends = [min(o + s, p + t) for o, s, p, t in zip(*a, *b, strict=True)]
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return (offsets, sizes) if all(size > 0 for size in sizes) else None


def overlaps(shape: Sequence[int], box: Box, start: int, stop: int) -> Iterator[tuple[Box, Box]]:
    """Yield ``(rectangle, common)``: the rectangles of a flat range that intersect ``box``, and each intersection.

    Example:
        >>> list(overlaps((3, 4), ((0, 0), (3, 2)), 2, 6))
        [(((1, 0), (1, 2)), ((1, 0), (1, 2)))]
    """
    for rectangle in flat_range_boxes(shape, start, stop):
        common = intersect(rectangle, box)
        if common is not None:
            yield rectangle, common


def index_from(origin: Sequence[int], box: Box) -> tuple[slice, ...]:
    """Return ``box`` as an index into a tensor whose first element is at ``origin``.

    Example:
        >>> index_from((2, 0), ((3, 1), (2, 4)))
        (slice(1, 3, None), slice(1, 5, None))
    """
    return tuple(slice(o - base, o - base + size) for o, size, base in zip(*box, origin, strict=True))


def flat_offset(shape: Sequence[int], index: Sequence[int]) -> int:
    """Return the row-major position of the element at ``index``.

    Example:
        >>> flat_offset((3, 4), (1, 2))
        6
    """
    position = 0
    for size, i in zip(shape, index, strict=True):
        position = position * size + i
    return position
