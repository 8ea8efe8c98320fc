"""The schedules: the published orders, for any number of ranks, micro-batches and stages, without deadlock."""

import functools

import pytest

from vescale.pipe import (
    dual_pipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)

ALL = [gpipe, one_f_one_b, looped_bfs, interleaved_1f1b, interleaved_zero_bubble, zb_h1, zb_h2, zb_v, dual_pipe_v]
LOOPED = [looped_bfs, interleaved_1f1b, interleaved_zero_bubble]


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


def test_interleaved_1f1b_begins_as_megatron_does():
    schedule = interleaved_1f1b(4, 8, 2)
    first = [next(n for n, action in enumerate(row) if action.kind == "B") for row in schedule.ranks]
    assert first == [11, 9, 7, 5]  # one forward more than the warm-up of 10, 8, 6, 4
    assert str(schedule).startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0")


def test_zb_v_of_two_ranks():
    assert str(zb_v(2, 4)).split("\n")[0] == (
        "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3"
    )


@pytest.mark.parametrize("make", ALL)
def test_every_size_is_valid(make):
    for num_ranks in range(1, 9):
        for num_microbatches in range(1, 18):
            assert validate(make(num_ranks, num_microbatches)) is None


@pytest.mark.parametrize("make", LOOPED)
@pytest.mark.parametrize("stages_per_rank", [1, 3, 4])
def test_every_number_of_stages_is_valid(make, stages_per_rank):
    for num_ranks in (1, 2, 3, 4, 8):
        for num_microbatches in range(1, 18):
            schedule = make(num_ranks, num_microbatches, stages_per_rank)
            validate(schedule)
            assert schedule.num_stages == num_ranks * stages_per_rank


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2, -1)])
def test_sizes_below_one_are_refused(make, sizes):
    with pytest.raises(ValueError, match="expected an integer of 1 or more for num_"):
        make(*sizes)


@pytest.mark.parametrize("make", [*ALL, functools.partial(looped_bfs, stages_per_rank=2**20)])
def test_sizes_that_would_take_gigabytes_are_refused(make):
    with pytest.raises(ValueError, match=r"num_stages x num_microbatches of at most 8388608, got num_stages="):
        make(2**12, 2**12)
