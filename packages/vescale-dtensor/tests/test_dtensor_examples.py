"""Examples in docstrings that need no processes run as they stand."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["_boxes", "_pieces", "_place"])
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"vescale.dtensor.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
