"""Which ready plan fits a model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..errors import PlanError
from ._parts import Plan
from .gpt2 import gpt2
from .llama import llama
from .mixtral import mixtral

__all__ = ["FAMILIES", "plan_for"]

# Hugging Face's config.model_type -> plan
FAMILIES: dict[str, Callable[..., Plan]] = {"mixtral": mixtral, "llama": llama, "mistral": llama, "gpt2": gpt2}

# what each rank holds a whole number of
DIVIDED = ("num_attention_heads", "num_key_value_heads", "num_local_experts")


def plan_for(
    model: nn.Module,
    *,
    axis: str = "tp",
    degree: int | None = None,
    sequence_parallel: bool = False,
    family: str | None = None,
) -> Plan:
    """Return the ready plan of a Hugging Face model, by its ``config.model_type``.

    Args:
        model: a model with a ``config``; only attributes of the config are read.
        axis: name of the tensor-parallel mesh axis.
        degree: size of that axis; given, heads and experts are checked to divide over it.
        sequence_parallel: shard activations between layers over the sequence.
        family: a key of ``FAMILIES``, for models whose config names another type.

    Raises:
        PlanError: no ready plan for the family, or heads or experts that do not divide.

    Example:
        >>> plan = plan_for(model, degree=2)                        # doctest: +SKIP
    """
    config = getattr(model, "config", None)
    name = family or getattr(config, "model_type", None)
    if name not in FAMILIES:
        raise PlanError(
            f"no ready plan for {type(model).__name__} (model type {name!r}); ready are {', '.join(sorted(FAMILIES))}; "
            "give a plan of your own, or family= for a model with the same names"
        )
    for attribute in DIVIDED if degree and FAMILIES[name] is not gpt2 else ():
        count = getattr(config, attribute, None)
        if isinstance(count, int) and count % degree:
            raise PlanError(
                f"{attribute} is {count}, which {axis}={degree} ranks do not divide; use a degree that divides it"
            )
    return FAMILIES[name](axis=axis, sequence_parallel=sequence_parallel)
