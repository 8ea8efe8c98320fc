"""No package has an import circle, and no import hides in a function."""

import pytest
from import_graph import circles, function_imports, imports_of, module_name
from projects import ROOT, TESTING, read_project, read_projects

PROJECTS = {**read_projects(), TESTING: read_project(ROOT / "testing")}

# File, imported module: why it is imported only when the function runs.
FUNCTION_IMPORTS = {
    ("draw.py", "matplotlib.figure"): "an extra brings matplotlib",
    ("draw.py", "matplotlib.patches"): "an extra brings matplotlib",
    ("crc32.py", "zlib_ng"): "an extra brings zlib-ng",
    ("_progress.py", "tqdm"): "an extra brings tqdm",
    ("storage.py", "upath"): "an extra brings universal-pathlib",
    ("training.py", "vescale"): "the plugin serves packages whose tests run without the umbrella",
}


def package_graph(name: str) -> dict[str, set[str]]:
    source = PROJECTS[name].folder / "src"
    files = {path.relative_to(source).as_posix(): path.read_text(encoding="utf-8") for path in source.rglob("*.py")}
    packages = {module_name(path) for path in files if path.endswith("__init__.py")}
    return imports_of({module_name(path): text for path, text in files.items()}, packages)


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_has_no_import_circle(name):
    found = circles(package_graph(name))
    assert found == [], "modules import each other; move what both need into a third one"


@pytest.mark.parametrize("name", PROJECTS)
def test_no_import_hides_in_a_function(name):
    source = PROJECTS[name].folder / "src"
    hidden = [
        f"{path.relative_to(ROOT)}:{line} {text}"
        for path in sorted(source.rglob("*.py"))
        for line, text in function_imports(path.read_text(encoding="utf-8"))
        if (path.name, text.split()[1].strip(".")) not in FUNCTION_IMPORTS
    ]
    assert hidden == [], "import at the top of the file, or give a reason in FUNCTION_IMPORTS"


def test_a_circle_through_relative_imports_is_found():
    modules = {
        "p": "from .a import A",
        "p.a": "from . import b",
        "p.b": "from .q.c import C",
        "p.q": "",
        "p.q.c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..a import A",
        "p.d": "import p.a",
    }
    assert circles(imports_of(modules, {"p", "p.q"})) == [("p.a", "p.b", "p.q.c")]


def test_a_line_of_imports_is_no_circle():
    modules = {"p": "from .a import A", "p.a": "from . import b", "p.b": "import torch"}
    assert circles(imports_of(modules, {"p"})) == []


def test_an_import_in_a_method_is_found():
    text = "import a\nclass C:\n    def f(self):\n        from .b import c\n"
    assert function_imports(text) == [(4, "from .b import c")]
