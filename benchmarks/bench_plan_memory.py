"""Memory of published training runs against the planner's memory model.

The runs and the choices of the systems that ran them are in ``packages/vescale-plan/tests/published_memory.py``; each
term of a prediction is something that these systems allocate, and none is fitted to a run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Result

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "vescale-plan" / "tests"))

import published_memory

WITHIN = 0.10


@dataclass(frozen=True)
class Predictions(Result):
    """Published and predicted memory.

    Attributes:
        rows: a published run, its GiB, and those predicted.
    """

    rows: list[tuple[dict[str, Any], float, float]]

    def table(self) -> str:
        """Return a markdown table, and how many runs are predicted within a tenth."""
        lines = ["| run | source | published, GiB | predicted, GiB | difference |", "|---|---|---:|---:|---:|"]
        for row, published, predicted in self.rows:
            lines.append(
                f"| {row['id']}: {_describe(row)} | {row['source']} | {published:.1f} | {predicted:.1f} | "
                f"{predicted / published - 1:+.1%} |"
            )
        within = sum(abs(predicted / published - 1) <= WITHIN for _, published, predicted in self.rows)
        return "\n".join([*lines, "", f"- within {WITHIN:.0%}: {within} of {len(self.rows)}"])


def _describe(row: dict[str, Any]) -> str:
    degrees = " ".join(f"{name} {row[name]}" for name in ("fsdp", "tp", "pp", "cp") if row.get(name, 1) > 1)
    words = [row["model"], degrees, f"{row['rows']} x {row['sequence_length']}", row.get("schedule", "")]
    words += [f"{row['recompute']} recomputation" if "recompute" in row else "", "compiled" * row.get("compile", False)]
    return ", ".join(filter(None, words))


def run(num_rounds: int) -> Result:  # noqa: ARG001 - nothing is timed
    """Predict all runs."""
    return Predictions("Memory of published runs", "published", {}, list(published_memory.table()))
