"""Training in 4D is the single-process training: data x tensor x pipeline x ZeRO, below 1e-10 in float64."""

import pytest

from vescale import Plan
from vescale_testing import assert_same_training, halved, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one

LAYOUTS = {
    "dp2_tp2_pp2": Plan(dp=2, tp=2, pp=2, zero=1, num_microbatches=2),
    "dp4_pp2": Plan(dp=4, pp=2, zero=2, num_microbatches=2),
    "tp4": Plan(tp=4),
    "pp4": Plan(pp=4, num_microbatches=4),
    "dp8": Plan(dp=8, zero=1),
    "pp2_tp2_sp_gpipe": Plan(pp=2, tp=2, sequence_parallel=True, schedule="gpipe", num_microbatches=3),
    "fewer_microbatches_than_stages": Plan(pp=4, num_microbatches=2),
    "axes_in_another_order": Plan(dp=2, tp=2, pp=2, zero=2, num_microbatches=1, axis_order=("tp", "dp", "pp")),
}


IN_OTHER_TESTS = ("dp4_pp2", "tp4", "dp8", "pp2_tp2_sp_gpipe", "axes_in_another_order")  # with other models


@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.thorough] * (name in IN_OTHER_TESTS)) for name in LAYOUTS]
)
def test_mixtral_equals_one_process(layout):
    plan = LAYOUTS[layout]
    training = Training("mixtral", layers=4, batch=24 if plan.num_microbatches == 3 else 8)
    expected = train_on_one(training)
    for record in run_ranks(train_in_parallel, plan.world_size, training, plan, timeout=120):
        assert_same_training(record, expected, rtol=1e-10)


@halved
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dense_models_equal_one_process(family, tied):
    training = Training(family, layers=3, overrides=(("tie_word_embeddings", tied),))
    expected = train_on_one(training)
    plan = Plan(dp=1, tp=2, pp=2, num_microbatches=4)
    for record in run_ranks(train_in_parallel, plan.world_size, training, plan, timeout=120):
        assert_same_training(record, expected, rtol=1e-10)
