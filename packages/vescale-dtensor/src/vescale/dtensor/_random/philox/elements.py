"""One draw of the stream "philox": which words belong to which elements, in pieces of bounded size.

Element ``e`` of a draw (``e`` counts the elements of the **global** tensor in row-major order) takes words from block
``e // per_block``, lane ``e % per_block``. A box is a set of **runs**: consecutive elements of the global tensor, one
run for each index of the outer dims::

    global shape (4, 8), box rows 1-2, columns 2-6, four elements per block

    row 1   . . x x | x x x .       run of 5 from element 10: blocks 2, 3, 4; the first two lanes are dropped
    row 2   . . x x | x x x .       run of 5 from element 18: blocks 4, 5, 6

Blocks are computed for full runs, as many as fit into a piece, or for parts of a long run. A rank that holds ``n``
elements in runs of length ``L`` computes at most ``n / 4 + 2 n / L`` blocks, for any size of the global tensor.

Elements are numbered in logical order, so the memory layout of a tensor does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..._layout.boxes import Box, flat_offset, flat_range_boxes, index_from
from ..global_position import BatchWindow, local_of, position_of
from .cipher import BLOCKS_AT_A_TIME, Key, blocks
from .values import Distribution

__all__ = ["Draw", "sample_box"]

ELEMENTS_AT_A_TIME = {"cpu": 4 * BLOCKS_AT_A_TIME}
ELEMENTS_ELSEWHERE = 2**22
"""Elements of a piece on other devices, where every operation is a kernel launch: 32 MiB of words in 64 bits."""


@dataclass(frozen=True)
class Draw:
    """One draw of the stream.

    Attributes:
        op: the random operator, for messages.
        key: key of the draw.
        windows: batch windows, innermost first.
    """

    op: object
    key: Key
    windows: tuple[BatchWindow, ...]

    def each(self, distribution: Distribution, tensor: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield ``(values, view of tensor, views of others)`` for parts that together cover the local elements.

        Args:
            distribution: how words become values.
            tensor: the tensor to compute values for.
            others: local tensors laid out like the local tensor of ``tensor``.

        Raises:
            UnsupportedRandomOperator: the tensor has no global position, see `position_of`.
        """
        position = position_of(self.op, tensor, self.windows, logical=True)
        local = local_of(tensor)
        columns = [position.boxed_views(each) for each in (local, *others)]
        for (box, view), *rest in zip(*columns, strict=True):
            for index, values in sample_box(distribution, self.key, position.shape, box, local.device):
                yield values, view[index], *(other[index] for _, other in rest)

    def fill(self, distribution: Distribution, tensor: Tensor, put: Callable[[Tensor, Tensor], object]) -> Tensor:
        """Call ``put(view, values)`` for all local elements of ``tensor`` and return it."""
        for values, view in self.each(distribution, tensor):
            put(view, values)
        return tensor


def sample_box(
    distribution: Distribution, key: Key, shape: tuple[int, ...], box: Box, device: torch.device
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Yield ``(index into the box, values)`` for rectangles that together cover ``box``, in row-major order.

    Args:
        distribution: how words become values.
        key: key of the draw.
        shape: global shape.
        box: the rectangle of it that is wanted.
        device: where the values are wanted.
    """
    sizes = box[1]
    if math.prod(sizes) == 0:
        return
    run = run_length(shape, sizes)
    limit = max(ELEMENTS_AT_A_TIME.get(device.type, ELEMENTS_ELSEWHERE), distribution.per_block)
    for start, stop in _pieces(math.prod(sizes), run, limit):
        values = _sample_runs(distribution, key, *_runs(shape, box, run, start, stop), device)
        for rectangle in flat_range_boxes(sizes, start, stop):
            first = flat_offset(sizes, rectangle[0]) - start
            part = values[first : first + math.prod(rectangle[1])]
            yield index_from((0,) * len(sizes), rectangle), part.view(rectangle[1])


def run_length(shape: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    """Return how many elements of a box follow each other in the global tensor.

    Example:
        >>> run_length((4, 8), (2, 5)), run_length((4, 8), (2, 8)), run_length((), ())
        (5, 16, 1)
    """
    length = 1
    for total, size in zip(reversed(shape), reversed(sizes), strict=True):
        length *= size
        if size != total:
            break
    return length


def _pieces(numel: int, run: int, limit: int) -> Iterator[tuple[int, int]]:
    """Cut the flat range of a box into ranges of full runs, or into parts of one run where runs are long."""
    if run <= limit:
        step = limit // run * run
        yield from ((start, min(start + step, numel)) for start in range(0, numel, step))
        return
    for base in range(0, numel, run):
        yield from ((start, min(start + limit, base + run)) for start in range(base, base + run, limit))


def _runs(shape: tuple[int, ...], box: Box, run: int, start: int, stop: int) -> tuple[Tensor, int]:
    """Return the global index of each run's first element in a flat range of a box, and the runs' length."""
    if stop - start < run or run == math.prod(box[1]):
        inside = start % run
        first = _global_index(shape, box, np.array([start - inside])) + inside
        return torch.from_numpy(first), stop - start
    return torch.from_numpy(_global_index(shape, box, np.arange(start, stop, run))), run


def _global_index(shape: tuple[int, ...], box: Box, inside: np.ndarray) -> np.ndarray:
    """Return the row-major global indices of elements of a box, given those inside the box."""
    result = np.zeros_like(inside)
    stride = 1
    for total, offset, size in zip(reversed(shape), reversed(box[0]), reversed(box[1]), strict=True):
        inside, index = np.divmod(inside, size)
        result += (index + offset) * stride
        stride *= total
    return result


def _sample_runs(distribution: Distribution, key: Key, starts: Tensor, length: int, device: torch.device) -> Tensor:
    """Return the values of runs of ``length`` elements, one after the other, flat."""
    per_block = distribution.per_block
    first, lane = starts // per_block, starts % per_block
    num_blocks = -(-(int(lane.max()) + length) // per_block)
    values = distribution.values(blocks(key, first, num_blocks, device)).view(len(starts), -1)
    if len(starts) == 1 or bool((lane == lane[0]).all()):
        return values.narrow(1, int(lane[0]), length).reshape(-1)
    window = lane[:, None] + torch.arange(length)
    return values.gather(1, window.to(device)).reshape(-1)
