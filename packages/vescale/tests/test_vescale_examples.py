"""The examples in the docstrings run."""

import doctest
import importlib

import pytest

MODULES = ("_device_peaks", "_emulate.emulate", "_launch", "_progress")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"vescale.{name}")
    found = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert found.attempted > 0
    assert found.failed == 0
