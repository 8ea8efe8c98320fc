"""The examples in the docstrings run, and the package imports only torch."""

import doctest
import importlib
import subprocess
import sys

import pytest

MODULES = ("_memory", "_profile", "_search", "_units", "cluster", "plan")


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    module = importlib.import_module(f"vescale.plan.{name}")
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.failed == 0


def test_some_docstrings_have_examples():
    finder = doctest.DocTestFinder()
    found = [importlib.import_module(f"vescale.plan.{name}") for name in MODULES]
    assert sum(bool(test.examples) for module in found for test in finder.find(module)) >= 6


def test_no_sibling_is_imported():
    code = "import sys, vescale.plan; print([m for m in sys.modules if m.startswith('vescale.') and 'plan' not in m])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
