"""Examples in the docstrings of a package, found by walking its modules."""

import doctest
import importlib
import pkgutil
from collections.abc import Mapping
from types import ModuleType

__all__ = ["docstring_examples", "run_docstring_examples"]


def docstring_examples(
    package: ModuleType, names: Mapping[str, object] | None = None
) -> dict[str, list[doctest.DocTest]]:
    """Return the docstrings that have an example to run, by the name of their module.

    Args:
        package: the package to walk. Docstrings whose examples are all marked ``doctest: +SKIP`` are left out.
        names: what the examples may use besides the names of their module.
    """
    found = {}
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(info.name)
        tests = doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=dict(names or {}))
        runnable = [t for t in tests if any(doctest.SKIP not in example.options for example in t.examples)]
        if runnable:
            found[info.name] = runnable
    return found


def run_docstring_examples(examples: list[doctest.DocTest]) -> None:
    """Run the examples of one module.

    Raises:
        AssertionError: an example prints something else than its docstring says; the difference is printed.
    """
    runner = doctest.DocTestRunner()
    for example in examples:
        runner.run(example)
    assert runner.summarize().failed == 0
