"""The architecture page leads to every folder of the code, and its four questions to the files that answer them."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"

# question -> a definition that the file behind its link must have
ANSWERS = {
    "Where is the rule of a random operator?": r"^def handlers\(",
    "Where is a bucket reduced?": r"^class Reduction\b",
    "Where is the collective of a boundary?": r"all_gather|reduce_scatter",
    "Where does a tensor move between placements?": r"^def \w*(move|redistribute)\w*\(",
}


def links(text: str) -> set[Path]:
    """Return the files and folders that a page links to."""
    return {(PAGE.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", text)}


def folders() -> set[Path]:
    """Return every folder with modules of a package or of the test plugin."""
    return {path.parent for top in ("packages/*/src", "testing/src") for path in ROOT.glob(f"{top}/**/*.py")}


def test_every_folder_is_linked():
    assert sorted(str(folder) for folder in folders() - links(PAGE.read_text())) == []


def test_the_questions_lead_to_their_answers():
    rows = dict(re.findall(r"^\| (Where [^|]+\?) \| \[[^]]+\]\(([^)]+)\) \|$", PAGE.read_text(), flags=re.MULTILINE))
    assert rows.keys() == ANSWERS.keys()
    for question, definition in ANSWERS.items():
        source = (PAGE.parent / rows[question]).resolve().read_text()
        assert re.search(definition, source, flags=re.MULTILINE), question


def test_a_folder_without_a_link_is_found():
    text = "\n".join(line for line in PAGE.read_text().splitlines() if "_random/philox" not in line)
    assert {folder.name for folder in folders() - links(text)} == {"philox"}
