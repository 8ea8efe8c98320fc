"""Nested arguments and results: find, replace and describe the tensors in them.

    function            containers                              other objects with attributes
    ``map_tensors``     rebuilt where a tensor in them changes  leaves
    ``map_leaves``      the same; each tensor has a path        changed in place: the caller keeps the object (caches)
    ``describe_value``  described by their items                described by their attributes
    ``copied``          rebuilt                                 copied deeply

Containers are tuples, lists, dicts and dataclasses.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from operator import is_not

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale.dtensor import extension

__all__ = [
    "copied",
    "describe_value",
    "fields_of",
    "map_leaves",
    "map_tensors",
    "rebuild_fields",
    "rebuild_sequence",
]

SIMPLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
CLOSED = (type, nn.Module, types.FunctionType, types.MethodType, types.ModuleType, torch.Generator)
DEPTH = 6  # of objects inside of objects


def map_leaves(fn: Callable[[Tensor, str], object], value: object, where: str, depth: int = 0) -> object:
    """Return ``value`` with ``fn(tensor, path)`` in place of its tensors."""
    if isinstance(value, Tensor):
        return fn(value, where)
    if value is None or isinstance(value, SIMPLE) or depth > DEPTH:
        return value
    if isinstance(value, tuple | list):
        items = [map_leaves(fn, item, f"{where} [{i}]", depth + 1) for i, item in enumerate(value)]
        return rebuild_sequence(value, items) if any(map(is_not, items, value)) else value
    fields = fields_of(value)
    if fields is not None:
        items = {name: map_leaves(fn, item, f"{where} {name!r}", depth + 1) for name, item in fields.items()}
        changed = {name: new for name, new in items.items() if new is not fields[name]}
        return rebuild_fields(value, changed) if changed else value
    for name, item in _attributes(value):
        new = map_leaves(fn, item, f"{where}.{name}", depth + 1)
        if new is not item:
            vars(value)[name] = new
    return value


def _attributes(value: object) -> list[tuple[str, object]]:
    if isinstance(value, CLOSED) or not hasattr(value, "__dict__"):
        return []
    return [(name, item) for name, item in vars(value).items() if not isinstance(item, SIMPLE)]


def describe_value(value: object, depth: int = 0) -> Hashable:
    """Return a key that distinguishes calls: shapes, dtypes and layouts of tensors, values of plain arguments."""
    if isinstance(value, Tensor):
        layout = tuple(value.placements) if isinstance(value, DTensor) else None
        return value.shape, value.dtype, value.requires_grad, layout
    if value is None or isinstance(value, SIMPLE):
        return value
    if depth > DEPTH:
        return type(value)
    if isinstance(value, tuple | list):
        return type(value), *[describe_value(item, depth + 1) for item in value]
    if isinstance(value, Mapping):
        return type(value), tuple((key, describe_value(item, depth + 1)) for key, item in value.items())
    fields = fields_of(value) or dict(_attributes(value))
    return type(value), tuple((name, describe_value(item, depth + 1)) for name, item in fields.items())


def copied(value: object) -> object:
    """Return a copy for a recording: tensors without their history, objects of unknown classes copied deeply."""

    def cut(tensor: Tensor, _where: str) -> Tensor:
        return tensor.detach().requires_grad_(tensor.requires_grad) if tensor.requires_grad else tensor

    if value is None or isinstance(value, (*SIMPLE, Tensor)):
        return cut(value, "") if isinstance(value, Tensor) else value
    if isinstance(value, tuple | list):
        return rebuild_sequence(value, [copied(item) for item in value])
    fields = fields_of(value)
    if fields is not None:
        return rebuild_fields(value, {name: copied(item) for name, item in fields.items()})
    if not _attributes(value) or isinstance(value, CLOSED):
        return value
    memo: dict[int, object] = {}

    def note(tensor: Tensor, _where: str) -> Tensor:  # copy.deepcopy refuses tensors with a history
        if tensor.grad_fn is not None:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_()
        return tensor

    map_leaves(note, value, "")
    return copy.deepcopy(value, memo)


def map_tensors(fn: Callable[[Tensor], Tensor], value: object) -> object:
    """Return ``value`` with ``fn`` applied to its tensors, in tuples, lists, dicts and dataclasses of any depth.

    Containers without a changed tensor stay the same objects; objects of other classes are left alone.

    Example:
        >>> map_tensors(lambda t: t + 1, {"x": (torch.zeros(2), "y")})
        {'x': (tensor([1., 1.]), 'y')}
    """
    return extension.map_leaves(fn, value, Tensor, dataclasses=True)


def fields_of(value: object) -> Mapping | None:
    """Return the named parts of a dataclass or a dict; a class that is both (Hugging Face's outputs) is a dataclass."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
    return value if isinstance(value, Mapping) else None


def rebuild_fields(value: object, changed: Mapping) -> object:
    """Return a dataclass instance or dict with some of its parts replaced."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **changed)
    new = copy.copy(value)
    new.update(changed)
    return new


def rebuild_sequence(value: Sequence, items: list) -> Sequence:
    """Return a tuple or list of the same class with other items."""
    return type(value)(items) if type(value) in (tuple, list) else type(value)(*items)  # named tuples take arguments
