"""A split by costs: the most expensive stage is as cheap as any cut makes it."""

import itertools
import random

import pytest
from torch import nn

from vescale.pipe import PipelinePlan, balanced_split, split_units


def largest(costs, split):
    return max(sum(costs[name] for name in stage) for stage in split)


@pytest.mark.parametrize("seed", range(20))
def test_no_other_cut_is_better(seed):
    generator = random.Random(seed)
    num_modules = generator.randint(1, 9)
    costs = {f"m{n}": generator.choice([0.0, 1.0, 2.5, 7.0]) for n in range(num_modules)}
    names = list(costs)
    for num_stages in range(1, num_modules + 1):
        split = balanced_split(costs, num_stages)
        assert [name for stage in split for name in stage] == names
        assert len(split) == num_stages
        assert all(split)
        cuts = itertools.combinations(range(1, num_modules), num_stages - 1)
        others = [[names[a:b] for a, b in itertools.pairwise((0, *cut, num_modules))] for cut in cuts]
        assert largest(costs, split) == min(largest(costs, other) for other in others)


def test_the_other_stages_are_even_too():
    costs = dict(zip("abcdef", [8.0, 1.0, 1.0, 1.0, 1.0, 1.0], strict=True))
    assert [len(stage) for stage in balanced_split(costs, 3)] == [1, 2, 3]


def test_it_is_the_split_of_a_plan():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
    split = balanced_split({"0": 4.0, "1": 1.0, "2": 1.0, "3": 1.0, "4": 1.0}, 2)
    stages = split_units(model, PipelinePlan(split=split), 2).stages
    assert stages == (("0",), ("1", "2", "3", "4"))


def test_fewer_modules_than_stages_are_refused():
    with pytest.raises(ValueError, match="expected costs of at least 3 modules for as many stages, got 2"):
        balanced_split({"a": 1.0, "b": 1.0}, 3)
