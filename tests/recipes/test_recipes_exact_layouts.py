"""The committed curves of the recipe of exact mode are those of one process, bit for bit, and the check sees a bit."""

import copy
import importlib.util
import json
import math
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "exact_layouts"


@pytest.fixture(scope="module")
def train():
    spec = importlib.util.spec_from_file_location("exact_layouts_train", RECIPE / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results():
    return json.loads((RECIPE / "losses.json").read_text(encoding="utf-8"))


def test_committed_curves_pass(train, results):
    assert set(results) == {train.EXACT, train.ORDINARY}
    assert all(set(losses) == {train.ALONE, *train.LAYOUTS} for losses in results.values())
    assert all(len(curve) == 60 for losses in results.values() for curve in losses.values())
    assert results[train.EXACT][train.ALONE][-1] < results[train.EXACT][train.ALONE][0] / 2
    assert train.passed(results)


def test_a_bit_fails(train, results):
    wrong = copy.deepcopy(results)
    curve = wrong[train.EXACT]["pp 2 x dp 2, ZeRO 2"]
    curve[20] = math.nextafter(curve[20], 0)
    assert not train.passed(wrong)
    wrong = copy.deepcopy(results)
    wrong[train.ORDINARY]["dp 4, ZeRO 3"] = wrong[train.ORDINARY][train.ALONE]
    assert not train.passed(wrong)
