"""The glossary has each word once, in a sentence of its own, and only words that the code uses."""

import re

from projects import ROOT

GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


def rows(page: str) -> list[tuple[str, str]]:
    """Return word and meaning of each row; a word that two packages use differently has its area in brackets."""
    found = re.findall(r"^\| \*\*(.+?)\*\*([^|]*) \| (.+?) \| .+? \|$", page, flags=re.MULTILINE)
    return [(f"{words}{area}", meaning) for words, area, meaning in found]


def unused(words: list[str], source: str) -> list[str]:
    """Return the words that do not occur in a source: as prose, as a name, in singular or plural."""

    def occurs(word: str) -> bool:
        stem = re.sub(r"(is|s|y)$", "", word.lower())
        return re.search(r"\b_?" + r"[\s_-]?".join(map(re.escape, re.split(r"[\s-]", stem))), source) is not None

    return [word for word in words if not occurs(word)]


def source_text() -> str:
    """Return paths and contents of all source files, in lower case."""
    files = [file for top in ("packages/*/src", "testing/src") for file in ROOT.glob(f"{top}/**/*.py")]
    return "\n".join(f"{file.relative_to(ROOT)}\n{file.read_text(encoding='utf-8')}" for file in files).lower()


def test_each_word_is_defined_once_in_a_sentence():
    words = [word for words, _ in rows(GLOSSARY) for word in words.split(", ")]
    assert len(words) > 60
    assert sorted({word for word in words if words.count(word) > 1}) == []
    assert [word for word, meaning in rows(GLOSSARY) if not meaning.endswith(".")] == []


def test_the_code_uses_every_word():
    words = [word for words, _ in rows(GLOSSARY) for word in re.sub(r" \(.*\)$", "", words).split(", ")]
    assert unused(words, source_text()) == []


def test_a_word_that_is_not_used_is_found():
    assert unused(["data axis", "tape", "twin"], "class dataaxes: ...\nthe tapes") == ["twin"]
