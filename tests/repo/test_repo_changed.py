"""A change selects the packages it concerns and those that depend on them."""

import pytest
from changed import changed_packages
from projects import read_projects

PROJECTS = read_projects()
ALL = sorted(PROJECTS)


@pytest.mark.parametrize(
    "paths, expected",
    [
        ([], []),
        (["README.md", "docs/tour.md", "recipes/mixtral_4d/train.py", "tests/dp_tp/test_x.py"], []),
        (["packages/vescale/src/vescale/__init__.py"], ["vescale"]),
        (["packages/vescale-pipe/README.md"], ["vescale", "vescale-pipe"]),
        (
            ["packages/vescale-dtensor/src/vescale/dtensor/random.py"],
            ["vescale", "vescale-dmodule", "vescale-dtensor", "vescale-optim"],
        ),
        (
            ["packages/vescale-ckpt/x.py", "docs/x.md", "packages/vescale-plan/x.py"],
            ["vescale", "vescale-ckpt", "vescale-plan"],
        ),
    ],
)
def test_packages_and_their_dependents(paths, expected):
    assert changed_packages(paths, PROJECTS) == expected


@pytest.mark.parametrize(
    "path",
    [
        "constraints.txt",
        "noxfile.py",
        "pyproject.toml",
        "testing/src/vescale_testing/ranks.py",
        "tools/projects.py",
        ".github/workflows/ci.yml",
        "packages/vescale-removed/pyproject.toml",
    ],
)
def test_what_everything_is_built_with_selects_everything(path):
    assert changed_packages([path], PROJECTS) == ALL


def test_a_file_name_that_only_begins_like_a_package_selects_nothing():
    assert changed_packages(["packages_of_others/vescale-pipe/x.py"], PROJECTS) == []
