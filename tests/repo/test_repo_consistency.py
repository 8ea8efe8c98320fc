"""Every test that the page about differences names exists, in the file that it links to."""

import ast
import re

import pytest
from projects import ROOT

PAGE = ROOT / "docs" / "design" / "consistency.md"
NAMED = re.compile(r"\[(test_\w+)\]\(([^)]+\.py)\)")


def missing(text: str) -> list[str]:
    """Return the tests that a text names and that their files do not define."""
    lost = []
    for name, path in NAMED.findall(text):
        file = (PAGE.parent / path).resolve()
        tree = ast.parse(file.read_text()) if file.exists() else ast.Module([], [])
        if name not in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}:
            lost.append(f"{path}: {name}")
    return lost


def rows(text: str) -> list[list[str]]:
    """Return the cells of every row of the page's tables, without heads and rules."""
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in cells if row[0].strip() != "class"]


def test_every_named_test_exists():
    assert missing(PAGE.read_text()) == []


def test_every_class_has_a_test():
    found = rows(PAGE.read_text())
    assert len(found) > 30
    assert [row[0] for row in found if len(row) != 3 or not NAMED.search(row[2])] == []


@pytest.mark.parametrize(("old", "new"), [("test_every_mutation]", "test_no_mutation]"), ("_lookup.py", "_seen.py")])
def test_a_test_that_is_gone_is_found(old, new):
    assert missing(PAGE.read_text().replace(old, new))
