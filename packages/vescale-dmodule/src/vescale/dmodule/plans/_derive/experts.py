"""Modules whose experts a plan spreads over ranks: stacked ones by their forward, lists by what a run shows.

The code of such a module depends on where tokens are routed, which a run without data does not know. It is taken as one
operator, which returns something of the shape of its tokens.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Shard

from ..._experts.plan import ARGUMENTS, OTHER_ARGUMENTS, plan_experts
from ..._plan.describe import Axes
from ...errors import PlanError
from .graph import Graph

__all__ = ["Found", "bytes_of_experts", "find_experts", "find_lists", "install_stand_ins"]


@dataclass
class Found:
    """The experts of a module.

    Attributes:
        spread: names of the modules whose experts are spread.
        whole: names of all modules that are taken as one operator.
        reasons: why the experts of a module are not spread.
    """

    spread: list[str] = field(default_factory=list)
    whole: set[str] = field(default_factory=set)
    reasons: dict[str, str] = field(default_factory=dict)


def find_experts(module: nn.Module, axis: str, degree: int) -> Found:
    """Return the modules of experts with a forward over tokens, indices and weights."""
    found = Found()
    for name, part in module.named_modules():
        taken = inspect.signature(part.forward).parameters
        if isinstance(part, nn.ModuleList | nn.ModuleDict) and type(part).forward is nn.Module.forward:
            continue
        if any(all(argument in taken for argument in arguments) for arguments in (ARGUMENTS, *OTHER_ARGUMENTS)):
            found.whole.add(name)
            _try(found, name, part, axis, degree)
    return found


def find_lists(module: nn.Module, graph: Graph, found: Found, axis: str, degree: int) -> None:
    """Add lists of equal modules that a run did not call, in modules that read values: experts, called one by one."""
    called = {op.module for op in graph.ops} | {op.boundary.module for op in graph.ops if op.boundary is not None}
    for name, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or len(part) < 2:
            continue
        owner = name.rpartition(".")[0]
        items = [f"{name}.{key}" for key, _ in part.named_children()]
        if owner in graph.reads and not any(item in called for item in items) and _are_equal(list(part)):
            _try(found, name, part, axis, degree)


def bytes_of_experts(graph: Graph, names: Iterable[str]) -> Counter[str]:
    """Return the bytes of a step that each module of experts reduces, all of whose ranks have all tokens.

    Each rank computes with its experts: outputs are summed in forward, gradients of tokens and weights in backward.
    """
    found: Counter[str] = Counter()
    for op in graph.ops:
        if op.boundary is not None and op.boundary.module in names:
            is_output = op.boundary.side == "output"
            tensors = [graph.tensors[t] for t in op.inputs]
            found[op.boundary.module] += sum(t.numel * t.itemsize for t in tensors if is_output or t.differentiable)
    return found


def _are_equal(items: list[nn.Module]) -> bool:
    shapes = [[(name, tuple(p.shape)) for name, p in item.named_parameters()] for item in items]
    return bool(shapes[0]) and all(other == shapes[0] for other in shapes)


def _try(found: Found, name: str, part: nn.Module, axis: str, degree: int) -> None:
    try:
        plan_experts(name, part, {axis: Shard(0)}, Axes((axis,), (degree,)))
        found.spread.append(name)
    except PlanError as error:
        found.reasons[name] = str(error)


def install_stand_ins(module: nn.Module, names: Iterable[str]) -> None:
    """Replace the forwards of some modules of a copy."""
    for name in names:
        part = module.get_submodule(name)
        vars(part)["forward"] = _stand_in(part)


def _stand_in(part: nn.Module) -> Callable[..., Any]:
    """Return a forward of the form of the tokens, on which it depends, as on the weights of their experts."""

    @functools.wraps(part.forward)
    def forward(*args: Any, **kwargs: Any) -> Tensor:
        tokens, *others = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        others = [other for other in others if other.is_floating_point()]
        return tokens + sum(other.sum() * 0 for other in others)

    return forward
