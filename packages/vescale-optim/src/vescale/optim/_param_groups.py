"""Param groups as users give them, checked: parameters, names with parameters, or dicts of them with settings."""

from __future__ import annotations

import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

__all__ = ["as_group", "as_groups", "check_settings", "is_alike"]


def as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    """Return parameters as groups.

    Raises:
        TypeError: If they are neither parameters, with or without names, nor groups of such.
        ValueError: If there are none.
    """
    if isinstance(params, Tensor):
        raise TypeError("expected several parameters for params, got one tensor; pass [parameter]")
    found = list(params)
    if not found:
        raise ValueError("expected parameters for params, got none; pass model.named_parameters()")
    return [as_group(group) for group in (found if isinstance(found[0], dict) else [{"params": found}])]


def as_group(group: Any) -> dict[str, Any]:
    """Return a group whose parameters are a list.

    Raises:
        TypeError: If it is no dict with parameters, with or without names.
    """
    if not isinstance(group, Mapping) or "params" not in group:
        raise TypeError(
            f"expected a dict with 'params' as param_group, got {reprlib.repr(group)}; pass {{'params': [...]}}"
        )
    params = group["params"]
    listed = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else list(params)
    for entry in listed:
        is_named = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if not isinstance(entry[1] if is_named else entry, Tensor):
            raise TypeError(
                "expected parameters, or names with parameters, as params of a param_group, got "
                f"{reprlib.repr(entry)}; pass those of the model"
            )
    return {**group, "params": listed}


def check_settings(make: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    """Check settings of an optimizer of torch, of which its constructor checks some, and only the defaults.

    Args:
        make: the class.
        settings: of the constructor, or of a group.

    Raises:
        ValueError: If a setting is of another type than its default, has another length, or is no finite number.
    """
    if not make.__module__.startswith("torch.optim"):
        return
    parameters = inspect.signature(make).parameters
    for name, value in settings.items():
        if name not in parameters:
            continue
        default = parameters[name].default
        if not is_alike(value, default) or (name == "lr" and not _is_rate(value)):
            raise ValueError(
                f"expected a setting {name} of {make.__name__} such as {default!r}, got {value!r}; pass such a value"
            )


def _is_rate(value: Any) -> bool:
    return isinstance(value, Tensor) or (not isinstance(value, bool) and 0 <= value < math.inf)


def is_alike(value: Any, like: Any) -> bool:
    """Return whether a setting can take the place of another: a number of a number, a pair of a pair."""
    if value is None:
        return like is None or isinstance(like, bool)
    if like is None:
        return isinstance(value, str | numbers.Real | Sequence | Tensor)
    if isinstance(like, Tensor):
        like = 0.0
    if isinstance(value, Tensor) and value.numel() == 1:
        return isinstance(like, numbers.Real)
    if isinstance(like, numbers.Real):
        return isinstance(value, numbers.Real) and value == value
    if isinstance(like, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(like) and all(map(is_alike, value, like))
    return isinstance(value, type(like))
