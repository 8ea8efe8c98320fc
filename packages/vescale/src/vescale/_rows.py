"""Refuse a model that mixes rows where its batch is computed in parts, before there is a process group.

A pipeline computes micro-batches, each on rows of its own. Ranks that spread experts have parts of the batch up to the
head, and communicate at boundaries of the plan alone. So nothing may depend on rows of several parts: the loss of a
router, batch statistics, a contrast. Without example inputs the first step finds it, on all ranks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from vescale.dmodule.rows import mixing_on_shapes
from vescale.plan import Plan


def check_rows(
    plan: Plan,
    model: nn.Module,
    batch: Mapping[str, Any] | None,
    *,
    loss_fn: Callable[..., Any] | None,
    row_wise: Sequence[str],
) -> None:
    """Raise `ValueError` if a call with an example batch mixes rows that the plan computes apart."""
    is_split = (plan.pp > 1 or plan.num_microbatches > 1) and plan.dp * plan.num_microbatches > 1
    if batch is None or not (is_split or plan.ep > 1):
        return

    def call(copied: nn.Module, inputs: dict[str, Any]) -> Any:
        target = [inputs.pop("target")] if loss_fn is not None and "target" in inputs else []
        output = copied(**inputs)
        return output if loss_fn is None or not is_split else loss_fn(output, *target)  # logits are whole over ep

    names = [name for name, _ in model.named_modules() if any(re.fullmatch(pattern, name) for pattern in row_wise)]
    if mixing := mixing_on_shapes(model, batch, row_wise=names, call=call):
        raise ValueError(
            f"parallelize: expected that {type(model).__name__} treats every row alone, since {_parts(plan, is_split)} "
            f"of one batch, got {'; '.join(mixing)}; {_ways_out(plan, is_split)}"
        )


def _parts(plan: Plan, is_split: bool) -> str:
    if not is_split:
        return f"ep={plan.ep} ranks that spread experts have parts"
    ranks = f" on each of {plan.dp} ranks" if plan.dp > 1 else ""
    return f"{plan.num_microbatches} micro-batches{ranks} are parts"


def _ways_out(plan: Plan, is_split: bool) -> str:
    whole = {"pp": plan.pp, "num_microbatches": plan.num_microbatches} if is_split else {}
    fields = ", ".join(f"{name}=1" for name, degree in {**whole, "ep": plan.ep}.items() if degree > 1)
    alone = (
        "" if plan.ep > 1 else ", or pass per_rank=True if every micro-batch on every rank may be a batch of its own"
    )
    return (
        f"use Plan({fields}), leave the loss of a router out (output_router_logits=False), or name modules that treat "
        f"every row alone in row_wise=[...]{alone}"
    )
