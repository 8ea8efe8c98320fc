"""Check what an environment holds before its tests count: run by the python of the environment.

    python tools/check_environment.py vescale-dmodule vescale-dtensor

asserts that

- exactly the named distributions of this project are installed and importable;
- each comes from this environment, not from the source tree, a user's site-packages or PYTHONPATH;
- no other portion of the `vescale` namespace can be imported.

Without it a package that does not declare a sibling would pass its tests by accident. Only the namespace itself is
imported, so the check takes no time.
"""

import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path

from projects import Project, read_projects


def origin(module: str) -> Path | None:
    """Return the file or folder a module would be imported from, or None where there is no such module."""
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        return None
    if spec is None:
        return None
    return Path(spec.origin or next(iter(spec.submodule_search_locations or ())))


def problems(expected: set[str], projects: dict[str, Project]) -> list[str]:
    """Return one sentence for every way in which this environment is not the expected one."""
    found = []
    prefix = Path(sys.prefix).resolve()
    installed = {dist.metadata["Name"].lower() for dist in distributions()} & set(projects)
    for name in sorted(installed - expected):
        found.append(f"{name} is installed but not declared as a dependency")
    for name in sorted(expected - installed):
        found.append(f"{name} should be installed and is not")
    for name, project in projects.items():
        where = origin(project.module)
        if project.module == "vescale" and name not in expected and where is not None and where.is_dir():
            continue  # without the umbrella `vescale` is the namespace of the installed portions: a folder, no file
        if name in expected and where is None:
            found.append(f"{project.module} cannot be imported")
        elif name in expected and not where.resolve().is_relative_to(prefix):
            found.append(f"{project.module} comes from {where}, not from the environment {prefix}")
        elif name not in expected and where is not None:
            found.append(f"{project.module} can be imported from {where} although {name} is not declared")
    return found


def main() -> None:
    """Exit with status 1 and the list of problems, or print one line."""
    expected = set(sys.argv[1:])
    projects = read_projects()
    if unknown := expected - set(projects):
        sys.exit(f"no such distribution here: {', '.join(sorted(unknown))}; there are: {', '.join(projects)}")
    if found := problems(expected, projects):
        sys.exit("wrong environment " + sys.prefix + "\n  " + "\n  ".join(found))
    print(f"the environment holds {', '.join(sorted(expected)) or 'nothing'} of vescale's packages, as declared")


if __name__ == "__main__":
    main()
