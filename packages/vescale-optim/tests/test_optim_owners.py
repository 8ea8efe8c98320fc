"""Matrices are balanced over ranks, and each element travels once: pure functions, every small case."""

import itertools
import time

import pytest

from vescale.optim._owners import Holding, Matrix, Span, assign_owners, cut_spans, holdings, matrix_cost


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


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match=r"num_owners must be positive and costs not negative, got 0 and \[1\]"):
        assign_owners([1], 0)
    with pytest.raises(ValueError, match=r"got 2 and \[-1\]"):
        assign_owners([-1], 2)
    with pytest.raises(ValueError, match=r"the parts \[Holding.* do not cover Matrix"):
        cut_spans([Matrix(0, 0, 0, 5, owner=0)], [[Holding(0, 0, 2), Holding(1, 3, 5)]])
    with pytest.raises(ValueError, match=r"do not cover Matrix"):
        cut_spans([Matrix(0, 0, 0, 5, owner=0)], [[Holding(0, 0, 4)]])


def test_holdings_by_brute_force():
    for start, numel, shard_numel in itertools.product(range(9), range(9), range(1, 6)):
        by_coord = {}
        for element in range(numel):
            by_coord.setdefault((start + element) // shard_numel, []).append(element)
        expected = [Holding(coord, found[0], found[-1] + 1) for coord, found in sorted(by_coord.items())]
        assert holdings(start, numel, shard_numel) == expected


def test_spans_by_brute_force():
    for count, size, start, shard_numel in itertools.product(range(1, 4), range(4), range(5), range(1, 6)):
        matrices = [Matrix(0, i, i * size, (i + 1) * size, owner=0) for i in range(count)]
        held = holdings(start, count * size, shard_numel)
        found = [(s.matrix, s.holder, e) for s in cut_spans(matrices, [held]) for e in range(s.start, s.stop)]
        assert found == [(e // size, (start + e) // shard_numel, e) for e in range(count * size)]


def test_spans_of_several_tensors():
    matrices = [Matrix(0, 0, 0, 4, owner=1), Matrix(1, 0, 0, 2, owner=0), Matrix(1, 1, 2, 4, owner=1)]
    parts = [[Holding(0, 0, 3), Holding(1, 3, 4)], [Holding(1, 0, 4)]]
    assert cut_spans(matrices, parts) == [Span(0, 0, 0, 3), Span(0, 1, 3, 4), Span(1, 1, 0, 2), Span(2, 1, 2, 4)]
