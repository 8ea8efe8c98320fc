"""Data x tensor x ZeRO parallel training with dropout is the single-process training, for every family and layout.

By default each layout with one or two of the families; `-m thorough` runs the rest of the product.
"""

import pytest

from vescale import Plan
from vescale_testing import assert_same_training, run_ranks
from vescale_testing.training import Training, train_in_parallel, train_on_one

LAYOUTS = [
    Plan(dp=2, tp=2, zero=0),
    Plan(dp=2, tp=2, zero=2, sequence_parallel=True),
    Plan(dp=4, zero=1),
    Plan(tp=4),
    Plan(dp=2, tp=2, zero=1, axis_order=("tp", "pp", "dp")),
    Plan(dp=2, tp=2, zero=2, sequence_parallel=True, mode="static"),
    Plan(dp=2, tp=2, zero=0, mode="static"),
    Plan(dp=2, tp=2, zero=3, sequence_parallel=True, mode="static"),
]


def check(family, layouts):
    training = Training(family, dropout=0.1)
    expected = train_on_one(training)
    for records in run_ranks(_train_all, 4, training, layouts, timeout=180):
        for record in records:
            assert_same_training(record, expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("family", "layouts"), [("llama", LAYOUTS[::2]), ("gpt2", LAYOUTS[1::4]), ("mixtral", LAYOUTS[3::4])]
)
def test_training_with_dropout_equals_one_process(family, layouts):
    check(family, layouts)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "layouts"),
    [
        ("llama", LAYOUTS[1::2]),
        ("gpt2", [*LAYOUTS[::2], *LAYOUTS[3::4]]),
        ("mixtral", [*LAYOUTS[::2], *LAYOUTS[1::4]]),
    ],
)
def test_the_other_layouts(family, layouts):
    check(family, layouts)


def test_a_real_model_trains_like_a_deferred_one():
    training = Training("llama", overrides=(("tie_word_embeddings", True),))
    expected = train_on_one(training)
    for record in run_ranks(train_in_parallel, 4, training, Plan(dp=2, tp=2, zero=2), deferred=False, timeout=60):
        assert_same_training(record, expected, rtol=1e-10)


def _train_all(training, layouts):
    return [train_in_parallel(training, plan) for plan in layouts]
