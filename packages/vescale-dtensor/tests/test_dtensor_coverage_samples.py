"""The operator sweep's samples: what is too small grows, stays valid, and gives shards that differ."""

import importlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "coverage"))
enlarge, plan, samples = map(importlib.import_module, ("enlarge", "plan", "samples"))
sys.path.pop(0)


def sample_of(*args, **kwargs):
    leaves, structure = samples.tree_flatten((args, kwargs))
    positions = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
    return samples.Sample(tuple(leaves), structure, positions, (False,) * len(positions), lambda result: result)


def runs(op):
    def check(sample):
        args, kwargs = sample.arguments(sample.whole())
        try:
            op(*args, **kwargs)
        except (IndexError, RuntimeError, ValueError):
            return False
        return True

    return check


def shapes(sample):
    return [list(tensor.shape) for tensor in sample.whole()]


def test_sizes_that_belong_together_grow_together():
    loss = sample_of(torch.randn(2, 3).double(), torch.tensor([1, 1]), weight=torch.rand(3).double())
    assert enlarge.is_small("nn.functional.cross_entropy", [loss])
    large = enlarge.enlarged([loss, loss], runs(F.cross_entropy))
    assert shapes(large["large0"]) == [[8, 12], [8], [12]]
    assert shapes(large["large1"]) == [[10, 15], [10], [15]]
    labels = large["large0"].whole()[1]
    assert len(labels.unique()) > 1, "shards would see the same labels"


def test_numbers_among_the_arguments_grow_where_they_are_sizes():
    norm = sample_of(torch.randn(2, 3), [3], torch.ones(3))
    (large,) = enlarge.enlarged([norm], runs(F.layer_norm)).values()
    assert shapes(large) == [[8, 12], [12]]
    assert large.arguments(large.whole())[0][1] == [12]


def test_samples_that_four_ranks_divide_stay_as_they_are():
    assert not enlarge.is_small("sin", [sample_of(torch.ones(8, 3))])
    assert not enlarge.is_small("sin", [sample_of(torch.tensor(1.0))])
    assert not enlarge.is_small("scatter", [sample_of(torch.ones(2, 3))])
    assert not enlarge.enlarged([sample_of(torch.ones(2, 3))], lambda _: False)


def test_a_case_is_read_from_its_key():
    for case in (plan.Case("0", "op", ("S0", "R", "P")), plan.Case("large1", "inplace", ("S0R",), True)):
        assert plan.Case.parse(case.key) == case
    assert plan.Case.parse("0:op:RS1,PR").num_axes == 2
    assert not plan.Case.parse("0:op:R,P").is_sharded
