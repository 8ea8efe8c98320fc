"""Rectangles and flat ranges describe the same elements: checked element by element on every small shape."""

import itertools
import math

import pytest
import torch

from vescale.dtensor.extension import flat_range_boxes

SHAPES = [(), (1,), (5,), (0,), (3, 4), (4, 1), (1, 4), (0, 3), (3, 0), (2, 3, 4), (2, 1, 3), (2, 0, 2), (2, 2, 2, 2)]


def elements(shape, box):
    """The flat positions in a box, in the box's own order."""
    offsets, sizes = box
    grid = torch.arange(math.prod(shape)).view(shape)
    return grid[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].flatten().tolist()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_flat_range_is_cut_into_rectangles_in_order(shape):
    numel = math.prod(shape)
    for start, stop in itertools.combinations_with_replacement(range(numel + 1), 2):
        boxes = flat_range_boxes(shape, start, stop)
        assert [e for box in boxes for e in elements(shape, box)] == list(range(start, stop))
        assert len(boxes) <= max(2 * len(shape) - 1, 1)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4), (5,), ()], ids=str)
def test_a_rectangle_of_a_range_is_itself_a_flat_range(shape):
    numel = math.prod(shape)
    for start, stop in itertools.combinations(range(numel + 1), 2):
        position = start
        for offsets, sizes in flat_range_boxes(shape, start, stop):
            held = elements(shape, (offsets, sizes))
            assert held == list(range(position, position + len(held)))
            position += len(held)


def test_a_wrong_offset_would_be_noticed():
    (first, *_) = flat_range_boxes((3, 4), 2, 9)
    moved = ((first[0][0], first[0][1] - 1), first[1])
    assert elements((3, 4), moved) != elements((3, 4), first)
