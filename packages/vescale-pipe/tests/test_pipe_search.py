"""The search: never worse than the other schedules, within the limit of memory, the same on every rank."""

import pytest

from vescale.pipe import (
    Costs,
    Schedule,
    ScheduleError,
    dual_pipe_v,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    search_schedule,
    simulate,
    v_half,
    v_min,
    validate,
    zb_v,
)

BUILDERS = {
    "loop": (looped_bfs, interleaved_1f1b, interleaved_zero_bubble),
    "V": (zb_v, dual_pipe_v),
}
EFFORT = 200_000


def makespan(schedule, costs, limit):
    result = simulate(schedule, costs)
    return result.makespan if max(result.peak_activations) <= limit else float("inf")


@pytest.mark.parametrize(
    "forward, input_grad, weight_grad, latency, v, target",
    [(1.0, 1.2, 0.8, 0.05, 5, 0.05), (1.0, 1.4, 0.6, 0.1, 3, 0.0883), (1.0, 1.0, 1.0, 0.0, 2, 0.0353)],
)
def test_bubbles_of_eight_ranks_are_below_those_of_shipped_schedules(
    forward, input_grad, weight_grad, latency, v, target
):
    costs = Costs(forward / v, input_grad / v, weight_grad / v, latency)
    result = simulate(search_schedule(8, 32, costs=costs, stages_per_rank=v, effort=EFFORT), costs)
    assert result.bubble < target
    assert max(result.peak_activations) <= 8


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("num_microbatches", [1, 3, 8])
@pytest.mark.parametrize("placement", ["loop", "V"])
def test_it_is_never_worse_than_a_builder(num_ranks, num_microbatches, placement):
    num_stages = 2 * num_ranks
    costs = [
        Costs(0.5, 0.7, 0.3, 0.1),
        # an embedding in front, a head and a loss at the end
        Costs([0.8] + [0.5] * (num_stages - 2) + [1.1], 0.6, [0.9] + [0.4] * (num_stages - 1), 0.02),
    ]
    sizes = {"stages_per_rank": 2, "placement": placement, "effort": EFFORT}
    for each in costs:
        for limit in (float(num_ranks), 2.0 * num_ranks):
            found = search_schedule(num_ranks, num_microbatches, costs=each, activations=limit, **sizes)
            validate(found)
            assert found.num_stages == num_stages
            best = min(makespan(make(num_ranks, num_microbatches), each, limit) for make in BUILDERS[placement])
            assert makespan(found, each, limit) <= best + 1e-9


@pytest.mark.parametrize("placement", ["loop", "V"])
def test_uneven_stages_are_better_than_in_any_builder(placement):
    forward, input_grad, weight_grad = ([time, *[time] * 6, 1.3 * time] for time in (0.5, 0.7, 0.3))
    costs = Costs([0.7, *forward[1:]], input_grad, [0.6, *weight_grad[1:]], 0.1)
    sizes = {"stages_per_rank": 2, "placement": placement, "effort": 2 * EFFORT}
    found = search_schedule(4, 12, costs=costs, **sizes)
    best = min(makespan(make(4, 12), costs, 4) for make in BUILDERS[placement])
    assert makespan(found, costs, 4) < 0.99 * best


@pytest.mark.parametrize("num_ranks", [3, 4, 6])
def test_half_and_a_third_of_the_activations(num_ranks):
    for make, limit in ((v_half, num_ranks / 2 + 1), (v_min, num_ranks / 3 + 1)):
        schedule = make(num_ranks, 12, effort=EFFORT)
        validate(schedule)
        assert max(simulate(schedule).peak_activations) <= limit
        assert simulate(schedule).makespan < simulate(sequential(num_ranks, 12)).makespan / 2


def sequential(num_ranks, num_microbatches):
    """Return one micro-batch after the other, placed as a V."""
    rows = [[] for _ in range(num_ranks)]
    for m in range(num_microbatches):
        for rank, row in enumerate(rows):
            first, second = rank, 2 * num_ranks - 1 - rank
            row += [f"{first}F{m}", f"{second}F{m}", f"{second}B{m}", f"{first}B{m}"]
    return Schedule.parse([" ".join(row) for row in rows])


def test_every_rank_finds_the_same():
    costs = Costs(0.5, 0.6, 0.4, 0.05)
    sizes = {"costs": costs, "stages_per_rank": 2, "placement": "V", "effort": EFFORT}
    assert search_schedule(4, 8, **sizes) == search_schedule(4, 8, **sizes)


@pytest.mark.parametrize("costs", [Costs(0.0, 0.0, 0.0), Costs(1.0, 0.0, 0.0), Costs(0.0, 1.0, 2.0)])
def test_actions_that_take_no_time(costs):
    validate(search_schedule(3, 4, costs=costs, effort=EFFORT))


def test_a_limit_below_one_micro_batch_is_refused():
    with pytest.raises(ScheduleError, match=r"limit of activations that a schedule keeps, got 0.5 micro-batches"):
        search_schedule(2, 4, activations=0.5, effort=EFFORT)


def test_costs_of_other_stages_are_refused():
    with pytest.raises(ValueError, match=r"expected a number for each of 4 stages as costs.forward, got 2"):
        search_schedule(2, 4, costs=Costs([1.0, 1.0]), stages_per_rank=2)
