"""What checks a change runs the same versions and the same rules everywhere: CI, nox, pre-commit."""

import ast
import re
import sys
import tomllib
from importlib.metadata import version

import pytest
from projects import ROOT, TESTING, read_project, read_projects

PROJECTS = {**read_projects(), TESTING: read_project(ROOT / "testing")}
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match(r"\w", line))
HOOKS = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
WORKFLOW = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
MYPY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]


def programs_of_hooks() -> set[str]:
    return set(re.findall(r"^ +entry: (\S+)", HOOKS, re.MULTILINE))


def test_hooks_are_local_and_pinned():
    assert re.findall(r"repo: (\S+)", HOOKS) == ["local"], "a hook from elsewhere has a version of its own"
    assert set(re.findall(r"language: (\S+)", HOOKS)) == {"system"}
    assert programs_of_hooks() <= set(PINS)


@pytest.mark.parametrize("name", ["ruff", "pytest", "mypy"])
def test_the_running_versions_are_the_pinned_ones(name):
    assert version(name) == PINS[name]


def test_pre_commit_is_pinned_above_what_the_hooks_ask_for():
    (minimum,) = re.findall(r'minimum_pre_commit_version: "([\d.]+)"', HOOKS)
    assert tuple(map(int, PINS["pre-commit"].split("."))) >= tuple(map(int, minimum.split(".")))


def test_hooks_and_lint_run_the_same_checks():
    lint = re.search(r"^def lint\(.*?\n\n\n", (ROOT / "noxfile.py").read_text(), re.DOTALL | re.MULTILINE)[0]
    for entry in re.findall(r"^ +entry: (.+)$", HOOKS, re.MULTILINE):
        program, subject = entry.split()[0], entry.split()[1].strip("-")
        assert f'"{program}"' in lint
        assert f'"{subject}"' in lint or "tests/repo" in entry


def jobs() -> dict[str, str]:
    """Return the text of each job of the workflow, by name."""
    text = WORKFLOW.split("\njobs:\n")[1]
    parts = re.split(r"^  (\w+):\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("session", ["lint", "unit", "floor", "integration", "mixtral_4d"])
def test_ci_runs_every_session_and_the_gate_waits_for_it(session):
    assert re.search(rf'nox -s "?{session}\b', jobs()[session])
    (needs,) = re.findall(r"needs: \[(.*)\]", jobs()["gate"])
    assert session in needs.split(", ")


@pytest.mark.parametrize("job", ["unit", "floor"])
def test_ci_covers_every_changed_package(job):
    assert "package: ${{ fromJSON(needs.changes.outputs.packages) }}" in jobs()[job]


def test_the_type_checker_reads_every_package():
    assert sorted(MYPY["packages"]) == sorted(project.module for project in PROJECTS.values())
    folders = [(project.folder / "src").relative_to(ROOT).as_posix() for project in PROJECTS.values()]
    assert sorted(MYPY["mypy_path"]) == sorted(folders)


@pytest.mark.parametrize("name", read_projects())
def test_a_package_that_says_it_is_typed_is_complete(name):
    """Every public function has annotated parameters and results: `py.typed` promises it."""
    source = PROJECTS[name].folder / "src"
    assert list(source.rglob("py.typed"))
    incomplete = [
        f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
        for path in sorted(source.rglob("*.py"))
        for function in public_functions(path)
        if not is_annotated(function)
    ]
    assert incomplete == []


def public_functions(path) -> list[ast.FunctionDef]:
    """Return the functions and methods of a file that have a public name, those of private classes excluded."""
    found, pending = [], [ast.parse(path.read_text(encoding="utf-8"))]
    while pending:
        for node in pending.pop().body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                pending.append(node)
            elif isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
                found.append(node)
    return found


def is_annotated(function: ast.FunctionDef) -> bool:
    """Return whether all parameters but ``self``, ``cls`` and ``ctx``, and the result have annotations."""
    a = function.args
    parameters = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    annotated = all(p.annotation or p.arg in ("self", "cls", "ctx") for p in parameters)
    return annotated and (function.returns is not None or function.name == "__init__")


def test_a_missing_annotation_is_found(tmp_path):
    path = tmp_path / "a.py"
    path.write_text("def f(x) -> int: ...\ndef g(x: int): ...\ndef h(x: int) -> None: ...\n")
    assert [is_annotated(function) for function in public_functions(path)] == [False, False, True]


def test_the_floor_of_python_is_the_same_everywhere():
    floors = {
        re.search(r'requires-python = ">=([\d.]+)"', (p.folder / "pyproject.toml").read_text())[1]
        for p in PROJECTS.values()
    }
    assert floors == {MYPY["python_version"]}
    assert sys.version_info >= tuple(map(int, floors.pop().split(".")))
