"""An optimizer that exists already, taken apart: its class, the arguments of its constructor, its groups and its state.

The parts of parameters that ranks own are other tensors than the parameters, and an optimizer may do things with its
tensors when it is made. So another one is made, by the class's own constructor:

    arguments     what ``defaults`` says, else an attribute of the argument's name      AdamW(..., betas=(0.9, 0.95))
    groups        each group's own hyperparameters and parameters                       {"params": [...], "lr": 0.1}
    state         by name of the parameter, whole, as of one process                    {"exp_avg": ..., "step": ...}

An argument whose value cannot be known is an error, as is everything that would be lost: hooks, schedulers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..muon import Muon

__all__ = ["Instance", "take_apart"]

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class Instance:
    """What an optimizer was made of.

    Attributes:
        optimizer_class: Its class.
        arguments: Of its constructor, besides parameters.
        param_groups: Its groups: hyperparameters and ``"params"``.
        state: Its state by parameter.
    """

    optimizer_class: type[torch.optim.Optimizer]
    arguments: dict[str, Any]
    param_groups: list[dict[str, Any]]
    state: Mapping[Tensor, dict[str, Any]]


def take_apart(optimizer: torch.optim.Optimizer) -> Instance:
    """Return what ``optimizer`` was made of.

    Raises:
        ValueError: If an argument of its constructor cannot be known, or if it has hooks or a scheduler.
    """
    kind = type(optimizer)
    hooks = [name for name in _HOOKS if getattr(optimizer, name, None)]
    if hooks:
        raise ValueError(f"this {kind.__name__} has hooks ({hooks}); register them with the DistributedOptimizer")
    if "step" in vars(optimizer):  # torch's schedulers put their own there
        raise ValueError(
            f"this {kind.__name__} has a learning-rate scheduler (or another step()), which would go on changing it; "
            "make the scheduler of the DistributedOptimizer"
        )
    groups = [{key: value for key, value in group.items() if key != "param_names"} for group in optimizer.param_groups]
    return Instance(kind, _arguments(optimizer), groups, optimizer.state)


def _arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    kind, known = type(optimizer), dict(optimizer.defaults)
    arguments, unknown = {}, []
    _, *parameters = inspect.signature(kind).parameters.values()
    if isinstance(optimizer, Muon):  # what it does with AdamW is in its groups
        return {p.name: known[p.name] for p in parameters if p.name in known}
    for parameter in parameters:
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= known
        elif parameter.name in known:
            arguments[parameter.name] = known[parameter.name]
        elif parameter.name in vars(optimizer):
            arguments[parameter.name] = vars(optimizer)[parameter.name]
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            unknown.append(parameter.name)
    if unknown:
        raise ValueError(
            f"the arguments {unknown} of {kind.__name__} cannot be known from an instance: they are neither in its "
            "defaults nor attributes of it; pass the class and its arguments to DistributedOptimizer instead"
        )
    return arguments
