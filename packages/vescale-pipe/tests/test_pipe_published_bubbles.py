"""Bubbles and peaks of the schedules are those of the papers and of other generators, in one simulator."""

import functools

import pytest

from vescale.pipe import (
    Costs,
    dual_pipe_v,
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    simulate,
    zb_h1,
    zb_h2,
    zb_v,
)

of_four = functools.partial(functools.partial, stages_per_rank=4)
SIZES = [(4, 8), (4, 16), (8, 16), (8, 32), (8, 64), (4, 4)]
#: bubble of the makespan in percent, at F = I = W = 1 per rank, without latency
EQUAL = [
    (gpipe, 1, [27.27, 15.79, 30.43, 17.95, 9.86, 42.86], 32),
    (one_f_one_b, 1, [27.27, 15.79, 30.43, 17.95, 9.86, 42.86], 8),
    (looped_bfs, 2, [15.79, 8.57, 17.95, 9.86, 5.19, 27.27], 32),
    (interleaved_1f1b, 2, [15.79, 8.57, 17.95, 9.86, 5.19, 27.27], 11.5),
    (of_four(interleaved_1f1b), 4, [8.57, 4.48, 9.86, 5.19, 2.66, 15.79], 9.75),
    (interleaved_zero_bubble, 2, [5.88, 3.03, 6.80, 3.52, 1.79, 11.11], 8),
    (of_four(interleaved_zero_bubble), 4, [3.03, 1.54, 3.52, 1.79, 0.90, 5.88], 8),
    (zb_h1, 1, [11.11, 5.88, 12.73, 6.80, 3.52, 20.00], 8),
    (zb_h2, 1, [11.11, 5.88, 12.73, 6.80, 3.52, 25.00], 15),
    (zb_v, 2, [5.88, 3.03, 6.80, 3.52, 1.79, 20.00], 8),
    (dual_pipe_v, 2, [11.11, 5.88, 12.73, 6.80, 3.52, 27.27], 8.5),
]
UNEQUAL = {(1.0, 1.2, 0.8, 0.05): 0, (1.0, 1.4, 0.6, 0.1): 1}
#: the same at 8 ranks and 32 micro-batches for the two rows of F, I, W and latency above
AT_UNEQUAL_COSTS = [
    (one_f_one_b, 1, [20.27, 22.46]),
    (interleaved_1f1b, 2, [11.11, 12.33]),
    (of_four(interleaved_1f1b), 4, [8.00, 10.66]),
    (interleaved_zero_bubble, 2, [6.52, 9.35]),
    (of_four(interleaved_zero_bubble), 4, [5.00, 11.52]),
    (zb_h1, 1, [10.45, 13.82]),
    (zb_v, 2, [5.74, 9.09]),
    (dual_pipe_v, 2, [11.68, 16.45]),
]


def costs_of(forward, input_grad, weight_grad, latency, stages_per_rank, **more):
    times = (time / stages_per_rank for time in (forward, input_grad, weight_grad))
    return Costs(*times, latency, **more)


@pytest.mark.parametrize("make, v, bubbles, peak", EQUAL)
def test_equal_costs(make, v, bubbles, peak):
    for (num_ranks, num_microbatches), bubble in zip(SIZES, bubbles, strict=True):
        result = simulate(make(num_ranks, num_microbatches), costs_of(1, 1, 1, 0, v))
        assert 100 * result.bubble == pytest.approx(bubble, abs=5e-3), (num_ranks, num_microbatches)
    assert max(simulate(make(8, 32)).peak_activations) == peak


@pytest.mark.parametrize("make, v, bubbles", AT_UNEQUAL_COSTS)
@pytest.mark.parametrize("costs", UNEQUAL, ids=str)
def test_unequal_costs_and_latency(make, v, bubbles, costs):
    result = simulate(make(8, 32), costs_of(*costs, v))
    assert 100 * result.bubble == pytest.approx(bubbles[UNEQUAL[costs]], abs=5.1e-3)


@pytest.mark.parametrize("make", [zb_h2, zb_v])
def test_no_rank_idles_within_its_span(make):
    assert max(simulate(make(8, 32), costs_of(1, 1, 1, 0, 1)).span_bubbles) == 0
    assert max(simulate(zb_h1(8, 32)).span_bubbles) > 0.06


def test_what_overlaps_takes_the_time_of_the_longer_one():
    none, half, all_of_it = (
        simulate(dual_pipe_v(4, 16), costs_of(1, 1, 1, 0, 2, overlap=x)).makespan for x in (0.0, 0.5, 1.0)
    )
    assert none > half > all_of_it
    assert half == pytest.approx((none + all_of_it) / 2)
