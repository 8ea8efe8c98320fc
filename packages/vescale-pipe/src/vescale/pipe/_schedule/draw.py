"""Draw schedules: a text table, and a time line with matplotlib (optional: ``vescale-pipe[draw]``)."""

from __future__ import annotations

from typing import Any

from .._checked import FilePath, checked
from .actions import Action, Schedule
from .simulate import Costs, Simulation, simulate

# kind -> (face color, legend); distinct in print and with the common forms of color blindness
_LOOK = {
    "F": ("#8ecae6", "F forward"),
    "B": ("#f4a261", "B backward"),
    "I": ("#e9c46a", "I input gradient"),
    "W": ("#a7c957", "W weight gradient"),
}

# the width follows the makespan between these bounds; labels wider than their box are left out
_MIN_INCHES, _MAX_INCHES, _INCHES_PER_LETTER = 8.0, 24.0, 0.07


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
    width = 1 + max(len(_label(action, with_stage=several)) for _, action in schedule)
    lines = [
        f"rank {rank} |" + _format_row(actions, result, width=width, with_stage=several)
        for rank, actions in enumerate(schedule.ranks)
    ]
    peaks = " ".join(f"{peak:g}" for peak in result.peak_activations)
    lines.append(f"bubble {result.bubble:.1%}, peak activations {peaks} (micro-batches per rank)")
    return "\n".join(lines)


def _label(action: Action, *, with_stage: bool) -> str:
    return str(action) if with_stage else f"{action.kind}{action.microbatch}"


def _format_row(actions: tuple[Action, ...], result: Simulation, *, width: int, with_stage: bool) -> str:
    def idle(units: float) -> str:
        return " ".join([".".center(width)] * round(units)) + "|" if units > 0 else ""

    row, now = "", 0.0
    for action in actions:
        row += idle(result.starts[action] - now)
        units = round(result.ends[action] - result.starts[action])
        row += _label(action, with_stage=with_stage).ljust(units * (width + 1) - 1) + "|"
        now = result.ends[action]
    return row + idle(max(result.ends.values()) - now)


@checked
def draw(schedule: Schedule, path: FilePath, *, costs: Costs | None = None, title: str | None = None) -> None:
    """Draw a schedule as a time line, one row per rank, and write it to ``path``.

    Args:
        schedule: the schedule.
        path: file to write, for example ``schedule.png``; the suffix selects the format.
        costs: durations of the actions; F = I = W = 1 by default.
        title: text above the picture; the sizes and the bubble by default.

    Raises:
        ImportError: matplotlib is not installed.
        ScheduleError: the schedule is invalid.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError("expected matplotlib, got no such package; pip install 'vescale-pipe[draw]'") from error

    result = simulate(schedule, costs)
    several = schedule.num_stages > schedule.num_ranks
    inches = min(_MAX_INCHES, max(_MIN_INCHES, 0.28 * result.makespan))
    figure = Figure(figsize=(inches, 1.3 + 0.42 * schedule.num_ranks), dpi=120)
    axes = figure.add_subplot()
    for rank, action in schedule:
        start, width = result.starts[action], result.ends[action] - result.starts[action]
        axes.barh(rank, width, left=start, height=0.9, color=_LOOK[action.kind][0], edgecolor="white", linewidth=0.8)
        label = str(action) if several else str(action.microbatch)
        if width / result.makespan * inches > _INCHES_PER_LETTER * len(label):
            axes.text(start + width / 2, rank, label, ha="center", va="center", fontsize=7)
    axes.set_xlim(0, result.makespan)
    axes.set_ylim(schedule.num_ranks - 0.5, -0.5)
    axes.set_yticks(range(schedule.num_ranks), [f"rank {rank}" for rank in range(schedule.num_ranks)])
    axes.set_xlabel("time", loc="left")
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


def _default_title(schedule: Schedule, result: Simulation) -> str:
    return f"{schedule.num_stages} stages, {schedule.num_microbatches} micro-batches: bubble {result.bubble:.1%}"
