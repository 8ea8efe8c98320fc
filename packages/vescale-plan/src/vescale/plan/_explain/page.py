"""One page of HTML about a plan, in one file: no script, style, font or picture is loaded from elsewhere.

The page has the plan's text, the two figures, the layouts of the search as a table that a click on a column sorts, and
every field. All text of a plan is escaped.
"""

import dataclasses
import html
import re
from collections.abc import Sequence
from typing import Any

from .._memory import ACTIVATIONS_COVER
from .._table import _COLUMNS as COLUMNS
from .._table import CHOSEN, REFUSED, Candidate
from .._units import BYTE_UNITS
from .facts import Explained
from .figures import memory_figure, mesh_figure

#: Fields that the page shows otherwise.
_SHOWN = ("memory", "table", "limit_bytes")

_NO_NUMBER = ("-", "any")
_FACTORS = {"": 1, "%": 1} | {unit: 1024**power for power, unit in enumerate(BYTE_UNITS)}
_NUMBER = re.compile(rf"([\d.]+) ?({'|'.join(map(re.escape, _FACTORS))})")

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, "Segoe UI", Helvetica, Arial, sans-serif; color: #1f2933; background: #fff;
  max-width: 1040px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; border-bottom: 1px solid #cbd2d9; }
pre { background: #f5f7fa; padding: .8rem; white-space: pre-wrap; font-size: 13px; }
svg { display: block; font-family: system-ui, "Segoe UI", Helvetica, Arial, sans-serif; }
svg .tick { stroke-width: 1; } svg .limit { stroke-width: 2; stroke-dasharray: 6 4; }
svg .rank { stroke: #cbd2d9; }
.scroll { max-height: 36rem; overflow: auto; border: 1px solid #cbd2d9; }
table { border-collapse: collapse; font-size: 13px; width: 100%; }
th, td { padding: .25rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e7eb; }
th:last-child, td:last-child, .fields td, .fields th { text-align: left; white-space: normal; }
thead th { position: sticky; top: 0; background: #f5f7fa; }
th button { background: none; border: 0; padding: 0; font: inherit; color: inherit; cursor: pointer; }
th button:focus-visible { outline: 2px solid #0072b2; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
tr.chosen td { background: #d8f3dc; font-weight: 600; } tr.refused td { color: #5f6c7b; }
.fields tr.default td { color: #5f6c7b; } .note { color: #5f6c7b; font-size: 13px; }
"""

_SCRIPT = """
for (const header of document.querySelectorAll("th button")) {
  header.addEventListener("click", () => {
    const cell = header.parentElement, column = cell.cellIndex, body = cell.closest("table").tBodies[0];
    const up = cell.getAttribute("aria-sort") !== "ascending";
    for (const other of cell.parentElement.cells) other.removeAttribute("aria-sort");
    cell.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.key;
    const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b);
    body.append(...[...body.rows].sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b))));
  });
}
"""


def page(plan: Explained, *, devices_per_host: int | None) -> str:
    """Return the page."""
    heading = str(plan).splitlines()[0]
    sections = [
        f"<h1>{html.escape(heading)}</h1>",
        f"<pre>{html.escape(str(plan))}</pre>",
        "<h2>Memory per rank</h2>",
        _memory(plan),
        "<h2>Ranks on the mesh</h2>",
        mesh_figure(plan.axis_order, plan.mesh_shape, devices_per_host=devices_per_host),
        f'<p class="note">{_mesh_note(plan, devices_per_host)}</p>',
        "<h2>Layouts of the search</h2>",
        _candidates(plan.table),
        "<h2>Fields</h2>",
        _fields(plan),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(heading)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(sections)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _memory(plan: Explained) -> str:
    if not plan.memory:
        return '<p class="note">This plan was written by hand: it has no estimate. Generated plans have one.</p>'
    note = f'<p class="note">{html.escape(ACTIVATIONS_COVER)}</p>'
    return memory_figure(plan.memory, limit=plan.limit_bytes) + note


def _mesh_note(plan: Explained, devices_per_host: int | None) -> str:
    rows = "A row is a host." if devices_per_host else "A row is a group of the fastest axis; hosts were not given."
    axes = html.escape(", ".join(plan.axis_order))
    return f"Axes, slowest first: {axes}. {rows} The color is the slowest coordinate."


def _candidates(table: Sequence[Candidate]) -> str:
    if not table:
        return '<p class="note">This plan was written by hand: no layouts were compared.</p>'
    head = "".join(f'<th scope="col"><button type="button">{html.escape(name)}</button></th>' for name in COLUMNS)
    rows = "\n".join(map(_row, table))
    note = f"<p class='note'>{len(table)} layouts in the order of preference; a click on a column sorts by it.</p>"
    table_text = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return f'{note}<div class="scroll">{table_text}</div>'


def _row(candidate: Candidate) -> str:
    style = f' class="{candidate.verdict}"' if candidate.verdict in (CHOSEN, REFUSED) else ""
    cells = "".join(
        f'<td data-key="{html.escape(sort_key(cell))}">{html.escape(cell)}</td>' for cell in candidate.cells()
    )
    return f"<tr{style}>{cells}</tr>"


def sort_key(cell: str) -> str:
    """Return what a cell is sorted by: its number in base units, -1 for none, or its text.

    Example:
        >>> sort_key("1.50 KiB"), sort_key("20.0%"), sort_key("-"), sort_key("fits")
        ('1536', '20', '-1', 'fits')
    """
    if cell in _NO_NUMBER:
        return "-1"
    match = _NUMBER.fullmatch(cell)
    return f"{float(match[1]) * _FACTORS[match[2] or '']:.15g}" if match else cell


def _fields(plan: Any) -> str:
    rows = []
    for field in dataclasses.fields(plan):
        if field.name in _SHOWN:
            continue
        value = getattr(plan, field.name)
        style = ' class="default"' if value == field.default else ""
        rows.append(f"<tr{style}><td>{field.name}</td><td>{html.escape(repr(value))}</td></tr>")
    head = '<thead><tr><th scope="col">field</th><th scope="col">value</th></tr></thead>'
    note = '<p class="note">Fields with their default value are pale.</p>'
    return f'{note}<table class="fields">{head}<tbody>{"".join(rows)}</tbody></table>'
