"""Plans, drawn at random or generated, train as one process does or are refused before a process group is used."""

import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
executability = importlib.import_module("executability")
sys.path.pop(0)


@pytest.mark.parametrize("model", ["llama", "opt"])
def test_random_plans_run_or_are_refused(model):
    found = {str(case): executability.attempt(case) for case in executability.cases(model, 3, seed=0)}
    assert {case: kind for case, kind in found.items() if kind[0] not in ("right", "refused")} == {}


def test_a_plan_that_trains_otherwise_is_found(monkeypatch):
    """Numbers of one process that are a billionth larger differ."""
    reference = executability.ranks._reference

    def changed(*arguments):
        return {name: value * (1 + 1e-9) for name, value in reference(*arguments).items()}

    monkeypatch.setattr(executability.ranks, "_reference", changed)
    case = executability.Case("llama", (("dp", 2), ("mode", "static")))
    assert executability.attempt(case)[0] == "wrong"


def test_a_refusal_names_its_reason():
    case = executability.Case("llama", (("tp", 3),))
    kind, text = executability.attempt(case)
    assert kind == "refused"
    assert "expected num_attention_heads that tp=3 ranks divide, got 4" in text


def test_cases_are_the_same_for_the_same_seed():
    first, second, other = ([*executability.cases("llama", 9, seed)] for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.thorough
@pytest.mark.parametrize("model", executability.MODELS)
def test_two_hundred_plans(model):
    told = []
    assert executability.main(["--models", model], told.append) == 0, told
