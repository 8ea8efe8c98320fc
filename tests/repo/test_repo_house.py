"""The counts of the repository: what counts, and what a comparison with a revision reads."""

import subprocess

import pytest
from house import count, imports_private_module, long_functions, main, revision_tree, table, working_tree

FILES = {
    "packages/vescale-one/src/vescale/one/__init__.py": "from .a import A\n",
    "packages/vescale-one/src/vescale/one/a.py": "from . import b\n\nA = 1\n",
    "packages/vescale-one/src/vescale/one/b.py": "def f():\n    from .a import A\n    return A\n",
    "packages/vescale-one/tests/test_one.py": "from vescale.one._a import A\n",
    "tests/suite/test_suite.py": "import vescale.one\n",
}


def test_a_distribution_is_counted():
    one = count(FILES)["vescale-one"]
    assert (one.source_files, one.source_lines, one.test_files, one.test_lines) == (3, 7, 1, 1)
    assert one.private_tests == ("packages/vescale-one/tests/test_one.py",)
    assert one.circles == ("vescale.one.a vescale.one.b",)


def test_the_composed_suites_are_a_row_of_their_own():
    assert count(FILES)["tests"].test_files == 1


def test_long_files_and_long_functions_are_found():
    text = "def f():\n" + "    pass\n" * 100
    long = {"packages/vescale-one/src/vescale/one/c.py": text + "x = 1\n" * 400}
    one = count(long)["vescale-one"]
    assert one.long_files == tuple(long)
    assert one.long_functions == (f"{next(iter(long))}:f",)
    assert long_functions(text[: -len("    pass\n")]) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from vescale.optim._norm import exact", True),
        ("import vescale.optim._norm.exact", True),
        ("from vescale.optim import _norm", True),
        ("from vescale.optim import __version__", False),
        ("from torch._ops import OpOverload", False),
    ],
)
def test_an_import_of_a_private_module_is_recognized(line, expected):
    assert imports_private_module(line) is expected


def test_a_comparison_shows_what_has_changed_only():
    after = dict(FILES)
    after["packages/vescale-one/src/vescale/one/b.py"] = "def f(): ...\n"
    row = next(line for line in table(count(after), count(FILES)).splitlines() if "vescale-one" in line)
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["vescale-one", "3", "7 -> 5", "1", "1", "1", "0", "0", "1 -> 0"]


def test_a_revision_is_read_without_touching_the_tree(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (tmp_path / "pyproject.toml").write_text("")  # not counted
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git("init")
    git("add", "--all")
    git("commit", "--message", "first")
    (tmp_path / "packages/vescale-one/src/vescale/one/b.py").write_text("changed\n")
    assert revision_tree("HEAD", tmp_path) == FILES
    assert working_tree(tmp_path) != FILES


def test_the_command_prints_every_distribution(capsys):
    main(["--list"])
    printed = capsys.readouterr().out
    assert "| vescale-dtensor" in printed
    assert "circles:" in printed
