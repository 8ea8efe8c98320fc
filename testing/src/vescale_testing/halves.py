"""Run half of a product of cases by default, and the rest under `-m thorough`.

The halves of a product are the black and the white fields of a chessboard: in each of them every value of every factor
occurs with values of all others, and, of three factors or more, every pair of values of two factors with more than one
value each. So a fault that one value or one pair causes is found by either half.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

#: Give a test the parameter `half`: 0, and 1 if it is marked `thorough`.
in_halves = pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.thorough)], ids=["half", "rest"])


def half_of(half: int, *factors: Iterable[Any]) -> list[tuple]:
    """Return the combinations of a product of which the sum of positions is even, if `half` is, or else odd.

    Example:
        >>> half_of(0, "abc", (True, False))
        [('a', True), ('b', False), ('c', True)]
        >>> half_of(1, "abc", (True, False))
        [('a', False), ('b', True), ('c', False)]
    """
    numbered = itertools.product(*(list(enumerate(factor)) for factor in factors))
    return [
        tuple(value for _, value in combination)
        for combination in numbered
        if (half + sum(position for position, _ in combination)) % 2 == 0
    ]


def params_in_halves(*factors: Iterable[Any]) -> list:
    """Return all combinations of a product for `pytest.mark.parametrize`, half of them marked `thorough`.

    Example:
        >>> [len(param.marks) for param in params_in_halves("ab", (1, 2))]
        [0, 0, 1, 1]
    """
    rest = [pytest.param(*combination, marks=pytest.mark.thorough) for combination in half_of(1, *factors)]
    return [*(pytest.param(*combination) for combination in half_of(0, *factors)), *rest]
