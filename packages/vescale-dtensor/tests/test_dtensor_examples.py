"""Examples in docstrings run as they stand: those of every module of the package that marks none of them as skipped."""

import doctest
import importlib
import pkgutil

import pytest

import vescale.dtensor


def examples() -> dict[str, list[doctest.DocTest]]:
    """Return the docstrings with examples that can run without ranks, by module."""
    found = {}
    for info in pkgutil.walk_packages(vescale.dtensor.__path__, "vescale.dtensor."):
        tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(info.name))
        runnable = [t for t in tests if any(doctest.SKIP not in example.options for example in t.examples)]
        if runnable:
            found[info.name] = runnable
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name):
    runner = doctest.DocTestRunner()
    for example in EXAMPLES[name]:
        runner.run(example)
    assert runner.summarize().failed == 0
