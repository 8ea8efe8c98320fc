"""Examples in docstrings run as they stand: those of every module of the package that marks none of them as skipped."""

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import vescale.dmodule

NAMES = {"torch": torch, "nn": nn, "Shard": Shard, "Replicate": Replicate, "Partial": Partial}


def examples() -> dict[str, list[doctest.DocTest]]:
    """Return the docstrings with examples that can run without ranks, by module."""
    found = {}
    for info in pkgutil.walk_packages(vescale.dmodule.__path__, "vescale.dmodule."):
        tests = doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(info.name), extraglobs=NAMES)
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
