"""Two figures as inline SVG: memory per rank, and ranks on the mesh.

Elements of SVG are made by the standard library's XML writer, so any text is escaped. No font is measured: a text takes
at most `CHARACTER` of its size per character, and places are chosen for that, so that labels do not overlap.

    legend        parameters  gradients  optimizer  activations  buffers
                                                 limit 72.00 GiB
    stage 0       |=======|=====|=========|============|    :       51.20 GiB (71.1%)
    stages 1-6    |=======|=====|=========|=====|           :       40.10 GiB (55.7%)
                  0           20 GiB         40 GiB      60 GiB
"""

import colorsys
import math
from collections.abc import Sequence
from xml.etree import ElementTree

from .._memory import StageMemory
from .._units import format_bytes, format_percent
from .facts import KINDS, Place, StageRow, full_scale, places, stacked_ends, stage_rows, used_axes

WIDTH = 960
CHARACTER = 0.62
TEXT_SIZE, SMALL = 12, 11
#: Colors of Okabe and Ito, distinct with the common forms of color blindness; repeated if there are more kinds.
COLORS = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#999999", "#d55e00")
INK, MUTED, RULE, ALARM = "#1f2933", "#5f6c7b", "#cbd2d9", "#c1121f"

_LEFT, _RIGHT = 120, 190  # beside the bars: names of stages, totals
_ROW, _BAR = 30, 20
_MAX_TICKS = 6
_CELLS, _CELL_WIDTH, _CELL_HEIGHT, _GAP, _HOST = 8, 102, 36, 4, 90
MAX_RANKS = 256  # drawn


def text_width(content: str, size: float = TEXT_SIZE) -> float:
    """Return an upper bound of the width of a text."""
    return CHARACTER * size * len(content)


class Figure:
    """An SVG element under construction.

    Args:
        height: in units of the figure; the width is `WIDTH`.
        label: what a screen reader says.
    """

    def __init__(self, height: float, label: str) -> None:
        box = {"viewBox": f"0 0 {WIDTH} {_number(height)}", "width": "100%", "role": "img", "aria-label": label}
        self.root = ElementTree.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **box})

    def text(
        self, x: float, y: float, content: str, *, anchor: str = "start", size: int = TEXT_SIZE, fill: str = INK
    ) -> None:
        """Add a line of text with its baseline at ``y``."""
        at = {"x": _number(x), "y": _number(y), "text-anchor": anchor, "font-size": str(size), "fill": fill}
        ElementTree.SubElement(self.root, "text", at).text = content

    def box(self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", kind: str) -> None:
        """Add a rectangle; ``title`` shows when the pointer is over it."""
        at = {"x": _number(x), "y": _number(y), "width": _number(width), "height": _number(height)}
        element = ElementTree.SubElement(self.root, "rect", {**at, "fill": fill, "class": kind})
        if title:
            ElementTree.SubElement(element, "title").text = title

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str, *, kind: str) -> None:
        """Add a line."""
        at = {"x1": _number(x1), "y1": _number(y1), "x2": _number(x2), "y2": _number(y2)}
        ElementTree.SubElement(self.root, "line", {**at, "stroke": color, "class": kind})

    def __str__(self) -> str:
        return ElementTree.tostring(self.root, encoding="unicode")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


# ---------------------------------------------------------------------------------------------------- memory


def memory_figure(stages: Sequence[StageMemory], *, limit: int | None) -> str:
    """Return stacked bars, one per run of equal stages, with the limit as a line."""
    rows = stage_rows(stages)
    scale, plot = 1.04 * full_scale(rows, limit), WIDTH - _LEFT - _RIGHT
    top = 26 + 22  # legend, label of the limit
    bottom = top + _ROW * len(rows)
    figure = Figure(bottom + 24, "estimated memory per rank of every stage")
    _legend(figure)
    for value in ticks(scale):
        x = _LEFT + value / scale * plot
        figure.line(x, top, x, bottom, RULE, kind="tick")
        figure.text(x, bottom + 16, tick_text(value), anchor="middle", size=SMALL, fill=MUTED)
    for number, row in enumerate(rows):
        _bar(figure, row, top + number * _ROW, scale=scale, limit=limit)
    if limit is not None:
        x, label = _LEFT + limit / scale * plot, f"limit {format_bytes(limit)}"
        half = text_width(label) / 2
        figure.line(x, top - 4, x, bottom, ALARM, kind="limit")
        figure.text(min(max(x, half), WIDTH - half), top - 8, label, anchor="middle", fill=ALARM)
    return str(figure)


def _legend(figure: Figure) -> None:
    x = float(_LEFT)
    for kind, color in _colored():
        figure.box(x, 6, 12, 12, color, kind="swatch")
        figure.text(x + 17, 16, kind)
        x += 17 + text_width(kind) + 16


def _bar(figure: Figure, row: StageRow, y: float, *, scale: float, limit: int | None) -> None:
    total = row.memory.total
    share = "" if limit is None else f" ({format_percent(total / limit)})"
    figure.text(_LEFT - 10, y + 19, row.name, anchor="end")
    start = 0.0
    ends = stacked_ends(row.parts, scale, WIDTH - _LEFT - _RIGHT)
    for (kind, color), num_bytes, end in zip(_colored(), row.parts, ends, strict=True):
        if num_bytes:
            title = f"{row.name}: {kind} {format_bytes(num_bytes)}"
            figure.box(_LEFT + start, y + (_ROW - _BAR) / 2, end - start, _BAR, color, title=title, kind="bar")
        start = end
    is_over = limit is not None and total > limit
    figure.text(WIDTH - _RIGHT + 10, y + 19, f"{format_bytes(total)}{share}", fill=ALARM if is_over else INK)


def _colored() -> list[tuple[str, str]]:
    return [(kind, COLORS[number % len(COLORS)]) for number, kind in enumerate(KINDS)]


def ticks(scale: float) -> list[int]:
    """Return round numbers of bytes from 0 to ``scale``: multiples of 1, 2 or 5 tens of a binary unit."""
    unit = 1
    while unit * 1024 <= scale:
        unit *= 1024
    step, factors = unit, (2.0, 2.5, 2.0)
    turn = 0
    while scale / step >= _MAX_TICKS:
        step = int(step * factors[turn % len(factors)])
        turn += 1
    return list(range(0, int(scale) + 1, step))


def tick_text(num_bytes: int) -> str:
    """Return a round number of bytes without digits after the point: ``20 GiB``."""
    return format_bytes(num_bytes).replace(".00 ", " ") if num_bytes else "0"


# ---------------------------------------------------------------------------------------------------- mesh


def mesh_figure(axes: Sequence[str], shape: Sequence[int], *, devices_per_host: int | None) -> str:
    """Return a cell per rank with its coordinates, in a row per host, colored by the slowest axis.

    Without ``devices_per_host`` a row is a group of ranks that differ in the fastest axis.
    """
    used = used_axes(shape)
    shown = places(shape, devices_per_host=devices_per_host, count=MAX_RANKS)
    per_group = devices_per_host or shape[used[-1]]
    groups = [shown[first : first + per_group] for first in range(0, len(shown), per_group)]
    heights = [-(-len(group) // _CELLS) * (_CELL_HEIGHT + _GAP) + 6 for group in groups]
    total = math.prod(shape)
    figure = Figure(sum(heights) + (20 if total > len(shown) else 0) + 4, "coordinates of every rank on the mesh")
    y = 2.0
    for number, (group, height) in enumerate(zip(groups, heights, strict=True)):
        if devices_per_host is not None:
            figure.text(0, y + _CELL_HEIGHT / 2 + 4, f"host {number}")
        for position, place in enumerate(group):
            row, column = divmod(position, _CELLS)
            x = _HOST + column * (_CELL_WIDTH + _GAP)
            _cell(figure, place, x, y + row * (_CELL_HEIGHT + _GAP), axes, used)
        y += height
    if total > len(shown):
        figure.text(0, y + 14, f"... and {total - len(shown)} ranks more", fill=MUTED)
    return str(figure)


def _cell(figure: Figure, place: Place, x: float, y: float, axes: Sequence[str], used: Sequence[int]) -> None:
    coords = " ".join(f"{axes[axis]}{place.coords[axis]}" for axis in used)
    title = f"rank {place.rank}: " + ", ".join(f"{axes[axis]} {place.coords[axis]}" for axis in range(len(axes)))
    figure.box(x, y, _CELL_WIDTH, _CELL_HEIGHT, tint(place.coords[used[0]]), title=title, kind="rank")
    figure.text(x + _CELL_WIDTH / 2, y + 15, f"rank {place.rank}", anchor="middle", size=SMALL)
    size = SMALL
    while size > 6 and text_width(coords, size) > _CELL_WIDTH - 4:
        size -= 1
    figure.text(x + _CELL_WIDTH / 2, y + 30, coords, anchor="middle", size=size, fill=MUTED)


def tint(coord: int) -> str:
    """Return a light color for a coordinate; neighbors are far apart on the color wheel."""
    channels = colorsys.hls_to_rgb(coord * 137 % 360 / 360, 0.88, 0.55)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
