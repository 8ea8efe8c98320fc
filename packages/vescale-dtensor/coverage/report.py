"""Tallies of a sweep: a table of operators, a list of findings that can be run again, and one line."""

from __future__ import annotations

import collections
import csv
import dataclasses
import json
from pathlib import Path

from plan import Plan
from world import Found

__all__ = ["Tally", "describe", "other_summary", "summary", "table", "write"]

BAD = ("wrong", "diverged", "died")
FOLDER = "packages/vescale-dtensor/coverage"


@dataclasses.dataclass
class Tally:
    """Verdicts of one operator; refusals by kind, moment and text."""

    plan: Plan
    counts: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    findings: list[Found] = dataclasses.field(default_factory=list)
    refusals: collections.Counter = dataclasses.field(default_factory=collections.Counter)

    def add(self, found: Found) -> None:
        """Count a verdict."""
        case, verdict = found.plan.cases[found.case], found.verdict
        self.counts[verdict.kind] += 1
        if verdict.kind == "right" and case.is_sharded:
            self.counts["right sharded" if verdict.sharded else "right by gathering"] += 1
        if verdict.kind in ("refused", "raised"):
            moment = "after communication" if verdict.collectives else f"in {verdict.where}"
            self.refusals[verdict.kind, moment, verdict.text[:300]] += 1
        if verdict.kind in BAD:
            self.findings.append(found)

    @property
    def state(self) -> str:
        """The operator in one word: the worst of its cases, or ``right``, ``sharded``, ``refused``, ``raised``."""
        for kind in reversed(BAD):
            if self.counts[kind]:
                return kind
        if self.counts["right sharded"]:
            return "sharded"
        if self.counts["right by gathering"]:
            return "right"
        if self.plan.skipped or not self.counts:
            return "skipped"
        if not any(case.is_sharded for case in self.plan.cases) and self.counts["right"]:
            return "right"
        return "refused" if self.counts["refused"] >= self.counts["raised"] else "raised"


def summary(tallies: list[Tally]) -> str:
    """Return a one-line summary of the sweep."""
    states = collections.Counter(tally.state for tally in tallies)
    tested = sum(states.values()) - states["skipped"]
    cases = sum((tally.counts for tally in tallies), collections.Counter())
    num = sum(cases[kind] for kind in ("right", "refused", "raised", *BAD))
    return (
        f"{tested} operators: right {states['sharded'] + states['right']} (sharded {states['sharded']}), "
        f"refused {states['refused']}, stopped by torch's own errors {states['raised']}; "
        f"{states['wrong']} wrong, {states['diverged']} diverged, {states['died']} died "
        f"({states['skipped']} skipped; {num} cases: {cases['right']} right, {cases['refused']} refused, "
        f"{cases['raised']} raised, {cases['wrong']} wrong, {cases['diverged']} diverged, {cases['died']} died, "
        f"{cases['left out']} left out)"
    )


def describe(found: Found, *, stock: bool) -> dict:
    """Return everything about a finding, and the command that runs it again."""
    plan, case, verdict = found.plan, found.plan.cases[found.case], found.verdict
    name = plan.name.replace(".", r"\.")
    return {
        "op": plan.name,
        "case": case.key,
        "arguments": plan.samples[case.sample].describe(),
        "placements": list(case.placements),
        "kind": verdict.kind,
        "where": verdict.where,
        "what": verdict.text,
        "command": f"python {FOLDER}/run.py {'--stock ' if stock else ''}--ops '^{name}$' --case '{case.key}'",
    }


def write(tallies: list[Tally], folder: Path, *, stock: bool, stem: str) -> None:
    """Write ``STEM.json``, ``STEM.csv`` and ``STEM.md`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [_row(tally) for tally in sorted(tallies, key=lambda tally: tally.plan.name)]
    columns = list(rows[0]) if rows else []
    content = {
        "mode": "stock" if stock else "vescale",
        "summary": summary(tallies),
        "operators": rows,
        "findings": [describe(found, stock=stock) for tally in tallies for found in tally.findings],
        "refusals": {
            tally.plan.name: [[*key, count] for key, count in tally.refusals.most_common(6)]
            for tally in tallies
            if tally.refusals
        },
    }
    (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    with open(folder / f"{stem}.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    lines = [summary(tallies), "", *table(tallies)]
    (folder / f"{stem}.md").write_text("\n".join(lines) + "\n")


def table(tallies: list[Tally]) -> list[str]:
    """Return the lines of a markdown table with one row per operator."""
    rows = [_row(tally) for tally in sorted(tallies, key=lambda tally: tally.plan.name)]
    columns = list(rows[0]) if rows else []
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(str(value) for value in row.values()) + " |" for row in rows]


def other_summary(folder: Path) -> str | None:
    """Return the summary of the sweep of stock torch that wrote into ``folder``, if there was one."""
    path = folder / "stock.json"
    return json.loads(path.read_text())["summary"] if path.exists() else None


def _row(tally: Tally) -> dict:
    counts = tally.counts
    return {
        "operator": tally.plan.name,
        "state": tally.state,
        "right sharded": counts["right sharded"],
        "right by gathering": counts["right by gathering"],
        "right replicated": counts["right"] - counts["right sharded"] - counts["right by gathering"],
        "refused": counts["refused"],
        "raised": counts["raised"],
        "wrong": counts["wrong"],
        "diverged": counts["diverged"],
        "died": counts["died"],
        "left out": counts["left out"],
        "note": tally.plan.skipped,
    }
