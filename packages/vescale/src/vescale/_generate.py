"""`generate_plan` with the parameters that a ready module plan shards.

``vescale.plan`` imports no sibling package and assumes which matrices tensor parallelism shards. This module reads them
from the model's ready plan. A model without a ready plan is planned without tensor parallelism.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from vescale.dmodule import describe
from vescale.dmodule.plans import plan_for
from vescale.dtensor.extension import checked
from vescale.plan import Cluster, Constraints, ModelProfile, Plan, profile
from vescale.plan import generate_plan as search


@checked
def generate_plan(
    model: nn.Module | ModelProfile,
    cluster: Cluster,
    constraints: Constraints,
    *,
    module_plan: Mapping[str, Any] | None = None,
) -> Plan:
    """Choose degrees, ZeRO stage and micro-batches for a model on a cluster.

    Args:
        model: an ``nn.Module`` (real, meta or deferred) or its profile.
        cluster: the devices; all of them are used.
        constraints: batch, sequence length, and fixed choices.
        module_plan: the tensor-parallel plan for `parallelize`. ``None``: the ready plan of the model's family; a model
            without one gets no tensor parallelism, and ``plan.explain()`` has the reason.

    Returns:
        The first plan in the order of preference that fits memory; see ``vescale.plan.generate_plan``.

    Raises:
        ValueError: no plan fits; the text has the nearest miss. Or the module plan does not fit the model.
    """
    if isinstance(model, ModelProfile):
        return search(model, cluster, constraints)
    refusal = ""
    if module_plan is None:
        try:
            module_plan = plan_for(model)
        except ValueError as error:
            refusal, module_plan = str(error), {}
    else:
        _check(model, module_plan)
    found = profile(model, tp_sharded=sharded_patterns(model, module_plan))
    return search(dataclasses.replace(found, tp_refusal=refusal), cluster, constraints)


def _check(model: nn.Module, module_plan: Mapping[str, Any]) -> None:
    """Refuse what `parallelize` would refuse later."""
    try:
        describe(model, {"tp": 1}, module_plan)
    except (ValueError, TypeError) as error:
        raise ValueError(f"generate_plan: expected a module_plan that fits the model, got another: {error}") from error


def sharded_patterns(model: nn.Module, module_plan: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of a module plan that shard parameters of this model."""
    patterns = [
        pattern
        for pattern, placements in module_plan.get("parameter", {}).items()
        if any(placement.is_shard() for placement in _placements(placements))
    ]
    patterns += [rf"(?:{pattern})\..*" for pattern in module_plan.get("expert", {})]
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    return [pattern for pattern in patterns if any(re.fullmatch(pattern, name) for name in names)]


def _placements(placements: Any) -> list[Any]:
    return list(placements.values()) if isinstance(placements, Mapping) else list(placements)
