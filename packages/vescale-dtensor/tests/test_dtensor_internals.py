"""The page for people who change the package says what the code says."""

import re
from pathlib import Path

import vescale.dtensor

PAGE = Path(__file__).parents[1] / "INTERNALS.md"
SOURCE = Path(vescale.dtensor.__file__).parent


def test_every_folder_is_on_the_page():
    named = set(re.findall(r"^\| `([\w/]+)/` \|", PAGE.read_text(), re.MULTILINE))
    folders = {str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("__init__.py")} - {"."}
    assert named == folders


def test_every_file_that_the_page_names_exists():
    named = set(re.findall(r"`(_\w+/[\w/]+\.py)`", PAGE.read_text()))
    assert named
    assert [name for name in named if not (SOURCE / name).is_file()] == []
