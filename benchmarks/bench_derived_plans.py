"""What derived plans shard and communicate, beside the ready plan where a family has one.

Tiny models of `tests/families` and `tests/plan`, one training step in static mode on two and four gloo ranks. Bytes are
those of all collectives of a rank in forward and backward, experts included, as `vescale.dtensor.debug.comm_log` counts
them. Only plans are compared: models are the same, and so is what they compute, which the tests check.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure import Result
from torch import nn
from torch.distributed.tensor import Replicate

from vescale.dmodule import describe, parallelize_module, plans
from vescale.dtensor import debug, init_device_mesh
from vescale_testing import keep_float64, run_ranks

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS / "families"), str(TESTS / "plan")]
families = importlib.import_module("families")
models = importlib.import_module("models")
del sys.path[:2]

DEGREES = (2, 4)
READY = sorted(plans.FAMILIES)
UNNAMED = [name for name in models.FAMILIES if name not in READY]


@dataclass(frozen=True)
class Row:
    """What a plan of a model does.

    Attributes:
        sharded: share of the parameters that are sharded.
        num_bytes: of the collectives of a step on a rank.
        replicated: matrices that are not sharded, by names in which numbers are left out.
    """

    sharded: float
    num_bytes: int
    replicated: tuple[str, ...]


@dataclass(frozen=True)
class Comparison(Result):
    """Derived plans beside ready ones.

    Attributes:
        rows: (family, degree) -> the row of the derived plan, that of the ready plan.
    """

    rows: dict[tuple[str, int], tuple[Row, Row | None]]

    def table(self) -> str:
        """Return a markdown table, and which derived plans communicate more than the ready ones."""
        lines = [
            "| model | ranks | sharded parameters, derived | ready | KiB, derived | ready | replicated (derived) |",
            "|---|---:|---:|---:|---:|---:|---|",
        ]
        for (family, degree), (derived, ready) in self.rows.items():
            of_ready = ("-", "-") if ready is None else (f"{ready.sharded:.1%}", f"{ready.num_bytes / 1024:.1f}")
            lines.append(
                f"| {family} | {degree} | {derived.sharded:.1%} | {of_ready[0]} | {derived.num_bytes / 1024:.1f} | "
                f"{of_ready[1]} | {', '.join(derived.replicated) or '-'} |"
            )
        both = {key: row for key, row in self.rows.items() if row[1] is not None}
        more = [f"{key[0]} on {key[1]}" for key, (one, other) in both.items() if one.num_bytes > other.num_bytes]
        less = [f"{key[0]} on {key[1]}" for key, (one, other) in both.items() if one.sharded < other.sharded - 1e-9]
        return "\n".join(
            [
                *lines,
                "",
                f"- derived plans that communicate more than the ready one: {', '.join(more) or 'none'}",
                f"- derived plans that shard fewer parameters: {', '.join(less) or 'none'}",
            ]
        )


def run(num_rounds: int) -> Result:  # noqa: ARG001 - nothing is timed
    """Count the collectives of one step of each plan."""
    cases = [(family, degree) for degree in DEGREES for family in READY] + [(family, 2) for family in UNNAMED]
    rows = {(family, degree): run_ranks(_measure, degree, family, degree, timeout=600)[0] for family, degree in cases}
    return Comparison("Derived plans beside ready plans", "ready", {}, rows)


def _measure(family: str, degree: int) -> tuple[Row, Row | None]:
    build, inputs = _builder(family)
    derived = plans.derive(build(), inputs, degree=degree).plan
    ready = plans.plan_for(build(), degree=degree) if family in plans.FAMILIES else None
    return _row(build(), inputs, derived, degree), None if ready is None else _row(build(), inputs, ready, degree)


def _builder(family: str) -> tuple[Any, dict[str, Any]]:
    if family in models.FAMILIES:
        return lambda: models.build(family), models.example(family, models.build(family), 0)
    model = families.build(family)
    return lambda: families.build(family), families.batch(model, 4, 0) | families.arguments(model)


def _row(model: nn.Module, inputs: Mapping[str, Any], plan: Mapping[str, Any], degree: int) -> Row:
    layouts = describe(model, {"tp": degree}, plan)
    whole = [layout for layout in layouts if layout.placements == (Replicate(),)]
    total, left = (sum(math.prod(layout.shape) for layout in of) for of in (layouts, whole))
    matrices = [layout.name for layout in whole if sum(size > 1 for size in layout.shape) > 1]
    mesh = init_device_mesh("cpu", (degree,), mesh_dim_names=("tp",))
    parallel = parallelize_module(model, mesh, plan, mode="static")
    with keep_float64():
        for _ in range(2):  # the first call is recorded
            with debug.comm_log(parallel) as log:
                output = parallel(**inputs)
                (output if hasattr(output, "backward") else output.loss).backward()
    kinds = dict.fromkeys(".".join(part for part in name.split(".") if not part.isdigit()) for name in matrices)
    return Row(1 - left / total, log.total_bytes, tuple(kinds))
