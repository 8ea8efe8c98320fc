"""The module plan of a plan: the sections that `vescale.dmodule.parallelize_module` gets.

tp, sequence_parallel    the ready plan of the model's family, one derived from its dataflow, or the user's
ep                       experts spread over the axis "ep", over which the batch lies from the tokens to the head: by
                         the names of a family with a ready plan, or by the dataflow of any other model
etp = tp                 the matrices of each expert sharded over "tp", instead of experts spread over it
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from vescale.dmodule import Experts, Repeat
from vescale.dmodule.plans import FAMILIES, derive, plan_for
from vescale.dtensor import InterleavedShard, Placement, Replicate, Shard
from vescale.plan import Plan

ModulePlan = Mapping[str, Any]

logger = logging.getLogger("vescale")


def _resolve_module_plan(
    plan: Plan, model: nn.Module, module_plan: ModulePlan | None, inputs: Mapping[str, Any] | None
) -> ModulePlan:
    """Return the module plan for the axes "tp" and, if the plan spreads experts, "ep".

    Args:
        plan: the plan.
        model: the full model.
        module_plan: that of the user.
        inputs: example arguments of the model, for a derived plan.

    Raises:
        ValueError: degrees do not divide heads or experts, there are no experts, or the model has no ready plan where
            one is needed.
    """
    if module_plan is not None:
        return _with_own_experts(plan, module_plan)
    family = None if plan.module_plan == "auto" else plan.module_plan
    if plan.tp == 1 and plan.ep == 1 and family is None:
        return {}
    name = family or getattr(getattr(model, "config", None), "model_type", None)
    if family is None and name not in FAMILIES:
        return _derived(plan, model, inputs)
    if name not in FAMILIES:
        raise ValueError(
            f"parallelize: expected a model with a ready plan ({', '.join(sorted(FAMILIES))}), got the name {name!r}; "
            "pass module_plan={...} of your own, the ready plan of a family with the same names by "
            "Plan(module_plan='llama'), or leave it out for a derived plan"
        )
    has_experts = plan.ep > 1 or plan.etp > 1
    try:
        found_plan = plan_for(
            model,
            degree=plan.tp,
            sequence_parallel=plan.sequence_parallel,
            family=family,
            expert_axis="ep" if has_experts else None,
        )
    except ValueError as error:
        if has_experts and "expert_axis" in str(error):
            got = f"{type(model).__name__} of type {name!r}, which has none"
            raise type(error)(_no_experts(plan, got)) from None
        raise type(error)(f"{error} (parallelize takes such a plan as module_plan=plan_for(model, ...))") from None
    return _with_experts(plan, found_plan) if has_experts else found_plan


def _derived(plan: Plan, model: nn.Module, inputs: Mapping[str, Any] | None) -> ModulePlan:
    """Return a plan from the dataflow of a model without a ready one."""
    kind = type(model).__name__
    if plan.etp > 1:
        raise ValueError(
            f"parallelize: expected etp=1 for {kind}, which has no ready plan, got {plan.etp}: a derived plan leaves "
            "the matrices of an expert whole; leave it out, or pass module_plan={...} of your own"
        )
    over_ep = "ep" if plan.ep > 1 else None
    derived = derive(
        model,
        inputs,
        degree=plan.tp,
        expert_axis=over_ep,
        batch_axis=over_ep,
        sequence_parallel=plan.sequence_parallel,
    )
    logger.info("derived a plan for %s over tp=%d:\n%s", kind, plan.tp, derived)
    if over_ep is None:
        return derived.plan
    if not derived.plan.get("expert"):
        raise ValueError(_no_experts(plan, f"{kind}, in which derive finds none"))
    return {**derived.plan, "expert": _spread(plan, derived.plan["expert"])}


def _no_experts(plan: Plan, got: str) -> str:
    return (
        f"parallelize: expected a mixture of experts for Plan(ep={plan.ep}, etp={plan.etp}), got {got}; leave ep and "
        "etp out"
    )


def _with_own_experts(plan: Plan, module_plan: ModulePlan) -> ModulePlan:
    """Return the user's module plan, in which experts lie over "ep" if the plan has that axis."""
    if plan.ep == 1:
        return module_plan
    entries = module_plan.get("expert", {})
    if not any("ep" in _axes_of(entry) for entry in entries.values()):
        raise ValueError(
            f"parallelize: expected experts over the axis 'ep' in module_plan for Plan(ep={plan.ep}, etp={plan.etp}), "
            f"got {dict(entries) or 'no section expert'}; write \"expert\": {{r'.*\\.experts': {{'ep': Shard(0)}}}}, "
            "and boundaries that shard the batch over it"
        )
    return module_plan


def _axes_of(entry: object) -> Mapping[str, Any]:
    placements = entry.placements if isinstance(entry, Experts) else entry
    return placements if isinstance(placements, Mapping) else {}


def _with_experts(plan: Plan, module_plan: ModulePlan) -> ModulePlan:
    """Return a ready plan with experts over "ep", and over "tp" as the plan says, and with the batch over "ep".

    The logits are whole again: no boundary follows the loss, which is a mean over the batch.
    """
    over_ep = {"ep": Shard(0)} if plan.ep > 1 else {}
    inputs = {"input": dict.fromkeys(_BATCHED, over_ep)} if over_ep else {}
    spread = _spread(plan, module_plan["expert"])
    if plan.tp == 1:
        return {"expert": spread, "forward": {**inputs, _HEAD: [{"ep": Replicate()}]}}
    forward = {
        name: entry if name == _HEAD or not over_ep else _over_batch(entry)
        for name, entry in module_plan["forward"].items()
    }
    return {**module_plan, "expert": spread, "forward": {**forward, **inputs}}


def _spread(plan: Plan, names: Iterable[str]) -> dict[str, Experts]:
    """Return the entries of modules with experts: over "ep", and over "tp" as the plan says."""
    over_ep = {"ep": Shard(0)} if plan.ep > 1 else {}
    over_tp = {"tp": Shard(0)} if plan.tp > 1 and plan.etp == 1 else {}
    inner: Any = {"gate_up_proj": {"tp": InterleavedShard(1, 2)}, "down_proj": {"tp": Shard(2)}} if plan.etp > 1 else {}
    placements: dict[str, Placement] = {**over_ep, **over_tp} or {"tp": Replicate()}
    return dict.fromkeys(names, Experts(placements, parameters=inner))


_HEAD = r"lm_head\.output"
#: Arguments of causal language models with the batch in dim 0. Labels meet logits that are whole.
_BATCHED = ("input_ids", "attention_mask", "position_ids", "inputs_embeds")


def _over_batch(entry: Any) -> Any:
    """Return the entry of a boundary with the batch, dim 0, over "ep"."""
    if isinstance(entry, Repeat):
        return dataclasses.replace(entry, entry=_over_batch(entry.entry))
    if isinstance(entry, list):
        return [_over_batch(inner) for inner in entry]
    return {**entry, "ep": Shard(0)}
