"""A schedule that deadlocks, or computes a gradient twice or never, is refused with the rank and the action."""

import pytest

from vescale.pipe import Schedule, ScheduleError, validate


def check_refused(text, match, **sizes):
    with pytest.raises(ScheduleError, match=match):
        validate(Schedule.parse(text, **sizes))


def test_backward_before_forward():
    check_refused("0B0 0F0", "got a deadlock: rank 0 waits at 0B0 for 0F0; put each action after")


def test_ranks_that_wait_for_each_other():
    # rank 0 wants the gradient of micro-batch 1 before it sends micro-batch 1's activations
    check_refused(
        "0F0 0B0 0F1 0B1; 1F0 1F1 1B0 1B1",
        "got a deadlock: rank 0 waits at 0B0 for 1B0; rank 1 waits at 1F1 for 0F1",
    )


def test_missing_backward():
    check_refused("0F0 0F1 0B0", r"stage 0, micro-batch 1: expected the actions F and B, .*, got \['F'\]")


def test_backward_both_whole_and_split():
    check_refused("0F0 0B0 0W0", r"expected the actions F and B, or F, I and W, got \['F', 'B', 'W'\]")


def test_repeated_action():
    check_refused("0F0 0B0 0B0", "expected each action once, got several of 0B0")


def test_index_out_of_range():
    check_refused(
        "0F0 0B0 0F1 0B1", "expected an action within 1 stages x 1 micro-batches, got 0F1", num_microbatches=1
    )


def test_stage_on_two_ranks():
    check_refused("0F0; 0B0", "expected stage 0 on one rank, got 0B0 on rank 1 and other actions on rank 0")


def test_rank_without_actions():
    check_refused(["0F0 0B0", ""], "rank 1: expected at least one action, got none")


def test_split_backward_and_several_stages_per_rank_are_accepted():
    assert validate(Schedule.parse("0F0 3F0 3I0 3W0 0I0 0W0; 1F0 2F0 2B0 1I0 1W0")) is None


def test_weight_gradient_before_input_gradient():
    check_refused("0F0 0W0 0I0", "rank 0 waits at 0W0 for 0I0")
