"""Matrices are balanced over ranks by what they cost: pure functions, every small case."""

import itertools
import time

import pytest

from vescale.optim._muon.plan import assign_owners, matrix_cost


def loads(costs, owners, num_owners):
    return [sum(c for c, o in zip(costs, owners, strict=True) if o == owner) for owner in range(num_owners)]


@pytest.mark.parametrize("num_owners", [1, 2, 3])
def test_the_largest_load_is_near_the_best_of_all_assignments(num_owners):
    for costs in itertools.product([0, 1, 2, 3, 5, 7], repeat=5):
        owners = assign_owners(costs, num_owners)
        assert len(owners) == 5
        assert set(owners) <= set(range(num_owners))
        if list(costs) == sorted(costs):  # the best is the same for every order
            every = itertools.product(range(num_owners), repeat=5)
            best = min(max(loads(costs, each, num_owners)) for each in every)
            assert 3 * num_owners * max(loads(costs, owners, num_owners)) <= best * (4 * num_owners - 1)


def test_jobs_that_cost_nothing_are_spread_too():
    assert sorted(assign_owners([0] * 6, 3)) == [0, 0, 1, 1, 2, 2]


def test_a_model_of_many_layers_is_balanced_and_quick():
    layer = [(4096, 4096)] * 4 + [(14336, 4096)] * 2 + [(4096, 14336)]
    costs = [matrix_cost(*shape) for shape in layer * 80] + [matrix_cost(2048, 768)] * 4096
    start = time.process_time()
    found = loads(costs, assign_owners(costs, 64), 64)
    assert time.process_time() - start < 0.5
    assert max(found) / (sum(found) / 64) < 1.02


def test_the_cost_of_an_iteration():
    assert matrix_cost(3, 5) == matrix_cost(5, 3) == 4 * 9 * 5 + 2 * 27


def test_owners_go_on_from_what_they_have_to_do_already():
    assert assign_owners([4, 3, 2], 3, loads=[0, 5, 9]) == (0, 0, 1)
    assert assign_owners([0, 0, 0], 2, loads=[1, 0]) == (1, 1, 1)
    for costs in itertools.product([0, 1, 3], repeat=4):
        assert assign_owners(costs, 3, loads=[0, 0, 0]) == assign_owners(costs, 3)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"num_owners must be positive and costs not negative, got 0 and \[1\]"):
        assign_owners([1], 0)
    with pytest.raises(ValueError, match=r"got 2 and \[-1\]"):
        assign_owners([-1], 2)
