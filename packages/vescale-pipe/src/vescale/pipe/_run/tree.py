"""Flatten and rebuild nested containers: tuples, lists, dicts, registered classes and plain dataclasses.

``flatten`` extends torch's pytree: it also opens dataclass instances with tensors inside, which are leaves for torch.
Objects of any other class are leaves.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch

from .._torch import tree_flatten, tree_unflatten


class Leaf:
    """Base of dataclasses that ``flatten`` treats as leaves."""


@dataclasses.dataclass(frozen=True)
class _Opened:
    """A flattened dataclass instance: the instance to copy, its field names, and the structure of each field."""

    instance: Any
    names: tuple[str, ...]
    parts: tuple[Structure, ...]


@dataclasses.dataclass(frozen=True)
class Structure:
    """The structure of a flattened tree. ``opened`` has the dataclasses among torch's leaves, by position."""

    spec: Any
    opened: tuple[_Opened | None, ...]

    def rebuild(self, leaves: list[Any]) -> Any:
        """Return the tree with the given leaves; dataclass instances are shallow copies."""
        return self._take(iter(leaves))

    def _take(self, leaves: Any) -> Any:
        return tree_unflatten([next(leaves) if o is None else _close(o, leaves) for o in self.opened], self.spec)


def _close(opened: _Opened, leaves: Any) -> Any:
    instance = copy.copy(opened.instance)
    for name, part in zip(opened.names, opened.parts, strict=True):
        object.__setattr__(instance, name, part._take(leaves))
    return instance


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree, in order, and its structure."""
    outer, spec = tree_flatten(tree)
    leaves: list[Any] = []
    opened: list[_Opened | None] = []
    for leaf in outer:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type | torch.Tensor | Leaf):
            names = tuple(field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name))
            parts = [flatten(getattr(leaf, name)) for name in names]
            inner = [item for part_leaves, _ in parts for item in part_leaves]
            if any(isinstance(item, torch.Tensor | Leaf) for item in inner):
                leaves.extend(inner)
                opened.append(_Opened(leaf, names, tuple(structure for _, structure in parts)))
                continue
        leaves.append(leaf)
        opened.append(None)
    return leaves, Structure(spec, tuple(opened))


def is_flat(args: tuple, kwargs: dict, leaves: list[Any]) -> bool:
    """Return whether the leaves of a call are its arguments."""
    given = [*args, *kwargs.values()]
    return len(given) == len(leaves) and all(map(operator.is_, given, leaves))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with ``function`` applied to every leaf."""
    leaves, structure = flatten(tree)
    return structure.rebuild([function(leaf) for leaf in leaves])
