"""What the repository publishes, read from the `pyproject.toml` files: the one source for every tool.

The tools, the noxfile and the tests of the repository ask this module which distributions exist, what each declares
and who depends on whom. Pure functions over text; the standard library is all it needs.

    vescale-dmodule 0.1.0   imports vescale.dmodule   siblings {vescale-dtensor}   requirements (torch>=2.11,<2.15)
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTING = "vescale-testing"


@dataclass(frozen=True)
class Project:
    """One distribution of this repository.

    Attributes:
        name: Distribution name, for example ``vescale-dmodule``.
        folder: Where its ``pyproject.toml`` lies.
        version: Version it declares.
        siblings: Distributions of this repository that it declares as dependencies.
        requirements: Every other dependency, as written.
        test_requirements: What its ``test`` extra adds, as written.
        optional_requirements: What its other extras add, as written.
    """

    name: str
    folder: Path
    version: str
    siblings: frozenset[str]
    requirements: tuple[str, ...]
    test_requirements: tuple[str, ...]
    optional_requirements: tuple[str, ...]

    @property
    def module(self) -> str:
        """Name to import: ``vescale.dmodule``, ``vescale`` for the umbrella, ``vescale_testing`` for the plugin."""
        if self.name == TESTING:
            return "vescale_testing"
        return self.name.replace("-", ".")

    @property
    def wheel_name(self) -> str:
        """File name of its wheel."""
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


def requirement_name(requirement: str) -> str:
    """Return the normalized distribution name at the head of a requirement string."""
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    if not match:
        raise ValueError(f"not a requirement: {requirement!r}; expected a name first, as in 'torch>=2.11,<2.15'")
    return re.sub(r"[-_.]+", "-", match[0]).lower()


def lowest_version(requirement: str) -> str | None:
    """Return the version after ``>=``, or None where the requirement has no lower bound."""
    match = re.search(r">=\s*([0-9][^,;\s]*)", requirement)
    return match[1] if match else None


def read_project(folder: Path) -> Project:
    """Read one distribution from ``folder/pyproject.toml``."""
    table = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    dependencies = table.get("dependencies", [])
    extras = table.get("optional-dependencies", {})
    siblings = {d for d in dependencies if requirement_name(d).split("-")[0] == "vescale"}
    return Project(
        name=table["name"],
        folder=folder,
        version=table["version"],
        siblings=frozenset(map(requirement_name, siblings)),
        requirements=tuple(d for d in dependencies if d not in siblings),
        test_requirements=tuple(extras.get("test", ())),
        optional_requirements=tuple(r for extra, added in extras.items() if extra != "test" for r in added),
    )


def read_projects(root: Path = ROOT) -> dict[str, Project]:
    """Read every published distribution, in alphabetical order of their names."""
    folders = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    projects = map(read_project, folders)
    return {project.name: project for project in projects}


def dependencies(projects: Mapping[str, Project], name: str) -> frozenset[str]:
    """Return every sibling that ``name`` needs, directly or through another sibling."""
    found: set[str] = set()
    pending = [name]
    while pending:
        new = projects[pending.pop()].siblings - found
        found |= new
        pending += new
    return frozenset(found)


def with_dependents(projects: Mapping[str, Project], names: Iterable[str]) -> list[str]:
    """Return ``names`` and every distribution that needs one of them, sorted."""
    names = frozenset(names)
    return sorted(name for name in projects if name in names or dependencies(projects, name) & names)
