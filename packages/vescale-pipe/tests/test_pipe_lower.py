"""Lowering adds every message once, in an order that one buffer cannot deadlock; what was changed is refused."""

import itertools

import pytest

from vescale.pipe import (
    Action,
    Costs,
    Schedule,
    ScheduleError,
    dual_pipe_v,
    interleaved_1f1b,
    interleaved_zero_bubble,
    lower,
    one_f_one_b,
    simulate,
    validate,
    zb_v,
)

ALL = [one_f_one_b, interleaved_1f1b, interleaved_zero_bubble, zb_v, dual_pipe_v]
SIZES = list(itertools.product((1, 2, 3, 4), (1, 2, 5, 9)))


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("num_ranks, num_microbatches", SIZES)
def test_one_buffer_is_enough(make, num_ranks, num_microbatches):
    schedule = make(num_ranks, num_microbatches)
    lowered = lower(schedule, costs=Costs(1.0, 1.3, 0.7, 0.2), unshard=True, max_unsharded=2, reduce_grad=True)
    validate(lowered, buffers=1)
    only = [[cell for cell in row if not isinstance(cell, Action) or len(cell.kind) == 1] for row in lowered.ranks]
    assert Schedule.of(only) == schedule
    assert sum(action.kind == "REDUCE_GRAD" for _, action in lowered) == schedule.num_stages


@pytest.mark.parametrize("make", ALL)
def test_communication_beside_the_computation_changes_no_time(make):
    costs = Costs(1.0, 1.3, 0.7, 0.2)
    schedule = make(4, 8)
    result, lowered = simulate(schedule, costs), simulate(lower(schedule, costs=costs), costs)
    assert lowered.makespan == pytest.approx(result.makespan)
    assert lowered.peak_activations == result.peak_activations
    assert lowered.busy == result.busy


@pytest.mark.parametrize("make", ALL)
@pytest.mark.parametrize("costs", [Costs(0.0, 0.0, 0.0), Costs(1.0, 0.0, 1.0), Costs(0.0, 1.0, 0.0)])
def test_what_takes_no_time_has_its_place(make, costs):
    validate(lower(make(4, 8), costs=costs, unshard=True), buffers=1)


def test_volume():
    costs = Costs(message=[3.0, 5.0, 7.0, 0.0], parameters=[10.0, 1.0, 1.0, 20.0])
    lowered = lower(zb_v(2, 4), unshard=True, max_unsharded=2, reduce_grad=True)  # stages 0 and 3, 1 and 2
    volume = simulate(lowered, costs).volume
    assert volume["SEND_F"] == (4 * 3.0, 4 * 7.0)  # what stages 1 and 2 exchange stays on their rank
    assert volume["RECV_F"] == (4 * 7.0, 4 * 3.0)
    assert volume["SEND_B"] == (4 * 7.0, 4 * 3.0)
    assert volume["UNSHARD"] == volume["REDUCE_GRAD"] == (30.0, 2.0)
    assert simulate(zb_v(2, 4), costs).volume == {}


def test_fewer_gathered_stages_are_gathered_more_often():
    def gathers(limit):
        lowered = lower(interleaved_1f1b(2, 8, 4), unshard=True, max_unsharded=limit)
        validate(lowered)
        return sum(action.kind == "UNSHARD" for _, action in lowered)

    assert gathers(4) == 8  # each stage once
    assert gathers(1) > gathers(2) > gathers(4)


def test_a_gather_and_a_reduction_take_their_time():
    lowered = lower(one_f_one_b(2, 2), unshard=True, reduce_grad=True)
    fast, slow = simulate(lowered), simulate(lowered, Costs(unshard=2.0, reduce_grad=5.0))
    assert fast.makespan == 9
    assert slow.makespan == 9 + 2 + 5  # before the first forward, and after the last backward of stage 0


def changed(schedule, rank, function):
    rows = [list(row) for row in schedule.ranks]
    rows[rank] = function(rows[rank])
    return Schedule.of(rows)


def without(word):
    return lambda row: [cell for cell in row if str(cell) != word]


def to_the_end(word):
    return lambda row: [*without(word)(row), Action.parse(word)]


def to_the_front(word):
    return lambda row: [Action.parse(word), *without(word)(row)]


LOWERED = lower(one_f_one_b(2, 3), unshard=True, reduce_grad=True)
CHANGED = {
    "a lost send": (0, without("0SEND_F1"), "rank 0: expected 0SEND_F1 once, got it 0 times"),
    "a lost receive": (1, without("1RECV_F1"), "rank 1: expected 1RECV_F1 once, got it 0 times"),
    "a message to nobody": (0, to_the_front("0SEND_B0"), "got 0SEND_B0, which is no message between ranks"),
    "a message of another rank": (0, to_the_front("1SEND_B0"), "got 1SEND_B0, which belongs to rank 1"),
    "a receive after its use": (1, to_the_end("1RECV_F0"), "rank 1: expected 1RECV_F0 before 1F0, got it later"),
    "a send before its value": (0, to_the_front("0SEND_F0"), "rank 0: expected 0F0 before 0SEND_F0, got it later"),
    "another order": (0, to_the_end("0SEND_F1"), "rank 1 to receive in the order in which rank 0 sends"),
    "no parameters": (1, without("1UNSHARD"), "rank 1: expected 1UNSHARD before 1F0, got none"),
    "freed too early": (0, to_the_front("0RESHARD"), "rank 0: expected 0UNSHARD before 0RESHARD"),
    "parameters twice": (0, to_the_front("0UNSHARD"), None),
    "a reduction before the last gradient": (0, to_the_front("0REDUCE_GRAD"), "0REDUCE_GRAD once, after the last"),
    "parameters of another rank": (0, to_the_front("1UNSHARD"), "got 1UNSHARD of rank 1"),
}


@pytest.mark.parametrize("name", CHANGED)
def test_changes_are_refused(name):
    rank, change, text = CHANGED[name]
    schedule = changed(LOWERED, rank, change)
    if text is None:  # a second gather: the first one was moved only
        schedule = changed(schedule, rank, lambda row: [row[0], *row])
        text = "rank 0: expected one 0UNSHARD at a time, got a second one"
    with pytest.raises(ScheduleError, match=text):
        validate(schedule)


def test_too_few_buffers_deadlock():
    # rank 0 sends all values first; rank 1 sends a gradient before it receives the next value
    m = range(4)
    first = [f"0F{i}" for i in m] + [f"0SEND_F{i}" for i in m] + [f"0RECV_B{i} 0B{i}" for i in m]
    second = [f"1RECV_F{i} 1F{i} 1B{i} 1SEND_B{i}" for i in m]
    schedule = Schedule.parse([" ".join(first), " ".join(second)])
    validate(schedule)
    validate(schedule, buffers=2)
    with pytest.raises(ScheduleError, match="with 1 buffers, got a deadlock: rank 0 waits at 0SEND_F3 for a receive"):
        validate(schedule, buffers=1)


def test_lowering_twice_is_refused():
    with pytest.raises(ValueError, match="expected a schedule of computations, got one with communication"):
        lower(lower(one_f_one_b(2, 2)))


def test_an_overlap_needs_both_of_its_stages():
    with pytest.raises(ValueError, match=r"expected max_unsharded of 2 or more for the stages of .*OVERLAP_F_B, got 1"):
        lower(dual_pipe_v(2, 4), unshard=True, max_unsharded=1)
