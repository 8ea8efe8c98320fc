"""A table whose ratios are to a case of the same group, with the bounds that they should keep.

A benchmark with groups (one per model, say) names for every case the one that counts as 1. A ratio is the median of
the ratios of all rounds: cases that run in turns share what else slows the machine down for a while. A target bounds a
ratio; the table says of each whether this run met it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from measure import Result

__all__ = ["Target", "Targets"]


def _ratio(seconds: list[float], reference: list[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(seconds, reference, strict=True))


@dataclass(frozen=True)
class Target:
    """A bound on how long a case takes, relative to another.

    Attributes:
        case: name of a case.
        reference: name of another.
        at_most: upper bound, or None.
        at_least: lower bound, or None.
    """

    case: str
    reference: str
    at_most: float | None = None
    at_least: float | None = None

    def line(self, seconds: dict[str, list[float]]) -> str:
        """Return the target, the ratio of this run and whether it keeps the bound."""
        bound = f"at most {self.at_most}" if self.at_least is None else f"at least {self.at_least}"
        what = f"{self.case} / {self.reference}, {bound}"
        if missing := [name for name in (self.case, self.reference) if name not in seconds]:
            return f"- {what}: not measured, there is no {' and no '.join(missing)}"
        ratio = _ratio(seconds[self.case], seconds[self.reference])
        met = ratio <= self.at_most if self.at_least is None else ratio >= self.at_least
        return f"- {what}: {ratio:.2f}, {'met' if met else 'MISSED'}"


@dataclass(frozen=True)
class Targets(Result):
    """Times of cases in groups.

    Attributes:
        reference: for every case, the one that counts as 1.
        targets: bounds, of which the table says whether they are kept.
        remarks: further columns by case: column name -> case -> text.
        notes: lines below the table, such as what was left out and why.
    """

    reference: dict[str, str] = field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    remarks: dict[str, dict[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """Return a markdown table of medians, spreads and ratios, then the targets and the notes."""
        more = list(self.remarks)
        lines = [
            " | ".join(["| case", "median, ms", "middle half, ms", f"ratio to {self.baseline}", *more]) + " |",
            "|---|---:|---:|---:|" + "---|" * len(more),
        ]
        for case, seconds in self.seconds.items():
            low, median, high = statistics.quantiles(seconds, n=4)
            ratio = _ratio(seconds, self.seconds[self.reference[case]])
            cells = [case, f"{1e3 * median:.2f}", f"{1e3 * low:.2f} to {1e3 * high:.2f}", f"{ratio:.2f}"]
            lines.append("| " + " | ".join([*cells, *(self.remarks[name].get(case, "") for name in more)]) + " |")
        below = [target.line(self.seconds) for target in self.targets] + [f"- {note}" for note in self.notes]
        return "\n".join([*lines, "", *below] if below else lines)
