"""Box arithmetic agrees with painting the same boxes onto a small tensor, element by element."""

import itertools

import pytest
import torch

from vescale.ckpt._format.boxes import Box, describe_coverage_fault, find_overlap, subtract, uncovered

SHAPE = (3, 4)
ALL_BOXES = [
    Box((row, col), (rows, cols))
    for row, col in itertools.product(range(3), range(4))
    for rows, cols in itertools.product(range(1, 4 - row), range(1, 5 - col))
]


def paint(*boxes: Box, shape=SHAPE) -> torch.Tensor:
    counts = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        counts[box.slices(inside=Box.full(shape))] += 1
    return counts


def test_intersection_and_difference_of_every_pair_match_their_elements():
    for a, b in itertools.product(ALL_BOXES, repeat=2):
        both = (paint(a) + paint(b)) == 2
        common = a.intersect(b)
        assert both.any() == (common is not None)
        if common is not None:
            assert torch.equal(paint(common) == 1, both)
        assert torch.equal(paint(*subtract(a, b)), paint(a) * (1 - paint(b)))
        assert a.contains(b) == bool((paint(a) >= paint(b)).all())


def test_a_missing_element_is_found_wherever_it_is():
    rows = [Box((row, 0), (1, 4)) for row in range(3)]
    assert uncovered(SHAPE, rows) == []
    assert describe_coverage_fault(SHAPE, rows) is None
    for row, col in itertools.product(range(3), range(4)):
        holed = [part for box in rows for part in subtract(box, Box((row, col), (1, 1)))]
        assert describe_coverage_fault(SHAPE, holed) == f"box [{row}:{row + 1}, {col}:{col + 1}] is missing"


def test_overlaps_are_found_among_many_boxes():
    columns = [Box((0, col), (1000, 1)) for col in range(500)]
    assert find_overlap(columns) is None
    assert find_overlap([*columns, Box((999, 499), (1, 1))]) == (columns[499], Box((999, 499), (1, 1)))
    assert describe_coverage_fault((4,), [Box((0,), (3,)), Box((2,), (2,))]) == "boxes [0:3] and [2:4] overlap"


def test_a_box_outside_of_the_tensor_is_reported():
    assert "outside of the global shape (4,)" in describe_coverage_fault((4,), [Box((2,), (3,))])
    assert "outside of the global shape (4,)" in describe_coverage_fault((4,), [Box((0, 0), (4, 1))])


@pytest.mark.parametrize(("shape", "boxes"), [((), [Box((), ())]), ((0, 5), []), ((1, 1), [Box((0, 0), (1, 1))])])
def test_scalars_and_empty_tensors_are_covered(shape, boxes):
    assert describe_coverage_fault(shape, boxes) is None


def test_a_scalar_without_a_box_is_missing():
    assert describe_coverage_fault((), []) == "box [] is missing"
