"""Build the reference of all public names from their docstrings, as static pages.

    python tools/api_site.py runs/api        # then open runs/api/index.html

pdoc imports ``vescale`` and follows ``__all__``: what a package exports is on the package's page, and a public
submodule has a page of its own. The build ends with status 1 and a list if a package has no page, a public name has no
docstring, a page names nothing, or pdoc warns about one of our names.
"""

import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path

import pdoc
import pdoc.doc
import pdoc.render
from projects import ROOT, read_projects


def undocumented(module: str) -> list[str]:
    """Return the public classes and functions of a module that are ours and have no docstring."""
    loaded = importlib.import_module(module)
    missing = [] if inspect.getdoc(loaded) else [module]
    for name in getattr(loaded, "__all__", ()):
        value = getattr(loaded, name)
        if is_ours(value) and (inspect.isclass(value) or inspect.isroutine(value)) and not inspect.getdoc(value):
            missing.append(f"{module}.{name}")
    return missing


def is_ours(value: object) -> bool:
    """Return whether a class or function was defined in this project. Torch's are re-exported for convenience."""
    return (getattr(value, "__module__", None) or "").split(".")[0] == "vescale"


def concerns_ours(warning: str) -> bool:
    """Return whether a warning of pdoc is about a name that was defined in this project."""
    names = re.findall(r"\bvescale(?:\.\w+)+", warning)
    return not names or any(is_ours(_nearest_class(name)) for name in names)


def _nearest_class(dotted: str) -> object:
    """Return the outermost class or function on the way to a dotted name, or the last module."""
    value: object = importlib.import_module("vescale")
    for part in dotted.split(".")[1:]:
        value = getattr(value, part, value)
        if not inspect.ismodule(value):
            break
    return value


def build(folder: Path, packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Write the pages into ``folder``; return the modules that have one, and a sentence for each problem."""
    pdoc.render.configure(docformat="google", footer_text="veScale")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pdoc.pdoc("vescale", output_directory=folder)
    pages = [path for path in folder.rglob("*.html") if path.name != "index.html"]
    modules = sorted(".".join(page.relative_to(folder).with_suffix("").parts) for page in pages)
    messages = sorted({str(each.message) for each in caught if issubclass(each.category, UserWarning)})
    problems = [f"{package} has no page" for package in packages if package not in modules]
    problems += [f"{name} has no docstring" for module in modules for name in undocumented(module)]
    problems += [f"{module} exports no name" for module in modules if not exports(module)]
    return modules, problems + [message for message in messages if concerns_ours(message)]


def exports(module: str) -> bool:
    """Return whether a module names something in ``__all__``."""
    return bool(getattr(importlib.import_module(module), "__all__", ()))


def main(folder: str) -> None:
    """Build into ``folder``; exit with status 1 and the list of problems, or print one line."""
    target = (ROOT / folder).resolve()
    modules, problems = build(target, [project.module for project in read_projects().values()])
    if problems:
        sys.exit("the reference is incomplete:\n  " + "\n  ".join(problems))
    print(f"{len(modules)} pages: {target}/index.html")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/api_site.py FOLDER")
    main(sys.argv[1])
