"""The halves of a product are a partition of it, and each half has every value, and every pair of three factors."""

import itertools

import pytest

from vescale_testing import half_of, params_in_halves

FACTORS = (list("abcd"), [1, 2, 3], [True, False])


def pairs(combinations):
    return {
        (first, second, combination[first], combination[second])
        for combination in combinations
        for first, second in itertools.combinations(range(len(combination)), 2)
    }


@pytest.mark.parametrize("num_factors", [1, 2, 3])
def test_two_halves_are_the_whole(num_factors):
    halves = [half_of(half, *FACTORS[:num_factors]) for half in (0, 1)]
    assert sorted(halves[0] + halves[1]) == sorted(itertools.product(*FACTORS[:num_factors]))
    assert not {*halves[0]} & {*halves[1]}
    assert half_of(2, *FACTORS[:num_factors]) == halves[0]


@pytest.mark.parametrize("half", [0, 1])
def test_each_has_every_value_and_every_pair(half):
    two = half_of(half, *FACTORS[:2])
    assert [{*values} for values in zip(*two, strict=True)] == [{*factor} for factor in FACTORS[:2]]
    assert pairs(half_of(half, *FACTORS)) == pairs(itertools.product(*FACTORS))


def test_every_second_of_the_product_has_not():
    every_second = list(itertools.product(*FACTORS))[::2]
    assert {last for *_, last in every_second} == {True}


def test_parameters_of_the_rest_are_marked():
    params = params_in_halves(*FACTORS)
    assert [param.values for param in params if not param.marks] == half_of(0, *FACTORS)
    assert [param.values for param in params if param.marks] == half_of(1, *FACTORS)
    assert {mark.name for param in params for mark in param.marks} == {"thorough"}
