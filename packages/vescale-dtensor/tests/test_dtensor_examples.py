"""Examples in docstrings run as they stand: those of every module of the package that marks none of them as skipped."""

import pytest

import vescale.dtensor
from vescale_testing.docstrings import docstring_examples, run_docstring_examples

EXAMPLES = docstring_examples(vescale.dtensor)


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_in_docstrings(name):
    run_docstring_examples(EXAMPLES[name])
