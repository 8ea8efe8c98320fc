"""Docstrings, comments, texts and pages use American spelling, and none of the words that the repository avoids."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

COVERED = (
    "packages/*/src",
    "packages/*/*.md",
    "docs",
    "testing/src",
    "testing/*.md",
    "recipes",
    "benchmarks/*.py",
    "README.md",
    "CONTRIBUTING.md",
)

STEMS = (
    "categor|character|custom|emphas|final|general|harmon|initial|local|material|maxim|memor|minim|modern|normal|"
    "optim|organ|parallel|priorit|random|real|recogn|serial|special|stabil|standard|summar|synchron|util|vector|visual"
)
AVOIDED = {
    "people for callers": r"\b(whoever|somebody|someone|nobody|everybody|anybody)\b",
    "verbs of telling": r"\b(tell whether|tells whether|hears)\b",
    "British -ise": rf"\b\w*({STEMS})(is(e|ed|es|er|ers|ing)|isations?)\b",
    "British spelling": r"\b\w*(behaviour|colour|favour|neighbour|honour|labelled|cancelled|learnt|whilst|grey)\w*",
}
PATTERN = re.compile("|".join(AVOIDED.values()), re.IGNORECASE)


def files() -> list[Path]:
    """Return the covered sources and pages."""
    found: list[Path] = []
    for entry in COVERED:
        for path in ROOT.glob(entry):
            found += sorted((*path.rglob("*.py"), *path.rglob("*.md"))) if path.is_dir() else [path]
    return found


def hits(text: str) -> list[str]:
    """Return ``line: word`` for every avoided word."""
    lines = enumerate(text.splitlines(), 1)
    return [f"{number}: {match[0]}" for number, line in lines for match in PATTERN.finditer(line)]


def test_no_avoided_word():
    found = [f"{path.relative_to(ROOT)}:{hit}" for path in files() for hit in hits(path.read_text(encoding="utf-8"))]
    assert found == []


def test_every_entry_covers_files():
    for entry in COVERED:
        assert any(ROOT.glob(entry)), entry
    assert len(files()) > 80


@pytest.mark.parametrize(
    "text",
    [
        "Tell whether a box is empty.",
        "Whoever calls this waits.",
        "somebody else",
        "nobody reads it",
        "the group is initialised",
        "parallelise a model",
        "a normalisation",
        "neighbouring devices",
        "the behaviour of stock torch",
    ],
)
def test_an_avoided_word_is_found(text):
    assert len(hits(f"first line\n{text}")) == 1
    assert hits(f"first line\n{text}")[0].startswith("2: ")


@pytest.mark.parametrize(
    "text", ["tensor parallelism", "a precise optimizer", "Return whether", "localized", "promise"]
)
def test_other_words_are_not(text):
    assert hits(text) == []
