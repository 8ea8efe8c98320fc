"""The sweep's metamorphic part: dims from the end, other data, results used twice, results that are given.

A part of the operators runs here; `nox -s coverage` runs all of them.
"""

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

import vescale.dtensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "coverage"))
plan, relations, report, samples, world = map(
    importlib.import_module, ("plan", "relations", "report", "samples", "world")
)
sys.path.pop(0)

OPERATORS = (
    "cumsum|cumprod|logcumsumexp|gather|take_along_dim|topk|sort|max_reduction_with_dim|min_reduction_with_dim|median|"
    "kthvalue|mode|unbind|index_add|index_select|scatter_add|diff|flip|softmax|log_softmax|stack|roll|any|argmax|"
    "linalg.cross|nn.functional.glu|aminmax|std_mean|__rlshift__|bitwise_left_shift|new_full"
)


def sample_of(*args, **kwargs):
    leaves, structure = samples.tree_flatten((args, kwargs))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    return samples.Sample(tuple(leaves), structure, positions, (False,) * len(positions), lambda result: result)


def related_to(function, *args, **kwargs):
    """Return the arguments that follow from those of a call, by label."""

    def run(sample):
        args, kwargs = sample.arguments(sample.whole())
        try:
            return samples.tree_flatten(function(*args, **kwargs))[0]
        except (IndexError, RuntimeError):
            return None

    found = relations.related(sample_of(*args, **kwargs), run)
    return {label: sample.arguments(sample.whole()) for label, sample in found.items()}


WHOLE = torch.arange(12.0).view(3, 4)


def test_dims_are_what_counts_from_the_end():
    args, kwargs = related_to(torch.diagonal, torch.randn(3, 4, 5), 1, dim1=0, dim2=2)["dims"]
    assert (args[1], kwargs) == (1, {"dim1": -3, "dim2": -1})
    args, _ = related_to(torch.stack, [WHOLE, WHOLE + 1], 1)["dims"]
    assert args[1] == -2
    args, kwargs = related_to(torch.sum, WHOLE, dim=(0, 1), keepdim=True)["dims"]
    assert kwargs == {"dim": (-2, -1), "keepdim": True}
    assert "dims" not in related_to(torch.add, WHOLE, 1)
    assert "dims" not in related_to(torch.sum, WHOLE)


def test_other_data_is_other_and_valid():
    args, _ = related_to(torch.cumsum, WHOLE, 0)["other"]
    assert torch.equal(args[0], WHOLE.flip(0, 1))
    assert "other" not in related_to(torch.cumsum, torch.arange(3), 0)
    assert "other" not in related_to(torch.linalg.cholesky, torch.tensor([[1.0, 5.0], [0.1, 2.0]]))


class Operator:
    """A planted operator whose first result is kept, or whose result is spoilt by its first use."""

    supports_out, inplace_variant = False, None

    def __init__(self, name, function):
        self.name = self.full_name = name
        self.function = function

    def __call__(self, x):
        return self.function(x)


kept = {}


def first_result(x):
    return kept.setdefault(x.placements, 2 * x) if isinstance(x, vescale.dtensor.DTensor) else 2 * x


def spoilt_by_use(x):
    result = 2 * x
    if isinstance(x, vescale.dtensor.DTensor):
        before = type(result).clone
        result.clone = lambda: (before(result), result.mul_(2))[0]
    return result


@pytest.mark.parametrize(
    ("name", "function", "label", "variant"),
    [("first result", first_result, "other", "op"), ("spoilt by use", spoilt_by_use, "0", "twice")],
)
def test_a_planted_operator_is_found(name, function, label, variant):
    whole = torch.arange(18.0, dtype=torch.float64).view(6, 3)
    made = {"0": sample_of(whole), "other": sample_of(whole.flip(0, 1))}
    cases = [plan.Case("0", "op", ("S0",)), plan.Case(label, variant, ("S0",))]
    kinds = [
        found.verdict.kind
        for found in world.sweep([plan.Plan(Operator(name, function), made, cases)], workers=1, stock=False)
    ]
    assert kinds == ["right", "wrong"]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")
def test_what_follows_from_samples_holds():
    plans = []
    for op in samples.find_operators(re.compile(f"^({OPERATORS})$".replace(".", r"\."))):
        made = plan.make_plan(op, limit=1, cap=10, with_related=True)
        made.cases = [case for case in made.cases if case.sample in ("dims", "other") or case.variant == "out"]
        plans.append(made)
    tallies = {id(made): report.Tally(made) for made in plans}
    for found in world.sweep(plans, workers=2, stock=False):
        tallies[id(found.plan)].add(found)
    bad = [report.describe(found, stock=False) for tally in tallies.values() for found in tally.findings]
    assert bad == []
    assert sum(tally.counts["right"] for tally in tallies.values()) > 150
