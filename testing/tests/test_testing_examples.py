"""The examples in the docstrings run and print what they say."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["compare", "float64", "gather", "late", "ranks"])
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"vescale_testing.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
