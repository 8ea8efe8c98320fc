"""What code outside of units can depend on, other than its inputs: attributes of modules that run on every stage."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .._run.values import KeptValue, is_value

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_DEPTH = 3  # of objects within attributes, as configurations are


def outside_modules(model: nn.Module, stages: Iterable[Iterable[str]]) -> list[nn.Module]:
    """Return the modules that are neither units of stages nor parts of units."""
    inside = [unit for units in stages for unit in units]
    return [
        module
        for name, module in model.named_modules()
        if not any(name == unit or name.startswith(f"{unit}.") for unit in inside)
    ]


def attributes_of(modules: Iterable[nn.Module], function: Callable[..., Any] | None) -> tuple:
    """Return the plain attributes of modules, and of what a function has kept, and the identity of all others.

    Two of these compare equal if code that reads these attributes does the same.
    """
    found = [item for module in modules for item in _items(vars(module), 0)]
    if function is not None:
        found.extend(_of_function(function))
    return tuple(found)


def numbers_of(function: Callable[..., Any]) -> tuple:
    """Return the numbers that a function has kept in its closure, its object, and containers there."""
    return tuple(item for item in _of_function(function) if isinstance(item, bool | int | float | complex))


def _items(attributes: dict[str, Any], depth: int) -> Iterator[Any]:
    for name, value in attributes.items():
        yield name
        yield from _value(value, depth)


def _value(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, PLAIN):
        yield value
    elif isinstance(value, tuple | list) and depth < _DEPTH:
        yield type(value)
        for item in value:
            yield from _value(item, depth + 1)
    elif isinstance(value, dict) and depth < _DEPTH:
        yield type(value)
        yield from _items({str(key): item for key, item in value.items()}, depth + 1)
    elif isinstance(value, torch.Tensor) and is_value(value):
        yield KeptValue(id(value))
    elif isinstance(value, nn.Module | torch.Tensor) or depth >= _DEPTH or _is_ours(value):
        yield id(value)
    else:
        yield id(value)
        yield from _items(getattr(value, "__dict__", {}), depth + 1)


def _is_ours(value: Any) -> bool:
    """Return whether an object is one that veScale has put on a module; its state says nothing of the program."""
    return type(value).__module__.startswith("vescale.")


def _of_function(function: Callable[..., Any]) -> Iterator[Any]:
    if isinstance(function, functools.partial):
        yield from _value([*function.args, function.keywords], 0)
        function = function.func
    yield id(function)
    owner = getattr(function, "__self__", None)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    yield from _value([owner, *cells, *(getattr(function, "__defaults__", None) or ())], 0)
    if isinstance(function, nn.Module):
        for module in function.modules():
            yield from _items(vars(module), 0)
