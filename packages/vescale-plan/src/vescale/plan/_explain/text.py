"""Memory and mesh as text: bars of letters, so that they are readable without colors.

memory per rank: p parameters, g gradients, o optimizer, a activations, b buffers; | limit 72.00 GiB
stage 0     ppppggggooooooooooooaaaaaaaaaaaaaaaaaaaabb        |  51.20 GiB  71.1%

ranks on the mesh pp 2 x dp 2 x tp 2, of 4 devices per host
pp 0  dp 0  tp: 0 1     host 0
"""

import math
from collections.abc import Sequence

from .._memory import ACTIVATIONS_COVER, StageMemory
from .._table import render
from .._units import format_bytes, format_percent
from .facts import KINDS, Explained, full_scale, places, stacked_ends, stage_rows, used_axes

_BAR_WIDTH = 60
#: Ranks that the fastest axis of a row shows at most.
_MAX_RANKS_OF_ROW = 16
_MAX_GROUPS = 16


def explain_text(plan: Explained, *, max_rows: int, devices_per_host: int | None) -> str:
    """Return the plan, its memory and mesh, the table of its search and the scope of the estimates."""
    lines = [str(plan), ""]
    mesh = mesh_lines(plan.axis_order, plan.mesh_shape, devices_per_host=devices_per_host, max_rows=_MAX_GROUPS)
    if plan.memory:
        lines += [*memory_lines(plan.memory, limit=plan.limit_bytes), ""]
    lines += [
        *mesh,
        "",
    ]
    if plan.table:
        limit = "" if plan.limit_bytes is None else f", limit {format_bytes(plan.limit_bytes)} per rank"
        header = f"Layouts in the order of preference{limit}:"
        lines += [header, render(plan.table, max_rows=max_rows), "", ACTIVATIONS_COVER]
    else:
        lines.append("This plan was written by hand and has no table; plans of generate_plan() have one.")
    return "\n".join(lines)


def memory_lines(stages: Sequence[StageMemory], *, limit: int | None) -> list[str]:
    """Return a stacked bar per run of equal stages, below a legend."""
    rows = stage_rows(stages)
    scale = full_scale(rows, limit)
    legend = ", ".join(f"{kind[0]} {kind}" for kind in KINDS)
    mark = None if limit is None else round(limit / scale * _BAR_WIDTH)
    lines = [f"memory per rank: {legend}" + ("" if limit is None else f"; | limit {format_bytes(limit)}")]
    width = max((len(row.name) for row in rows), default=0)
    for row in rows:
        bar = _bar(row.parts, scale)
        if mark is not None:
            bar = bar.ljust(mark)[:mark] + "|" + bar[mark:]
        share = "" if limit is None else f"  {format_percent(row.memory.total / limit)}"
        lines.append(f"{row.name.ljust(width)}  {bar.ljust(_BAR_WIDTH + 1)}  {format_bytes(row.memory.total)}{share}")
    return lines


def _bar(parts: Sequence[int], scale: int) -> str:
    """Return the letters of a stacked bar; rounding never makes it longer than its total."""
    bar = ""
    for kind, end in zip(KINDS, stacked_ends(parts, scale, _BAR_WIDTH), strict=True):
        bar += kind[0] * (round(end) - len(bar))
    return bar


def mesh_lines(axes: Sequence[str], shape: Sequence[int], *, devices_per_host: int | None, max_rows: int) -> list[str]:
    """Return one line per group of the fastest axis: its coordinates, ranks and hosts."""
    degrees = " x ".join(f"{axis} {size}" for axis, size in zip(axes, shape, strict=True))
    hosts = "" if devices_per_host is None else f", of {devices_per_host} devices per host"
    lines = [f"ranks on the mesh {degrees}{hosts}"]
    *slow, fast = used_axes(shape)
    size = shape[fast]
    num_groups = math.prod(shape) // size
    members = places(shape, devices_per_host=devices_per_host, count=size * min(num_groups, max_rows))
    for first in range(0, len(members), size):
        group = members[first : first + size]
        where = "".join(f"{axes[axis]} {group[0].coords[axis]}  " for axis in slow)
        ranks = _numbers([place.rank for place in group])
        on = "" if devices_per_host is None else f"   host {_numbers(sorted({place.host or 0 for place in group}))}"
        lines.append(f"{where}{axes[fast]}: {ranks}{on}")
    if num_groups > max_rows:
        lines.append(f"... and {num_groups - max_rows} groups more")
    return lines


def _numbers(numbers: Sequence[int]) -> str:
    if len(numbers) > _MAX_RANKS_OF_ROW:
        return f"{numbers[0]} to {numbers[-1]}"
    return " ".join(map(str, numbers))
