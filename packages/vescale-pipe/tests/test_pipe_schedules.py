"""GPipe and 1F1B: the published orders, for any number of micro-batches, without deadlock."""

import pytest

from vescale.pipe import gpipe, one_f_one_b, validate


def words(schedule, rank):
    return " ".join(f"{action.kind}{action.microbatch}" for action in schedule.ranks[rank])


def test_1f1b_orders_of_four_stages_and_eight_microbatches():
    schedule = one_f_one_b(4, 8)
    assert words(schedule, 0) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert words(schedule, 3) == "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"


def test_1f1b_with_fewer_microbatches_than_stages():
    assert words(one_f_one_b(4, 2), 0) == "F0 F1 B0 B1"
    assert words(one_f_one_b(4, 1), 2) == "F0 B0"


def test_gpipe_runs_all_forwards_first():
    assert words(gpipe(2, 3), 0) == words(gpipe(2, 3), 1) == "F0 F1 F2 B0 B1 B2"


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_every_size_is_valid(make):
    for num_stages in range(1, 9):
        for num_microbatches in range(1, 18):
            assert validate(make(num_stages, num_microbatches)) is None


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2, -1)])
def test_sizes_below_one_are_refused(make, sizes):
    with pytest.raises(ValueError, match="expected an integer of 1 or more for num_"):
        make(*sizes)
