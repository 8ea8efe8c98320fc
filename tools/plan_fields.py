"""Write the page of the fields of a plan: who carries each out, and what is refused.

    python tools/plan_fields.py docs/plan_fields.md

The rows are those of the test that goes field by field, which checks each of them; defaults are those of `Plan`.
"""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "packages" / "vescale" / "tests" / "test_vescale_plan_fields.py"
HEAD = """# Fields of a plan

`vescale.parallelize` carries out each field of a `vescale.Plan`, or refuses it with the reason, before it communicates.
A combination that has no effect is refused when the plan is made. `help(vescale.Plan)` says what each field means.

`python tools/plan_fields.py docs/plan_fields.md` writes this page from the rows of
[test_vescale_plan_fields.py](../packages/vescale/tests/test_vescale_plan_fields.py), which tries each of them.

| field | default | carried out by |
|---|---|---|
"""


def load_rows() -> ModuleType:
    """Return the module of the rows."""
    spec = importlib.util.spec_from_file_location("plan_field_rows", ROWS)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def page() -> str:
    """Return docs/plan_fields.md."""
    from vescale.plan import Plan

    rows = load_rows()
    lines = []
    for field in dataclasses.fields(Plan):
        default = "" if field.name in rows.DESCRIPTIONS else f"`{field.default!r}`"
        how = rows.DESCRIPTIONS.get(field.name) or rows.ROWS[field.name].how
        lines.append(f"| `{field.name}` | {default} | {how} |\n")
    return HEAD + "".join(lines)


def main(path: str) -> None:
    """Write the page to ``path``."""
    Path(path).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/plan_fields.py PAGE.md")
    main(sys.argv[1])
