"""Seven distributions share one namespace, and each carries what a user and a packager expect."""

import re
import tomllib

import pytest
from projects import ROOT, TESTING, lowest_version, read_project, read_projects, requirement_name

PROJECTS = read_projects()


def table(name: str) -> dict:
    """Return the parsed ``pyproject.toml`` of a distribution."""
    return tomllib.loads((PROJECTS[name].folder / "pyproject.toml").read_text())


def test_only_the_umbrella_owns_the_namespace():
    owners = [path.relative_to(ROOT).parts[1] for path in ROOT.glob("packages/*/src/vescale/__init__.py")]
    assert owners == ["vescale"]


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_ships_its_portion_alone(name):
    project = PROJECTS[name]
    entries = {path.name for path in (project.folder / "src" / "vescale").iterdir()} - {"__pycache__"}
    if name != "vescale":
        assert entries == {project.module.removeprefix("vescale.")}
    else:
        others = {other.module.removeprefix("vescale.") for other in PROJECTS.values()} - {"vescale"}
        assert not entries & others, "the umbrella's files must not shadow a portion"
    assert table(name)["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["src/vescale"]


@pytest.mark.parametrize("name", PROJECTS)
def test_a_package_is_typed(name):
    project = PROJECTS[name]
    assert (project.folder / "src" / project.module.replace(".", "/") / "py.typed").is_file()


@pytest.mark.parametrize("name", PROJECTS)
def test_metadata(name):
    project = table(name)["project"]
    assert PROJECTS[name].folder.name == name
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert (PROJECTS[name].folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@pytest.mark.parametrize("name", PROJECTS)
def test_the_version_is_the_changelogs_newest(name):
    changelog = (PROJECTS[name].folder / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    assert newest, f"{name}: CHANGELOG.md has no '## VERSION' heading"
    assert newest[1] == PROJECTS[name].version


@pytest.mark.parametrize("name", PROJECTS)
def test_sibling_ranges_hold_the_versions_of_this_repository(name):
    for requirement in table(name)["project"]["dependencies"]:
        sibling = PROJECTS.get(requirement_name(requirement))
        if sibling is None:
            continue
        match = re.fullmatch(r"[a-z-]+>=(\d+)\.(\d+),<(\d+)\.(\d+)", requirement)
        assert match, f"{name}: write {requirement!r} as a range such as '{sibling.name}>=0.1,<0.2'"
        low, high = (int(match[1]), int(match[2])), (int(match[3]), int(match[4]))
        version = tuple(map(int, sibling.version.split(".")))
        assert low <= version < high, f"{name} declares {requirement}, {sibling.name} is {sibling.version}"


@pytest.mark.parametrize("name", [*PROJECTS, TESTING])
def test_every_third_party_dependency_has_a_floor_and_a_constraint(name):
    project = PROJECTS.get(name) or read_project(ROOT / "testing")
    constrained = {
        requirement_name(line)
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    for requirement in (*project.requirements, *project.test_requirements, *project.optional_requirements):
        assert lowest_version(requirement), f"{name}: {requirement} has no lower bound (>=)"
        assert requirement_name(requirement) in constrained, f"constraints.txt pins no {requirement}"


def test_every_package_declares_one_range_of_torch_and_says_so():
    """The bound is above the last version that was tested; a newer torch would change values without an error."""
    projects = [*PROJECTS.values(), read_project(ROOT / "testing")]
    (declared,) = {r for project in projects for r in project.requirements if requirement_name(r) == "torch"}
    low, high = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", declared).groups()
    source = (ROOT / "packages/vescale-dtensor/src/vescale/dtensor/_torch_range.py").read_text()
    first, last = re.search(r'^TESTED = \("2\.(\d+)", "2\.(\d+)"\)$', source, re.MULTILINE).groups()
    assert int(low) <= int(first) < int(last) == int(high) - 1
    text = f"It needs Python 3.11 or later and torch 2.{low} to 2.{last}; it is tested with 2.{first} and 2.{last}."
    missing = [name for name, project in PROJECTS.items() if text not in (project.folder / "README.md").read_text()]
    assert missing == [], text


def test_constraints_are_exact():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==\S+", line)] == []
    assert len(lines) == len(set(map(requirement_name, lines)))


def test_the_umbrella_knows_its_version():
    source = (PROJECTS["vescale"].folder / "src" / "vescale" / "__init__.py").read_text()
    assert f'__version__ = "{PROJECTS["vescale"].version}"' in source
