"""The committed curves of the nanoGPT recipe say what its page says, and the figure shows them."""

import copy
import importlib.util
import json
import sys
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "nanogpt_dropout"


@pytest.fixture(scope="module")
def train():
    sys.path.insert(0, str(RECIPE))
    try:
        spec = importlib.util.spec_from_file_location("nanogpt_dropout_train", RECIPE / "train.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(RECIPE))
        sys.modules.pop("model", None)
    return module


@pytest.fixture
def results():
    return json.loads((RECIPE / "losses.json").read_text(encoding="utf-8"))


def test_committed_curves_pass(train, results):
    assert set(results) == {f"{heads} heads, {dtype}" for heads, dtype, _ in train.RUNS}
    for heads, dtype, rules in train.RUNS:
        names = {f"{layout}, {rule}" for layout in train.LAYOUTS for rule in rules}
        assert set(results[f"{heads} heads, {dtype}"]) == names | {"one process"}
    assert all(len(curve) == 20 for losses in results.values() for curve in losses.values())
    assert train.passed(results)


def test_a_wrong_curve_fails(train, results):
    for name, change in (("tp 4, vescale.dtensor", 1e-9), ("tp 4, stock randomness", None)):
        wrong = copy.deepcopy(results)
        losses = wrong["12 heads, float64"]
        if change is None:
            losses[name] = list(losses["one process"])
        else:
            losses[name][-1] += change
        assert not train.passed(wrong)
