"""Examples in docstrings that need no processes run as they stand."""

import doctest
import importlib

import pytest


MODULES = ["_layout.boxes", "_layout.shards", "_random.global_position", "_random.stream_position"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"vescale.dtensor.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
