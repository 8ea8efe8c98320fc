"""Cut a draw into spans: pure functions over integers.

The elements of a tensor are numbered in the order in which its memory is drawn. The boxes of a rank cut this line into
**spans** of three kinds::

    shape (6, 4), rows [2, 4)      0 . . . . . . 8 ======== 16 . . . . . . 24        . not held: skip it
    columns [1, 3)                 0 ############################### 24              # drawn in scratch, parts kept
                                                                                     = drawn in the local tensor

Cuts lie on multiples of ``block`` elements, and the last span has at least ``block``, because `normal_` works in blocks
(see ``draw``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..._layout.boxes import Box, flat_offset

__all__ = ["KEEP_PARTS", "SKIP", "Span", "spans", "steps"]

SKIP = -2
KEEP_PARTS = -1

MIN_DIRECT = 2048
"""Elements below which a call of its own costs more than a copy out of the scratch."""


class Span(NamedTuple):
    """Elements ``[start, stop)`` of a draw; ``target`` is `SKIP`, `KEEP_PARTS`, or the number of the box it lies in."""

    start: int
    stop: int
    target: int


def spans(shape: Sequence[int], boxes: Sequence[Box], block: int = 1) -> tuple[Span, ...]:
    """Cut a draw of ``shape`` (slowest dim first) into spans, in order.

    Example:
        >>> [tuple(span) for span in spans((2000, 4), [((1000, 0), (800, 4))])]
        [(0, 4000, -2), (4000, 7200, 0), (7200, 8000, -2)]
    """
    numel = math.prod(shape)
    if numel == 0:
        return ()
    cut = [each for span in _merged(_bounds(shape, boxes, numel)) for each in _aligned(span, numel, block)]
    return tuple(_with_gaps(_merged(cut), numel))


def _bounds(shape: Sequence[int], boxes: Sequence[Box], numel: int) -> list[Span]:
    """Return the span of every box, from its first to its last element."""
    found = []
    for number, (offsets, sizes) in enumerate(boxes):
        start = flat_offset(shape, offsets)
        stop = flat_offset(shape, [o + s - 1 for o, s in zip(offsets, sizes, strict=True)]) + 1
        count = math.prod(sizes)
        direct = stop - start == count and (count >= MIN_DIRECT or count == numel)
        found.append(Span(start, stop, number if direct else KEEP_PARTS))
    return sorted(found)


def _merged(found: list[Span]) -> list[Span]:
    """Join overlapping spans, and small spans that are close, into `KEEP_PARTS` spans."""
    merged: list[Span] = []
    for span in found:
        if merged and _joins(merged[-1], span):
            last = merged.pop()
            span = Span(last.start, max(last.stop, span.stop), KEEP_PARTS)
        merged.append(span)
    return merged


def _joins(last: Span, span: Span) -> bool:
    close = span.start - last.stop < MIN_DIRECT and last.target == span.target == KEEP_PARTS
    return span.start < last.stop or close


def _aligned(span: Span, numel: int, block: int) -> Iterator[Span]:
    """Move the ends of a span to legal cuts: those of a direct one inwards, the rest becomes `KEEP_PARTS`."""
    if block == 1:
        yield span
        return
    last = max(numel - block, 0) // block * block  # the last legal cut before the end

    def down(cut: int) -> int:
        return cut if cut == numel else min(cut // block * block, last)

    def up(cut: int) -> int:
        rounded = -(-cut // block) * block
        return rounded if rounded <= last else numel

    start, stop = up(span.start), down(span.stop)
    if span.target != KEEP_PARTS and stop - start >= min(MIN_DIRECT, numel):
        if down(span.start) < start:
            yield Span(down(span.start), start, KEEP_PARTS)
        yield Span(start, stop, span.target)
        if stop < up(span.stop):
            yield Span(stop, up(span.stop), KEEP_PARTS)
    else:
        yield Span(down(span.start), up(span.stop), KEEP_PARTS)


def _with_gaps(found: list[Span], numel: int) -> list[Span]:
    """Fill the gaps: a small one is drawn with the scratch beside it, others are skipped."""
    filled: list[Span] = []
    for span in (*found, Span(numel, numel, SKIP)):
        position = filled[-1].stop if filled else 0
        gap = span.start - position
        if 0 < gap < MIN_DIRECT and span.target == KEEP_PARTS:
            span = Span(position, span.stop, KEEP_PARTS)
        elif 0 < gap < MIN_DIRECT and filled and filled[-1].target == KEEP_PARTS:
            filled[-1] = Span(filled[-1].start, span.start, KEEP_PARTS)
        elif gap:
            filled.append(Span(position, span.start, SKIP))
        filled.append(span)
    return filled[:-1]


def steps(shape: Sequence[int], span: Span, block: int, max_piece: int) -> Iterator[tuple[int, int]]:
    """Cut a span into pieces of at most ``max_piece`` elements (a last one of up to ``block`` more), at row boundaries
    where they fit, so that most pieces are rectangles.

    Example:
        >>> list(steps((5, 30), Span(15, 150, -1), 1, 64))
        [(15, 60), (60, 120), (120, 150)]
    """
    start, stop, _ = span
    if stop - start <= max_piece:
        yield start, stop
        return
    row = next((size for d in range(len(shape)) if (size := math.prod(shape[d:])) <= max_piece), 1)
    unit = math.lcm(row, block)
    if unit > max_piece:
        unit = block
    step = max(max_piece // unit, 1) * unit
    # at the end of the draw, a remainder smaller than a block is joined to the piece before it
    least = block if stop == math.prod(shape) else 1
    while stop - start > step:
        following = (start // step + 1) * step
        if stop - following < least:
            break
        yield start, following
        start = following
    yield start, stop
