"""Plan which launches of a random kernel give the elements of a shard: pure functions over integers.

One round of the kernel's loop fills a **window** of consecutive elements, and the next round starts a fixed number of
words later in the generator. So a window of a draw is a draw of its own, by the same native operator, from a generator
whose offset is shifted; and it may stop early, because an element does not depend on how many follow it::

    window          |   0   |   1   |   2   |   3   |  4 |        N elements, o = offset before the draw
    wanted                      xxxxxxxxxxxxx                     a row shard: one flat range
    launches                |-->|                                 offset o + 1 step, into scratch, keep the end
                                |--------->                       offset o + 2 steps, straight into the shard

A shard that is not a flat range (columns) needs every window that it meets, each drawn into scratch and cut. Where it
is made of flat ranges longer than a window (a sequence cut within each batch row), `flat_runs` takes it apart first.

Guarantee: for a flat range, elements launched <= elements wanted + one window before them (and, where launches draw
multiples of some number, one for the last of them); scratch is at most the larger of one window and `scratch_numel`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..._layout.boxes import Box, flat_offset, index_from, overlaps
from .geometry import Draw, Rounds

__all__ = ["Copy", "Launch", "Request", "flat_runs", "plan"]


class Copy(NamedTuple):
    """Elements that a launch gives to a box: `scratch[first : first + prod(sizes)].view(sizes)[inside]` to `index`."""

    box: int
    index: tuple[slice, ...]
    first: int
    sizes: tuple[int, ...]
    inside: tuple[slice, ...]


class Launch(NamedTuple):
    """One call of the native operator.

    Attributes:
        offset: words after the generator's offset before the draw.
        start: flat position of its first element.
        numel: elements to draw.
        direct: the box whose memory, `[start - first of the box, ... + numel)`, is drawn into; None means scratch.
        copies: what to keep of the scratch.
    """

    offset: int
    start: int
    numel: int
    direct: int | None
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class Request:
    """Elements wanted of a draw.

    Attributes:
        shape: shape of the global tensor, dims from the slowest to the fastest in memory.
        boxes: rectangles of it that are wanted, not empty.
        direct: for each box, whether its elements lie in local memory in their order, so that a draw may go there.
        draws: the launches that stock makes for the global tensor.
        rounds: the loop rounds of the kernel.
        multiple: launches must draw multiples of this many elements.
        scratch_numel: most elements of the scratch, if that is more than a window.
        direct_numel: most elements of a launch into local memory.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    direct: tuple[bool, ...]
    draws: tuple[Draw, ...]
    rounds: Rounds
    multiple: int = 1
    scratch_numel: int = 2**22
    direct_numel: int = 2**26


class _Part(NamedTuple):
    """The elements of a box in a flat range."""

    box: int
    start: int
    stop: int


@functools.lru_cache(maxsize=128)
def plan(request: Request) -> tuple[Launch, ...]:
    """Return the launches that give the wanted elements.

    Example:
        >>> wanted = Request((10, 4), (((3, 0), (4, 4)),), (True,), (Draw(0, 0, 40),), Rounds(8, 4))
        >>> [(launch.offset, launch.start, launch.numel, launch.direct) for launch in plan(wanted)]
        [(8, 16, 12, 0), (4, 8, 8, None)]
    """
    launches: list[Launch] = []
    for draw in request.draws:
        scratch: list[_Part] = []
        for number, box in enumerate(request.boxes):
            part = _clip(request, number, box, draw)
            if part.start >= part.stop:
                continue
            inner = _direct_part(request, part, draw)
            launches += _direct_launches(request, inner, draw)
            outside = [_Part(number, part.start, inner.start), _Part(number, inner.stop, part.stop)]
            scratch += [piece for piece in outside if piece.start < piece.stop]
        launches += _scratch_launches(request, scratch, draw)
    return tuple(launches)


def _clip(request: Request, number: int, box: Box, draw: Draw) -> _Part:
    offsets, sizes = box
    first = flat_offset(request.shape, offsets)
    last = flat_offset(request.shape, [offset + size - 1 for offset, size in zip(offsets, sizes, strict=True)])
    return _Part(number, max(first, draw.start), min(last + 1, draw.start + draw.numel))


# ------------------------------------------------------------------------------------------------- direct


def _direct_part(request: Request, part: _Part, draw: Draw) -> _Part:
    """Return the range of a part that can be drawn where it is kept; an empty one at its start if there is none."""
    nothing = _Part(part.box, part.start, part.start)
    offsets, sizes = request.boxes[part.box]
    last = flat_offset(request.shape, [offset + size - 1 for offset, size in zip(offsets, sizes, strict=True)])
    if not request.direct[part.box] or last - flat_offset(request.shape, offsets) + 1 != math.prod(sizes):
        return nothing
    window = request.rounds.window
    start, stop = part.start - draw.start, part.stop - draw.start
    start = -(-start // window) * window
    if stop % request.multiple:
        stop = stop // window * window
    return _Part(part.box, draw.start + start, draw.start + stop) if start < stop else nothing


def _direct_launches(request: Request, part: _Part, draw: Draw) -> Iterator[Launch]:
    window = request.rounds.window
    size = max(request.direct_numel // window, 1) * window
    for start in range(part.start, part.stop, size):
        offset = draw.offset + (start - draw.start) // window * request.rounds.offset
        yield Launch(offset, start, min(size, part.stop - start), part.box)


# ------------------------------------------------------------------------------------------------- scratch


def _scratch_launches(request: Request, parts: list[_Part], draw: Draw) -> Iterator[Launch]:
    """Yield launches for the windows that hold elements of `parts`, neighbors together."""
    window = request.rounds.window
    needed = _needed(request, parts, draw)
    most = max(request.scratch_numel // window, 1)
    group: list[int] = []
    for number in [*sorted(needed), None]:
        if group and (number != group[-1] + 1 or len(group) == most):
            yield _scratch_launch(request, parts, draw, group[0], needed[group[-1]])
            group = []
        if number is not None:
            group.append(number)


def _needed(request: Request, parts: list[_Part], draw: Draw) -> dict[int, int]:
    """Return, for each window that holds elements of `parts`, the end of the last one (flat)."""
    window, ends = request.rounds.window, {}
    for part in parts:
        for number in range((part.start - draw.start) // window, (part.stop - 1 - draw.start) // window + 1):
            start = max(draw.start + number * window, part.start)
            stop = min(draw.start + (number + 1) * window, part.stop)
            found = [common for _, common in overlaps(request.shape, request.boxes[part.box], start, stop)]
            for offsets, sizes in found:
                last = flat_offset(request.shape, [o + size - 1 for o, size in zip(offsets, sizes, strict=True)])
                ends[number] = max(ends.get(number, 0), last + 1)
    return ends


def _scratch_launch(request: Request, parts: list[_Part], draw: Draw, first: int, end: int) -> Launch:
    start = draw.start + first * request.rounds.window
    numel = -(-(end - start) // request.multiple) * request.multiple
    copies = [copy for part in parts for copy in _copies(request, part, start, end)]
    return Launch(draw.offset + first * request.rounds.offset, start, numel, None, tuple(copies))


def _copies(request: Request, part: _Part, start: int, stop: int) -> Iterator[Copy]:
    box = request.boxes[part.box]
    lowest, highest = max(start, part.start), min(stop, part.stop)
    for (offsets, sizes), common in overlaps(request.shape, box, lowest, highest):
        first = flat_offset(request.shape, offsets) - start
        yield Copy(part.box, index_from(box[0], common), first, sizes, index_from(offsets, common))


def flat_runs(shape: Sequence[int], box: Box, least: int) -> list[Box]:
    """Cut a box into its flat ranges, if they have at least ``least`` elements each.

    Example:
        >>> flat_runs((2, 6, 5), ((0, 2, 0), (2, 3, 5)), 10)
        [((0, 2, 0), (1, 3, 5)), ((1, 2, 0), (1, 3, 5))]
        >>> flat_runs((2, 6, 5), ((0, 2, 0), (2, 3, 5)), 20)
        [((0, 2, 0), (2, 3, 5))]
    """
    offsets, sizes = box
    cut = len(shape) - 1
    while cut > 0 and sizes[cut] == shape[cut]:
        cut -= 1
    if cut <= 0 or math.prod(sizes[cut:]) < least:
        return [box]
    leading = (range(offset, offset + size) for offset, size in zip(offsets[:cut], sizes[:cut], strict=True))
    return [((*index, *offsets[cut:]), (*(1 for _ in index), *sizes[cut:])) for index in itertools.product(*leading)]
