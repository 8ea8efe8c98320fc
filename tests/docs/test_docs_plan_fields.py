"""docs/plan_fields.md has a row for each field of a plan, as the test that tries them says."""

import dataclasses

from plan_fields import load_rows, page
from projects import ROOT

from vescale.plan import Plan


def test_the_page_is_what_is_tried():
    text = (ROOT / "docs" / "plan_fields.md").read_text(encoding="utf-8")
    assert text == page(), "run: python tools/plan_fields.py docs/plan_fields.md"
    assert all(f"| `{field.name}` |" in text for field in dataclasses.fields(Plan))


def test_a_row_that_changes_changes_the_page(monkeypatch):
    rows = load_rows()
    monkeypatch.setitem(rows.ROWS, "dp", dataclasses.replace(rows.ROWS["dp"], how="nothing"))
    monkeypatch.setattr("plan_fields.load_rows", lambda: rows)
    assert page() != (ROOT / "docs" / "plan_fields.md").read_text(encoding="utf-8")
