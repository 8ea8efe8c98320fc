"""Stages in static mode compute the bits of stages in eager mode; compiled ones train as one process, too."""

import dataclasses
import itertools

import pytest

from vescale import Plan
from vescale_testing import assert_same_training, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one

PLANS = {
    "1f1b": Plan(tp=2, pp=2, num_microbatches=4),
    "zb_h1": Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=2, schedule="zb_h1"),
    "zb_v": Plan(tp=2, pp=2, num_microbatches=4, schedule="zb_v", sequence_parallel=True),
    "interleaved": Plan(dp=2, tp=2, pp=2, zero=3, num_microbatches=2, schedule="interleaved_1f1b"),
    "one stage": Plan(dp=2, tp=2, pp=1, zero=2, num_microbatches=2),
}
PLAIN = [("mixtral", "zb_v", "static")]
OTHERS = [case for case in itertools.product(("llama", "mixtral"), PLANS, ("static", "compile")) if case not in PLAIN]


@pytest.mark.parametrize(
    "family, name, mode", [*PLAIN, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)]
)
def test_training_is_that_of_one_process(family, name, mode):
    training, plan = Training(family, layers=4), PLANS[name]
    expected = train_on_one(training)
    eager = run_ranks(train_in_parallel, plan.world_size, training, plan, timeout=120)
    records = run_ranks(train_in_parallel, plan.world_size, training, dataclasses.replace(plan, mode=mode), timeout=240)
    for record, other in zip(records, eager, strict=True):
        assert_same_training(record, expected, rtol=1e-10)
        if mode == "static":
            assert_same_training(record, other, bitwise=True)
