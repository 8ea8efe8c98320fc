"""Draw schedules: a text table, a time line with matplotlib (optional: ``vescale-pipe[draw]``), a trace for Perfetto.

In a picture, two actions that overlap lie above each other. Communication is in traces alone.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from .._checked import Condition, FilePath, checked
from .actions import FORWARD, KINDS, Action, Cell, Schedule, actions_of
from .simulate import Costs, simulate
from .timeline import Timeline

Positive = Annotated[float, Condition("a finite number above 0", lambda value: 0 < value < math.inf)]

# kind -> (face color, legend); distinct in print and with the common forms of color blindness
_LOOK = {
    "F": ("#8ecae6", "F forward"),
    "B": ("#f4a261", "B backward"),
    "I": ("#e9c46a", "I input gradient"),
    "W": ("#a7c957", "W weight gradient"),
}

# the width follows the makespan between these bounds; labels shrink to the width of their box, or are left out
_MIN_INCHES, _MAX_INCHES = 8.0, 24.0
_POINTS, _LEAST_POINTS = 7.0, 4.0  # sizes of labels
_POINTS_OF_ROW, _WIDTH_OF_LETTER = 11.0, 0.85  # the most by the height of a row; the width of a letter by its size


@checked
def format_table(schedule: Schedule) -> str:
    """Return a schedule as a text table: one row per rank, one column per unit of time; B is two units wide.

    A dot is an idle unit. The last line has the bubble (idle fraction of the makespan).

    Example:
        >>> from vescale.pipe import one_f_one_b
        >>> print(format_table(one_f_one_b(2, 2)))
        rank 0 |F0 |F1 | .   . |B0     | . |B1     |
        rank 1 | . |F0 |B0     |F1 |B1     | .   . |
        bubble 33.3%, peak activations 2 1 (micro-batches per rank)
    """
    result = simulate(schedule)
    several = schedule.num_stages > schedule.num_ranks
    rows = list(map(_computations, schedule.ranks))
    width = 1 + max(
        len(_label(action, with_stage=several)) for row in rows for cell in row for action in actions_of(cell)
    )
    lines = [
        f"rank {rank} |" + _format_row(row, result, width=width, with_stage=several) for rank, row in enumerate(rows)
    ]
    peaks = " ".join(f"{peak:g}" for peak in result.peak_activations)
    lines.append(f"bubble {result.bubble:.1%}, peak activations {peaks} (micro-batches per rank)")
    return "\n".join(lines)


def _label(action: Action, *, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.kind}{action.microbatch}"


def _computations(row: Iterable[Cell]) -> list[Cell]:
    return [cell for cell in row if not isinstance(cell, Action) or cell.kind in KINDS]


def _format_row(cells: list[Cell], result: Timeline, *, width: int, with_stage: bool) -> str:
    def idle(units: float) -> str:
        return " ".join([".".center(width)] * round(units)) + "|" if units > 0 else ""

    row, now = "", 0.0
    for cell in cells:
        actions = actions_of(cell)
        start, end = result.starts[actions[0]], result.ends[actions[0]]
        row += idle(start - now)
        label = "+".join(_label(action, with_stage=with_stage) for action in actions)
        row += label.ljust(round(end - start) * (width + 1) - 1) + "|"
        now = end
    return row + idle(max(result.ends.values()) - now)


@checked
def draw(
    schedule: Schedule | Timeline, path: FilePath, *, costs: Costs | None = None, title: str | None = None
) -> None:
    """Draw a schedule, or a measured step, as a time line, one row per rank, and write it to ``path``.

    Args:
        schedule: the schedule, or a step of ``PipelineEngine.timing``.
        path: file to write, for example ``schedule.png``; the suffix selects the format.
        costs: durations of the actions of a schedule; F = I = W = 1 by default.
        title: text above the picture; the sizes and the bubble by default.

    Raises:
        ImportError: matplotlib is not installed.
        ScheduleError: the schedule is invalid.
        ValueError: a timeline has its own times, and takes no costs.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("expected matplotlib, got no such package; pip install 'vescale-pipe[draw]'") from error

    result = _timeline_of("draw", schedule, costs)
    schedule = result.schedule
    several = schedule.num_stages > schedule.num_ranks
    inches = min(_MAX_INCHES, max(_MIN_INCHES, 0.28 * result.makespan / _unit(result)))
    figure = Figure(figsize=(inches, 1.3 + 0.42 * schedule.num_ranks), dpi=120)
    axes = figure.add_subplot()
    inches_of_time = inches * axes.get_position().width / result.makespan
    for rank, row in enumerate(schedule.ranks):
        for cell in _computations(row):
            actions = actions_of(cell)
            height = 0.9 / len(actions)
            for number, action in enumerate(actions):
                start, width = result.starts[action], result.ends[action] - result.starts[action]
                middle = rank + (number - (len(actions) - 1) / 2) * height
                look: dict[str, Any] = {"color": _LOOK[action.kind][0], "edgecolor": "white", "linewidth": 0.8}
                axes.barh(middle, width, left=start, height=height, **look)
                label = str(action) if several else str(action.microbatch)
                fitting = 72 * inches_of_time * width / (_WIDTH_OF_LETTER * len(label))
                if (points := min(_POINTS, _POINTS_OF_ROW * height, fitting)) >= _LEAST_POINTS:
                    axes.text(start + width / 2, middle, label, ha="center", va="center", fontsize=points)
    axes.set_xlim(0, result.makespan)
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    axes.set_xlabel("time, s" if result.is_measured else "time", loc="left")
    axes.set_facecolor("#f1f1f1")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title or _default_title(schedule, result), fontsize=9, loc="left")
    kinds = [kind for kind in _LOOK if any(action.kind == kind for _, action in schedule)]
    handles = [Patch(color=_LOOK[kind][0], label=_LOOK[kind][1]) for kind in kinds]
    axes_inches = figure.get_figheight() * axes.get_position().height
    # below the time axis: above it, the legend would overlap the title of a narrow picture
    anchor: dict[str, Any] = {"loc": "upper right", "bbox_to_anchor": (1.0, -0.3 / axes_inches)}
    axes.legend(handles=handles, ncols=len(kinds), frameon=False, fontsize=8, borderpad=0, **anchor)
    figure.savefig(path, bbox_inches="tight")


@checked
def to_trace(
    schedule: Schedule | Timeline,
    path: FilePath,
    *,
    costs: Costs | None = None,
    microseconds: Positive | None = None,
) -> None:
    """Write a simulated or measured step as a trace in JSON, for https://ui.perfetto.dev or ``chrome://tracing``.

    Each rank is a process with two threads, one for computations and one for communication.

    Args:
        schedule: the schedule, lowered or not, or a step of ``PipelineEngine.timing``.
        path: file to write, for example ``step.json``.
        costs: durations of the actions of a schedule; F = I = W = 1 by default.
        microseconds: how long one unit of time is; 1000 by default, and as measured for a measured step.

    Raises:
        ScheduleError: the schedule is invalid.
        ValueError: a timeline has its own times, and takes no costs.

    Example:
        >>> import json, pathlib, tempfile
        >>> from vescale.pipe import gpipe
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "step.json"
        >>> to_trace(gpipe(1, 1), path)
        >>> [event["name"] for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
        ['0F0', '0B0']
    """
    timeline = _timeline_of("to_trace", schedule, costs)
    unit = microseconds or (1e6 if timeline.is_measured else 1e3)
    events: list[dict[str, Any]] = []
    for rank in range(timeline.schedule.num_ranks):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for thread, name in enumerate(("computation", "communication")):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}})
    for rank, action, start, end in timeline.events:
        time = {"ts": start * unit, "dur": (end - start) * unit}
        place = {"pid": rank, "tid": int(action.kind not in KINDS)}
        details = {"stage": action.stage, "microbatch": action.microbatch}
        events.append({"ph": "X", "name": str(action), "cat": action.kind, **place, **time, "args": details})
    Path(path).write_text(json.dumps({"traceEvents": events}), encoding="utf-8")


def _timeline_of(function: str, given: Schedule | Timeline, costs: Costs | None) -> Timeline:
    if isinstance(given, Schedule):
        return simulate(given, costs)
    if costs is not None:
        raise ValueError(f"{function}: expected no costs with a timeline, which has its own times, got {costs}")
    return given


def _unit(timeline: Timeline) -> float:
    """Return about how long a forward takes, for the width of a picture."""
    forwards = [end - start for _, action, start, end in timeline.events if action.kind == FORWARD]
    return statistics.median(forwards or [1.0]) or 1.0


def _default_title(schedule: Schedule, result: Timeline) -> str:
    return f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches: bubble {result.bubble:.1%}"
