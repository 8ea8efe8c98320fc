"""A run that is stopped and continued under another layout is the run that was never stopped."""

from dataclasses import replace

import pytest

from vescale import Plan
from vescale_testing import assert_same_training, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one

FIRST = Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=2)
SECOND = {
    "dp4_tp2": Plan(dp=4, tp=2, zero=2),
    "pp4_dp2": Plan(dp=2, pp=4, zero=0, num_microbatches=2),
    "one_process": Plan(),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A training, what it gives on one process, and where its first half under `FIRST` is saved."""
    training, folder = Training(layers=4, steps=4), str(tmp_path_factory.mktemp("first") / "checkpoint")
    run_ranks(train_in_parallel, FIRST.world_size, training, FIRST, save=folder, stop=2, timeout=120)
    return training, train_on_one(training), folder


@pytest.mark.parametrize("layout", SECOND)
def test_continued_under_another_layout(layout, stopped):
    (training, expected, folder), plan = stopped, SECOND[layout]
    for record in run_ranks(train_in_parallel, plan.world_size, training, plan, load=folder, timeout=120):
        assert_same_training(record, _last_steps(expected, 2), rtol=1e-10)


def test_dropout_continues_where_it_stopped(tmp_path):
    training, folder = Training(dropout=0.1, steps=4), str(tmp_path / "checkpoint")
    expected = train_on_one(training)
    run_ranks(train_in_parallel, 2, training, Plan(tp=2), save=folder, stop=2, timeout=60)
    for record in run_ranks(train_in_parallel, 2, training, Plan(dp=2, zero=2), load=folder, seed=99, timeout=60):
        assert_same_training(record, _last_steps(expected, 2), rtol=1e-10)


@pytest.mark.parametrize("first, second", [("pp2", "one_process"), ("one_process", "pp2"), ("pp2", "tp2_pp2_v")])
def test_a_weight_of_two_stages_continues(first, second, tmp_path):
    """GPT-2's head is its embedding: a checkpoint has both names, and the optimizer's state once."""
    layouts = {
        "one_process": Plan(),
        "pp2": Plan(dp=2, pp=2, zero=2, num_microbatches=2),
        "tp2_pp2_v": Plan(tp=2, pp=2, num_microbatches=2, schedule="zb_v"),
    }
    training, folder = Training("gpt2", layers=4, steps=4), str(tmp_path / "checkpoint")
    expected = train_on_one(training)
    run_ranks(train_in_parallel, layouts[first].world_size, training, layouts[first], save=folder, stop=2, timeout=120)
    plan = layouts[second]
    for record in run_ranks(train_in_parallel, plan.world_size, training, plan, load=folder, seed=99, timeout=120):
        assert_same_training(record, _last_steps(expected, 2), rtol=1e-10)


def test_without_the_checkpoint_it_is_another_training():
    training = Training(steps=4)
    expected = train_on_one(training)
    for record in run_ranks(train_in_parallel, 2, training, Plan(dp=2), stop=2, timeout=60):
        with pytest.raises(AssertionError, match="loss of step 1 differs"):
            assert_same_training(record, _last_steps(expected, 2), rtol=1e-10)


def _last_steps(record, count):
    return replace(record, losses=record.losses[-count:], grad_norms=record.grad_norms[-count:])
