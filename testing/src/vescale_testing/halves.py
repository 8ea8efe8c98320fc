"""Run half of a product of cases by default, and the rest under `-m thorough`.

The halves of a product are the black and the white fields of a chessboard: in each of them every value of every factor
occurs with values of all others, and, of three factors or more, every pair of values of two factors with more than one
value each. So a fault that one value or one pair causes is found by either half.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

#: Mark all but the first half of the cases of a test, the product of its `parametrize`, as `thorough`.
halved = pytest.mark.halved

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


def mark_the_rest(item: pytest.Item) -> None:
    """Mark a case of a test under `halved` as thorough, if it is not in the first half of the test's cases."""
    if item.get_closest_marker("halved") is None:
        return
    params = item.callspec.params  # type: ignore[attr-defined]
    if sum(_position(mark, params) for mark in item.iter_markers("parametrize")) % 2:
        item.add_marker("thorough")


def _position(mark: pytest.Mark, params: Mapping[str, object]) -> int:
    """Return the place of a case's values among those of one factor."""
    given_names, factor = mark.args
    is_one = isinstance(given_names, str) and "," not in given_names
    names = [name.strip() for name in given_names.split(",")] if isinstance(given_names, str) else given_names
    for position, given in enumerate(factor):
        values = given.values if hasattr(given, "marks") else (given,) if is_one else given
        if all(params[name] is value for name, value in zip(names, values, strict=True)):
            return position
    raise ValueError(f"halved: expected factors that give the same objects again, such as lists, got {factor!r}")
