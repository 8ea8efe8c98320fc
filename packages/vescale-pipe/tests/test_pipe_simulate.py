"""The simulator agrees with the closed formulas at equal costs, and with known numbers elsewhere."""

import pytest

from vescale.pipe import Costs, Schedule, ScheduleError, gpipe, one_f_one_b, simulate

SIZES = [(p, m) for p in (1, 2, 3, 4, 8) for m in (1, 2, 3, 8, 17)]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
@pytest.mark.parametrize("p, m", SIZES)
def test_bubble_is_the_formula(make, p, m):
    result = simulate(make(p, m))
    assert result.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert result.makespan == 3 * (m + p - 1)


@pytest.mark.parametrize("p, m", SIZES)
def test_peak_activations_are_the_formula(p, m):
    assert simulate(gpipe(p, m)).peak_activations == (m,) * p
    assert simulate(one_f_one_b(p, m)).peak_activations == tuple(min(p - r, m) for r in range(p))


def test_idle_time_scales_with_forward_and_backward():
    costs = Costs(forward=2.0, input_grad=3.0, weight_grad=4.0)
    assert simulate(one_f_one_b(4, 8), costs).makespan == (8 + 3) * (2.0 + 3.0 + 4.0)


def test_latency_and_unequal_costs_are_the_published_row():
    # p=4, m=8 at F 1, I 1.2, W 0.8, latency 0.05: 28.99 % (and 30.64 % at 1 / 1.4 / 0.6 / 0.1)
    result = simulate(one_f_one_b(4, 8), Costs(1.0, 1.2, 0.8, latency=0.05))
    assert result.bubble == pytest.approx(0.2899, abs=5e-5)
    result = simulate(one_f_one_b(4, 8), Costs(1.0, 1.4, 0.6, latency=0.1))
    assert result.bubble == pytest.approx(0.3064, abs=5e-5)


def test_a_slow_stage_sets_the_pace():
    result = simulate(one_f_one_b(2, 8), Costs(forward=[1.0, 2.0], input_grad=[1.0, 2.0], weight_grad=[1.0, 2.0]))
    assert result.busy == (24.0, 48.0)
    assert result.makespan == 1.0 + 48.0 + 2.0  # the first forward, all of stage 1, the last backward


def test_span_is_shorter_than_the_makespan_on_later_ranks():
    result = simulate(one_f_one_b(4, 8))
    assert result.spans[0] == result.makespan == 33
    assert result.spans[3] == 24
    assert result.span_bubbles[3] == 0


def test_activations_live_until_the_weight_gradient():
    late = Schedule.parse("0F0 0I0 0F1 0I1 0W0 0W1")
    early = Schedule.parse("0F0 0I0 0W0 0F1 0I1 0W1")
    assert simulate(late).peak_activations == (2,)
    assert simulate(early).peak_activations == (1,)


def test_two_stages_per_rank_count_one_half_each():
    schedule = Schedule.parse("0F0 3F0 3B0 0B0; 1F0 2F0 2B0 1B0")
    assert simulate(schedule).peak_activations == (1.0, 1.0)
    assert simulate(schedule).makespan == 12


def test_an_invalid_schedule_is_refused():
    with pytest.raises(ScheduleError, match="got a deadlock"):
        simulate(Schedule.parse("0B0 0F0"))
