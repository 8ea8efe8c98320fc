"""Recomputation: modules whose activations are computed again in backward, instead of being kept.

    forward     module(x) runs under torch.utils.checkpoint, which keeps x and the position of the random generators
    backward    module(x) runs again from there, and its backward follows

The whole call runs again, hooks included: boundaries of tensor parallelism, gathers of ZeRO 3. So the numbers are the
same bit for bit, random ones included. A layer of a model of Hugging Face has a switch of its own for this, which is
used, since it knows what of the layer's arguments, such as a cache, must not be written twice.

The class of another module becomes a subclass of the same name, as in torch's ``fully_shard``: Python looks up
``__call__`` in the class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vescale.plan import blocks_of

from ._names import matching_modules

_SWITCHED = "GradientCheckpointingLayer"  # the class of layers with a switch, in transformers
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def recomputed_modules(model: nn.Module, which: int | Sequence[str] | None) -> list[str]:
    """Return the names of the modules that a plan recomputes.

    Args:
        model: the full model.
        which: ``Plan.recompute``: every k-th block, or names.

    Raises:
        ValueError: there are no blocks, or not enough; a name matches no module, one inside of another, or a list.
    """
    if which is None:
        return []
    if isinstance(which, int):
        blocks = blocks_of(model, every=which)
        if not blocks:
            raise ValueError(
                f"parallelize: expected a model with {which} blocks or more, in an nn.ModuleList or nn.Sequential, for "
                f"Plan(recompute={which}), got {len(blocks_of(model))} in {type(model).__name__}; name the modules to "
                "recompute: Plan(recompute=[...])"
            )
        return list(blocks)
    found = matching_modules(model, which, field="recompute")
    for name in found:
        outer = next((other for other in found if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise ValueError(
                "parallelize: expected modules that are not inside of each other for Plan(recompute=...), got "
                f"{name!r} in {outer!r}; name one of them"
            )
        if isinstance(model.get_submodule(name), _CONTAINERS):
            raise ValueError(
                f"parallelize: expected modules with a forward for Plan(recompute=...), got the list {name!r}; name "
                f"its elements: {name + '.'!r} + r'\\d+'"
            )
    return found


def recompute(model: nn.Module, names: Sequence[str]) -> None:
    """Let modules of a model be recomputed in backward, from now on."""
    for module in dict.fromkeys(map(model.get_submodule, names)):
        if any(base.__name__ == _SWITCHED for base in type(module).__mro__):
            vars(module).update({"gradient_checkpointing": True, "_gradient_checkpointing_func": _again})
        else:
            kind: Any = type(module)
            module.__class__ = _recomputed(kind)


def _again(function: Callable[..., Any], *args: Any) -> Any:
    """Run a function, and again in backward."""
    return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)


@functools.cache
def _recomputed(kind: Any) -> Any:
    """Return the subclass of a class of modules whose calls run again in backward."""

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _again(functools.partial(kind.__call__, self, **kwargs), *args)

    body = {"__call__": call, "__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind.__name__, (kind,), body)
