"""The result of a comparison: the first difference, what was compared and what was not, and a page of text."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vescale.plan import Plan

#: What texts call the two runs.
NAMES = ("A", "B")

_MAX_UNCOMPARED = 12
_MAX_PLAN = 300


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: number of the step.
        kind: "input", "output", "output gradient", "gradient", "parameter", "buffer", "initial parameter" or "initial
            buffer".
        fqn: full name of the module, or of the parameter or buffer.
        call: number of the module's call in the step.
        tensor: place in inputs or outputs.
        what: "values", "shape", "dtype", "replicas" (ranks of one run differ) or "calls" (their number differs).
        verdict: what it means, and where the fault is.
        size: relative difference of norms, if values differ.
        allowed: what rounding explains of it; 0 where bits are compared.
        norms: of the tensor in both runs.
        placements: in both runs, as text.
        shape: of the global tensor.
        rows: range of rows (dim 0) that has all of the difference.
        index: first global index that differs, if values were recorded.
        values: of both runs there.
        others: number of further tensors of the step that differ.
    """

    step: int
    kind: str
    fqn: str
    call: int
    tensor: str
    what: str
    verdict: str
    size: float = math.nan
    allowed: float = 0.0
    norms: tuple[float, float] = (math.nan, math.nan)
    placements: tuple[str, str] = ("", "")
    shape: tuple[int, ...] = ()
    rows: tuple[int, int] | None = None
    index: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    others: int = 0


@dataclass
class Comparison:
    """The result of a comparison. ``print`` shows it as one page of text.

    Attributes:
        labels: of the two runs: their folders, or names of functions.
        first: the first difference; None if there is none in what was recorded.
        bits: whether bits were compared in every step.
        steps: numbers of the compared steps.
        compared: number of compared tensors.
        uncompared: texts about what was not compared, and how many tensors that is.
        headers: of the files of rank 0.
    """

    labels: tuple[str, str]
    first: Difference | None = None
    bits: bool = True
    steps: list[int] = field(default_factory=list)
    compared: int = 0
    uncompared: Counter[str] = field(default_factory=Counter)
    headers: tuple[dict[str, Any], dict[str, Any]] = field(default_factory=lambda: ({}, {}))

    @property
    def is_same(self) -> bool:
        """Whether nothing differs in what was recorded in both runs."""
        return self.first is None

    def __str__(self) -> str:
        return _text(self)


def _text(result: Comparison) -> str:
    """Return the page: what differs first, why it is the first, what it means, and what was not compared."""
    a, b = result.labels
    lines = [f"A  {_run(a, result.headers[0])}", f"B  {_run(b, result.headers[1])}", ""]
    lines += _difference(result.first) if result.first is not None else [_same(result)]
    lines += ["", f"compared  {_scope(result)}"]
    if result.uncompared:
        lines.append("not compared, so nothing is said about it:")
        shown = sorted(result.uncompared.items(), key=lambda item: -item[1])
        lines += [f"  {count:>6} x {what}" for what, count in shown[:_MAX_UNCOMPARED]]
        if len(shown) > _MAX_UNCOMPARED:
            lines.append(f"         and {len(shown) - _MAX_UNCOMPARED} other kinds")
    return "\n".join(lines)


def alike(fqn: str) -> str:
    """Return what a text calls modules whose names differ in their numbers alone."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", fqn) or "the model"


def _run(name: str, header: dict) -> str:
    world = header.get("world")
    of = f"vescale {header.get('vescale')}, torch {header.get('torch')}, {world} rank{'' if world == 1 else 's'}"
    plan = _plan(str(header.get("plan", "")))
    return f"{name} ({of})" + (f"  {plan}" if plan else "")


def _plan(text: str) -> str:
    """Return the fields of a plan that are not the defaults."""
    try:
        fields, defaults = dict(json.loads(text)), json.loads(Plan().to_json())
        for estimated in ("memory", "limit_bytes", "table"):
            defaults.pop(estimated, None)
    except (TypeError, ValueError):
        return ""
    told = [f"{name}={value!r}" for name, value in fields.items() if value != defaults.get(name, value)]
    return f"Plan({', '.join(told)})"[:_MAX_PLAN]


def _same(result: Comparison) -> str:
    if not result.compared:
        return "nothing was compared: no tensor is in both records"
    how = "the same bits" if result.bits else "equal within rounding"
    return f"no difference: all that was compared is {how}"


def _scope(result: Comparison) -> str:
    steps = f"steps {result.steps[0]} to {result.steps[-1]}" if result.steps else "no step"
    how = "bit for bit" if result.bits else "within rounding (dtype and length of sums), bits where they are equal"
    return f"{result.compared} tensors, {steps}, {how}"


def _difference(first: Difference) -> list[str]:
    place = f", {first.tensor}" if first.tensor not in ("", first.kind) else ""
    call = f", call {first.call}" if first.kind in ("input", "output", "output gradient") else ""
    lines = [
        f"{first.fqn or 'the model'}{call} of step {first.step}, {first.kind}{place}: differs first ({first.what})"
    ]
    lines.append(f"  {first.verdict}")
    if first.what in ("values", "replicas"):
        norm_a, norm_b = first.norms
        ratio = f", ratio {norm_b / norm_a:.6g}" if norm_a else ""
        lines.append(f"  norms        A {norm_a:.9g}, B {norm_b:.9g}{ratio}")
    if first.what == "values" and not math.isnan(first.size):
        allowed = f"; rounding explains {first.allowed:.2g}" if first.allowed else "; bits are compared"
        lines.append(f"  difference   {first.size:.3g} of the norm{allowed}")
    lines.append(f"  placements   A {first.placements[0] or 'one tensor'}; B {first.placements[1] or 'one tensor'}")
    if first.shape:
        rows = f", all of it in rows {first.rows[0]}:{first.rows[1]}" if first.rows else ""
        lines.append(f"  global shape {list(first.shape)}{rows}")
    if first.index is not None and first.values is not None:
        lines.append(f"  first index  {list(first.index)}: A {first.values[0]!r}, B {first.values[1]!r}")
    elif first.what == "values":
        lines.append(f"  first index  record both runs again with steps=[{first.step}], values=[{first.fqn!r}]")
    if first.others:
        lines.append(f"  after it     {first.others} more tensors of this step differ")
    return lines
