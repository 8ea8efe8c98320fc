"""The page for people who change the package says what the code says."""

import re
from pathlib import Path

import vescale.dtensor
from vescale.dtensor._install import ROWS

PAGE = Path(__file__).parents[1] / "INTERNALS.md"
SOURCE = Path(vescale.dtensor.__file__).parent


def table_of_changes() -> str:
    """Return the table of process-wide changes as the page must have it."""
    lines = ["| change | family | what is replaced | reason |", "|---|---|---|---|"]
    lines += [f"| {row.name.strip('_')} | `{row.family}` | `{row.patch.place}` | {row.reason} |" for row in ROWS]
    return "\n".join(lines)


def test_the_table_of_process_wide_changes_is_the_one_that_is_installed():
    shown = PAGE.read_text().partition("<!-- rows -->\n")[2].partition("\n<!-- end of rows -->")[0]
    assert shown == table_of_changes(), f"put this table into the page:\n{table_of_changes()}"


def test_every_folder_is_on_the_page():
    named = set(re.findall(r"^\| `([\w/]+)/` \|", PAGE.read_text(), re.MULTILINE))
    folders = {str(path.parent.relative_to(SOURCE)) for path in SOURCE.rglob("__init__.py")} - {"."}
    assert named == folders


def test_every_file_that_the_page_names_exists():
    named = set(re.findall(r"`(_\w+/[\w/]+\.py)`", PAGE.read_text()))
    assert named
    assert [name for name in named if not (SOURCE / name).is_file()] == []
