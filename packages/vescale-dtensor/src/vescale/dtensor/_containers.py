"""Nested containers: find and replace the leaves of a value.

    container                      children                     rebuilt as
    list, tuple, named tuple       items                        the same class
    dataclass instance (asked for) fields that ``__init__`` has ``dataclasses.replace``, which derives other fields
    dict and its subclasses        values                       a shallow copy with new values
    anything else                  a leaf

Arguments of ATen operators contain lists, tuples and dicts only, so this is smaller and several times faster than a
general tree library. Arguments and outputs of modules also contain dataclasses: pass ``dataclasses=True``.

Guarantee: a container without a changed leaf is returned itself, not as a copy.
"""

from __future__ import annotations

import copy
import dataclasses as _dataclasses
from collections.abc import Callable, Iterator

from torch import Tensor

__all__ = ["leaves", "map_leaves", "tensors_in"]


def leaves(value: object, *, dataclasses: bool = False) -> Iterator[object]:
    """Yield the leaves of a nested value, from left to right.

    Args:
        value: any object; an object that is not a container is a leaf.
        dataclasses: whether dataclass instances are containers, too.

    Example:
        >>> list(leaves((1, [2, "x"], {"a": (3,)})))
        [1, 2, 'x', 3]
    """
    if isinstance(value, (list, tuple)):
        children = value
    elif dataclasses and _is_instance_of_dataclass(value):
        children = _fields(value).values()
    elif isinstance(value, dict):
        children = value.values()
    else:
        yield value
        return
    for child in children:
        yield from leaves(child, dataclasses=dataclasses)


def tensors_in(value: object, *, dataclasses: bool = False) -> Iterator[Tensor]:
    """Yield the tensors among the leaves of a nested value, from left to right.

    Example:
        >>> import torch
        >>> [tuple(tensor.shape) for tensor in tensors_in([torch.zeros(2), {"x": (torch.zeros(3), 1)}])]
        [(2,), (3,)]
    """
    return (leaf for leaf in leaves(value, dataclasses=dataclasses) if isinstance(leaf, Tensor))


def map_leaves(
    function: Callable, value: object, kind: type | tuple[type, ...] = object, *, dataclasses: bool = False
) -> object:
    """Return a nested value with ``function(leaf)`` in place of every leaf of a kind.

    Args:
        function: takes a leaf and returns its replacement; the same object means no change.
        value: any object.
        kind: leaves of other classes stay.
        dataclasses: whether dataclass instances are containers, too.

    Example:
        >>> map_leaves(lambda number: 10 * number, (1, [2, "x"]), int)
        (10, [20, 'x'])
    """
    if isinstance(value, (list, tuple)):
        items = [map_leaves(function, item, kind, dataclasses=dataclasses) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    is_dataclass = dataclasses and _is_instance_of_dataclass(value)
    if is_dataclass:
        children = _fields(value)
    elif isinstance(value, dict):
        children = value
    else:
        return function(value) if isinstance(value, kind) else value
    new = {key: map_leaves(function, child, kind, dataclasses=dataclasses) for key, child in children.items()}
    changed = {key: child for key, child in new.items() if child is not children[key]}
    if not changed:
        return value
    if is_dataclass:
        return _dataclasses.replace(value, **changed)
    rebuilt = copy.copy(value)
    for key, child in changed.items():  # some dict classes override `__setitem__` but not `update`
        rebuilt[key] = child
    return rebuilt


def _is_instance_of_dataclass(value: object) -> bool:
    return _dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: object) -> dict[str, object]:
    return {field.name: getattr(value, field.name) for field in _dataclasses.fields(value) if field.init}
