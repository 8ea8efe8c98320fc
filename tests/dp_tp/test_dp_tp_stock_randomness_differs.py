"""The negative sibling: with stock torch's random operators the same comparison fails."""

import pytest

from vescale import Plan
from vescale.dtensor import disabled
from vescale_testing import assert_same_training, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp=2)], ids=["tp", "dp"])
def test_without_our_randomness_training_differs(plan):
    training = Training(dropout=0.1)
    expected = train_on_one(training)
    for record in run_ranks(_train_with_stock_randomness, 2, training, plan, timeout=60):
        with pytest.raises(AssertionError, match=r"loss of step 1 differs by \d"):
            assert_same_training(record, expected, rtol=1e-10)


def test_without_dropout_it_does_not_matter():
    training = Training(dropout=0.0)
    expected = train_on_one(training)
    for record in run_ranks(_train_with_stock_randomness, 2, training, Plan(tp=2), timeout=60):
        assert_same_training(record, expected, rtol=1e-10)


def _train_with_stock_randomness(training, plan):
    with disabled("random"):
        return train_in_parallel(training, plan)
