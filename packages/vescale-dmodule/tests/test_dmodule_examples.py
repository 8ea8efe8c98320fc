"""Examples in docstrings run as they stand: those of every module of the package that marks none of them as skipped."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard

import vescale.dmodule
from vescale_testing.docstrings import docstring_examples, run_docstring_examples

NAMES = {"torch": torch, "nn": nn, "Shard": Shard, "Replicate": Replicate, "Partial": Partial}
EXAMPLES = docstring_examples(vescale.dmodule, NAMES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name):
    run_docstring_examples(EXAMPLES[name])
