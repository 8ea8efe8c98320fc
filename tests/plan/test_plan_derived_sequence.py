"""`Plan(tp=2, sequence_parallel=True)` trains models that no ready plan knows as one process does, in both modes.

Sequences have twelve tokens, those of images five, which two ranks do not share evenly. By default a family of each
kind; `-m thorough` runs all of them, on four ranks too.
"""

import importlib
import sys
from pathlib import Path

import pytest

import vescale
from vescale import Plan

sys.path.insert(0, str(Path(__file__).resolve().parent))
training = importlib.import_module("derived_training")
sys.path.pop(0)
models = training.models

ORDINARY = ("bloom", "olmoe", "vit")
REFUSED = {"opt": "whose dims are merged, for every size of them", "mamba": "no sum over ranks of shape"}
PLANS = Plan(tp=2, sequence_parallel=True), Plan(tp=2, sequence_parallel=True, mode="static")


@pytest.mark.parametrize("family", ORDINARY)
def test_a_family_trains_as_on_one_process(family):
    training.check(family, *PLANS)


@pytest.mark.thorough
@pytest.mark.parametrize("family", [name for name in models.FAMILIES if name not in (*ORDINARY, *REFUSED)])
def test_the_other_families_train_as_on_one_process(family):
    training.check(family, *PLANS)


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["bert", "deepseek_v3"])
def test_four_ranks(family):
    training.check(family, Plan(tp=4, sequence_parallel=True), Plan(dp=2, tp=2, mode="static", sequence_parallel=True))


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_activations_cannot_be_cut_are_refused(family):
    """Before there are ranks. OPT merges batch and sequence: each rank's rows depend on the size of the batch."""
    model = models.build(family)
    message = rf"for sequence_parallel=True, got a .* \(.*{REFUSED[family]}"
    with pytest.raises(vescale.dmodule.PlanError, match=message):
        vescale.parallelize(PLANS[0], model, training.OPTIMIZER, example_inputs=models.example(family, model, 0))


def test_a_dropout_with_other_numbers_is_seen():
    """The comparison can fail: here one process draws from another seed."""
    expected = training.train_on_one("vit", seed=2)
    with pytest.raises(AssertionError, match="loss 0"):
        training.assert_equal(training.train_on_one("vit"), expected)
