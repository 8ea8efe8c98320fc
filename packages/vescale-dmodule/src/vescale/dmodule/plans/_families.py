"""The ready plan of a model, by the type in its config."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from vescale.dtensor.extension import Count, checked

from ..errors import PlanError
from ._build import Plan
from .gpt import gpt2, gpt_neox
from .llama import llama, olmo2
from .mixture import mixtral, qwen2_moe, qwen3_moe
from .phi3 import phi3

__all__ = ["FAMILIES", "plan_for"]

# Hugging Face's config.model_type -> plan
FAMILIES: dict[str, Callable[..., Plan]] = {
    "gemma2": llama,
    "gemma3_text": llama,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "llama": llama,
    "mistral": llama,
    "mixtral": mixtral,
    "olmo2": olmo2,
    "phi3": phi3,
    "qwen2": llama,
    "qwen2_moe": qwen2_moe,
    "qwen3": llama,
    "qwen3_moe": qwen3_moe,
}
MIXTURES = (mixtral, qwen2_moe, qwen3_moe)


@checked
def plan_for(
    model: nn.Module,
    *,
    axis: str = "tp",
    degree: Count | None = None,
    sequence_parallel: bool = False,
    replicate_attention: bool = False,
    expert_axis: str | None = None,
    family: str | None = None,
) -> Plan:
    """Return the ready plan of a Hugging Face model, by its ``config.model_type``.

    Args:
        model: a causal language model with a ``config``; only attributes of the config are read.
        axis: name of the tensor-parallel mesh axis.
        degree: size of that axis. If given, the plan checks that it divides heads and experts, and repeats key-value
            heads that are fewer than ranks.
        sequence_parallel: shard activations between layers over the sequence.
        replicate_attention: compute all heads on every rank, for head counts that do not divide.
        expert_axis: mesh axis over which experts are spread; by default ``axis``.
        family: a key of ``FAMILIES``, if the config of the model has another type.

    Raises:
        PlanError: no ready plan for the family, heads or experts that do not divide, or an expert axis for a model
            without experts.

    Example:
        >>> plan = plan_for(model, degree=2)                        # doctest: +SKIP
    """
    config = getattr(model, "config", None)
    name = getattr(config, "model_type", None) if family is None else family
    if name not in FAMILIES:
        raise PlanError(
            f"no ready plan for {type(model).__name__}: expected a family among {', '.join(sorted(FAMILIES))}, got "
            f"{name!r}; give a plan of your own, or family= for a model with the same names"
        )
    make = FAMILIES[name]
    if expert_axis is not None and make not in MIXTURES:
        raise PlanError(f"expected no expert_axis, as a model of type {name!r} has no experts, got {expert_axis!r}")
    return make(
        config,
        axis=axis,
        degree=degree,
        sequence_parallel=sequence_parallel,
        replicate_attention=replicate_attention,
        **({} if expert_axis is None else {"expert_axis": expert_axis}),
    )
