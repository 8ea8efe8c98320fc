"""What the pages promise exists: the commands, the sessions, the packages, the short example."""

import ast
import re

import pytest
from projects import ROOT, read_projects
from run_examples import pages, programs

README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^python3? -m pip install .*nox.*$", README, re.MULTILINE)


def sessions() -> set[str]:
    """Return the names of all functions of the noxfile that are sessions."""
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {f.name for f in functions if any("nox.session" in ast.unparse(d) for d in f.decorator_list)}


def test_the_readme_has_two_commands():
    train, test = COMMANDS
    assert train.endswith("nox -s mixtral_4d")
    assert test.endswith("nox")


def test_ci_runs_the_readmes_test_command():
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines() if not line.startswith("#")]
    assert any(COMMANDS[1] in line for line in lines)


def test_every_session_that_is_mentioned_exists():
    files = [*pages(ROOT), ROOT / ".github/workflows/ci.yml", ROOT / ".ci/run", ROOT / "constraints.txt"]
    mentioned = [
        (file.name, name)
        for file in files
        for name in re.findall(r"nox -s \"?([a-z0-9_]+)", file.read_text(encoding="utf-8"))
    ]
    assert mentioned
    assert [(file, name) for file, name in mentioned if name not in sessions()] == []


def test_the_readme_lists_every_package():
    for name in read_projects():
        assert re.search(rf"^\|[^|]*`{name}`", README, re.MULTILINE), f"README.md's table lacks {name}"


def test_the_readmes_example_has_at_most_twenty_lines():
    (example,) = (program for program in programs(ROOT / "README.md") if program.num_processes == 0)
    assert 0 < sum(bool(line.strip()) for line in example.lines) <= 20


@pytest.mark.parametrize("name", read_projects())
def test_a_package_readme_has_an_example(name):
    page = read_projects()[name].folder / "README.md"
    assert "\n## Example\n" in page.read_text()
    assert f"pip install {name}\n" in page.read_text()
    assert programs(page), f"{page} has no Python example"
