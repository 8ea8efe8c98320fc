"""The order in which modules run.

Modules are registered in one order and may run in another: Hugging Face's OPT registers its last norm before its
blocks. A forward of a copy of the model without data (of fake tensors) shows the order of the first calls. Where it
cannot go on, as at a branch that reads elements, what has run until then counts, and the order of registration for what
has not. The first step of the engine compares: it refuses a module of an early stage that needs a value of a later one.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._run.tree import map_leaves
from .._torch import clear_forward_hooks, fake_tensors, without_data

logger = logging.getLogger("vescale.pipe")

ExampleInputs = Mapping[str, Any] | Sequence[Any]


def first_calls(model: nn.Module, example_inputs: ExampleInputs | None) -> dict[str, int]:
    """Return the position of each module among those that run, by name, as far as a forward without data shows it.

    Args:
        model: it is not modified, and its tensors are not read.
        example_inputs: keyword or positional arguments of one call; None for the attribute ``dummy_inputs`` of the
            model, which Hugging Face's models have.
    """
    is_given = example_inputs is not None
    if example_inputs is None:
        example_inputs = _dummy_inputs(model)
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    if example_inputs is None or any(isinstance(tensor, DTensor) for tensor in tensors):
        return {}
    calls: dict[str, int] = {}
    try:
        mode = fake_tensors()
        with without_data(mode):
            inputs, memo = map_leaves(_empty, example_inputs), {id(tensor): _empty(tensor) for tensor in tensors}
        shadow = copy.deepcopy(model, memo)
        for name, module in shadow.named_modules():
            clear_forward_hooks(module)
            module.register_forward_pre_hook(functools.partial(_note, calls, name))
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        with torch.no_grad(), torch.random.fork_rng(devices=[]), without_data(mode):
            shadow(*args, **kwargs)
    except Exception as error:  # any error of the user's code, which is not made to run without data
        logger.log(
            logging.WARNING if is_given else logging.INFO,
            "the order of modules after `%s` is that of their registration: a forward without data ends there: %s: %s",
            next(reversed(calls), ""),
            type(error).__name__,
            str(error).partition("\n")[0],
        )
    return calls


def _note(calls: dict[str, int], name: str, _module: nn.Module, _args: tuple) -> None:
    calls.setdefault(name, len(calls))


def in_order_of_calls(units: Sequence[str], calls: Mapping[str, int]) -> list[str]:
    """Return units in the order of their first calls, and behind them those that are not called, as they are.

    Example:
        >>> in_order_of_calls(["embed", "norm", "unused", "layer"], {"": 0, "embed": 1, "layer.up": 2, "norm": 3})
        ['embed', 'layer', 'norm', 'unused']
    """

    def place(unit: str) -> int:
        return min((n for name, n in calls.items() if name == unit or name.startswith(f"{unit}.")), default=len(calls))

    return sorted(units, key=place)


def _dummy_inputs(model: nn.Module) -> Mapping[str, Any] | None:
    try:
        found = getattr(model, "dummy_inputs", None)
    except Exception:  # a property of the user's class
        return None
    return found if isinstance(found, Mapping) else None


def _empty(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    empty = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu")
    return nn.Parameter(empty, leaf.requires_grad) if isinstance(leaf, nn.Parameter) else empty
