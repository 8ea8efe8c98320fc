"""Which packages must be tested after a change: those changed and those that depend on them.

A file under `packages/NAME/` concerns NAME and its dependents. A file that every package is built or tested with (the
noxfile, the constraints, the tools, the test plugin, the tool configuration, the workflow) concerns all of them. Any
other file (documentation, recipes, benchmarks, composed suites) concerns no package by itself: the integration jobs
always run.

    python tools/changed.py origin/main      # prints a JSON list for the unit matrix
    python tools/changed.py --all            # every package
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath

from projects import ROOT, TESTING, Project, read_project, read_projects, with_dependents

COMMON = ("noxfile.py", "constraints.txt", "pyproject.toml", "tools", "testing", ".ci", ".github")


def changed_packages(paths: Iterable[str], projects: Mapping[str, Project]) -> list[str]:
    """Return the distributions to test, sorted, when the files ``paths`` (relative to the root) have changed.

    ``projects`` may hold the test plugin beside the packages: it is selected when all are.
    A path under ``packages/`` that belongs to no distribution (one that was removed, say) selects all: safe and rare.
    """
    changed = set()
    for path in paths:
        parts = PurePosixPath(path).parts
        if parts[0] == "packages":
            if len(parts) < 2 or parts[1] not in projects:
                return sorted(projects)
            changed.add(parts[1])
        elif parts[0] in COMMON:
            return sorted(projects)
    return with_dependents(projects, changed)


def changed_paths(base: str) -> list[str]:
    """Return the files that differ between HEAD and its merge base with the commit ``base``."""
    command = ["git", "-C", str(ROOT), "diff", "--name-only", f"{base}...HEAD"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def main(base: str) -> None:
    """Print the packages changed since ``base``, or all for ``--all``, as a JSON list."""
    projects = {**read_projects(), TESTING: read_project(ROOT / "testing")}
    names = sorted(projects) if base == "--all" else changed_packages(changed_paths(base), projects)
    print(json.dumps(names))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/changed.py BASE_COMMIT | --all")
    main(sys.argv[1])
