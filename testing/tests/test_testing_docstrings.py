"""Examples in docstrings are found in every module of a package, and one that is wrong is noticed."""

import importlib
import sys

import pytest

from vescale_testing.docstrings import docstring_examples, run_docstring_examples


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose modules have a right, a wrong and a skipped example."""
    folder = tmp_path / "shown_examples"
    folder.mkdir()
    for name, line in (("right", "1 + given"), ("wrong", "2 + given"), ("skipped", "1 + 1  # doctest: +SKIP")):
        (folder / f"{name}.py").write_text(f'def f():\n    r"""F.\n\n    >>> {line}\n    2\n    """\n')
    (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("shown_examples")
    for name in [name for name in sys.modules if name.startswith("shown_examples")]:
        del sys.modules[name]


def test_examples_of_every_module(package):
    examples = docstring_examples(package, {"given": 1})
    assert sorted(examples) == ["shown_examples.right", "shown_examples.wrong"]
    run_docstring_examples(examples["shown_examples.right"])


def test_a_wrong_example_is_noticed(package):
    with pytest.raises(AssertionError):
        run_docstring_examples(docstring_examples(package, {"given": 1})["shown_examples.wrong"])
