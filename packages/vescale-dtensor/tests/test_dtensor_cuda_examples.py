"""Examples in the docstrings of the CUDA replay run as they stand, on any machine."""

import doctest
import importlib

import pytest

MODULES = ["_entries", "_geometry", "_philox", "_replay", "_rules", "_windows"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"vescale.dtensor._random.cuda_replay.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
