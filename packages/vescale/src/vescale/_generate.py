"""`generate_plan` with the parameters that a ready module plan shards.

``vescale.plan`` imports no sibling package and finds out by itself which matrices tensor parallelism could shard. This
module says which ones the model's ready plan does shard. A model without a ready plan is planned without tensor
parallelism.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vescale.dmodule.plans import plan_for
from vescale.dtensor import Placement
from vescale.dtensor.extension import CheckedInside, checked
from vescale.plan import Cluster, Constraints, ModelProfile, Plan, build_model, profile
from vescale.plan import generate_plan as search


@checked
def generate_plan(
    model: CheckedInside[Any],
    cluster: Cluster,
    constraints: Constraints,
    *,
    module_plan: Mapping[str, Any] | None = None,
) -> Plan:
    """Choose degrees, ZeRO stage and micro-batches for a model on a cluster.

    Args:
        model: an ``nn.Module`` (real, meta or deferred), its profile, a config of Hugging Face, or a class with
            arguments, as ``functools.partial(GPT, config)``.
        cluster: the devices; all of them are used.
        constraints: batch, sequence length, and fixed choices.
        module_plan: the tensor-parallel plan for `parallelize`. ``None``: the ready plan of the model's family; a model
            without one gets no tensor parallelism, and ``plan.explain()`` has the reason.

    Returns:
        The first plan in the order of preference that fits memory; see ``vescale.plan.generate_plan``.

    Raises:
        ValueError: no plan fits; the text has the nearest miss.
        TypeError: an argument, or an entry of the module plan, has another type.

    Example:
        >>> from torch import nn
        >>> constraints = Constraints(global_batch_size=8, sequence_length=16)
        >>> generate_plan((nn.Linear, 8, 8), Cluster(4, memory_bytes=2**30), constraints).dp
        4
    """
    if isinstance(model, ModelProfile):
        return search(model, cluster, constraints)
    model, refusal = build_model(model), ""
    if module_plan is None:
        try:
            module_plan = plan_for(model)
        except ValueError as error:
            refusal, module_plan = str(error), {}
    sharded = sharded_patterns(model, module_plan)
    found = profile(model, sequence_length=constraints.sequence_length, tp_sharded=sharded)
    return search(dataclasses.replace(found, tp_refusal=refusal), cluster, constraints)


@checked
def _module_plan(
    *, parameter: Mapping[str, Mapping[str, Placement] | Sequence[Placement]], expert: Mapping[str, object]
) -> None:
    """Check the sections of a module plan that are read here."""


def sharded_patterns(model: nn.Module, module_plan: Mapping[str, Any]) -> list[str]:
    """Return the regular expressions of a module plan that shard parameters of this model."""
    sections = {name: module_plan.get(name, {}) for name in ("parameter", "expert")}
    _module_plan(**sections)
    patterns = [
        pattern
        for pattern, placements in sections["parameter"].items()
        if any(placement.is_shard() for placement in _placements(placements))
    ]
    patterns += [rf"(?:{pattern})\..*" for pattern in sections["expert"]]
    names = [fqn for fqn, _ in model.named_parameters(remove_duplicate=False)]
    return [pattern for pattern in patterns if any(re.fullmatch(pattern, name) for name in names)]


def _placements(placements: Any) -> list[Any]:
    return list(placements.values()) if isinstance(placements, Mapping) else list(placements)
