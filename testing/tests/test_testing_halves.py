"""The halves of a product are a partition of it, and each half has every value, and every pair of three factors."""

import itertools

import pytest

from vescale_testing import half_of

pytest_plugins = ["pytester"]

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


SOURCE = """
import pytest
from vescale_testing import halved
@halved
@pytest.mark.parametrize("letter, capital", list(zip("abcd", "ABCD")))
@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("flag",), [(True,), (False,)])
def test_cases(letter, capital, number, flag): pass
@pytest.mark.parametrize("number", [1, 2, 3])
def test_whole(number): pass
"""


@pytest.mark.parametrize(("half", "expression", "num_whole"), [(0, "not thorough", 3), (1, "thorough", 0)])
def test_the_rest_of_the_cases_is_thorough(half, expression, num_whole, pytester):
    pytester.makepyfile(SOURCE)
    options = ("-p", "vescale_testing.plugin", "-p", "no:cacheprovider", "--strict-markers", "-v", "-m", expression)
    result = pytester.runpytest_inprocess(*options)
    result.assert_outcomes(passed=12 + num_whole, deselected=15 - num_whole)
    found = {line.partition("[")[2].partition("]")[0] for line in result.stdout.lines if "test_cases[" in line}
    wanted = {f"{flag}-{number}-{letter}-{letter.upper()}" for letter, number, flag in half_of(half, *FACTORS)}
    assert found == wanted
