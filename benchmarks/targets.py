"""A table whose ratios are to a case of the same group, with the bounds that they should keep.

A benchmark with groups (one per model, say) names for every case the one that counts as 1. A ratio is the median of
the ratios of all rounds: cases that run in turns share what else slows the machine down for a while. A target bounds a
ratio; the table says of each whether this run met it, and between which ratios the median of ever more rounds lies with
95% certainty. Where the bound lies between them, more rounds tell more.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from measure import Result

__all__ = ["Target", "Targets"]


def _ratios(seconds: list[float], reference: list[float]) -> list[float]:
    """Return the ratio of each round, in rising order."""
    return sorted(mine / other for mine, other in zip(seconds, reference, strict=True))


def _median_between(values: list[float]) -> tuple[float, float]:
    """Return two of the sorted values, between which the median of their distribution lies with 95% certainty.

    Half of all values are above it, whatever the distribution: with n values, k or fewer are with a probability of
    sum(binomial(n, i), i <= k) / 2^n. Five values or fewer cannot be as certain; then these are the outermost.
    """
    n, outside, probability = len(values), 0, 0.5 ** len(values)
    while probability <= 0.025 and outside < n // 2:
        outside += 1
        probability += math.comb(n, outside) / 2**n
    return values[max(outside - 1, 0)], values[-max(outside, 1)]


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
        ratios = _ratios(seconds[self.case], seconds[self.reference])
        ratio, (low, high) = statistics.median(ratios), _median_between(ratios)
        met = ratio <= self.at_most if self.at_least is None else ratio >= self.at_least
        return f"- {what}: {ratio:.2f} ({low:.2f} to {high:.2f}), {'met' if met else 'MISSED'}"


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
            ratio = statistics.median(_ratios(seconds, self.seconds[self.reference[case]]))
            cells = [case, f"{1e3 * median:.2f}", f"{1e3 * low:.2f} to {1e3 * high:.2f}", f"{ratio:.2f}"]
            lines.append("| " + " | ".join([*cells, *(self.remarks[name].get(case, "") for name in more)]) + " |")
        below = [target.line(self.seconds) for target in self.targets] + [f"- {note}" for note in self.notes]
        return "\n".join([*lines, "", *below] if below else lines)
