"""The order in which modules run.

Modules are registered in one order and may run in another: Hugging Face's OPT registers its last norm before its
blocks. A forward of a copy of the model without data (of fake tensors) shows the order of the first calls. Where it
cannot go on, as at a branch that reads elements, what has run until then counts, and the order of registration for what
has not. The first step of the engine compares: it refuses a module of an early stage that needs a value of a later one.
"""

from __future__ import annotations

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
from .shadow import emptied, shadow_of

logger = logging.getLogger("vescale.pipe")


class Calls(dict[str, int]):
    """The position of each module among those that run, by name; ``is_complete`` says whether that are all."""

    is_complete = False


ExampleInputs = Mapping[str, Any] | Sequence[Any]


def first_calls(model: nn.Module, example_inputs: ExampleInputs | None) -> Calls:
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
        return Calls()
    calls = Calls()
    try:
        mode = fake_tensors()
        inputs, shadow = map_leaves(lambda leaf: emptied(leaf, mode), example_inputs), shadow_of(model, mode)
        for name, module in shadow.named_modules():
            clear_forward_hooks(module)
            module.register_forward_pre_hook(functools.partial(_note, calls, name))
        args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else (inputs, {})
        with torch.no_grad(), torch.random.fork_rng(devices=[]), without_data(mode):
            shadow(*args, **kwargs)
        calls.is_complete = True
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


def in_order_of_calls(units: Sequence[str], calls: Calls) -> list[str]:
    """Return units in the order of their first calls.

    Those that are never called stay behind the one before them; those of which that is unknown come last.

    Example:
        >>> calls = Calls({"": 0, "embed": 1, "layer.up": 2, "norm": 3})
        >>> in_order_of_calls(["embed", "unused", "norm", "layer"], calls)
        ['embed', 'layer', 'norm', 'unused']
        >>> calls.is_complete = True
        >>> in_order_of_calls(["embed", "unused", "norm", "layer"], calls)
        ['embed', 'unused', 'layer', 'norm']
    """
    places: dict[str, int] = {}
    last = -1 if calls.is_complete else len(calls)
    for unit in units:
        place = min((n for name, n in calls.items() if name == unit or name.startswith(f"{unit}.")), default=last)
        places[unit] = place
        last = place if calls.is_complete else last
    return sorted(units, key=places.__getitem__)


def _dummy_inputs(model: nn.Module) -> Mapping[str, Any] | None:
    try:
        found = getattr(model, "dummy_inputs", None)
    except Exception:  # a property of the user's class
        return None
    return found if isinstance(found, Mapping) else None
