"""Small models train on data-parallel ranks as on one device, or are refused; `sweep` has all models and all cases."""

import functools
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sweep = importlib.import_module("sweep")
sys.path.pop(0)

# of each kind: draws of rows and of none, losses over some rows, values that are kept, code that runs in backward
RIGHT = (
    "drop_path",
    "layers_that_drop",
    "masked_mean",
    "variance_and_covariance",
    "running_mean_in_data",
    "code_book",
    "experts_choose_tokens",
    "fused_mean",
    "linear_function",
)
REFUSED = ("numpy_noise", "queue_of_rows", "hook_that_centers", "normalized_gradient", "gradient_penalty_of_a_mean")
#: What a plan makes right.
WITH_A_PLAN = {"queue_of_rows", "hook_that_centers", "gradient_penalty_of_a_mean"}


def kinds(case, names):
    return {name: kind for name, (kind, _) in sweep.run(case, names).items()}


def test_without_a_plan():
    found = kinds("ddp 2", [*RIGHT, *REFUSED])
    assert len(found) == 2 * len([*RIGHT, *REFUSED])
    for name, kind in found.items():
        assert kind == ("refused" if name.removesuffix(", norm") in REFUSED else "right"), name


def test_with_a_plan():
    """It refuses a function that is not linear, and one that multiplies rows by a parameter, which is not split."""
    found = kinds("plan eager", [*RIGHT, *REFUSED])
    refused = {*REFUSED, "linear_function"} - WITH_A_PLAN
    for name, kind in found.items():
        assert kind == ("refused" if name.removesuffix(", norm") in refused else "right"), name


def test_static_mode():
    found = kinds("plan static", ["drop_path", "masked_mean", "running_mean_in_data", "variance_and_covariance"])
    assert set(found.values()) == {"right"}


@pytest.mark.parametrize("name", ["shuffled_rows", "distance_to_the_mean_row", "sum_of_all_rows"])
def test_ranks_that_are_worlds_of_their_own_differ(monkeypatch, name):
    monkeypatch.setattr(sweep, "DDP", functools.partial(sweep.DDP, per_rank=True))
    told = []
    assert sweep.main(["--models", name, "--cases", "ddp 2"], told.append) == 1
    assert told[-1] == "ddp 2: 0 right, 0 refused, 2 wrong"
